"""Heads, ffn widths and the vocabulary cut over devices: where each device works on its own cut.

The compiler divides what is left to it along `Parallel.tensor_axis`. It cannot divide kernels, and collectives along
other axes, layouts and grouped products make it gather or send more than is needed: these run inside a `shard_map` of
their own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from ._parallel import Parallel
from ._param import ParamSpec
from ._rows import Rows

TENSOR_LETTERS = frozenset("HJFV")


def tensor_dimension(spec: ParamSpec) -> int | None:
    """Which axis of a parameter the tensor axis cuts; None for a parameter that every device has whole."""
    return next((i for i, letter in enumerate(spec.axes.split()) if letter in TENSOR_LETTERS), None)


def cut_along(axis: int | None, parallel: Parallel) -> PartitionSpec:
    """Partition of an array whose axis `axis`, if any, the tensor axis cuts."""
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, parallel.tensor_axis)


def on_own_cut(
    function: Callable, parallel: Parallel | None, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., Any]:
    """`function` of each device's cuts along the tensor axis; `function` itself where no axis cuts.

    Its gradient at an operand that is not cut is added over the axis.

    Args:
        function: All its arrays are arguments.
        parallel: Names the axis; must be that of the `shard_map` around.
        in_specs: Partitions of its operands, by `cut_along`.
        out_specs: Of its results.
    """
    if parallel is None or parallel.tensor_axis is None:
        return function
    return jax.shard_map(
        function,
        axis_names={parallel.tensor_axis},
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # as the `shard_map` around; kernels do not say how their outputs vary
    )


def on_own_heads(
    function: Callable[[PyTree, PyTree, Rows], tuple[Array, Array | None]],
    activations: PyTree[Array],
    weights: PyTree[Array],
    rows: Rows,
) -> tuple[Array, Array | None]:
    """`function(activations, weights, rows)` of each device's heads.

    Args:
        function: Treats every head alike; it sees `rows` without a tensor axis.
        activations: Heads are axis 2, as in its first result.
        weights: Heads are axis 0, as in its second result.
        rows: The same on all devices.
    """
    parallel = rows.parallel
    if parallel is None or parallel.tensor_axis is None:
        return function(activations, weights, rows)

    def own(activations: PyTree, weights: PyTree, rows: Rows) -> tuple[Array, Array | None]:
        return function(activations, weights, dataclasses.replace(rows, parallel=alone(parallel)))

    of_positions, of_weights = cut_along(2, parallel), cut_along(0, parallel)
    specs = (of_positions, of_weights, PartitionSpec())
    return on_own_cut(own, parallel, specs, (of_positions, of_weights))(activations, weights, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_of_cuts(part: Float[Array, "..."], parallel: Parallel) -> Float[Array, "..."]:
    """The sum over the tensor axis, inside `on_own_cut`, for a result that is not cut.

    Such a result's slope comes divided by the devices. The slope of a `psum` would add it up again: one more sum.
    """
    return jax.lax.psum(part, parallel.tensor_axis)


sum_of_cuts.defvjp(
    lambda part, parallel: (sum_of_cuts(part, parallel), None),
    lambda parallel, _, slope: (slope * parallel.size(parallel.tensor_axis),),
)


def alone(parallel: Parallel) -> Parallel:
    """What a device is told inside `on_own_cut`: there is no tensor axis."""
    exchange = dataclasses.replace(parallel.exchange, expert_cuts=1)
    return dataclasses.replace(parallel, tensor_axis=None, exchange=exchange)
