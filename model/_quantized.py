"""Matrix products of 8-bit numbers, by qwix (the extra `quantize`).

A layer's products, forward and to the gradient of their input, run on numbers rounded to 8 bits: every token and every
column of a weight has a scale of its own, the largest absolute value.
A row of zeros stays zero, one below about 1e-17 becomes zero, and what is not finite stays so in the product.
The gradient of a weight is left in the compute dtype (SwitchBack, arXiv:2304.13013): it sums over tokens, so a scale
would depend on how the batch is cut, and results must not. What is not quantized: embedding, output head, router,
norms, convolutions, decay and step-size gates, attention and recurrences.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from ._precision import widen

Quantization = Literal["int8", "fp8"]

# Types of forward operands and of gradients. fp8 as in MaxText 0.2.5 (`fp8_full`): gradients have the wider range.
_TYPES: dict[Quantization, tuple[DTypeLike, DTypeLike]] = {
    "int8": (jnp.int8, jnp.int8),
    "fp8": (jnp.float8_e4m3fn, jnp.float8_e5m2),
}
# qwix puts the largest number at 127.5, between two steps, where the last bit of a scale decides; so it is at 127.
_CALIBRATION: dict[Quantization, str] = {"int8": f"absmax,{127.5 / 127}", "fp8": "absmax"}
_CURRENT: ContextVar[Quantization | None] = ContextVar("quantization", default=None)


def has_qwix() -> bool:
    """True when qwix is installed."""
    return importlib.util.find_spec("qwix") is not None


def current_quantization() -> Quantization | None:
    """What products of the layer that is being traced are to use; None for the compute dtype."""
    return _CURRENT.get()


def with_quantization(call: Callable, quantization: Quantization | None) -> Callable:
    """`call` with its products quantized; itself for None.

    The result is a new function every time: `jax.checkpoint` keeps traces by function, and a trace made without
    quantization must not be found for it.
    """
    if quantization is None:
        return call

    @functools.wraps(call)
    def quantized(*args: Any) -> Any:
        with _quantizing(quantization):
            return call(*args)

    return quantized


def quantized_einsum(
    equation: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    quantization: Quantization,
    *,
    is_gradient: bool = False,
) -> Float[Array, "..."]:
    """`einsum(equation, x, weight)` of 8-bit numbers, in `x`'s dtype.

    Args:
        equation: Two operands, `->`, result.
        x: Tokens, or with `is_gradient` the gradient at them.
        weight: A matrix.
        quantization: Which 8-bit type.
        is_gradient: `x` takes the type of gradients.
    """
    import qwix

    operands, result = equation.split("->")
    left, right = operands.split(",")
    rows = _rounded(x, left, result, quantization, is_gradient=is_gradient)
    return qwix.einsum(equation, rows, _rounded(weight, right, result, quantization)).astype(x.dtype)


def quantized_ragged_dot(
    x: Float[Array, "T D"],
    weight: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    quantization: Quantization,
    *,
    is_gradient: bool = False,
) -> Float[Array, "T F"]:
    """`jax.lax.ragged_dot` of 8-bit numbers, in `x`'s dtype; every expert's column has a scale of its own.

    Args:
        x: Rows sorted by expert, or with `is_gradient` the gradient at them.
        weight: A matrix of each expert.
        group_sizes: Rows of each expert.
        quantization: Which 8-bit type.
        is_gradient: `x` takes the type of gradients.
    """
    import qwix

    rows = _rounded(x, "td", "tf", quantization, is_gradient=is_gradient)
    matrices = _rounded(weight, "edf", "etf", quantization)
    return qwix.ragged_dot(rows, matrices, group_sizes).astype(x.dtype)


@contextlib.contextmanager
def _quantizing(quantization: Quantization) -> Generator[None]:
    token = _CURRENT.set(quantization)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _rounded(
    x: Array, axes: str, result: str, quantization: Quantization, *, is_gradient: bool = False
) -> Any:
    """`x` as qwix's pair of 8-bit values and scales, one for each place of the axes that the product keeps."""
    import qwix

    return qwix.quantize(
        widen(x),
        _TYPES[quantization][is_gradient],
        channelwise_axes=[i for i, letter in enumerate(axes) if letter in result],
        calibration_method=_CALIBRATION[quantization],
    )
