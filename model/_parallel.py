"""A model that runs inside `jax.shard_map`: which mesh axes cut which weights, and gathers and sums over them."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ._expert_exchange import ExpertExchange
from ._param import ParamSpec

# Of the axes a parameter has, the first of these is cut, unless experts are kept whole. Experts are cut over their own
# mesh axis as well.
CUT_LETTERS = ("D", "Q", "C", "K", "U", "F")
# Too small to be worth a gather in every layer: whole on every device.
WHOLE_ROLES = frozenset({"norm", "bias", "router_bias", "conv", "decay"})
# Devices of one gather and of one sum. The TPU compiler (libtpu 0.0.52) makes an all-reduce of a gather over 64 devices
# (v5p, v6e, tpu7x) and of a reduce-scatter over 8 (v5p:2x2x2; 16 on v6e:4x4): twice the bytes on the wire.
MAX_GATHER = 32
MAX_SUM = 4
# Entries of an axis, as of a vocabulary, that sums over TPUs pad to a multiple of `ALIGNED`: at most 3% more.
LONG_AXIS = 2**15
ALIGNED = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """Mesh axes, all of them but `tensor_axis` manual where the model runs.

    Attributes:
        fsdp_axes: Axes that cut every weight.
        expert_axis: Axis that holds the experts; it cuts weights without an expert dimension as well.
        context_axis: Axis that cuts the positions, and the weights like `fsdp_axes`.
        tensor_axis: Axis that cuts heads, ffn widths and the vocabulary. The compiler divides the work along it, but
            for what runs `on_own_cut`.
        whole_experts: All these axes together divide the number of experts: a device keeps some of them whole, not a
            part of each. Gathered they lie side by side, with nothing to rearrange.
        sizes: Size of each named axis.
        gather_dtype: Dtype in which matrices travel.
        reduce_dtype: Dtype in which their gradients are added over devices.
        platform: Platform of the devices.
        exchange: What travels along `expert_axis`.
    """

    fsdp_axes: tuple[str, ...] = ()
    expert_axis: str | None = None
    context_axis: str | None = None
    tensor_axis: str | None = None
    whole_experts: bool = False
    sizes: tuple[tuple[str, int], ...] = ()
    gather_dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    platform: str = "cpu"
    exchange: ExpertExchange = dataclasses.field(default_factory=ExpertExchange)

    def size(self, name: str | None) -> int:
        """Devices along a mesh axis; 1 for None."""
        return 1 if name is None else dict(self.sizes)[name]


def cut_dimension(spec: ParamSpec, parallel: Parallel) -> int | None:
    """Which axis of a parameter the mesh divides for storage; None for a parameter that stays whole."""
    if spec.role in WHOLE_ROLES:
        return None
    letters = spec.axes.split()
    if parallel.whole_experts and is_expert(spec):
        return letters.index("E")
    return next((letters.index(letter) for letter in CUT_LETTERS if letter in letters), None)


def cut_axes(spec: ParamSpec, parallel: Parallel) -> tuple[str, ...]:
    """Mesh axes that divide `cut_dimension`, outermost first; where that is the experts, inside the expert axis."""
    names = [*parallel.fsdp_axes]
    if parallel.expert_axis is not None and not is_expert(spec):
        names.append(parallel.expert_axis)
    if parallel.context_axis is not None:
        names.append(parallel.context_axis)
    return tuple(names)


def is_expert(spec: ParamSpec) -> bool:
    """True for a weight that every expert has its own of; False for the router, which scores all of them."""
    return "E" in spec.axes.split() and "E" not in spec.columns.split() and spec.role == "matrix"


def gathered(
    shard: Shaped[Array, "..."], axis: int, names: tuple[str, ...], parallel: Parallel
) -> Shaped[Array, "..."]:
    """`shard` of all devices along `names` joined along `axis`, outermost name first; the way back of `sum_scattered`.

    On TPUs in stages of at most `MAX_GATHER` devices.
    """
    count = math.prod(parallel.size(name) for name in names)
    if parallel.platform != "tpu" or count <= MAX_GATHER:
        return jax.lax.all_gather(shard, names, axis=axis, tiled=True)
    for name, groups in reversed(_stages(names, parallel, MAX_GATHER)):
        shard = jax.lax.all_gather(shard, name, axis=axis, axis_index_groups=groups, tiled=True)
    return shard


def sum_scattered(
    x: Float[Array, "..."], axis: int, names: tuple[str, ...], dtype: str, parallel: Parallel
) -> Float[Array, "..."]:
    """The sum of `x` over the devices along `names` in `dtype`; every device keeps its cut along `axis`, outermost name
    first.

    On TPUs in stages of at most `MAX_SUM` devices. A narrower `x` is not widened there to be summed on the way: its
    parts travel as they are, half the bytes, and every device adds up its own.
    """
    if parallel.platform != "tpu":
        return jax.lax.psum_scatter(x.astype(dtype), names, scatter_dimension=axis, tiled=True)
    if x.dtype.itemsize < jnp.dtype(dtype).itemsize:
        count = math.prod(parallel.size(name) for name in names)
        parts = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
        parts = jax.lax.all_to_all(parts, names, split_axis=axis, concat_axis=axis, tiled=True)
        return jnp.sum(parts, axis=axis, dtype=dtype)
    x = x.astype(dtype)
    shape = list(x.shape)
    x = _padded(x, axis)
    for name, groups in _stages(names, parallel, MAX_SUM):
        x = jax.lax.psum_scatter(x, name, scatter_dimension=axis, axis_index_groups=groups, tiled=True)
    shape[axis] = x.shape[axis]
    return jax.lax.slice(x, [0] * x.ndim, shape)


def _stages(names: tuple[str, ...], parallel: Parallel, limit: int) -> list[tuple[str, list[list[int]]]]:
    """Mesh axis and groups of devices of each stage, outermost first."""
    stages: list[tuple[str, list[list[int]]]] = []
    for name in names:
        factors = _factors(dict(parallel.sizes).get(name, 1), limit)
        devices = np.arange(math.prod(factors)).reshape(factors)
        for i, count in enumerate(factors):
            stages.append((name, np.moveaxis(devices, i, -1).reshape(-1, count).tolist()))
    return stages


def _factors(size: int, limit: int) -> tuple[int, ...]:
    """Factors of `size`, the largest first, of at most `limit` unless a prime is larger."""
    factors: list[int] = []
    while size > limit:
        factor = max(d for d in range(1, limit + 1) if size % d == 0)
        if factor == 1:
            break
        factors.append(factor)
        size //= factor
    return (*factors, size)


def _padded(x: Array, axis: int) -> Array:
    """`x` with long axes beside `axis` padded by zeros: Ling's vocabulary is 307 * 512, and rows of 307 * 4 tiles are
    summed by an all-reduce in every stage (v5p)."""
    long = [i != axis and size > LONG_AXIS for i, size in enumerate(x.shape)]
    if not any(long):
        return x
    return jnp.pad(
        x, [(0, -size % ALIGNED if is_long else 0) for size, is_long in zip(x.shape, long, strict=True)]
    )
