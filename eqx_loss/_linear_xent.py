"""Weighted cross-entropy of a linear output layer, fused: no logits of the whole batch, one pass.

Loss weights are made from masks before the model runs, so the forward pass knows the cotangent of
every token up to one factor. `linear_cross_entropy` therefore forms both gradients while it forms
the loss, tile by tile, from the same logits; the backward pass multiplies them by that factor.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._linear_xent_pass import Tokens
from ._linear_xent_plan import explain_linear_cross_entropy
from ._linear_xent_types import AUTO_EXECUTION, EXACT_RULES, XentExecution, XentRules
from ._linear_xent_unfused import unfused_token_losses
from ._linear_xent_vjp import objectives, token_losses
from ._xent import HeadLoss, TokenLosses, head_loss


def linear_cross_entropy(
    hidden: Float[Array, "B S D"],
    unembed: Float[Array, "D V"],
    targets: Int[Array, "B S"],
    weights: Float[Array, "B S"],
    *,
    mask: Bool[Array, "B S"] | None = None,
    rules: XentRules = EXACT_RULES,
    execution: XentExecution = AUTO_EXECUTION,
) -> HeadLoss:
    """`head_loss(cross_entropy(hidden @ unembed, ...), weights)` without the `[B, S, V]` logits.

    Differentiable in `hidden` and `unembed` through `objective` and `z_objective`. Neither
    `weights` nor the per-token results have a gradient: see `linear_token_cross_entropy`.

    Args:
        hidden: Input of the output layer. Rows outside `mask` may hold NaN or Inf.
        unembed: The output matrix.
        targets: Index of the right class; any integer outside `mask`. A scored target that is no
            class gives NaN.
        weights: Weight of each token, made from masks; weights outside `mask` do not count.
            Tiles of tokens whose weights are all 0, and which `mask` leaves out, cost nothing.
        mask: True where the loss of a token is wanted for the log. None means `weights != 0`.
        rules: z term, soft cap, label smoothing, padded vocabulary.
        execution: Implementation, tiles, mesh.

    Returns:
        The head's objectives and per-token losses, float32 (float64 for float64 arguments). Without
        any scored token all are 0 with zero gradient.

    Raises:
        ValueError: Shapes that do not fit together or the mesh, an option outside its range, or an
            implementation that cannot give per-token losses.
    """
    heads = linear_cross_entropy_heads(
        hidden[None],
        unembed,
        targets[None],
        weights[None],
        mask=None if mask is None else mask[None],
        rules=rules,
        execution=execution,
    )
    return heads[0]


def linear_cross_entropy_heads(
    hidden: Float[Array, "M B S D"],
    unembed: Float[Array, "D V"],
    targets: Int[Array, "M B S"],
    weights: Float[Array, "M B S"],
    *,
    mask: Bool[Array, "M B S"] | None = None,
    rules: XentRules = EXACT_RULES,
    execution: XentExecution = AUTO_EXECUTION,
) -> tuple[HeadLoss, ...]:
    """`linear_cross_entropy` of M heads that share `unembed`: the lm head and the MTP depths.

    The gradient of `unembed` is accumulated in one buffer over all heads. When the heads'
    objectives arrive with one common cotangent (as in their sum) the backward pass is a
    multiplication; otherwise it recomputes the logits tile by tile.

    Returns:
        One `HeadLoss` a head.
    """
    plan = explain_linear_cross_entropy(hidden, unembed, rules=rules, execution=execution)
    mask = weights != 0 if mask is None else mask
    dtype = plan.vocab_cut.accumulator_dtype
    weights = jnp.where(mask, jax.lax.stop_gradient(weights).astype(dtype), 0)
    multipliers = rules.z_loss_multipliers(hidden.shape[0])
    if plan.implementation != "tiled":
        losses = unfused_token_losses(hidden, unembed, targets, mask, rules, plan)
        return tuple(
            head_loss(
                TokenLosses(xent=losses.xent[head], z_term=losses.z_term[head]),
                weights[head],
                z_loss_multiplier=multiplier,
            )
            for head, multiplier in enumerate(multipliers)
        )
    z_weights = jnp.asarray(multipliers, dtype)[:, None, None] * weights
    tokens = Tokens(hidden, targets, mask, xent_weight=weights, z_weight=z_weights)
    objective, z_objective, token_losses = objectives(rules, plan, tokens, unembed)
    xent, z_term = jax.lax.stop_gradient((token_losses.xent, token_losses.z_term))
    return tuple(
        HeadLoss(
            objective=objective[head],
            z_objective=z_objective[head],
            xent=xent[head],
            z_term=z_term[head],
        )
        for head in range(hidden.shape[0])
    )


def linear_token_cross_entropy(
    hidden: Float[Array, "B S D"],
    unembed: Float[Array, "D V"],
    targets: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    *,
    rules: XentRules = EXACT_RULES,
    execution: XentExecution = AUTO_EXECUTION,
) -> TokenLosses:
    """`cross_entropy(hidden @ unembed, ...)` by tiles, differentiable token by token.

    For weights that depend on the losses, or on anything else that is known only after the
    forward pass. Its backward pass recomputes the logits: four matrix products instead of three.
    `rules.z_loss_multiplier` plays no part.
    """
    plan = explain_linear_cross_entropy(hidden, unembed, rules=rules, execution=execution)
    if plan.implementation != "tiled":
        losses = unfused_token_losses(hidden[None], unembed, targets[None], mask[None], rules, plan)
    else:
        unweighted = jnp.zeros((1, *targets.shape), plan.vocab_cut.accumulator_dtype)
        tokens = Tokens(hidden[None], targets[None], mask[None], xent_weight=unweighted, z_weight=unweighted)
        losses = token_losses(rules, plan, tokens, unembed)
    return TokenLosses(xent=losses.xent[0], z_term=losses.z_term[0])
