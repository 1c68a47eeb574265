"""Per-token cross-entropy with a separate z term, on materialized logits (the plain path)."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class TokenLosses(eqx.Module):
    """What one output head says about each token, before any weighting.

    Attributes:
        xent: Cross-entropy in nats; 0 where the token is not scored.
        z_term: Squared log-partition `logsumexp(logits)^2` (nats squared), without a
            coefficient; 0 where the token is not scored.
    """

    xent: Float[Array, "*B S"]
    z_term: Float[Array, "*B S"]


class HeadLoss(eqx.Module):
    """One output head: its objective, and its per-token losses for the log.

    Attributes:
        objective: `sum(weights * xent)`; differentiable.
        z_objective: `z_loss_multiplier * sum(weights * z_term)`; differentiable, exactly 0 when
            the multiplier is 0.
        xent: Cross-entropy of each token in nats; 0 where not scored; no gradient.
        z_term: `logsumexp(logits)^2` of each token; 0 where not scored; no gradient.
    """

    objective: Float[Array, ""]
    z_objective: Float[Array, ""]
    xent: Float[Array, "B S"]
    z_term: Float[Array, "B S"]


def cross_entropy(
    logits: Float[Array, "*B S V"],
    targets: Int[Array, "*B S"],
    mask: Bool[Array, "*B S"],
    *,
    logit_soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
) -> TokenLosses:
    """Cross-entropy and z term of each token, in float32 (float64 for float64 logits).

    `xent = logsumexp(x) - x[target]` with `x` the (capped) logits. Rows outside `mask` may hold
    NaN or Inf: they are replaced before any arithmetic, so neither value nor gradient sees them,
    and their target may be any integer.

    Args:
        logits: Scores before the softmax, any float type.
        targets: Index of the right class; in `[0, vocab_size)` where `mask` is True. A scored
            target outside that range gives NaN, never a silent number.
        mask: True where the prediction is scored.
        logit_soft_cap: If given, `x = cap * tanh(logits / cap)`; positive.
        label_smoothing: Share in [0, 1) of the target mass spread evenly over the vocabulary
            (PyTorch's and optax's convention: the target itself receives a part of it).
        vocab_size: Number of real classes; columns from there on are padding and take no part in
            value or gradient. None means all `V`.

    Returns:
        Per-token losses, 0 where `mask` is False.

    Raises:
        ValueError: An option outside its range.
    """
    num_columns = logits.shape[-1]
    num_classes = num_columns if vocab_size is None else vocab_size
    _check_options(num_columns, num_classes, logit_soft_cap, label_smoothing)
    # At least float32: a bfloat16 loss near 4 moves in steps of 1/32.
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    scores = jnp.where(mask[..., None], logits.astype(dtype), 0)
    if logit_soft_cap is not None:
        scores = logit_soft_cap * jnp.tanh(scores / logit_soft_cap)
    if num_classes < num_columns:
        scores = jnp.where(jnp.arange(num_columns) < num_classes, scores, -jnp.inf)
    log_partition = jax.nn.logsumexp(scores, axis=-1)
    safe_targets = jnp.where(mask, targets, 0)
    in_range = (safe_targets >= 0) & (safe_targets < num_classes)
    index = jnp.where(in_range, safe_targets, 0)
    target_scores = jnp.take_along_axis(scores, index[..., None], axis=-1)[..., 0]
    xent = log_partition - target_scores
    if label_smoothing > 0:
        mean_score = jnp.sum(scores[..., :num_classes], axis=-1) / num_classes
        xent = xent + label_smoothing * (target_scores - mean_score)
    xent = jnp.where(in_range, xent, jnp.nan)
    return TokenLosses(xent=jnp.where(mask, xent, 0), z_term=jnp.where(mask, jnp.square(log_partition), 0))


def head_loss(
    losses: TokenLosses,
    weights: Float[Array, "B S"],
    *,
    z_loss_multiplier: float = 0.0,
) -> HeadLoss:
    """The objective of one head from its per-token losses and the weights of the whole batch.

    Additive: the `HeadLoss` of a batch is the sum of those of its micro-steps, with the weights
    cut the same way. `z_loss_multiplier` is at least 0; 0 turns the z term off.

    Raises:
        ValueError: `z_loss_multiplier` is negative.
    """
    if z_loss_multiplier < 0:
        raise ValueError(f"z_loss_multiplier must be >= 0, got {z_loss_multiplier}; use 0 to turn it off")
    weights = jax.lax.stop_gradient(weights).astype(losses.xent.dtype)
    if z_loss_multiplier > 0:
        z_objective = z_loss_multiplier * jnp.sum(weights * losses.z_term)
    else:
        z_objective = jnp.zeros((), losses.xent.dtype)
    return HeadLoss(
        objective=jnp.sum(weights * losses.xent),
        z_objective=z_objective,
        xent=jax.lax.stop_gradient(losses.xent),
        z_term=jax.lax.stop_gradient(losses.z_term),
    )


def _check_options(
    num_columns: int, num_classes: int, logit_soft_cap: float | None, label_smoothing: float
) -> None:
    if not 0 < num_classes <= num_columns:
        raise ValueError(
            f"vocab_size must be in [1, {num_columns}] (the columns of logits), got {num_classes}"
        )
    if logit_soft_cap is not None and logit_soft_cap <= 0:
        raise ValueError(f"logit_soft_cap must be positive, got {logit_soft_cap}; use None for no cap")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
