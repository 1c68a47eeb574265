"""RMS normalization."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._precision import widen


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, "*groups D"], eps: float
) -> Float[Array, "*batch D"]:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last axis, in at least float32, returned in `x`'s dtype.

    Zhang and Sennrich, arXiv:1910.07467, eq. 4.
    """
    wide = widen(x)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight).astype(x.dtype)
