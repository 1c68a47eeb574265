"""Other ways to the same per-token losses: the plain path, and tokamax's TPU kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._linear_xent_plan import XentPlan
from ._linear_xent_types import XentRules
from ._xent import TokenLosses, cross_entropy


def unfused_token_losses(
    hidden: Float[Array, "M B S D"],
    unembed: Float[Array, "D V"],
    targets: Int[Array, "M B S"],
    mask: Bool[Array, "M B S"],
    rules: XentRules,
    plan: XentPlan,
) -> TokenLosses:
    """Per-token losses by the plan's implementation, differentiable by the usual rules."""
    hidden = jnp.where(mask[..., None], hidden, 0)
    return _plain(hidden, unembed, targets, mask, rules, plan)


def _plain(
    hidden: Float[Array, "M B S D"],
    unembed: Float[Array, "D V"],
    targets: Int[Array, "M B S"],
    mask: Bool[Array, "M B S"],
    rules: XentRules,
    plan: XentPlan,
) -> TokenLosses:
    dtype = plan.vocab_cut.accumulator_dtype
    logits = jnp.einsum("mbsd,dv->mbsv", hidden, unembed, preferred_element_type=dtype)
    return cross_entropy(
        logits,
        targets,
        mask,
        logit_soft_cap=rules.logit_soft_cap,
        label_smoothing=rules.label_smoothing,
        vocab_size=rules.vocab_size,
    )
