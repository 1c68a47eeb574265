"""Causal depthwise convolution along positions, which stops at document ends."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._kda_documents import vary_together, zero_cotangent
from ._made_once import made_once_on_cpu


def causal_conv1d(
    x: Float[Array, "B S C"],
    weight: Float[Array, "C W"],
    segment_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S C"]:
    """`y[b, t, c] = sum_j weight[c, W-1-j] x[b, t-j, c]` over lags j = 0 .. W-1, each channel by itself.

    The last tap meets the current token, as in `torch.nn.Conv1d` with W-1 zeros on the left. Computed in at least
    float32. Only the arguments are kept for the backward pass.

    Args:
        x: Rows of C channels.
        weight: Taps of each channel.
        segment_ids: Packed-document ids, unique within a row; 0 is padding. A tap that reaches into another document or
            into padding counts as 0; padding positions are 0. None: one document, no padding.

    Returns:
        The filtered rows, in `x`'s dtype.
    """
    state = jnp.zeros((x.shape[0], weight.shape[1] - 1, x.shape[2]), x.dtype)
    past_ids = (
        None if segment_ids is None else jnp.zeros((x.shape[0], weight.shape[1] - 1), segment_ids.dtype)
    )
    return causal_conv1d_after(x, weight, state, segment_ids, past_ids)


def silu_conv1d(
    x: Float[Array, "B S C"],
    weight: Float[Array, "C W"],
    segment_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S C"]:
    """`silu(causal_conv1d(x, weight, segment_ids))`, of which only the arguments are kept for the backward pass."""
    x, weight, segment_ids = vary_together((x, weight, segment_ids))
    return _silu_conv(x, weight, segment_ids)


def causal_conv1d_after(
    x: Float[Array, "B S C"],
    weight: Float[Array, "C W"],
    past: Float[Array, "B P C"],
    segment_ids: Int[Array, "B S"] | None = None,
    past_ids: Int[Array, "B P"] | None = None,
) -> Float[Array, "B S C"]:
    """`causal_conv1d` of rows that go on from `past`, P = W - 1 positions.

    Args:
        x: Rows of C channels.
        weight: Taps of each channel.
        past: Inputs of the W - 1 positions before the rows; zeros where there are none.
        segment_ids: As in `causal_conv1d`.
        past_ids: Document ids of `past`; needed with `segment_ids`.

    Returns:
        The filtered rows, in `x`'s dtype.

    Raises:
        ValueError: `past` is not W - 1 positions long, or only one of the id arrays is given.
    """
    width = weight.shape[1]
    if past.shape[1] != width - 1:
        raise ValueError(
            f"past must hold W-1={width - 1} positions, got {past.shape[1]}; pad it with zeros on the left"
        )
    if (segment_ids is None) != (past_ids is None):
        raise ValueError("segment_ids and past_ids must be given together; past_ids of 0 cuts the past off")
    ids = (
        None if segment_ids is None or past_ids is None else jnp.concatenate([past_ids, segment_ids], axis=1)
    )
    rows = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    rows, weight, ids = vary_together((rows, weight, ids))
    return _conv(rows, weight, ids)


def last_inputs(
    x: Float[Array, "B S C"],
    past: Float[Array, "B P C"],
    segment_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "B P C"]:
    """The `past` of what follows the rows `x`: the last P inputs of each row's last document.

    Padding is skipped, so a row padded on the right goes on as if it were not padded; a row of padding keeps its past.

    Args:
        x: Inputs of the convolution.
        past: What came before them; it belongs to the first document of the row.
        segment_ids: As in `causal_conv1d`; padding inside a document is not allowed here.
    """
    length = past.shape[1]
    rows = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    if segment_ids is None:
        return rows[:, rows.shape[1] - length :]
    position = jnp.arange(1, x.shape[1] + 1, dtype=segment_ids.dtype)
    end = jnp.max(jnp.where(segment_ids != 0, position, 0), axis=1)  # positions up to the last real one
    first_id = jnp.take_along_axis(segment_ids, jnp.argmax(segment_ids != 0, axis=1)[:, None], axis=1)
    # A row of padding has end 0: all of what it returns is its past.
    ids = jnp.concatenate([jnp.broadcast_to(first_id, past.shape[:2]), segment_ids], axis=1)
    index = end[:, None] + jnp.arange(length, dtype=segment_ids.dtype)
    last_id = jnp.take_along_axis(ids, end[:, None] + length - 1, axis=1) if length else ids[:, :0]
    same = jnp.take_along_axis(ids, index, axis=1) == last_id
    # Padding on the left separates the past from the row.
    return jnp.where(same[:, :, None], jnp.take_along_axis(rows, index[:, :, None], axis=1), 0)


@jax.custom_vjp
def _conv(
    rows: Float[Array, "B R C"], weight: Float[Array, "C W"], ids: Int[Array, "B R"] | None
) -> Float[Array, "B S C"]:
    width = weight.shape[1]
    size = rows.shape[1] - width + 1
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    taps = [
        _tap(rows, ids, lag, width).astype(dtype) * weight[:, width - 1 - lag].astype(dtype)
        for lag in range(width)
    ]
    assert taps[0].shape[1] == size
    return sum(taps[1:], taps[0]).astype(rows.dtype)


def _tap(rows, ids, lag, width):
    """Each position's input `lag` positions back, 0 where that is of another document or padding."""
    size = rows.shape[1] - width + 1
    start = width - 1 - lag
    source = rows[:, start : start + size]
    seen = _seen(ids, lag, width)
    return source if seen is None else jnp.where(seen[..., None], source, 0)


