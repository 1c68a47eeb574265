"""Weights and the products with them."""

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._random import normal


def init_normal(shape: tuple[int, ...], std: float, *, key: PRNGKeyArray) -> Float[Array, "..."]:
    """Float32 array of independent normal values with mean 0 and standard deviation `std`."""
    return std * normal(key, shape)


def project(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """`einsum(equation, x, weight)` in `x`'s dtype; the weight is cast where it is used."""
    return jnp.einsum(equation, x, weight.astype(x.dtype))
