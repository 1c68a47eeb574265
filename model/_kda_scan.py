"""A scan over chunks of positions that keeps only the states between its steps for its backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._kda_documents import Documents, zero_cotangent, zeros_beside


class ChunkMask(NamedTuple):
    """Which positions of each chunk see each other and the state before it.

    Attributes:
        same: The two positions are of one document.
        first: The position is of the document that the state before the chunk belongs to.
        last: The position is of the document that the state after the chunk belongs to.
        kept: `first` and `last` name the same document: the state survives the chunk.
        scored: The position is not padding.
    """

    same: Bool[Array, "B N X X"]
    first: Bool[Array, "B N X"]
    last: Bool[Array, "B N X"]
    kept: Bool[Array, "B N"]
    scored: Bool[Array, "B N X"]


class ChunkSize(NamedTuple):
    """How rows are cut: chunks of some positions, of which a step of the scan takes several."""

    positions: int
    at_once: int


# A program grows with the chunks of a step.
_AT_ONCE = (2, 4, 8)

# (state, parameters, arrays [B, N, X, ...] of N chunks, mask) -> (state, output [B, N, X, H, U])
Step = Callable[[Array, Any, tuple[Array, ...], ChunkMask | None], tuple[Array, Array]]


def scan_rows(
    step: Step,
    chunk_size: int,
    state: Float[Array, "B H K U"],
    params: Any,
    inputs: tuple[Array, ...],
    documents: Documents | None,
    *,
    step_bytes: int = 0,
) -> tuple[Float[Array, "B S H U"], Float[Array, "B H K U"]]:
    """`step` applied to chunks in their order, one or several at a time, and the last state, for rows of any length.

    Args:
        step: What chunks that follow one another do; a module-level function.
        chunk_size: Positions of a chunk, a power of two.
        state: State before the first chunk.
        params: Arrays that every chunk sees whole.
        inputs: Arrays [B, S, ...] that are cut into chunks. `inputs[0]` has the output's shape and dtype.
        documents: Documents of the rows, or None when each row is one document without padding.
        step_bytes: A step is given as many chunks as make the largest of its inputs no larger than this in the state's
            dtype: 1, 2, 4 or 8, a divisor of their number.

    Raises:
        ValueError: `chunk_size` is no power of two.
    """
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, got {chunk_size}; 64 is the usual one")
    rows, length = inputs[0].shape[:2]
    if rows == 0 or length == 0:
        return jnp.zeros_like(inputs[0]), state
    chunk_size = min(chunk_size, 1 << (length - 1).bit_length())
    missing = -length % chunk_size
    if missing:
        if documents is None:
            documents = Documents(jnp.zeros((rows, length), jnp.int32), jnp.ones((rows, length), bool))
        number = jnp.pad(documents.number, ((0, 0), (0, missing)), mode="edge")
        documents = Documents(number, jnp.pad(documents.scored, ((0, 0), (0, missing))))
        inputs = tuple(jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) for x in inputs)
    size = ChunkSize(chunk_size, _chunks_at_once(inputs, state.dtype.itemsize, chunk_size, step_bytes))
    output, state = _scan(step, size, state, params, inputs, documents)
    return output[:, :length], state


def _chunks_at_once(inputs: tuple[Array, ...], itemsize: int, chunk_size: int, step_bytes: int) -> int:
    """A power of two that divides the number of chunks."""
    count = inputs[0].shape[1] // chunk_size
    chunk_bytes = max(x.size for x in inputs) // count * itemsize
    fitting = [n for n in _AT_ONCE if count % n == 0 and n * chunk_bytes <= step_bytes]
    return max(fitting, default=1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(step, size, state, params, inputs, documents):
    output, final, _ = _forward(step, size, state, params, inputs, documents, keep_states=False)
    return output, final


def _forward(step, size, state, params, inputs, documents, *, keep_states):
    def one(carry, index):
        state, output = carry
        chunks = tuple(_slice(x, index, size) for x in inputs)
        after, y = step(state, params, chunks, _mask(documents, index, size))
        return (after, _update(output, y, index)), state if keep_states else None

    output = zeros_beside(inputs[0], inputs[0].shape, inputs[0].dtype)
    indices = jnp.arange(inputs[0].shape[1] // (size.positions * size.at_once))
    (final, output), states = jax.lax.scan(one, (state, output), indices)
    return output, final, states


def _scan_fwd(step, size, state, params, inputs, documents):
    output, final, states = _forward(step, size, state, params, inputs, documents, keep_states=True)
    return (output, final), (states, params, inputs, documents)


def _scan_bwd(step, size, residuals, cotangents):
    states, params, inputs, documents = residuals
    d_output, d_final = cotangents

    def one(carry, xs):
        d_state, d_params, d_inputs = carry
        index, state = xs
        mask = _mask(documents, index, size)
        chunks = tuple(_slice(x, index, size) for x in inputs)
        _, pull = jax.vjp(lambda s, p, x: step(s, p, x, mask), state, params, chunks)
        d_state, d_p, d_chunks = pull((d_state, _slice(d_output, index, size)))
        d_params = jax.tree.map(jnp.add, d_params, d_p)
        d_inputs = tuple(_update(d, x, index) for d, x in zip(d_inputs, d_chunks))
        return (d_state, d_params, d_inputs), None

    zeros = jax.tree.map(lambda x: zeros_beside(x, x.shape, x.dtype), (params, inputs))
    indices = jnp.arange(states.shape[0])
    (d_state, d_params, d_inputs), _ = jax.lax.scan(one, (d_final, *zeros), (indices, states), reverse=True)
    return d_state, d_params, d_inputs, jax.tree.map(zero_cotangent, documents)


_scan.defvjp(_scan_fwd, _scan_bwd)


def _slice(x: Array, index: Int[Array, ""], size: ChunkSize) -> Array:
    """The chunks [B, N, X, ...] of step `index`."""
    positions = size.positions * size.at_once
    part = jax.lax.dynamic_slice_in_dim(x, index * positions, positions, axis=1)
    return jnp.reshape(part, (x.shape[0], size.at_once, size.positions, *x.shape[2:]))


def _update(x: Array, chunks: Array, index: Int[Array, ""]) -> Array:
    batch, at_once, positions, *rest = chunks.shape
    part = jnp.reshape(chunks.astype(x.dtype), (batch, at_once * positions, *rest))
    return jax.lax.dynamic_update_slice_in_dim(x, part, index * at_once * positions, axis=1)


def _mask(documents: Documents | None, index: Int[Array, ""], size: ChunkSize) -> ChunkMask | None:
    if documents is None:
        return None
    number = _slice(documents.number, index, size)
    # Documents are numbered from 0, so the initial state's document is that of position 0.
    before = jnp.maximum(index * size.positions * size.at_once - 1, 0)
    before = jax.lax.dynamic_slice_in_dim(documents.number, before, 1, axis=1)
    carried = jnp.concatenate([before, number[:, :-1, -1]], axis=1)[..., None]
    return ChunkMask(
        same=number[..., :, None] == number[..., None, :],
        first=number == carried,
        last=number == number[..., -1:],
        kept=number[..., -1] == carried[..., 0],
        scored=_slice(documents.scored, index, size),
    )
