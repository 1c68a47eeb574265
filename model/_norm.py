"""RMS normalization."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._made_once import made_once
from ._precision import widen


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, "*groups D"], eps: float
) -> Float[Array, "*batch D"]:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last axis, in at least float32, returned in `x`'s dtype.

    Zhang and Sennrich, arXiv:1910.07467, eq. 4.
    """
    return scaled(x, _scale(x, eps), weight)


def norm_beside(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*batch D"]:
    """`rms_norm` of a sum that is used beside it: on TPUs the sum and its scale are made in one operation."""
    x, scale = scale_beside(x, eps)
    return scaled(x, scale, weight)


def scale_beside(
    x: Float[Array, "*batch D"], eps: float
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch 1"]]:
    """`x` and what `rms_norm` multiplies it by, made in one operation on TPUs."""
    return made_once((x, _scale(x, eps)))


def _scale(x: Float[Array, "*batch D"], eps: float) -> Float[Array, "*batch 1"]:
    wide = widen(x)
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


def scaled(
    x: Float[Array, "*batch D"], scale: Float[Array, "*batch 1"], weight: Float[Array, "*groups D"]
) -> Float[Array, "*batch D"]:
    """`x` normed, with its scale known."""
    return (widen(x) * scale * weight).astype(x.dtype)
