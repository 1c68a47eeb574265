"""Further loss terms: one small protocol, and the two divergences in use."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._reduce import SumCount


class ExtraTerm(eqx.Module):
    """A user's term: its own per-token values, mask, weights and coefficient.

    The weights are made like every other weight, by `token_weights(mask, granularity)` over the
    whole global batch before the backward pass, and cut to the rows at hand. So the term keeps its
    own count, whatever the main loss divides by.

    Attributes:
        values: The term of each token; differentiable. May be NaN or Inf outside `mask`.
        mask: True where the term is scored.
        weights: The rows' part of the term's token weights.
        coefficient: Factor in the objective, at least 0; not in the log.
        name: Name in the log.
    """

    values: Float[Array, "B S"]
    mask: Bool[Array, "B S"]
    weights: Float[Array, "B S"]
    coefficient: float = eqx.field(static=True)
    name: str = eqx.field(static=True)

    def __check_init__(self) -> None:
        if not 0 <= self.coefficient < float("inf"):
            raise ValueError(
                f"coefficient of term {self.name!r} must be finite and >= 0, got {self.coefficient}; "
                "use 0 to log the term without training on it"
            )

    def objective(self) -> Float[Array, ""]:
        """`coefficient * sum(weights * values)`; 0 without a gradient when the coefficient is 0."""
        kept = jnp.where(self.mask, self.values, 0)
        if self.coefficient == 0:
            return jnp.zeros((), kept.dtype)
        return self.coefficient * jnp.sum(jax.lax.stop_gradient(self.weights).astype(kept.dtype) * kept)

    def log(self) -> SumCount:
        """Sum and count of the values over scored tokens; no coefficient, no gradient."""
        kept = jax.lax.stop_gradient(jnp.where(self.mask, self.values, 0))
        return SumCount(jnp.sum(kept), jnp.sum(self.mask, dtype=kept.dtype))


def distillation_kl(
    student_logits: Float[Array, "*B S V"],
    teacher_logits: Float[Array, "*B S V"],
    mask: Bool[Array, "*B S"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "*B S"]:
    """`KL(teacher || student)` of each token in nats, times `temperature^2`; 0 outside `mask`.

    Both distributions are softened by the temperature; the factor keeps the gradient's size.
    No gradient flows to the teacher. Source: Hinton et al., arXiv:1503.02531, section 2. At least
    float32; rows outside `mask` may hold NaN or Inf.

    Raises:
        ValueError: `temperature` is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    student = _masked_log_softmax(student_logits, mask, temperature)
    teacher = jax.lax.stop_gradient(_masked_log_softmax(teacher_logits, mask, temperature))
    return temperature**2 * _kl(teacher, student, mask)


def indexer_kl(
    attention: Float[Array, "*B S K"],
    index_scores: Float[Array, "*B S K"],
    mask: Bool[Array, "*B S"],
    key_mask: Bool[Array, "*B S K"],
) -> Float[Array, "*B S"]:
    """`KL(attention || softmax(index_scores))` of each query in nats; 0 outside `mask`.

    Trains the indexer of sparse attention towards the main attention. Source: DeepSeek-V3.2-Exp,
    "Lightning Indexer", eq. 3 (dense warm-up). No gradient flows to the attention.

    Args:
        attention: Non-negative attention mass of each query over its `K` keys, summed over heads;
            normalized here over visible keys.
        index_scores: Scores of the indexer, any float type.
        mask: True where the query counts.
        key_mask: True where a query may see a key. A query that sees none has divergence 0.
    """
    visible = key_mask & mask[..., None]
    dtype = jnp.promote_types(index_scores.dtype, jnp.float32)
    mass = jax.lax.stop_gradient(jnp.where(visible, attention.astype(dtype), 0))
    total = jnp.sum(mass, axis=-1, keepdims=True)
    target = mass / jnp.where(total > 0, total, 1)
    some = jnp.any(visible, axis=-1, keepdims=True)
    # A row without visible keys would be all -inf: give it finite scores, its mass is 0 anyway.
    scores = jnp.where(visible, index_scores.astype(dtype), jnp.where(some, -jnp.inf, 0))
    log_index = jax.nn.log_softmax(scores, axis=-1)
    log_index = jnp.where(target > 0, log_index, 0)
    log_target = jnp.log(jnp.where(target > 0, target, 1))
    return jnp.where(mask, jnp.sum(target * (log_target - log_index), axis=-1), 0)


def _masked_log_softmax(
    logits: Float[Array, "*B S V"], mask: Bool[Array, "*B S"], temperature: float
) -> Float[Array, "*B S V"]:
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    scores = jnp.where(mask[..., None], logits.astype(dtype), 0)
    return jax.nn.log_softmax(scores / temperature, axis=-1)


def _kl(
    log_p: Float[Array, "*B S V"], log_q: Float[Array, "*B S V"], mask: Bool[Array, "*B S"]
) -> Float[Array, "*B S"]:
    p = jnp.exp(log_p)
    # p = 0 contributes 0 even where its logarithm is -inf.
    terms = jnp.where(p > 0, p * (jnp.where(p > 0, log_p, 0) - jnp.where(p > 0, log_q, 0)), 0)
    return jnp.where(mask, jnp.sum(terms, axis=-1), 0)
