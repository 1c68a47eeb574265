"""Narrow forms of what a pass holds on a TPU: kept scores in 16 bits, sums over token tiles in 24.

A float32 sum whose result is bfloat16 and one more byte a number take less memory than the sum and the
result: the sum is held as the bfloat16 nearest to it and a byte for what is left, and at the end the
result is written where the bfloat16 lies.
"""

import math
from typing import NamedTuple, cast

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int, Int8, UInt16

# Steps of a kept score below the largest of its row in its vocabulary tile, in nats. Half a step is
# 2^-12 = 2.4e-4 of a probability, a sixteenth of what rounding the slope to bfloat16 may take from it. That
# largest score is exact, and a probability above 1/2 is one, so `p - 1` loses no more where p is near 1.
SCORE_STEP = 2.0**-11
# The last code stands for everything from 32 nats below that score on: probability 0, by at most 1.3e-14.
LAST_CODE = 2**16 - 1
# What a bfloat16 near 2^e leaves of a float32, at most 2^(e - 8), in 127 steps to either side: a sum loses
# at most 1.6e-5 of itself each time a token tile is added, its result at most 254 times as much once.
REST_STEP = 2.0**-8 / 127
# Exponent bits of float32 numbers; below 2^-100 the steps stay those of 2^-100.
EXPONENT, SMALLEST, LARGEST = 255 << 23, 27 << 23, 254 << 23
BFLOAT16_BITS = (8, 7)
# Rows of a sum that are rounded at once: a slice must be small beside the sum.
ROUNDED_ROWS = 64


class KeptScores(NamedTuple):
    """Scores of a token tile between its losses and its gradient.

    Attributes:
        scores: Scores as they are, or steps below `peaks`.
        peaks: Largest counted score of each row of each vocabulary tile; None with scores as they are.
    """

    scores: Float[Array, "N B S X"] | UInt16[Array, "N B S X"]
    peaks: Float[Array, "N B S"] | None


class SplitSum(NamedTuple):
    """Float32 numbers to 1.6e-5 of themselves: the nearest bfloat16, and steps of `REST_STEP` from there."""

    nearest: BFloat16[Array, "..."]
    rest: Int8[Array, "..."]


Sum = Float[Array, "..."] | SplitSum


def no_scores(shape: tuple[int, ...], dtype: jnp.dtype, *, narrow: bool) -> KeptScores:
    """A buffer for the scores of a token tile, [N, B, S, X]."""
    if not narrow:
        return KeptScores(scores=jnp.zeros(shape, dtype), peaks=None)
    return KeptScores(scores=jnp.zeros(shape, jnp.uint16), peaks=jnp.zeros(shape[:-1], dtype))


def keep_scores(
    kept: KeptScores, scores: Float[Array, "B S X"], peak: Float[Array, "B S"], j: Int[Array, ""]
) -> KeptScores:
    """`kept` with the scores of vocabulary tile j, whose counted columns are `peak` at most."""
    if kept.peaks is None:
        whole = cast(Array, lax.dynamic_update_index_in_dim(kept.scores, scores, j, 0))
        return KeptScores(scores=whole, peaks=None)
    steps = jnp.clip(jnp.round((peak[..., None] - scores) / SCORE_STEP), 0, LAST_CODE)
    return KeptScores(
        scores=cast(Array, lax.dynamic_update_index_in_dim(kept.scores, steps.astype(jnp.uint16), j, 0)),
        peaks=cast(Array, lax.dynamic_update_index_in_dim(kept.peaks, peak, j, 0)),
    )


def narrow_shares(
    steps: UInt16[Array, "B S X"], tile_peak: Float[Array, "B S"], peak: Float[Array, "B S"]
) -> Float[Array, "B S X"]:
    """`exp(score - peak)` of kept steps below `tile_peak`."""
    # The difference of peaks first: a score near 1e4 has no bits left for the steps.
    below = (tile_peak - peak)[..., None] - steps.astype(peak.dtype) * SCORE_STEP
    return jnp.where(steps == LAST_CODE, 0, jnp.exp(below))


