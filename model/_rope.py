"""Rotary position embedding (arXiv:2104.09864), with optional YaRN frequencies."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._config import RopeConfig, YarnConfig
from ._precision import at_least_float32


def apply_rope(
    x: Float[Array, "B S *heads R"], positions: Int[Array, "B S"], config: RopeConfig, *, interleaved: bool
) -> Float[Array, "B S *heads R"]:
    """`x` with every pair turned by `position * frequency`; pairs keep their places.

    Args:
        x: Any number of head axes between the positions and the turned dims.
        positions: Position within the document.
        config: Frequencies.
        interleaved: Pairs are (0, 1), (2, 3), ...; otherwise j and j + R/2.
    """
    return _turned(interleaved, x, *_cos_sin(x, positions, config))


def apply_rope_apart(
    x: Float[Array, "B S M R"], positions: Int[Array, "B S"], config: RopeConfig, sizes: tuple[int, ...]
) -> tuple[Float[Array, "B S H R"], Float[Array, "B S J R"], Float[Array, "B S J R"]]:
    """Queries and keys turned, and values, of heads that lie side by side; halves are paired.

    Args:
        x: Heads of queries, of keys and of values.
        positions: Position within the document.
        config: Frequencies.
        sizes: How many heads of each of the three.
    """
    return _turned_apart(sizes, x, *_cos_sin(x, positions, config))


def _cos_sin(
    x: Float[Array, "B S *heads R"], positions: Int[Array, "B S"], config: RopeConfig
) -> tuple[Float[Array, "B S *ones R/2"], Float[Array, "B S *ones R/2"]]:
    wide = at_least_float32(x.dtype)
    frequencies = jnp.asarray(rope_frequencies(x.shape[-1], config), dtype=wide)
    angle = positions.astype(wide)[..., None] * frequencies
    angle = jnp.expand_dims(angle, tuple(range(2, x.ndim - 1)))
    return jnp.cos(angle), jnp.sin(angle)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turned(
    interleaved: bool,
    x: Float[Array, "B S *heads R"],
    cos: Float[Array, "B S *ones R/2"],
    sin: Float[Array, "B S *ones R/2"],
) -> Float[Array, "B S *heads R"]:
    """`x` turned by angles that have no gradient. The slope turns the other way, in one operation as well."""
    ways = (functools.partial(way, interleaved) for way in (_turned_by_shifts, _turned_by_pairs))
    by_shifts, by_pairs = ways
    return jax.lax.platform_dependent(x, cos, sin, tpu=by_shifts, default=by_pairs)


def _turned_forward(interleaved, x, cos, sin):
    return _turned(interleaved, x, cos, sin), (cos, sin)


def _turned_backward(interleaved, angle, slope):
    cos, sin = angle
    return _turned(interleaved, slope, cos, -sin), None, None


_turned.defvjp(_turned_forward, _turned_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turned_apart(sizes, x, cos, sin):
    end_q, end_k = sizes[0], sizes[0] + sizes[1]

    def turned(heads):
        ways = (_turned_by_shifts, _turned_by_pairs)
        by_shifts, by_pairs = (functools.partial(way, False, heads=heads) for way in ways)
        return jax.lax.platform_dependent(x, cos, sin, tpu=by_shifts, default=by_pairs)

    return turned((0, end_q)), turned((end_q, end_k)), x[:, :, end_k:]


def _turned_apart_forward(sizes, x, cos, sin):
    return _turned_apart(sizes, x, cos, sin), (cos, sin)


def _turned_apart_backward(sizes, angle, slopes):
    cos, sin = angle
    d_q, d_k, d_v = slopes
    back = (_turned(False, d, cos, -sin) for d in (d_q, d_k))
    return jnp.concatenate([*back, d_v], axis=2), None, None


_turned_apart.defvjp(_turned_apart_forward, _turned_apart_backward)


def _turned_by_pairs(interleaved, x, cos, sin, heads=(0, None)):
    y = (x if heads == (0, None) else x[:, :, slice(*heads)]).astype(cos.dtype)
    a, b = (y[..., 0::2], y[..., 1::2]) if interleaved else jnp.split(y, 2, axis=-1)
    turned = _joined(interleaved, a * cos - b * sin, b * cos + a * sin)
    return turned.astype(x.dtype)


def _turned_by_shifts(interleaved, x, cos, sin, heads=(0, None)):
    """Halves of a vector register are no arrays of their own on TPUs: the partner of each entry comes by a shift.

    Heads are cut by it too: a slice would be copied before its three uses.
    """
    zero = jnp.zeros((), x.dtype)
    step = 1 if interleaved else x.shape[-1] // 2
    whole = [(0, 0, 0)] * (x.ndim - 1)
    if heads != (0, None):
        whole[2] = (-heads[0], heads[1] - x.shape[2], 0)
    y, after, before = (
        jax.lax.pad(x, zero, [*whole, (shift, -shift, 0)]).astype(cos.dtype) for shift in (0, -step, step)
    )
    is_first = np.arange(x.shape[-1]) // step % 2 == 0
    partner = jnp.where(is_first, after, before)
    turned = y * _joined(interleaved, cos, cos) + partner * _joined(interleaved, -sin, sin)
    return turned.astype(x.dtype)


def _joined(interleaved, a, b):
    """Pairs in their places."""
    if not interleaved:
        return jnp.concatenate([a, b], axis=-1)
    return jnp.stack([a, b], axis=-1).reshape(*a.shape[:-1], 2 * a.shape[-1])


def rope_frequencies(rope_dim: int, config: RopeConfig) -> np.ndarray:
    """Radians per position of each of the R/2 pairs, float64."""
    exponent = np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim
    frequencies = config.theta**-exponent
    if config.yarn is None:
        return frequencies
    ramp = _yarn_ramp(rope_dim, config.theta, config.yarn)
    return frequencies * (1 - ramp) + frequencies / config.yarn.factor * ramp


def _yarn_ramp(rope_dim: int, theta: float, yarn: YarnConfig) -> np.ndarray:
    """0 where a frequency is kept, 1 where it is divided by the factor; arXiv:2309.00071, eq. 18."""

    def pair_with(rotations: float) -> float:
        return (
            rope_dim
            * math.log(yarn.original_max_positions / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), rope_dim - 1)
    pairs = np.arange(rope_dim // 2, dtype=np.float64)
    return np.clip((pairs - low) / max(high - low, 1e-3), 0.0, 1.0)
