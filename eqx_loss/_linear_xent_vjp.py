"""Differentiation rules of the fused output layer.

`objectives` forms its gradients in the forward pass, at cotangent 1; `token_losses` recomputes the
logits in the backward pass, because only then the cotangent of each token is known.
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._linear_xent_narrow import Sum, like_sum, scaled_sum, whole_sum
from ._linear_xent_pass import Gradients, Losses, Tokens, no_gradients
from ._linear_xent_plan import XentPlan
from ._linear_xent_sharded import fused_on_devices, gradient_on_devices, losses_on_devices
from ._linear_xent_types import XentRules
from ._xent import TokenLosses


class Objectives(NamedTuple):
    """Objective and z objective of each head, and its per-token losses (without gradient)."""

    objective: Float[Array, " M"]
    z_objective: Float[Array, " M"]
    losses: TokenLosses


class SavedGradients(NamedTuple):
    """Residuals of `objectives`: gradients at cotangent 1, and what a recomputation needs."""

    gradients: Gradients
    tokens: Tokens
    unembed: Float[Array, "D V"]
    log_partition: Float[Array, "M B S"]


class SavedTokens(NamedTuple):
    """Residuals of `token_losses`."""

    tokens: Tokens
    unembed: Float[Array, "D V"]
    log_partition: Float[Array, "M B S"]


# Cotangents of (tokens, unembed). Those of everything but hidden are None, which means zero.
TokenCotangents = tuple[Tokens, Array]


def _objectives(rules: XentRules, plan: XentPlan, tokens: Tokens, unembed: Array) -> Objectives:
    return _weigh(losses_on_devices(tokens, unembed, rules, plan), tokens)


def _objectives_forward(
    rules: XentRules, plan: XentPlan, tokens: Tokens, unembed: Array
) -> tuple[Objectives, SavedGradients]:
    losses, gradients = fused_on_devices(tokens, unembed, rules, plan)
    return _weigh(losses, tokens), SavedGradients(gradients, tokens, unembed, losses.log_partition)


def _objectives_backward(
    rules: XentRules, plan: XentPlan, saved: SavedGradients, cotangents: Objectives
) -> TokenCotangents:
    tokens, factor = saved.tokens, cotangents.objective[0]
    differs = _factors_differ(rules, cotangents)
    if differs is None:
        return _cotangents(saved.gradients, tokens, saved.unembed, factor)

    def scale(part: Sum) -> Sum:
        return like_sum(jnp.where(differs, 0, factor * whole_sum(part)), part)

    scaled = Gradients(*(scale(part) for part in saved.gradients))
    reweighted = tokens._replace(
        xent_weight=jnp.where(differs, cotangents.objective[:, None, None] * tokens.xent_weight, 0),
        z_weight=jnp.where(differs, cotangents.z_objective[:, None, None] * tokens.z_weight, 0),
    )

    def recompute() -> Gradients:
        return gradient_on_devices(
            reweighted, saved.log_partition, saved.unembed, scaled, rules, plan, is_usual=False
        )

    if plan.sharding is None:
        # Where the factors agree every weight is 0, so every tile is skipped and this adds nothing;
        # a `cond` would copy the gradient of unembed.
        return _cotangents(recompute(), tokens, saved.unembed)
    gradients = cast(Gradients, jax.lax.cond(differs, recompute, lambda: scaled))
    return _cotangents(gradients, tokens, saved.unembed)


def _token_losses(rules: XentRules, plan: XentPlan, tokens: Tokens, unembed: Array) -> TokenLosses:
    return _public(losses_on_devices(tokens, unembed, rules, plan), tokens.scored)


def _token_losses_forward(
    rules: XentRules, plan: XentPlan, tokens: Tokens, unembed: Array
) -> tuple[TokenLosses, SavedTokens]:
    losses = losses_on_devices(tokens, unembed, rules, plan)
    return _public(losses, tokens.scored), SavedTokens(tokens, unembed, losses.log_partition)


def _token_losses_backward(
    rules: XentRules, plan: XentPlan, saved: SavedTokens, cotangents: TokenLosses
) -> TokenCotangents:
    tokens = saved.tokens._replace(
        xent_weight=jnp.where(saved.tokens.scored, cotangents.xent, 0),
        z_weight=jnp.where(saved.tokens.scored, cotangents.z_term, 0),
    )
    zero = no_gradients(tokens, saved.unembed, plan.vocab_cut)
    gradients = gradient_on_devices(
        tokens, saved.log_partition, saved.unembed, zero, rules, plan, is_usual=True
    )
    return _cotangents(gradients, tokens, saved.unembed)


objectives = jax.custom_vjp(_objectives, nondiff_argnums=(0, 1))
objectives.defvjp(_objectives_forward, _objectives_backward)
token_losses = jax.custom_vjp(_token_losses, nondiff_argnums=(0, 1))
token_losses.defvjp(_token_losses_forward, _token_losses_backward)


def _factors_differ(rules: XentRules, cotangents: Objectives) -> Bool[Array, ""] | None:
    """Whether the saved gradients need more than one factor; None where there is only one."""
    num_heads = len(cotangents.objective)
    with_z = [head for head, multiplier in enumerate(rules.z_loss_multipliers(num_heads)) if multiplier > 0]
    if num_heads == 1 and not with_z:
        return None
    factors = jnp.concatenate([cotangents.objective, cotangents.z_objective[jnp.asarray(with_z, int)]])
    return jnp.any(factors != factors[0])


def _public(losses: Losses, scored: Bool[Array, "M B S"]) -> TokenLosses:
    return TokenLosses(xent=losses.xent, z_term=jnp.where(scored, jnp.square(losses.log_partition), 0))


def _weigh(losses: Losses, tokens: Tokens) -> Objectives:
    public = _public(losses, tokens.scored)
    return Objectives(
        objective=jnp.sum(tokens.xent_weight * public.xent, axis=(1, 2)),
        z_objective=jnp.sum(tokens.z_weight * public.z_term, axis=(1, 2)),
        losses=public,
    )


def _cotangents(
    gradients: Gradients, tokens: Tokens, unembed: Array, factor: Float[Array, ""] | float = 1.0
) -> TokenCotangents:
    """`factor` times them, in the types of the arguments; targets, mask and weights get no gradient."""
    none = cast(Array, None)
    hidden = scaled_sum(gradients.hidden, factor, tokens.hidden.dtype)
    return Tokens(hidden, none, none, none, none), scaled_sum(gradients.unembed, factor, unembed.dtype)
