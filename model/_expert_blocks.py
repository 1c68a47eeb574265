"""The experts of one device on a CPU: one walk over blocks of copies, forward and backward."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._grouped import Blocks, block_size
from ._swiglu import swiglu

# (gate, up, down) of all experts
Matrices = tuple[Float[Array, "E D F"], Float[Array, "E D F"], Float[Array, "E F D"]]


def blocked_experts(
    matrices: Matrices,
    limit: Float[Array, ""] | None,
    tokens: Float[Array, "T D"],
    weights: Float[Array, " N"],
    source: Int[Array, " N"],
    group_sizes: Int[Array, " E"],
) -> Float[Array, "M D"]:
    """Copies sorted by expert through their expert, times their weight, before the sum over a token's copies.

    A block of rows of one expert at a time goes through all three products while it is in the cache. An expert's last
    block runs over into the next expert's rows, which that expert then overwrites: blocks go in order. The last
    expert's runs over into rows M - N of the result, which mean nothing.

    Args:
        matrices: Of all experts.
        limit: SwiGLU clamp.
        tokens: Tokens of all rows.
        weights: Factor of each copy.
        source: Token of each copy.
        group_sizes: Copies for each expert, N in all.
    """
    blocks, source, weights = _blocks(matrices, weights, source, group_sizes)

    def step(i, y):
        group, start, _ = blocks.at(i)
        gate, up, down = (jax.lax.dynamic_index_in_dim(x, group, keepdims=False) for x in matrices)
        rows = tokens[jax.lax.dynamic_slice_in_dim(source, start, blocks.size)]
        factor = jax.lax.dynamic_slice_in_dim(weights, start, blocks.size)
        hidden = _weighted(limit, rows @ gate, rows @ up, factor)
        return jax.lax.dynamic_update_slice_in_dim(y, hidden @ down, start, 0)

    y = jnp.zeros((source.shape[0], tokens.shape[1]), tokens.dtype)
    return jax.lax.fori_loop(0, blocks.count, step, y)


def blocked_experts_backward(
    matrices: Matrices,
    limit: Float[Array, ""] | None,
    tokens: Float[Array, "T D"],
    weights: Float[Array, " N"],
    source: Int[Array, " N"],
    group_sizes: Int[Array, " E"],
    slopes: Float[Array, "T D"],
) -> tuple[Matrices, Float[Array, "M D"], Float[Array, " M"]]:
    """Gradients of the matrices (at least float32), of each copy, and of its weight; the products are made again.

    Args:
        matrices: As in `blocked_experts`, and so on.
        limit: Has no gradient.
        tokens: Tokens of all rows.
        weights: Factor of each copy.
        source: Token of each copy.
        group_sizes: Copies for each expert.
        slopes: Gradient of each token's sum over its copies.
    """
    blocks, source, weights = _blocks(matrices, weights, source, group_sizes)

    def step(i, carry):
        d_rows, d_weights, sums = carry
        group, start, used = blocks.at(i)
        gate, up, down = (jax.lax.dynamic_index_in_dim(x, group, keepdims=False) for x in matrices)
        own = jax.lax.dynamic_slice_in_dim(source, start, blocks.size)
        rows, slope = tokens[own], slopes[own]
        factor = jax.lax.dynamic_slice_in_dim(weights, start, blocks.size)
        hidden, pull = jax.vjp(functools.partial(_weighted, limit), rows @ gate, rows @ up, factor)
        d_gate, d_up, d_factor = pull(slope @ down.T)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        d_rows, d_weights = put(d_rows, d_gate @ gate.T + d_up @ up.T), put(d_weights, d_factor)
        # Rows past the expert's end belong to the next one.
        is_own = (jnp.arange(blocks.size) < used)[:, None]
        narrow = (jnp.where(is_own, x, 0).T for x in (d_gate, d_up, hidden))
        # XLA's CPU compiler has no fast kernel for a transposed left operand: transpose the narrow one by hand.
        d_gate, d_up, hidden = jax.lax.optimization_barrier(tuple(narrow))
        updates = d_gate @ rows, d_up @ rows, hidden @ slope
        return d_rows, d_weights, tuple(_add(total, x, group) for total, x in zip(sums, updates))

    start = (
        jnp.zeros((source.shape[0], tokens.shape[1]), tokens.dtype),
        jnp.zeros(weights.shape, weights.dtype),
        (jnp.zeros(matrices[2].shape, jnp.promote_types(tokens.dtype, jnp.float32)),) * 3,
    )
    d_rows, d_weights, sums = jax.lax.fori_loop(0, blocks.count, step, start)
    d_gate, d_up, d_down = sums
    return (jnp.swapaxes(d_gate, 1, 2), jnp.swapaxes(d_up, 1, 2), d_down), d_rows, d_weights


def _weighted(limit, gate, up, factor):
    return (swiglu(gate, up, limit) * factor[:, None]).astype(gate.dtype)


def _blocks(matrices, weights, source, group_sizes):
    """The blocks; source and weights with room for the last one to run over."""
    num_copies = source.shape[0]
    blocks = Blocks(group_sizes, num_copies, block_size(num_copies, matrices[0].shape[0]))
    return blocks, jnp.pad(source, (0, blocks.size)), jnp.pad(weights, (0, blocks.size))


def _add(total, update, group):
    """`total` with `update` added to matrix `group`."""
    old = jax.lax.dynamic_index_in_dim(total, group, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, old + update, group, 0)
