"""A scan over chunks of positions that keeps only the states between chunks for its backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._kda_documents import Documents, zero_cotangent, zeros_beside


class ChunkMask(NamedTuple):
    """Which positions of a chunk see each other and the state before it.

    Attributes:
        same: The two positions are of one document.
        first: The position is of the document that the state before the chunk belongs to.
        last: The position is of the document that the state after the chunk belongs to.
        kept: `first` and `last` name the same document: the state survives the chunk.
        scored: The position is not padding.
    """

    same: Bool[Array, "B X X"]
    first: Bool[Array, "B X"]
    last: Bool[Array, "B X"]
    kept: Bool[Array, " B"]
    scored: Bool[Array, "B X"]


# (state, parameters, arrays [B, X, ...] of one chunk, mask) -> (state, output [B, X, H, U])
Step = Callable[[Array, Any, tuple[Array, ...], ChunkMask | None], tuple[Array, Array]]


def scan_rows(
    step: Step,
    chunk_size: int,
    state: Float[Array, "B H K U"],
    params: Any,
    inputs: tuple[Array, ...],
    documents: Documents | None,
) -> tuple[Float[Array, "B S H U"], Float[Array, "B H K U"]]:
    """`step` applied to one chunk after another, and the last state, for rows of any length.

    Args:
        step: What a chunk does; a module-level function.
        chunk_size: Positions of a chunk, a power of two.
        state: State before the first chunk.
        params: Arrays that every chunk sees whole.
        inputs: Arrays [B, S, ...] that are cut into chunks. `inputs[0]` has the output's shape and dtype.
        documents: Documents of the rows, or None when each row is one document without padding.

    Raises:
        ValueError: `chunk_size` is no power of two.
    """
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, got {chunk_size}; 64 is the usual one")
    rows, length = inputs[0].shape[:2]
    if length == 0:
        return jnp.zeros_like(inputs[0]), state
    chunk_size = min(chunk_size, 1 << (length - 1).bit_length())
    missing = -length % chunk_size
    if missing:
        if documents is None:
            documents = Documents(jnp.zeros((rows, length), jnp.int32), jnp.ones((rows, length), bool))
        number = jnp.pad(documents.number, ((0, 0), (0, missing)), mode="edge")
        documents = Documents(number, jnp.pad(documents.scored, ((0, 0), (0, missing))))
        inputs = tuple(jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2)) for x in inputs)
    output, state = _scan(step, chunk_size, state, params, inputs, documents)
    return output[:, :length], state


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan(step, chunk_size, state, params, inputs, documents):
    output, final, _ = _forward(step, chunk_size, state, params, inputs, documents, keep_states=False)
    return output, final


def _forward(step, chunk_size, state, params, inputs, documents, *, keep_states):
    def one(carry, index):
        state, output = carry
        chunk = tuple(_slice(x, index, chunk_size) for x in inputs)
        after, y = step(state, params, chunk, _mask(documents, index, chunk_size))
        return (after, _update(output, y, index)), state if keep_states else None

    output = zeros_beside(inputs[0], inputs[0].shape, inputs[0].dtype)
    indices = jnp.arange(inputs[0].shape[1] // chunk_size)
    (final, output), states = jax.lax.scan(one, (state, output), indices)
    return output, final, states


def _scan_fwd(step, chunk_size, state, params, inputs, documents):
    output, final, states = _forward(step, chunk_size, state, params, inputs, documents, keep_states=True)
    return (output, final), (states, params, inputs, documents)


def _scan_bwd(step, chunk_size, residuals, cotangents):
    states, params, inputs, documents = residuals
    d_output, d_final = cotangents

    def one(carry, xs):
        d_state, d_params, d_inputs = carry
        index, state = xs
        mask = _mask(documents, index, chunk_size)
        chunk = tuple(_slice(x, index, chunk_size) for x in inputs)
        _, pull = jax.vjp(lambda s, p, x: step(s, p, x, mask), state, params, chunk)
        d_state, d_p, d_chunk = pull((d_state, _slice(d_output, index, chunk_size)))
        d_params = jax.tree.map(jnp.add, d_params, d_p)
        d_inputs = tuple(_update(d, x, index) for d, x in zip(d_inputs, d_chunk))
        return (d_state, d_params, d_inputs), None

    zeros = jax.tree.map(lambda x: zeros_beside(x, x.shape, x.dtype), (params, inputs))
    indices = jnp.arange(states.shape[0])
    (d_state, d_params, d_inputs), _ = jax.lax.scan(one, (d_final, *zeros), (indices, states), reverse=True)
    return d_state, d_params, d_inputs, jax.tree.map(zero_cotangent, documents)


_scan.defvjp(_scan_fwd, _scan_bwd)


def _slice(x: Array, index: Int[Array, ""], chunk_size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * chunk_size, chunk_size, axis=1)


def _update(x: Array, chunk: Array, index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, chunk.astype(x.dtype), index * chunk.shape[1], axis=1)


def _mask(documents: Documents | None, index: Int[Array, ""], chunk_size: int) -> ChunkMask | None:
    if documents is None:
        return None
    number = _slice(documents.number, index, chunk_size)
    # Documents are numbered from 0, so the initial state's document is that of position 0.
    before = jnp.maximum(index * chunk_size - 1, 0)
    carried = jax.lax.dynamic_slice_in_dim(documents.number, before, 1, axis=1)
    return ChunkMask(
        same=number[:, :, None] == number[:, None, :],
        first=number == carried,
        last=number == number[:, -1:],
        kept=number[:, -1] == carried[:, 0],
        scored=_slice(documents.scored, index, chunk_size),
    )
