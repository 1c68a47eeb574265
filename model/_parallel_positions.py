"""Positions cut over devices: what needs whole rows gets them for a part of the heads, by one exchange each
way.

DeepSpeed-Ulysses, arXiv:2309.14509. Attention, convolutions and recurrences work head by head, so a device
that holds every position of some heads runs them as if the row were whole: documents that cross a border
need no care.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ._parallel import Parallel
from ._rows import Rows


def is_cut(rows: Rows) -> bool:
    """Whether a device holds a part of each row only."""
    return rows.parallel is not None and rows.parallel.context_axis is not None


def to_heads(x: Shaped[Array, "B S H *rest"], rows: Rows) -> Shaped[Array, "B S2 H2 *rest"]:
    """From some positions of every head to every position of some heads; `x` itself when rows are whole.

    Raises:
        ValueError: The heads do not divide over the devices.
    """
    parallel = rows.parallel
    if parallel is None or parallel.context_axis is None:
        return x
    count = parallel.size(parallel.context_axis)
    if x.shape[2] % count:
        raise ValueError(
            f"{x.shape[2]} heads do not divide over mesh axis {parallel.context_axis}={count}; use a divisor"
        )
    return jax.lax.all_to_all(x, parallel.context_axis, split_axis=2, concat_axis=1, tiled=True)


def to_positions(x: Shaped[Array, "B S H *rest"], rows: Rows) -> Shaped[Array, "B S2 H2 *rest"]:
    """The inverse of `to_heads`."""
    if rows.parallel is None or rows.parallel.context_axis is None:
        return x
    return jax.lax.all_to_all(x, rows.parallel.context_axis, split_axis=1, concat_axis=2, tiled=True)


def whole_rows(rows: Rows) -> Rows:
    """`rows` with every position, for use between `to_heads` and `to_positions`."""
    parallel = rows.parallel
    if parallel is None or parallel.context_axis is None:
        return rows

    def gather(x: Array) -> Array:
        return jax.lax.all_gather(x, parallel.context_axis, axis=1, tiled=True)

    return Rows(
        segment_ids=gather(rows.segment_ids),
        positions=gather(rows.positions),
        router_mask=gather(rows.router_mask),
        axes=rows.axes,
        parallel=dataclasses.replace(parallel, context_axis=None),
    )


def own_heads(weight: Float[Array, "H *rest"], rows: Rows) -> Float[Array, "H2 *rest"]:
    """The heads of a per-head parameter that this device has after `to_heads`."""
    parallel = rows.parallel
    if parallel is None or parallel.context_axis is None:
        return weight
    size = weight.shape[0] // parallel.size(parallel.context_axis)
    start = jax.lax.axis_index(parallel.context_axis) * size
    return jax.lax.dynamic_slice_in_dim(weight, start, size)


def repeat_heads(x: Float[Array, "B S J K"], rows: Rows) -> Float[Array, "B S J2 K"]:
    """Key or value heads, each repeated where they do not divide over the devices, until they do."""
    parallel = rows.parallel
    if parallel is None or parallel.context_axis is None:
        return x
    num_heads = x.shape[2]
    times = math.lcm(num_heads, parallel.size(parallel.context_axis)) // num_heads
    return x if times == 1 else jnp.repeat(x, times, axis=2)


def all_heads(top: Float[Array, " H2"] | None, rows: Rows) -> Float[Array, " H"] | None:
    """A fact per head from the devices that know it."""
    if top is None or rows.parallel is None or rows.parallel.context_axis is None:
        return top
    return jax.lax.all_gather(top, rows.parallel.context_axis, axis=0, tiled=True)


def with_following(x: Int[Array, "B S"], count: int, parallel: Parallel | None) -> Int[Array, "B S2"]:
    """`x` and the next `count` positions of the row, which the next device holds; 0 past the end of the row.

    Raises:
        ValueError: A device holds fewer positions than `count`.
    """
    if parallel is None or parallel.context_axis is None:
        return x
    if count > x.shape[1]:
        raise ValueError(f"a device must hold at least {count} positions of a row, got {x.shape[1]}")
    devices = parallel.size(parallel.context_axis)
    # Pairs (source, target); the last device is sent nothing and receives zeros.
    pairs = [(i + 1, i) for i in range(devices - 1)]
    return jnp.concatenate([x, jax.lax.ppermute(x[:, :count], parallel.context_axis, pairs)], axis=1)
