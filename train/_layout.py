"""Where the gradient of each parameter is computed, added up and kept."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, PyTree

from eqx_loss import XentSharding
from model import Cut, Parallel, ParamSpec, cut_axes, cut_dimension, looks_up, on_own_cut, sum_scattered

from ._mesh import MESH_AXES, TENSOR


@dataclass(frozen=True, kw_only=True)
class GradientLayout:
    """Partitions of parameters and gradients on a mesh.

    Attributes:
        mesh: The devices.
        parallel: What the model is told of them.
        specs: Declared facts of every parameter.
        partitions: Partition of every parameter.
        gradient_partitions: Partition in which gradients are wanted: that of the optimizer state.
        is_tied: The embedding is the output head as well.
    """

    mesh: Mesh
    parallel: Parallel
    specs: PyTree
    partitions: PyTree
    gradient_partitions: PyTree
    is_tied: bool

    @property
    def manual_axes(self) -> frozenset[str]:
        """Mesh axes that the step handles itself: all but tensor, which is left to the partitioner."""
        return frozenset(MESH_AXES) - ({TENSOR} if self.mesh.shape[TENSOR] > 1 else frozenset())

    @property
    def backend(self) -> Literal["cpu", "gpu", "tpu"]:
        """Platform of the mesh, which need not be that of this process when compiling ahead of time."""
        platform = self.mesh.devices.flat[0].platform
        return "gpu" if platform in ("cuda", "rocm") else platform

    @property
    def output_sharding(self) -> XentSharding | None:
        """How the output layer divides the vocabulary inside the step; None where no axis does."""
        if self.mesh.shape[TENSOR] == 1:
            return None
        return XentSharding(mesh=self.mesh, vocab=(TENSOR,), unembed=PartitionSpec(None, TENSOR))

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Mesh axes over which rows and positions are cut: what is computed from them adds over these."""
        return tuple(name for name in MESH_AXES if name != TENSOR)


def make_sinks(layout: GradientLayout, params: PyTree, dtype: Literal["float32", "bfloat16"]) -> PyTree:
    """What to differentiate with respect to, so that whole gradients stay on the device.

    Zeros shaped as the whole weight for a cut weight, the parameter itself for any other.
    """

    def sink(shard: Array, spec: ParamSpec) -> Array:
        axis, names = _gathered(layout, spec)
        if axis is None:
            return shard
        shape = list(shard.shape)
        shape[axis] *= math.prod(layout.mesh.shape[name] for name in names)
        return jnp.zeros(shape, dtype)

    return jax.tree.map(sink, params, layout.specs)


def on_own_cuts(layout: GradientLayout, grads: PyTree) -> PyTree:
    """`grads`, told to stay cut over tensor as their parameters are: the compiler cuts a carried sum as it likes."""

    def stay(grad: Array, partition: PartitionSpec) -> Array:
        own = tensor_part(partition)
        return on_own_cut(lambda grad: grad, layout.parallel, own, own)(grad)

    return jax.tree.map(stay, grads, layout.partitions)


def with_shards(layout: GradientLayout, trained: PyTree, params: PyTree) -> PyTree:
    """The parameters a model runs with: gathered weights beside their sinks of `make_sinks`."""

    def pair(trained: Array, shard: Array, spec: ParamSpec) -> Array | Cut:
        return trained if _gathered(layout, spec)[0] is None else Cut(shard=shard, sink=trained)

    return jax.tree.map(pair, trained, params, layout.specs)


def reduce_gradient(
    layout: GradientLayout, grads: PyTree, dtype: Literal["float32", "bfloat16"], *, is_whole: bool
) -> PyTree:
    """Gradients added over the devices that hold a part of them, cut as `gradient_partitions` says, float32.

    Args:
        layout: Partitions.
        grads: Gradients of every device's own rows, those of cut weights whole or reduced and cut already.
        dtype: Dtype of the sums over devices.
        is_whole: Gradients of cut weights are whole.
    """

    def reduce(grad: Array, spec: ParamSpec, partition: PartitionSpec, wanted: PartitionSpec) -> Array:
        kept = {name for _, names in _cuts(partition) for name in names}
        axis, cut = _gathered(layout, spec)
        if is_whole and axis is not None:
            grad = sum_scattered(grad, axis, cut, dtype, layout.parallel)
        left = [name for name in layout.summed_axes if name not in kept]
        for axis, names in _cuts(wanted):
            new = tuple(name for name in names if name in left)
            if new:
                grad = sum_scattered(grad, axis, new, dtype, layout.parallel)
                left = [name for name in left if name not in new]
        if left:
            grad = jax.lax.psum(grad.astype(dtype), tuple(left))
        return grad.astype(jnp.float32)

    def reduce_own(grad: Array, spec: ParamSpec, partition: PartitionSpec, wanted: PartitionSpec) -> Array:
        own = tensor_part(partition)
        return on_own_cut(lambda grad: reduce(grad, spec, partition, wanted), layout.parallel, own, own)(grad)

    return jax.tree.map(reduce_own, grads, layout.specs, layout.partitions, layout.gradient_partitions)


def manual_part(partitions: PyTree) -> PyTree:
    """`partitions` without the tensor axis, which the `shard_map` of the step does not handle."""

    return jax.tree.map(
        lambda partition: _only(partition, lambda name: name != TENSOR),
        partitions,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def tensor_part(partition: PartitionSpec) -> PartitionSpec:
    """What `manual_part` leaves out."""
    return _only(partition, lambda name: name == TENSOR)


def _only(partition: PartitionSpec, is_kept: Callable[[str], bool]) -> PartitionSpec:
    groups = [tuple(name for name in names if is_kept(name)) for names in _groups(partition)]
    return PartitionSpec(*(group or None for group in groups))


def _gathered(layout: GradientLayout, spec: ParamSpec) -> tuple[int | None, tuple[str, ...]]:
    """Axis along which a layer gathers the parameter, and from which mesh axes; (None, ()) if it does not."""
    axis, names = cut_dimension(spec, layout.parallel), cut_axes(spec, layout.parallel)
    if axis is None or not names or looks_up(spec, layout.is_tied):
        return None, ()
    return axis, names


def _groups(partition: PartitionSpec) -> list[tuple[str, ...]]:
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in partition]


def _cuts(partition: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
    return [(axis, names) for axis, names in enumerate(_groups(partition)) if names]
