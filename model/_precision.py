"""Which dtype norms, softmax and router scores are computed in."""

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float


def at_least_float32(dtype: DTypeLike) -> jnp.dtype:
    """The dtype of reductions over values of `dtype`: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def widen(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x` in at least float32."""
    return x.astype(at_least_float32(x.dtype))
