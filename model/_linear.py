"""Weights and the products with them."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._kda_documents import vary_together
from ._quantized import Quantization, current_quantization, quantized_einsum
from ._random import normal


def init_normal(shape: tuple[int, ...], std: float, *, key: PRNGKeyArray) -> Float[Array, "..."]:
    """Float32 array of independent normal values with mean 0 and standard deviation `std`."""
    return std * normal(key, shape)


def project(
    equation: str, x: Float[Array, "..."], weight: Float[Array, "..."], *, is_gate: bool = False
) -> Float[Array, "..."]:
    """`einsum(equation, x, weight)` in `x`'s dtype; the weight is cast where it is used.

    In 8 bits where the layer is quantized, but for gates (`is_gate`), which are small and go into exponentials.
    """
    quantization = None if is_gate else current_quantization()
    return _product(equation, quantization, *vary_together((x, weight.astype(x.dtype))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    equation: str, quantization: Quantization | None, x: Float[Array, "..."], weight: Float[Array, "..."]
) -> Float[Array, "..."]:
    return _multiply(equation, quantization, x, weight)


def _multiply(equation, quantization, x, weight):
    if quantization is not None:
        return quantized_einsum(equation, x, weight, quantization)
    return jnp.einsum(equation, x, weight)


def _product_forward(equation, quantization, x, weight):
    # Not `_product`: a rematerialization policy would not see the product that it is to keep.
    return _multiply(equation, quantization, x, weight), (x, weight)


def _product_backward(equation, quantization, residuals, slope):
    cpu, default = (functools.partial(form, equation) for form in (_slopes_on_cpu, _slopes))
    d_x, d_weight = jax.lax.platform_dependent(*residuals, slope, cpu=cpu, default=default)
    if quantization is not None:
        operands, result = equation.split("->")
        left, right = operands.split(",")
        back = f"{result},{right}->{left}"
        d_x = quantized_einsum(back, slope, residuals[1], quantization, is_gradient=True)
    return d_x, d_weight


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
