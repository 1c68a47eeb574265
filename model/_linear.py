"""Weights and the products with them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def init_normal(shape: tuple[int, ...], std: float, *, key: PRNGKeyArray) -> Float[Array, "..."]:
    """Float32 array of independent normal values with mean 0 and standard deviation `std`."""
    return std * jax.random.normal(key, shape, dtype=jnp.float32)


def project(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """`einsum(equation, x, weight)` in `x`'s dtype; the weight is cast where it is used."""
    return jnp.einsum(equation, x, weight.astype(x.dtype))