def no_sum(shape: tuple[int, ...], dtype: jnp.dtype, *, split: bool) -> Sum:
    """An empty sum; `split` is for float32."""
    if not split:
        return jnp.zeros(shape, dtype)
    return SplitSum(nearest=jnp.zeros(shape, jnp.bfloat16), rest=jnp.zeros(shape, jnp.int8))


def split_sum(whole: Float[Array, "..."]) -> SplitSum:
    """The parts of float32 numbers."""
    # Not a cast and back, which the compiler may take for nothing: the rest would always be 0.
    nearest = lax.reduce_precision(whole, *BFLOAT16_BITS)
    inverse = lax.bitcast_convert_type(LARGEST - _power_bits(nearest), jnp.float32)
    steps = jnp.round((whole - nearest) * inverse * (1 / REST_STEP))
    return SplitSum(nearest=nearest.astype(jnp.bfloat16), rest=steps.astype(jnp.int8))


def whole_sum(total: Sum) -> Float[Array, "..."]:
    """The numbers of a sum."""
    if not isinstance(total, SplitSum):
        return total
    nearest = total.nearest.astype(jnp.float32)
    power = lax.bitcast_convert_type(_power_bits(nearest), jnp.float32)
    return nearest + total.rest.astype(jnp.float32) * (power * REST_STEP)


def like_sum(whole: Float[Array, "..."], total: Sum) -> Sum:
    """`whole` in the form of `total`."""
    return split_sum(whole) if isinstance(total, SplitSum) else whole


def reshape_sum(total: Sum, shape: tuple[int, ...]) -> Sum:
    """`total` in another shape."""
    if not isinstance(total, SplitSum):
        return total.reshape(shape)
    return SplitSum(nearest=total.nearest.reshape(shape), rest=total.rest.reshape(shape))


def add_to_columns(total: Sum, part: Float[Array, "D X"], start: Int[Array, ""]) -> Sum:
    """`total` with `part` added to its columns from `start` on."""
    size = part.shape[1]
    if not isinstance(total, SplitSum):
        old = lax.dynamic_slice_in_dim(total, start, size, 1)
        return lax.dynamic_update_slice_in_dim(total, old + part, start, 1)
    old = SplitSum(*(lax.dynamic_slice_in_dim(piece, start, size, 1) for piece in total))
    new = split_sum(whole_sum(old) + part)
    return SplitSum(
        *(lax.dynamic_update_slice_in_dim(whole, piece, start, 1) for whole, piece in zip(total, new))
    )


def write_sum(total: Sum, tile: Float[Array, "..."], starts: tuple[Int[Array, ""] | int, ...]) -> Sum:
    """`total` with `tile` in place of what it held from `starts` on."""
    if not isinstance(total, SplitSum):
        return lax.dynamic_update_slice(total, tile.astype(total.dtype), starts)
    pieces = split_sum(tile)
    return SplitSum(*(lax.dynamic_update_slice(whole, piece, starts) for whole, piece in zip(total, pieces)))


def scaled_sum(total: Sum, factor: Float[Array, ""] | float, dtype: jnp.dtype) -> Float[Array, "..."]:
    """`factor * total` in the type of the result, which takes the place of a split sum's bfloat16."""
    if not isinstance(total, SplitSum):
        return (factor * total).astype(dtype)
    shape = total.nearest.shape
    nearest, rest = (part.reshape(-1, shape[-1]) for part in total)
    size = math.gcd(len(nearest), ROUNDED_ROWS)

    def round_rows(j: Int[Array, ""], result: Array) -> Array:
        pieces = (lax.dynamic_slice_in_dim(part, j * size, size, 0) for part in (result, rest))
        scaled = (factor * whole_sum(SplitSum(*pieces))).astype(jnp.bfloat16)
        return lax.dynamic_update_slice_in_dim(result, scaled, j * size, 0)

    # By slices: one operation on the whole sum gets a buffer of its own for its result.
    result = cast(Array, lax.fori_loop(0, len(nearest) // size, round_rows, nearest))
    return result.reshape(shape)


def _power_bits(number: Float[Array, "..."]) -> Int[Array, "..."]:
    """Bits of the power of two below a float32 number."""
    return jnp.clip(lax.bitcast_convert_type(number, jnp.int32) & EXPONENT, SMALLEST, LARGEST)
