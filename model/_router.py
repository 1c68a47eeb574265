"""Which experts a token is sent to, and with what weight."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._config import MoeConfig
from ._linear import init_normal
from ._param import matrix, param
from ._precision import widen


class Routing(NamedTuple):
    """The router's decision for every position, in at least float32.

    Attributes:
        experts: Chosen experts, best first.
        weights: Factor of each chosen expert's output.
        logits: Raw router logits.
        scores: Router score of every expert, bias apart.
    """

    experts: Int[Array, "B S A"]
    weights: Float[Array, "B S A"]
    logits: Float[Array, "B S E"]
    scores: Float[Array, "B S E"]


class Router(eqx.Module):
    """Group-limited top-k router with a bias that takes part in the choice only.

    DeepSeek-V3, arXiv:2412.19437, eq. 12 to 16.
    """

    weight: Float[Array, "D E"] = eqx.field(metadata=matrix("D", "E"))
    router_bias: Float[Array, " E"] | None = eqx.field(metadata=param("router_bias"))
    config: MoeConfig = eqx.field(static=True)

    def __call__(self, x: Float[Array, "B S D"]) -> Routing:
        """Score, choose, weigh. Ties go to the lower expert. The choice has no gradient."""
        # At least float32: scores that differ in the ninth bit decide between experts.
        logits = jnp.einsum("bsd,de->bse", widen(x), widen(self.weight), precision=jax.lax.Precision.HIGHEST)
        config = self.config
        scores = (
            jax.nn.sigmoid(logits) if config.score_function == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        )
        choice = jax.lax.stop_gradient(scores)
        if self.router_bias is not None:
            choice = choice + jax.lax.stop_gradient(self.router_bias).astype(choice.dtype)
        experts = choose_experts(choice, config)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if config.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return Routing(experts, weights * config.routed_scaling_factor, logits, scores)


def choose_experts(choice: Float[Array, "B S E"], config: MoeConfig) -> Int[Array, "B S A"]:
    """The best experts by `choice` among the best groups; a group's score is the sum of its two best experts."""
    if config.topk_routing_group < config.num_routing_groups:
        size = config.num_experts // config.num_routing_groups
        grouped = jnp.reshape(choice, (*choice.shape[:-1], config.num_routing_groups, size))
        group_scores = jnp.sum(jax.lax.top_k(grouped, min(2, size))[0], axis=-1)
        _, kept = jax.lax.top_k(group_scores, config.topk_routing_group)
        keep = jnp.any(kept[..., None] == jnp.arange(config.num_routing_groups), axis=-2)
        choice = jnp.reshape(jnp.where(keep[..., None], grouped, -jnp.inf), choice.shape)
    return jax.lax.top_k(choice, config.num_experts_per_tok)[1]


class RouterFacts(eqx.Module):
    """What one router says about its batch, for losses and logs; fields as in `RouterStats`, one layer."""

    logsumexp: Float[Array, "B S"]
    score_sums: Float[Array, "B E"]
    counts: Int[Array, "B E"]
    overflow: Int[Array, ""] | None
    logits: Float[Array, "B S E"] | None
    experts: Int[Array, "B S A"] | None
    weights: Float[Array, "B S A"] | None


def router_facts(
    routing: Routing, router_mask: Bool[Array, "B S"], overflow: Int[Array, ""] | None = None
) -> RouterFacts:
    """Sums over the positions `router_mask` counts, the router's details, and what its experts dropped."""
    num_experts = routing.scores.shape[-1]
    shares = routing.scores / (jnp.sum(routing.scores, axis=-1, keepdims=True) + 1e-20)
    chosen = jnp.any(routing.experts[..., None] == jnp.arange(num_experts), axis=-2)
    return RouterFacts(
        logsumexp=jax.nn.logsumexp(routing.logits, axis=-1),
        score_sums=jnp.sum(jnp.where(router_mask[..., None], shares, 0), axis=1),
        counts=jnp.sum(chosen & router_mask[..., None], axis=1, dtype=jnp.int32),
        overflow=overflow,
        logits=routing.logits,
        experts=routing.experts,
        weights=routing.weights,
    )


def init_router(config: MoeConfig, hidden_size: int, std: float, *, key: PRNGKeyArray) -> Router:
    """Normal weights of standard deviation `std`; bias 0."""
    bias = jnp.zeros(config.num_experts, dtype=jnp.float32) if config.use_router_bias else None
    return Router(
        weight=init_normal((hidden_size, config.num_experts), std, key=key), router_bias=bias, config=config
    )
