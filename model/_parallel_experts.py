"""Experts cut over devices: copies of tokens travel to the devices that hold their experts, and back.

Every copy has a place in the receiving buffer, whatever the router does, unless `ExpertExchange.buffer` bounds it.
The copies that a device receives then take their places by the device they come from, and of one device by expert,
until the buffer is full; the rest stays where it is, comes out as 0 and is counted. All devices know all counts, so
they agree on it. TPUs send the copies that there are (`ragged_all_to_all`), other platforms blocks of equal size: both
drop the same copies.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._expert_exchange import ExchangeWork
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


def run_across(
    copies: Copies, work: ExchangeWork, products: Products, parallel: Parallel
) -> tuple[Float[Array, "N D"], Int[Array, ""] | None]:
    """`products` of every copy, computed where its expert is, and how many copies of this device had no place.

    The products of a copy without a place are 0. The number is None where every copy has one.

    Args:
        copies: Of this device's tokens.
        work: Their sizes.
        products: The experts of this device.
        parallel: Names the expert axis and bounds the buffer.
    """
    run = _run_ragged if parallel.platform == "tpu" else _run_padded
    size = work.buffer_rows(parallel.exchange.buffer)
    is_bounded = size < work.buffer_rows(None)
    return run(copies, _Buffer(size, work.block_rows, is_bounded), products, parallel)


class _Buffer(NamedTuple):
    """Rows that a device receives.

    Attributes:
        size: Most rows of all devices together.
        block: Most rows of one device.
        is_bounded: More copies than `size` may come.
    """

    size: int
    block: int
    is_bounded: bool

    def placed(self, traffic: Int[Array, "P P"]) -> Int[Array, "P P"]:
        """Copies that have a place, of those that go [from, to]: the first devices' come first."""
        before = jnp.cumsum(traffic, axis=0) - traffic
        return jnp.clip(self.size - before, 0, traffic)


def _run_padded(
    copies: Copies, buffer: _Buffer, products: Products, parallel: Parallel
) -> tuple[Array, Array | None]:
    axis, count = parallel.expert_axis, parallel.size(parallel.expert_axis)
    num_copies = copies.rows.shape[0]
    num_local = copies.group_sizes.shape[0] // count
    sent = jnp.sum(copies.group_sizes.reshape(count, num_local), axis=1)
    starts = jnp.cumsum(sent) - sent
    placed = sent
    if buffer.is_bounded:
        placed = buffer.placed(jax.lax.all_gather(sent, axis))[jax.lax.axis_index(axis)]
    place = jnp.arange(buffer.block)[None, :]
    is_used = place < placed[:, None]
    # Where each place of the sending buffer comes from, and where each copy went; one past the end means nowhere.
    source = jnp.where(is_used, starts[:, None] + place, num_copies).reshape(-1)
    target = copies.experts // num_local
    # Where a copy without a place would be, the full buffer of its receiver has nothing: 0 comes back.
    went = target * buffer.block + jnp.arange(num_copies) - starts[target]

    def travel(x: Array) -> Array:
        return jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)

    rows = travel(_move(copies.rows, source, went))
    weights = travel(_move(copies.weights[:, None], source, went))[:, 0]
    named = jnp.where(is_used.reshape(-1), jnp.append(copies.experts, 0)[source] % num_local, num_local)
    local = travel(named)
    order = jnp.argsort(local, stable=True)
    back = jnp.argsort(order)
    order = order[: buffer.size]
    sizes = jnp.bincount(local, length=num_local + 1)[:num_local].astype(jnp.int32)
    done = products(_move(rows, order, back), _move(weights[:, None], order, back)[:, 0], sizes)
    returned = _move(travel(_move(done, back, order)), went, source)
    return returned, jnp.sum(sent - placed) if buffer.is_bounded else None


def _run_ragged(
    copies: Copies, buffer: _Buffer, products: Products, parallel: Parallel
) -> tuple[Array, Array | None]:
    axis, count = parallel.expert_axis, parallel.size(parallel.expert_axis)
    num_local = copies.group_sizes.shape[0] // count
    me = jax.lax.axis_index(axis)
    # [from, to, expert of the receiver]: everything about the exchange follows from these counts.
    table = jax.lax.all_gather(copies.group_sizes, axis).reshape(count, count, num_local)
    traffic = jnp.sum(table, axis=2).astype(jnp.int32)
    starts, placed = jnp.cumsum(traffic, axis=1) - traffic, traffic
    if buffer.is_bounded:
        placed = buffer.placed(traffic)
        table = jnp.clip(placed[:, :, None] - (jnp.cumsum(table, axis=2) - table), 0, table)
    arrived = jnp.cumsum(placed, axis=0) - placed
    forth = (starts[me], placed[me], arrived[me], placed[:, me])
    return_trip = (arrived[:, me], placed[:, me], starts[:, me], placed[me])

    def travel(x: Array, size: int, trip: tuple[Array, Array, Array, Array]) -> Array:
        empty = jnp.zeros((size, *x.shape[1:]), x.dtype)
        return jax.lax.ragged_all_to_all(x, empty, *trip, axis_name=axis)

    rows, weights = travel(copies.rows, buffer.size, forth), travel(copies.weights, buffer.size, forth)
    local = _received_experts(table[:, me], buffer.size)
    order = jnp.argsort(local, stable=True)
    back = jnp.argsort(order)
    sizes = jnp.sum(table[:, me], axis=0).astype(jnp.int32)
    done = products(_move(rows, order, back), _move(weights[:, None], order, back)[:, 0], sizes)
    returned = travel(_move(done, back, order), copies.rows.shape[0], return_trip)
    return returned, jnp.sum(traffic[me] - placed[me]) if buffer.is_bounded else None


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
