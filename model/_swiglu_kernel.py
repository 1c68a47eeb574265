"""SwiGLU as TPU kernels: tokens are normed, multiplied by gate and up, and activated in one operation.

XLA multiplies by one matrix in an operation, so the products of gate and up go through main memory before the
activation reads them. Here they stay in VMEM, in float32. The backward pass makes them again.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ._norm import scaled
from ._swiglu import swiglu

# Must divide the tokens of a device and both widths.
SWIGLU_TILE = 256
# Tiles of tokens, of the ffn width and of the model width: the first that divides.
_TOKENS, _COLUMNS, _ROWS = (1024, 512, 256), (512, 256), (512, 256)
# For the tiles, twice for what is on its way, the sums, and values of the activation.
_VMEM_BYTES = 40 * 2**20


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def fused_swiglu(
    x: Float[Array, "B S D"],
    scale: Float[Array, "B S 1"],
    norm: Float[Array, " D"],
    gate: Float[Array, "D F"],
    up: Float[Array, "D F"],
    down: Float[Array, "F D"],
    interpret: bool = False,
) -> Float[Array, "B S D"]:
    """`swiglu(normed @ gate, normed @ up) @ down` of `normed = x * scale * norm`; only the activation is float32.

    Args:
        x: Tokens.
        scale: What the norm multiplies each of them by.
        norm: What it multiplies each channel by.
        gate: Matrix of the activated side, in the dtype of `x` as the other two.
        up: Matrix of the other side.
        down: Back to the model width.
        interpret: Run the kernels in the interpreter, on any platform.

    Raises:
        ValueError: `SWIGLU_TILE` does not divide the tokens and both widths.
    """
    return jnp.einsum("bsf,fd->bsd", _Tiles(x, gate).hidden(x, scale, norm, gate, up, interpret), down)


def _forward(x, scale, norm, gate, up, down, interpret):
    return fused_swiglu(x, scale, norm, gate, up, down, interpret), (x, scale, norm, gate, up, down)


def _backward(interpret, residuals, slope):
    x, scale, norm, gate, up, down = residuals
    hidden, d_gate, d_up = _Tiles(x, gate).slopes(x, scale, norm, slope, gate, up, down, interpret)
    normed, pull = jax.vjp(scaled, x, scale, norm)
    d_x = pull(jnp.einsum("bsf,df->bsd", d_gate, gate) + jnp.einsum("bsf,df->bsd", d_up, up))
    pairs = ((normed, d_gate), (normed, d_up), (hidden, slope))
    return *d_x, *(jnp.einsum("bsi,bso->io", *pair) for pair in pairs)


fused_swiglu.defvjp(_forward, _backward)


class _Tiles:
    """The grid, tokens x ffn width x model width, and what of each array is in VMEM in one of its steps."""

    def __init__(self, x: Array, gate: Array) -> None:
        sizes = (x.shape[0] * x.shape[1], *gate.shape[::-1])
        if any(size % SWIGLU_TILE for size in sizes):
            raise ValueError(
                f"fused_swiglu: tiles of {SWIGLU_TILE} do not divide {sizes[0]} tokens, ffn width {sizes[1]} and model"
                f" width {sizes[2]} of one device; set model.fused_swiglu to false"
            )
        m, n, k = (
            next(tile for tile in tiles if size % tile == 0)
            for size, tiles in zip(sizes, (_TOKENS, _COLUMNS, _ROWS), strict=True)
        )
        self.grid = (sizes[0] // m, sizes[1] // n, sizes[2] // k)
        self.tile = (m, n)
        self.result = jax.ShapeDtypeStruct(sizes[:2], x.dtype)
        self.rows = x.shape[:2]
        self.tokens = pl.BlockSpec((m, k), lambda i, j, k: (i, k))
        self.scale = pl.BlockSpec((m, 1), lambda i, j, k: (i, 0))
        self.norm = pl.BlockSpec((1, k), lambda i, j, k: (0, k))
        self.matrix = pl.BlockSpec((k, n), lambda i, j, k: (k, j))
        self.down = pl.BlockSpec((n, k), lambda i, j, k: (j, k))
        self.inner = pl.BlockSpec((m, n), lambda i, j, k: (i, j))

    def hidden(
        self, x: Array, scale: Array, norm: Array, gate: Array, up: Array, interpret: bool
    ) -> Float[Array, "B S F"]:
        """The activation."""
        specs = (self.tokens, self.scale, self.norm, self.matrix, self.matrix)
        call = self._call(_swiglu_hidden_kernel, specs, num_results=1, num_sums=2, interpret=interpret)
        (hidden,) = call(_flat(x), _flat(scale), norm[None], gate, up)
        return hidden

    def slopes(
        self,
        x: Array,
        scale: Array,
        norm: Array,
        slope: Array,
        gate: Array,
        up: Array,
        down: Array,
        interpret: bool,
    ) -> tuple[Float[Array, "B S F"], Float[Array, "B S F"], Float[Array, "B S F"]]:
        """The activation, and the slopes of the products of gate and up."""
        specs = (self.tokens, self.scale, self.norm, self.tokens, self.matrix, self.matrix, self.down)
        call = self._call(_swiglu_slopes_kernel, specs, num_results=3, num_sums=3, interpret=interpret)
        return call(_flat(x), _flat(scale), norm[None], _flat(slope), gate, up, down)

    def _call(
        self,
        kernel: Callable,
        specs: Sequence[pl.BlockSpec],
        *,
        num_results: int,
        num_sums: int,
        interpret: bool,
    ) -> Callable[..., Any]:
        call = pl.pallas_call(
            kernel,
            grid=self.grid,
            in_specs=specs,
            out_specs=(self.inner,) * num_results,
            out_shape=(self.result,) * num_results,
            scratch_shapes=[pltpu.VMEM(self.tile, jnp.float32)] * num_sums,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
            ),
            interpret=interpret,
            name=kernel.__name__.strip("_"),
        )
        return lambda *operands: tuple(jnp.reshape(y, (*self.rows, -1)) for y in call(*operands))


def _flat(x: Array) -> Array:
    return jnp.reshape(x, (-1, x.shape[-1]))


def _swiglu_hidden_kernel(x: Any, scale: Any, norm: Any, gate: Any, up: Any, hidden: Any, *sums: Any) -> None:
    def multiply() -> None:
        normed = scaled(x[...], scale[...], norm[...])
        _add(sums[0], normed, gate)
        _add(sums[1], normed, up)

    def finish() -> None:
        hidden[...] = swiglu(sums[0][...], sums[1][...], None).astype(hidden.dtype)

    _run(sums, multiply, finish)


def _swiglu_slopes_kernel(
    x: Any, scale: Any, norm: Any, slope: Any, gate: Any, up: Any, down: Any, *results_and_sums: Any
) -> None:
    results, sums = results_and_sums[:3], results_and_sums[3:]

    def multiply() -> None:
        normed = scaled(x[...], scale[...], norm[...])
        _add(sums[0], normed, gate)
        _add(sums[1], normed, up)
        _add(sums[2], slope[...], down, transposed=True)

    def finish() -> None:
        hidden, pull = jax.vjp(lambda a, b: swiglu(a, b, None), sums[0][...], sums[1][...])
        for result, value in zip(results, (hidden, *pull(sums[2][...])), strict=True):
            result[...] = value.astype(result.dtype)

    _run(sums, multiply, finish)


def _add(total: Any, left: Array, right: Any, *, transposed: bool = False) -> None:
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    total[...] += jax.lax.dot_general(left, right[...], contracted, preferred_element_type=jnp.float32)


def _run(sums: Sequence[Any], multiply: Callable[[], None], finish: Callable[[], None]) -> None:
    """A step of the grid, whose innermost axis sums over the model width."""

    @pl.when(pl.program_id(2) == 0)
    def _start() -> None:
        for total in sums:
            total[...] = jnp.zeros_like(total)

    multiply()
    pl.when(pl.program_id(2) == pl.num_programs(2) - 1)(finish)
