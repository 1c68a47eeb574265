"""Recurrences and convolutions over rows whose positions are split over a mesh axis.

The state is linear in the state before: a shard is `S' = M S + C` and its output `o + R S`. Each shard finds M, C, o
and R in one pass, as the response to the value columns [v, 0] from the state [0, I]; the pairs (M, C) are gathered and
folded, and R meets the state that comes out of the shards before. For use inside `jax.shard_map`; exact.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._conv import causal_conv1d_after
from ._kda_chunk import PRECISION
from ._kda_documents import vary_together, zeros_beside

Recurrence = Callable[
    [Float[Array, "B S H W"], Float[Array, "B H K W"]],
    tuple[Float[Array, "B S H W"], Float[Array, "B H K W"]],
]


def over_context(
    recurrence: Recurrence,
    v: Float[Array, "B S H U"],
    *,
    key_size: int,
    axis_name: str,
    segment_ids: Int[Array, "B S"] | None = None,
    initial_state: Float[Array, "B H K U"] | None = None,
) -> tuple[Float[Array, "B S H U"], Float[Array, "B H K U"]]:
    """A recurrence over whole rows, from one shard of their positions; shard i has the i-th part.

    `kda_chunked` over a row is
    `over_context(lambda v, s: kda_chunked(q, k, v, g, beta, segment_ids=ids, initial_state=s), v, ...)`.

    Args:
        recurrence: Output and last state as a function of values and initial state, any number W of value columns;
            each column of the state must depend on its own column of the values only, and linearly.
        v: Values of this shard.
        key_size: K.
        axis_name: Mesh axis that positions are split over.
        segment_ids: Documents of this shard, ids unique within the whole row; the same that `recurrence` uses.
        initial_state: State that the first document of each whole row goes on from, on every shard; None is zero.

    Returns:
        Output of this shard in `v`'s dtype, and the state after the whole rows, the same on every shard.
    """
    size = v.shape[3]
    dtype = jnp.promote_types(v.dtype, jnp.float32)
    batch, _, heads, _ = v.shape
    zeros = zeros_beside(v, (batch, heads, key_size, size), dtype)
    identity = jnp.broadcast_to(jnp.eye(key_size, dtype=dtype), (batch, heads, key_size, key_size))
    columns = jnp.pad(v.astype(dtype), ((0, 0), (0, 0), (0, 0), (0, key_size)))
    o, after = recurrence(columns, jnp.concatenate([zeros, identity], axis=-1))
    start = zeros if initial_state is None else initial_state.astype(dtype)
    before, final = _fold(after[..., size:], after[..., :size], _edge_ids(v, segment_ids), start, axis_name)
    reached = jnp.einsum("bshk,bhku->bshu", o[..., size:], before, precision=PRECISION)
    return (o[..., :size] + reached).astype(v.dtype), final


def causal_conv1d_over_context(
    x: Float[Array, "B S C"],
    weight: Float[Array, "C W"],
    *,
    axis_name: str,
    segment_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S C"]:
    """`causal_conv1d` over whole rows, from one shard of their positions; shard i has the i-th part.

    Args:
        x: Inputs of this shard.
        weight: Taps of each channel, the same on every shard.
        axis_name: Mesh axis that positions are split over.
        segment_ids: Documents of this shard, ids unique within the whole row; 0 is padding.

    Raises:
        ValueError: A shard is shorter than W - 1 positions, so a tap reaches past the neighbour.
    """
    length = weight.shape[1] - 1
    if x.shape[1] < length:
        raise ValueError(
            f"a shard must have at least W-1={length} positions, got {x.shape[1]}; split the rows over fewer devices"
        )
    count = jax.lax.axis_size(axis_name)
    pairs = [(i, i + 1) for i in range(count - 1)]  # the first shard receives zeros

    def from_left(part: Array) -> Array:
        return jax.lax.ppermute(part[:, part.shape[1] - length :], axis_name, pairs)

    x, segment_ids = vary_together((x, segment_ids))
    past_ids = None if segment_ids is None else from_left(segment_ids)
    return causal_conv1d_after(x, weight, from_left(x), segment_ids, past_ids)


def _edge_ids(v: Array, segment_ids: Int[Array, "B S"] | None) -> Int[Array, "B 2"]:
    """First and last document id of the shard's rows; 0 for rows of padding and when there are no ids."""
    if segment_ids is None or segment_ids.shape[1] == 0:
        return zeros_beside(v, (v.shape[0], 2), jnp.int32)
    real = segment_ids != 0
    first = jnp.argmax(real, axis=1)
    last = real.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
    return jnp.take_along_axis(segment_ids, jnp.stack([first, last], axis=1), axis=1).astype(jnp.int32)


def _fold(
    transition: Float[Array, "B H K K"],
    added: Float[Array, "B H K U"],
    edge_ids: Int[Array, "B 2"],
    start: Float[Array, "B H K U"],
    axis_name: str,
) -> tuple[Float[Array, "B H K U"], Float[Array, "B H K U"]]:
    """The state before this shard (0 where it begins with a new document), and the state after the last shard."""
    index = jax.lax.axis_index(axis_name)
    transition, added, edge_ids, start, index = vary_together((transition, added, edge_ids, start, index))
    shards = jax.lax.all_gather((transition, added, edge_ids), axis_name)

    def one(carry, shard):
        state, last_id, mine, number = carry
        transition, added, edge = shard
        goes_on = (last_id == 0) | (edge[:, 0] == 0) | (edge[:, 0] == last_id)
        state = jnp.where(goes_on[:, None, None, None], state, 0)
        mine = jnp.where(number == index, state, mine)
        state = jnp.einsum("bhkl,bhlu->bhku", transition, state, precision=PRECISION) + added
        return (state, jnp.where(edge[:, 1] == 0, last_id, edge[:, 1]), mine, number + 1), None

    carry = vary_together(
        (start, jnp.zeros_like(edge_ids[:, 0]), jnp.zeros_like(start), jnp.zeros_like(index), shards)
    )
    (final, _, mine, _), _ = jax.lax.scan(one, carry[:4], shards)
    # Every shard has found the same state; the sum says so to the type system.
    return mine, jax.lax.psum(jnp.where(index == 0, final, 0), axis_name)
