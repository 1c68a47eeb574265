"""Rotary position embedding (arXiv:2104.09864), with optional YaRN frequencies."""

import math

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
    wide = at_least_float32(x.dtype)
    frequencies = jnp.asarray(rope_frequencies(x.shape[-1], config), dtype=wide)
    angle = positions.astype(wide)[..., None] * frequencies
    angle = jnp.expand_dims(angle, tuple(range(2, x.ndim - 1)))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    y = x.astype(wide)
    if interleaved:
        a, b = y[..., 0::2], y[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(y, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


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