def _seen(ids, lag, width):
    if ids is None:
        return None
    size = ids.shape[1] - width + 1
    target, source = ids[:, width - 1 :], ids[:, width - 1 - lag :][:, :size]
    return (target == source) & (target != 0)


def _conv_fwd(rows, weight, ids):
    return _conv(rows, weight, ids), (rows, weight, ids)


def _conv_bwd(residuals, d_y):
    rows, weight, ids = residuals
    width = weight.shape[1]
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    wide = made_once_on_cpu(d_y).astype(dtype)
    d_rows, d_taps = jnp.zeros((), dtype), []
    for lag in range(width):
        seen = _seen(ids, lag, width)
        d_tap = wide if seen is None else jnp.where(seen[..., None], wide, 0)
        d_taps.append(jnp.sum(d_tap * _tap(rows, ids, lag, width).astype(dtype), axis=(0, 1)))
        start = width - 1 - lag
        d_rows += jnp.pad(d_tap * weight[:, start].astype(dtype), ((0, 0), (start, lag), (0, 0)))
    d_weight = jnp.stack(d_taps[::-1], axis=1).astype(weight.dtype)
    return d_rows.astype(rows.dtype), d_weight, None if ids is None else zero_cotangent(ids)


_conv.defvjp(_conv_fwd, _conv_bwd)


@jax.custom_vjp
def _silu_conv(
    x: Float[Array, "B S C"], weight: Float[Array, "C W"], ids: Int[Array, "B S"] | None
) -> Float[Array, "B S C"]:
    return jax.nn.silu(made_once_on_cpu(causal_conv1d(x, weight, ids)))


def _silu_conv_bwd(residuals, d_y):
    x, weight, ids = residuals
    y, pull = jax.vjp(lambda x, weight: made_once_on_cpu(causal_conv1d(x, weight, ids)), x, weight)
    d_x, d_weight = pull(jax.vjp(jax.nn.silu, y)[1](d_y)[0])
    return d_x, d_weight, None if ids is None else zero_cotangent(ids)


_silu_conv.defvjp(lambda *arguments: (_silu_conv(*arguments), arguments), _silu_conv_bwd)
