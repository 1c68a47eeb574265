"""Logged quantities: per-domain losses, bits per byte, perplexity, estimator gaps, intervals."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from ._reduce import SumCount

Logs = TypeVar("Logs")  # any pytree of arrays: `LossLogs`, or a user's own


def by_domain(
    values: Float[Array, "B S"],
    mask: Bool[Array, "B S"],
    domain_ids: Int[Array, "B S"] | Int[Array, " B"],
    num_domains: int,
) -> SumCount:
    """Sum and count of `values` over the scored tokens of each domain, `[num_domains]`.

    Summed over domains it is the pooled (sum, count) again, so the token mean is
    `sum(by_domain.sum) / sum(by_domain.count)`. A domain without tokens has value 0.

    Args:
        values: Per-token loss in nats; may be NaN or Inf outside `mask`.
        mask: True where the token is scored.
        domain_ids: In `[0, num_domains)`, one per token or one per row.
        num_domains: At least 1. Tokens with an id outside the range belong to no domain.

    Raises:
        ValueError: `num_domains` is below 1.
    """
    if num_domains < 1:
        raise ValueError(f"num_domains must be at least 1, got {num_domains}")
    ids = domain_ids if domain_ids.ndim == 2 else domain_ids[:, None]
    one_hot = (ids[..., None] == jnp.arange(num_domains)) & mask[..., None]
    kept = jax.lax.stop_gradient(jnp.where(mask, values, 0))
    return SumCount(
        jnp.sum(jnp.where(one_hot, kept[..., None], 0), axis=(0, 1)),
        jnp.sum(one_hot, axis=(0, 1), dtype=kept.dtype),
    )


def domain_scale(
    domain_ids: Int[Array, "B S"] | Int[Array, " B"],
    objective_weight: Float[Array, " D"],
    sampling_weight: Float[Array, " D"],
) -> Float[Array, "B S"] | Float[Array, "B 1"]:
    """Importance weight `objective_weight / sampling_weight` of each token's domain.

    Pass it as `token_scale` with `scale_denominator="count"`: dividing by the plain token count
    makes the expectation the loss under the objective mixture. A domain that is never sampled
    (weight 0) scales by 0.
    """
    ids = domain_ids if domain_ids.ndim == 2 else domain_ids[:, None]
    sampled = sampling_weight > 0
    ratio = jnp.where(sampled, objective_weight / jnp.where(sampled, sampling_weight, 1), 0)
    return ratio[ids]


def bits_per_byte(xent: SumCount, num_bytes: Real[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Cross-entropy in bits per byte of text: `xent.sum / ln 2 / num_bytes`; 0 without bytes.

    `num_bytes` is the number of bytes that the scored tokens of `xent` stand for.
    """
    bits = SumCount(xent.sum / jnp.log(2.0).astype(xent.sum.dtype), num_bytes.astype(xent.sum.dtype))
    return bits.value()


def perplexity(xent: SumCount) -> Float[Array, "*shape"]:
    """`exp` of the token mean of the cross-entropy alone (no z term, no auxiliary loss).

    1 without tokens.
    """
    return jnp.exp(xent.value())


def estimator_gap(group: SumCount, pooled: SumCount) -> Float[Array, "*shape"]:
    """Mean over groups minus mean over tokens of the same losses.

    For equal votes of `B` rows it is `-Cov(n, lbar) / E[n]` exactly, with `n` the tokens of a row,
    `lbar` its mean loss (0 for an empty row) and the population covariance over all rows.
    """
    return group.value() - pooled.value()


def add_logs(first: Logs, second: Logs) -> Logs:
    """Two logs pooled: sums add, counts add. The neutral element is `zero_logs`."""
    return jax.tree.map(jnp.add, first, second)


def zero_logs(like: Logs) -> Logs:
    """An empty log accumulator of the same structure; part of a run's checkpointed state."""
    return jax.tree.map(_zeros, like)


def _zeros(leaf: Array) -> Array:
    return jnp.zeros(leaf.shape, leaf.dtype)
