"""Scores of a model on validation rows: token-weighted losses, bits per byte, MTP acceptance."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from eqx_loss import SumCount, bits_per_byte, cross_entropy, perplexity, shift_targets, sum_count
from model import Transformer

from ._examples import Batch
from ._gradient import GradientPlan
from ._layout import manual_part
from ._mesh import CONTEXT, ROW_AXES
from ._tokenizer import NUM_BYTES

# Tokens whose logits exist at the same time on a device.
_TOKENS_PER_CHUNK = 2048


class EvaluationSums(NamedTuple):
    """What adds over validation batches.

    Attributes:
        lm: Cross-entropy over scored tokens (nats).
        mtp: The same per MTP depth, `[M]`.
        accepted: Per MTP depth, agreements with the main head over scored tokens, `[M]`.
        num_bytes: Scored targets that are bytes of text.
    """

    lm: SumCount
    mtp: SumCount
    accepted: SumCount
    num_bytes: Float[Array, ""]


Evaluate = Callable[[Batch, Transformer], EvaluationSums]


def make_evaluate(plan: GradientPlan) -> Evaluate:
    """The pure function `evaluate(batch, model) -> sums`.

    MTP depth k is accepted at position t when its most likely token is that of the main head at position t + k,
    which predicts the same token from the true prefix: what greedy speculative decoding would keep, given that
    the tokens before were kept. Counted where the target of depth k is scored; depths are judged apart.
    Source: MaxText, `calculate_mtp_acceptance_rate` in `src/maxtext/layers/multi_token_prediction.py`
    (its rate for `mtp_eval_target_module`).

    Args:
        plan: How the model runs on its mesh.
    """
    tokens = PartitionSpec(ROW_AXES, CONTEXT)
    heads = PartitionSpec(None, ROW_AXES, CONTEXT)

    def evaluate(batch: Batch, model: Transformer) -> EvaluationSums:
        targets, masks = _targets(
            batch, model.config.num_mtp_layers, plan.semantics.mtp_roll_across_documents
        )
        params, static = eqx.partition(model, eqx.is_array)

        def body(params: PyTree, batch: Batch, targets: Array, masks: Array) -> tuple[Array, Array]:
            return _predict(plan, eqx.combine(params, static), batch, targets, masks)

        xent, chosen = jax.shard_map(
            body,
            mesh=plan.layout.mesh,
            in_specs=(manual_part(plan.layout.partitions), tokens, heads, heads),
            out_specs=(heads, heads),
            axis_names=plan.layout.manual_axes,
            check_vma=False,
        )(params, batch, targets, masks)
        return _sums(batch, xent, chosen, masks)

    return evaluate


def evaluation_row(batches: Iterable[EvaluationSums]) -> dict[str, float]:
    """The metrics of one evaluation, `eval/*`; losses in nats, MTP depth 1 under the plain name.

    The lm loss is token-weighted: sums over sums of counts, whatever the batches hold. Bits per byte divide the
    nats of all scored tokens, end-of-document tokens included, by the bytes among them.
    """
    # float64 on the host: exact counts over any number of batches.
    lists = [jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(sums)) for sums in batches]
    total: EvaluationSums = jax.tree.map(lambda *x: jnp.asarray(sum(x), jnp.float32), *lists)
    lm = total.lm
    row = {
        "eval/lm_loss": float(lm.value()),
        "eval/perplexity": float(perplexity(lm)),
        "eval/bits_per_byte": float(bits_per_byte(lm, total.num_bytes)),
        "eval/total_weights": float(lm.count),
    }
    losses, rates = np.asarray(total.mtp.value()), np.asarray(total.accepted.value())
    for depth, (loss, rate) in enumerate(zip(losses, rates, strict=True), start=1):
        suffix = "" if depth == 1 else f"_depth_{depth}"
        row[f"eval/raw_mtp_loss{suffix}"] = float(loss)
        row[f"eval/mtp_acceptance_rate_percent{suffix}"] = 100.0 * float(rate)
    return row


def _targets(
    batch: Batch, num_mtp_layers: int, roll: bool
) -> tuple[Int[Array, "heads B S"], Bool[Array, "heads B S"]]:
    """Targets and masks of the main head and of every depth."""
    shifted = [
        shift_targets(
            batch.targets, batch.loss_mask, depth=k, segment_ids=batch.segment_ids, roll_across_documents=roll
        )
        for k in range(num_mtp_layers + 1)
    ]
    targets, masks = zip(*shifted, strict=True)
    return jnp.stack(targets), jnp.stack(masks)


def _predict(
    plan: GradientPlan, model: Transformer, batch: Batch, targets: Array, masks: Array
) -> tuple[Float[Array, "heads B S"], Int[Array, "heads B S"]]:
    """Cross-entropy and most likely token of every head, for the rows and positions of one device."""
    facts = model(
        batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions, parallel=plan.parallel
    )
    unembed = model.whole_unembed(plan.parallel)
    hidden = jnp.concatenate([facts.hidden[None], facts.mtp_hidden])

    def chunk(inputs: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        hidden, targets, mask = inputs
        logits = jnp.einsum(
            "td,dv->tv", hidden, unembed.astype(hidden.dtype), preferred_element_type=jnp.float32
        )
        losses = cross_entropy(logits[None], targets[None], mask[None])
        return losses.xent[0], jnp.argmax(logits, axis=-1).astype(jnp.int32)

    size = math.gcd(targets.size, _TOKENS_PER_CHUNK)
    width = hidden.shape[-1]
    chunks = (hidden.reshape(-1, size, width), targets.reshape(-1, size), masks.reshape(-1, size))
    xent, chosen = jax.lax.map(chunk, chunks)
    return xent.reshape(targets.shape), chosen.reshape(targets.shape)


def _sums(batch: Batch, xent: Array, chosen: Array, masks: Array) -> EvaluationSums:
    depths = range(1, xent.shape[0])
    everywhere = jnp.ones(batch.loss_mask.shape, bool)
    agreements = []
    for k in depths:
        # Rolling across documents changes what is scored, never which position predicts a token.
        main, _ = shift_targets(chosen[0], everywhere, depth=k, segment_ids=None, roll_across_documents=True)
        agreements.append(sum_count((chosen[k] == main).astype(jnp.float32), masks[k]))
    mtp = [sum_count(xent[k], masks[k]) for k in depths]
    return EvaluationSums(
        lm=sum_count(xent[0], masks[0]),
        mtp=_stacked(mtp),
        accepted=_stacked(agreements),
        num_bytes=jnp.sum(batch.loss_mask & (batch.targets < NUM_BYTES), dtype=jnp.float32),
    )


def _stacked(parts: list[SumCount]) -> SumCount:
    empty = jnp.zeros((0,))
    if not parts:
        return SumCount(empty, empty)
    return SumCount(jnp.stack([p.sum for p in parts]), jnp.stack([p.count for p in parts]))
