"""Where two semantics differ, and by how much on a batch of masks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._layout import BatchLayout
from .._loss_weights import LossWeights
from .._profile_weights import loss_weights
from .._release_rules import MegatronRules, MicroStepRules
from .._semantics import LossSemantics
from ._batch import MaskBatch
from ._explanation import TermExplanation
from ._terms import explain_semantics

COMPARED = ("objective", "divided", "coefficient", "log", "world_size", "accumulation", "micro_batch_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TermDifference:
    """One line in which two explanations of a term differ."""

    term: str
    aspect: str
    first: str
    second: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """How far apart the weights of one term are on a batch.

    Attributes:
        term: Term.
        first_sum: Sum of the first's weights: the objective if every token had loss 1.
        second_sum: Sum of the second's weights.
        relative: Size of the difference of the weights over the size of the first's: the relative
            difference of the gradients if the tokens' gradients were of equal size and unrelated.
        largest: Largest ratio of a token's two weights, second over first.
        smallest: Smallest ratio.
        first_objective: Value with the batch's per-token losses; None when it has none.
        second_objective: The same.
    """

    term: str
    first_sum: float
    second_sum: float
    relative: float
    largest: float
    smallest: float
    first_objective: float | None = None
    second_objective: float | None = None


def diff_semantics(
    first: LossSemantics, second: LossSemantics, *, num_mtp_layers: int = 1
) -> tuple[TermDifference, ...]:
    """Every line of the two explanations that differs; empty when none does."""
    found: list[TermDifference] = []
    pairs = zip(
        explain_semantics(first, num_mtp_layers=num_mtp_layers).terms,
        explain_semantics(second, num_mtp_layers=num_mtp_layers).terms,
    )
    for one, other in pairs:
        found += [
            TermDifference(
                term=one.name, aspect=aspect, first=_text(one, aspect), second=_text(other, aspect)
            )
            for aspect in (*COMPARED, "notes")
            if getattr(one, aspect) != getattr(other, aspect)
        ]
    return tuple(found)


def measure_difference(
    first: LossSemantics, second: LossSemantics, batch: MaskBatch
) -> tuple[Difference, ...]:
    """The weights of both on a batch of masks, term by term.

    Args:
        first: One semantics.
        second: The other.
        batch: Masks of a whole global batch.

    Raises:
        ValueError: As `loss_weights`.
    """
    with jax.enable_x64(True):
        ours, theirs = _weights(first, batch), _weights(second, batch)
        found = [_measured("lm", ours.lm_objective, theirs.lm_objective, batch.xent)]
        for depth in range(batch.num_mtp_layers):
            one, other = ours.mtp_objective[depth], theirs.mtp_objective[depth]
            found.append(_measured(f"mtp_{depth + 1}", one, other, None))
        found.append(_measured("router_z", ours.router_objective, theirs.router_objective, None))
        one, other = _balance(ours, batch), _balance(theirs, batch)
        width = max(one.shape[1], other.shape[1])
        one = jnp.repeat(one, width // one.shape[1], axis=1)
        other = jnp.repeat(other, width // other.shape[1], axis=1)
        found.append(_measured("load_balance (per position)", one, other, None))
    return tuple(found)


def _text(term: TermExplanation, aspect: str) -> str:
    value: str | float | tuple[str, ...] = getattr(term, aspect)
    if isinstance(value, tuple):
        return "; ".join(value)
    return value if isinstance(value, str) else f"{value:g}"


def _weights(semantics: LossSemantics, batch: MaskBatch) -> LossWeights:
    mask = jnp.asarray(batch.loss_mask)
    return loss_weights(
        mask != 0,
        semantics,
        num_mtp_layers=batch.num_mtp_layers,
        segment_ids=None if batch.segment_ids is None else jnp.asarray(batch.segment_ids),
        token_scale=mask,
        router_mask=None if batch.router_mask is None else jnp.asarray(batch.router_mask),
        layout=_layout(semantics, batch),
    )


def _balance(weights: LossWeights, batch: MaskBatch) -> Float[Array, "B C"]:
    """Load-balance weight of each row, on each context rank."""
    return weights.load_balance_objective.reshape(batch.loss_mask.shape[0], -1)


def _layout(semantics: LossSemantics, batch: MaskBatch) -> BatchLayout | None:
    """The layout that the profile needs, from the batch's number of micro-steps and ranks."""
    rows = batch.loss_mask.shape[0]
    match semantics.rules:
        case None:
            return None
        case MegatronRules():
            groups = rows // semantics.micro_batch_size
            return BatchLayout(
                num_micro_batches=max(groups // batch.data_parallel_size, 1),
                data_parallel_size=batch.data_parallel_size,
            )
        case MicroStepRules(framework="MaxText"):
            return BatchLayout.strided(batch.num_micro_steps, rows)
        case MicroStepRules(framework="Levanter"):
            return BatchLayout(num_micro_batches=batch.num_micro_steps)
        case MicroStepRules():
            return BatchLayout(
                num_micro_batches=batch.num_micro_steps, data_parallel_size=batch.data_parallel_size
            )


def _measured(
    term: str,
    first: Float[Array, "B S"],
    second: Float[Array, "B S"],
    xent: Float[np.ndarray, "B S"] | None,
) -> Difference:
    one, other = np.asarray(first), np.asarray(second)
    size = float(np.sqrt(np.sum(one**2)))
    distance = float(np.sqrt(np.sum((other - one) ** 2)))
    both = (one != 0) & (other != 0)
    ratios = other[both] / one[both]
    return Difference(
        term=term,
        first_sum=float(one.sum()),
        second_sum=float(other.sum()),
        relative=distance / size if size else (0.0 if distance == 0 else float("inf")),
        largest=float(ratios.max()) if ratios.size else 1.0,
        smallest=float(ratios.min()) if ratios.size else 1.0,
        first_objective=None if xent is None else float(np.sum(one * np.where(one != 0, xent, 0))),
        second_objective=None if xent is None else float(np.sum(other * np.where(other != 0, xent, 0))),
    )
