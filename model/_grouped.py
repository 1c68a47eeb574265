"""Matrix products of sorted rows with one matrix per group, at about the cost of the useful products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._quantized import Quantization, quantized_ragged_dot

_MAX_BLOCK = 256
_MIN_BLOCK = 8


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "T D"], weight: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T F"]:
    """Row t times the matrix of its group: rows come sorted, `group_sizes[e]` rows for matrix e, T in all.

    CPUs walk over blocks of rows (`blocked_matmul`), other platforms run `jax.lax.ragged_dot`; the choice is made
    when the program is lowered. `ragged_dot` on a CPU multiplies every row with every matrix.
    """
    return jax.lax.platform_dependent(x, weight, group_sizes, cpu=blocked_matmul, default=ragged_matmul)


def _grouped_forward(x, weight, group_sizes):
    return grouped_matmul(x, weight, group_sizes), (x, weight, group_sizes)


def _grouped_backward(residuals, cotangent):
    arguments = (*residuals, cotangent)
    dx, dw = jax.lax.platform_dependent(*arguments, cpu=_blocked_backward, default=_ragged_backward)
    return dx, dw, None


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def quantized_grouped_matmul(
    quantization: Quantization,
    x: Float[Array, "T D"],
    weight: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
) -> Float[Array, "T F"]:
    """`grouped_matmul` of 8-bit numbers, by `ragged_dot` on every platform; the gradient of the matrices is that of
    `grouped_matmul`."""
    return quantized_ragged_dot(x, weight, group_sizes, quantization)


def _quantized_forward(quantization, x, weight, group_sizes):
    return quantized_ragged_dot(x, weight, group_sizes, quantization), (x, weight, group_sizes)


def _quantized_backward(quantization, residuals, cotangent):
    _, weight, group_sizes = residuals
    transposed = jnp.swapaxes(weight, 1, 2)
    dx = quantized_ragged_dot(cotangent, transposed, group_sizes, quantization, is_gradient=True)
    return dx, _grouped_backward(residuals, cotangent)[1], None


quantized_grouped_matmul.defvjp(_quantized_forward, _quantized_backward)


def ragged_matmul(
    x: Float[Array, "T D"], weight: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T F"]:
    """`grouped_matmul` by `jax.lax.ragged_dot`, which TPUs and GPUs have kernels for."""
    return jax.lax.ragged_dot(x, weight, group_sizes)


def _ragged_backward(x, weight, group_sizes, cotangent):
    _, pull = jax.vjp(lambda x, weight: jax.lax.ragged_dot(x, weight, group_sizes), x, weight)
    return pull(cotangent)


def blocked_matmul(
    x: Float[Array, "T D"], weight: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "T F"]:
    """`grouped_matmul`, a block of rows of one group at a time.

    A group's last block runs over into the next group's rows, which that group then overwrites: blocks go in order.
    """
    num_rows, num_groups = x.shape[0], weight.shape[0]
    block = block_size(num_rows, num_groups)
    padded = jnp.pad(x, ((0, block), (0, 0)))
    blocks = Blocks(group_sizes, num_rows, block)

    def step(i, y):
        group, start, _ = blocks.at(i)
        rows = jax.lax.dynamic_slice_in_dim(padded, start, block)
        matrix = jax.lax.dynamic_index_in_dim(weight, group, keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(y, rows @ matrix, start, 0)

    y = jnp.zeros((num_rows + block, weight.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, blocks.count, step, y)[:num_rows]


def _blocked_backward(x, weight, group_sizes, cotangent):
    num_rows, num_groups = x.shape[0], weight.shape[0]
    block = block_size(num_rows, num_groups)
    blocks = Blocks(group_sizes, num_rows, block)
    padded_x = jnp.pad(x, ((0, block), (0, 0)))
    padded_g = jnp.pad(cotangent, ((0, block), (0, 0)))

    def step(i, carry):
        dx, dw = carry
        group, start, used = blocks.at(i)
        g = jax.lax.dynamic_slice_in_dim(padded_g, start, block)
        matrix = jax.lax.dynamic_index_in_dim(weight, group, keepdims=False)
        dx = jax.lax.dynamic_update_slice_in_dim(dx, g @ matrix.T, start, 0)
        # Rows past the group's end belong to the next matrix.
        own = jnp.where((jnp.arange(block) < used)[:, None], g, 0)
        rows = jax.lax.dynamic_slice_in_dim(padded_x, start, block)
        update = jax.lax.dynamic_index_in_dim(dw, group) + (rows.T @ own)[None]
        return dx, jax.lax.dynamic_update_slice_in_dim(dw, update, group, 0)

    start = (jnp.zeros((num_rows + block, x.shape[1]), x.dtype), jnp.zeros(weight.shape, weight.dtype))
    dx, dw = jax.lax.fori_loop(0, blocks.count, step, start)
    return dx[:num_rows], dw


class Blocks:
    """Which rows block i covers; a group of n rows has ceil(n / size) blocks.

    Attributes:
        size: Rows of a block.
        count: Blocks in all.
    """

    def __init__(self, group_sizes: Int[Array, " E"], num_rows: int, size: int) -> None:
        self.size = size
        blocks = -(-group_sizes // size)
        ends = jnp.cumsum(blocks)
        self.count: Int[Array, ""] = ends[-1]
        # The table is made once: in the loop its small steps would cost as much as a product.
        index = jnp.arange(num_rows // size + group_sizes.shape[0])
        group = jnp.minimum(jnp.sum(ends <= index[:, None], axis=1), group_sizes.shape[0] - 1)
        offset = (index - (ends - blocks)[group]) * size
        starts = (jnp.cumsum(group_sizes) - group_sizes)[group] + offset
        used = jnp.minimum(group_sizes[group] - offset, size)
        self._table = jnp.stack([group, starts, used], axis=1)

    def at(self, i: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
        """Group, first row, and number of the group's rows of block i (at most the block size)."""
        group, start, used = jax.lax.dynamic_index_in_dim(self._table, i, keepdims=False)
        return group, start, used


def block_size(num_rows: int, num_groups: int) -> int:
    """A power of two near half an even group, so that a group's ragged end wastes little."""
    half = max(num_rows // (2 * num_groups), 1)
    return int(np.clip(2 ** round(np.log2(half)), _MIN_BLOCK, _MAX_BLOCK))
