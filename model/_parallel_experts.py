"""Experts cut over devices: copies of tokens travel to the devices that hold their experts, and back.

Every copy has a place in the receiving buffer, whatever the router does: nothing is dropped. TPUs send the
copies that there are (`ragged_all_to_all`); other platforms send blocks of equal size.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._parallel import Parallel

# (rows sorted by expert, their weights, rows of each expert) -> rows
Products = Callable[[Float[Array, "N D"], Float[Array, " N"], Int[Array, " E"]], Float[Array, "N D"]]


class Copies(NamedTuple):
    """Copies of a device's tokens, sorted by expert.

    Attributes:
        rows: One row for each copy.
        weights: Factor of each.
        experts: Expert of each, ascending, counted over all devices.
        group_sizes: Copies for each expert of all devices.
    """

    rows: Float[Array, "N D"]
    weights: Float[Array, " N"]
    experts: Int[Array, " N"]
    group_sizes: Int[Array, " E"]


def buffer_rows(num_tokens: int, num_chosen: int, num_local_experts: int) -> int:
    """Most copies that one device can send to another: a token goes to each expert at most once."""
    return num_tokens * min(num_chosen, num_local_experts)


def run_across(copies: Copies, capacity: int, products: Products, parallel: Parallel) -> Float[Array, "N D"]:
    """`products` of every copy, computed where its expert is.

    Args:
        copies: Of this device's tokens.
        capacity: From `buffer_rows`.
        products: The experts of this device.
        parallel: Names the expert axis.
    """
    if parallel.platform == "tpu":
        return _run_ragged(copies, capacity, products, parallel)
    return _run_padded(copies, capacity, products, parallel)


def _run_padded(copies: Copies, capacity: int, products: Products, parallel: Parallel) -> Array:
    axis, count = parallel.expert_axis, parallel.size(parallel.expert_axis)
    num_copies = copies.rows.shape[0]
    num_local = copies.group_sizes.shape[0] // count
    sent = jnp.sum(copies.group_sizes.reshape(count, num_local), axis=1)
    starts = jnp.cumsum(sent) - sent
    place = jnp.arange(capacity)[None, :]
    is_used = place < sent[:, None]
    # Where each place of the sending buffer comes from, and where each copy went; one past the end means nowhere.
    source = jnp.where(is_used, starts[:, None] + place, num_copies).reshape(-1)
    target = copies.experts // num_local
    went = target * capacity + jnp.arange(num_copies) - starts[target]

    def travel(x: Array) -> Array:
        return jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)

    rows = travel(_move(copies.rows, source, went))
    weights = travel(_move(copies.weights[:, None], source, went))[:, 0]
    named = jnp.where(is_used.reshape(-1), jnp.append(copies.experts, 0)[source] % num_local, num_local)
    local = travel(named)
    order = jnp.argsort(local, stable=True)
    back = jnp.argsort(order)
    sizes = jnp.bincount(local, length=num_local + 1)[:num_local].astype(jnp.int32)
    done = products(_move(rows, order, back), _move(weights[:, None], order, back)[:, 0], sizes)
    return _move(travel(_move(done, back, order)), went, source)


def _run_ragged(copies: Copies, capacity: int, products: Products, parallel: Parallel) -> Array:
    axis, count = parallel.expert_axis, parallel.size(parallel.expert_axis)
    num_local = copies.group_sizes.shape[0] // count
    me = jax.lax.axis_index(axis)
    # [from, to, expert of the receiver]: everything about the exchange follows from these counts.
    table = jax.lax.all_gather(copies.group_sizes, axis).reshape(count, count, num_local)
    traffic = jnp.sum(table, axis=2).astype(jnp.int32)
    before = jnp.cumsum(traffic, axis=0) - traffic
    sent, received = traffic[me], traffic[:, me]
    forth = (jnp.cumsum(sent) - sent, sent, before[me], received)
    arrived = before[:, me]
    offsets_there = jnp.cumsum(traffic, axis=1) - traffic
    return_trip = (arrived, received, offsets_there[:, me], sent)

    def travel(x: Array, size: int, trip: tuple[Array, Array, Array, Array]) -> Array:
        empty = jnp.zeros((size, *x.shape[1:]), x.dtype)
        return jax.lax.ragged_all_to_all(x, empty, *trip, axis_name=axis)

    size = count * capacity
    rows, weights = travel(copies.rows, size, forth), travel(copies.weights, size, forth)
    local = _received_experts(table[:, me], size)
    order = jnp.argsort(local, stable=True)
    back = jnp.argsort(order)
    sizes = jnp.sum(table[:, me], axis=0).astype(jnp.int32)
    done = products(_move(rows, order, back), _move(weights[:, None], order, back)[:, 0], sizes)
    return travel(_move(done, back, order), copies.rows.shape[0], return_trip)


def _received_experts(counts: Int[Array, "P E"], size: int) -> Int[Array, " N"]:
    """Expert of each received row: senders in order, each one's rows sorted by expert; E for rows not there."""
    ends = jnp.cumsum(counts.reshape(-1))
    block = jnp.searchsorted(ends, jnp.arange(size), side="right")
    return jnp.where(block < ends.shape[0], block % counts.shape[1], counts.shape[1])


@jax.custom_vjp
def _move(x: Float[Array, "N D"], source: Int[Array, " M"], target: Int[Array, " N"]) -> Float[Array, "M D"]:
    """Row `source[i]` of `x` at i, 0 where that is no row. `target` is the way back: both ways are gathers."""
    return jnp.take(x, source, axis=0, mode="fill", fill_value=0)


_move.defvjp(
    lambda x, source, target: (_move(x, source, target), (source, target)),
    lambda ways, g: (_move(g, ways[1], ways[0]), None, None),
)
