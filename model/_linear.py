"""Weights and the products with them."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._kda_documents import vary_together
from ._random import normal


def init_normal(shape: tuple[int, ...], std: float, *, key: PRNGKeyArray) -> Float[Array, "..."]:
    """Float32 array of independent normal values with mean 0 and standard deviation `std`."""
    return std * normal(key, shape)


def project(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """`einsum(equation, x, weight)` in `x`'s dtype; the weight is cast where it is used."""
    return _product(equation, *vary_together((x, weight.astype(x.dtype))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.einsum(equation, x, weight)


def _product_forward(equation, x, weight):
    return jnp.einsum(equation, x, weight), (x, weight)


def _product_backward(equation, residuals, slope):
    cpu, default = (functools.partial(form, equation) for form in (_slopes_on_cpu, _slopes))
    return jax.lax.platform_dependent(*residuals, slope, cpu=cpu, default=default)


def _slopes(equation, x, weight, slope):
    _, pull = jax.vjp(lambda x, weight: jnp.einsum(equation, x, weight), x, weight)
    return pull(slope)


def _slopes_on_cpu(equation, x, weight, slope):
    operands, result = equation.split("->")
    left, right = operands.split(",")
    # Without the barriers XLA's CPU compiler makes the gradient of the weight a product of two transposed operands,
    # which its fast kernels do not take: three times the time of this one. One barrier for each operand: products of
    # one `x` with several weights share its transposed copy.
    d_weight = jnp.einsum(f"{left},{result}->{right}", *map(jax.lax.optimization_barrier, (x, slope)))
    d_weight = jax.lax.optimization_barrier(d_weight)
    return jnp.einsum(f"{result},{right}->{left}", slope, weight), d_weight


_product.defvjp(_product_forward, _product_backward)
