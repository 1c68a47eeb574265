"""What a forward pass returns: facts for losses and logs, and no loss."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._block import BlockFacts
from ._layer_plan import StackPlan
from ._router import RouterFacts
from ._stack import in_layer_order


class RouterStats(eqx.Module):
    """The routers of the MoE layers in order, then those of the MTP depths.

    Attributes:
        logsumexp: Of the raw router logits, before the score function, nats.
        score_sums: Per row, the sum over counted positions of the scores divided by their sum over experts.
        counts: Per row, counted positions sent to each expert.
        overflow: Copies of tokens that found no place in a bounded buffer and were dropped; None where all have one.
        logits: Raw router logits; None unless asked for, as the two below.
        experts: Chosen experts, best first.
        weights: Factor of each chosen expert's output.
    """

    logsumexp: Float[Array, "L B S"]
    score_sums: Float[Array, "L B E"]
    counts: Int[Array, "L B E"]
    overflow: Int[Array, " L"] | None
    logits: Float[Array, "L B S E"] | None
    experts: Int[Array, "L B S A"] | None
    weights: Float[Array, "L B S A"] | None


class ModelOutput(eqx.Module):
    """A forward pass.

    Attributes:
        hidden: After the final norm; `hidden @ model.unembed` are the logits.
        mtp_hidden: Depth k at index k - 1, after its own final norm.
        router: None when no layer routes.
        max_logits: Largest attention logit per full-attention layer (main layers, then MTP) and head, over the pairs
            that count; -inf when all is padding. None unless the model records them.
        hidden_states: The residual stream after the embedding and after every main layer but the last; None unless
            asked for.
    """

    hidden: Float[Array, "B S D"]
    mtp_hidden: Float[Array, "M B S D"]
    router: RouterStats | None
    max_logits: Float[Array, "N H"] | None
    hidden_states: Float[Array, "L B S D"] | None


def without_details(facts: BlockFacts) -> BlockFacts:
    """`facts` without what is large and seldom asked for."""
    if facts.router is None:
        return facts
    router = RouterFacts(
        logsumexp=facts.router.logsumexp,
        score_sums=facts.router.score_sums,
        counts=facts.router.counts,
        overflow=facts.router.overflow,
        logits=None,
        experts=None,
        weights=None,
    )
    return BlockFacts(router=router, max_logits=facts.max_logits)


def stack_facts(
    main: Sequence[BlockFacts], stack: StackPlan, mtp: Sequence[BlockFacts]
) -> tuple[RouterStats | None, Float[Array, "N H"] | None]:
    """Router statistics and largest logits of all layers in order.

    Args:
        main: Facts of each kind of main layers, as `run_layers` returns them.
        stack: The plan.
        mtp: Facts of each MTP depth.
    """

    def gather(get: Callable[[BlockFacts], Array | None]) -> Array | None:
        layers = in_layer_order([get(facts) for facts in main], stack)
        depths = [y[None] for y in map(get, mtp) if y is not None]
        parts = [*([] if layers is None else [layers]), *depths]
        return jnp.concatenate(parts) if parts else None

    def of_router(name: str) -> Array | None:
        return gather(lambda facts: None if facts.router is None else getattr(facts.router, name))

    logsumexp, score_sums, counts = of_router("logsumexp"), of_router("score_sums"), of_router("counts")
    max_logits = gather(lambda facts: facts.max_logits)
    if logsumexp is None or score_sums is None or counts is None:
        return None, max_logits
    stats = RouterStats(
        logsumexp=logsumexp,
        score_sums=score_sums,
        counts=counts,
        overflow=of_router("overflow"),
        logits=of_router("logits"),
        experts=of_router("experts"),
        weights=of_router("weights"),
    )
    return stats, max_logits
