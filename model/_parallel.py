"""A model that runs inside `jax.shard_map`: which mesh axes cut the weights, and how a layer gets its
weights whole.

Every device holds a cut of each weight (ZeRO-3, arXiv:1910.02054). A layer gathers its own weights just
before it uses them and drops them after, so no more than a few layers are whole at a time; the backward
pass gathers again and sends
every gradient back to the device that keeps the cut.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int, Shaped

from ._expert_exchange import ExpertExchange
from ._param import ParamSpec, field_spec, param_specs

M = TypeVar("M", bound=eqx.Module)

# Of the axes a parameter has, the first of these is cut. Experts are cut over their own mesh axis as well.
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
    """Mesh axes, all of them manual where the model runs.

    Attributes:
        fsdp_axes: Axes that cut every weight.
        expert_axis: Axis that holds the experts; it cuts weights without an expert dimension as well.
        context_axis: Axis that cuts the positions, and the weights like `fsdp_axes`.
        sizes: Size of each named axis.
        gather_dtype: Dtype in which matrices travel.
        reduce_dtype: Dtype in which their gradients are added over devices.
        platform: Platform of the devices.
        exchange: What travels along `expert_axis`.
    """

    fsdp_axes: tuple[str, ...] = ()
    expert_axis: str | None = None
    context_axis: str | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    gather_dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    platform: str = "cpu"
    exchange: ExpertExchange = dataclasses.field(default_factory=ExpertExchange)

    def size(self, name: str | None) -> int:
        """Devices along a mesh axis; 1 for None."""
        return 1 if name is None else dict(self.sizes)[name]


# Cut axis, mesh axes, dtype that travels, the mesh, and for sinks the dtype of the gradient.
GatherOptions = tuple[int, tuple[str, ...], str, Parallel]
SinkOptions = tuple[int, tuple[str, ...], str, Parallel, str]


class Cut(eqx.Module):
    """A cut weight whose whole gradient is kept on the device, to be reduced later.

    Attributes:
        shard: The device's part of the weight.
        sink: Zeros shaped as the whole weight; the gradient arrives here, unreduced, and none at `shard`.
    """

    shard: Array
    sink: Array


def cut_dimension(spec: ParamSpec) -> int | None:
    """Which axis of a parameter the mesh divides for storage; None for a parameter that stays whole."""
    if spec.role in WHOLE_ROLES:
        return None
    letters = spec.axes.split()
    return next((letters.index(letter) for letter in CUT_LETTERS if letter in letters), None)


def cut_axes(spec: ParamSpec, parallel: Parallel) -> tuple[str, ...]:
    """Mesh axes that divide `cut_dimension(spec)`, outermost first."""
    names = [*parallel.fsdp_axes]
    if parallel.expert_axis is not None and not is_expert(spec):
        names.append(parallel.expert_axis)
    if parallel.context_axis is not None:
        names.append(parallel.context_axis)
    return tuple(names)


def is_expert(spec: ParamSpec) -> bool:
    """True for a weight that every expert has its own of; False for the router, which scores all of them."""
    return "E" in spec.axes.split() and "E" not in spec.columns.split() and spec.role == "matrix"


def whole(module: M, parallel: Parallel | None) -> M:
    """`module` with its weights gathered from the devices that hold their cuts; itself when `parallel` is
    None.

    Gradients of the gathered weights are added over the devices and cut again. Weights of experts stay cut
    over the expert axis.
    """
    if parallel is None:
        return module
    plain = jax.tree.map(lambda x: x.shard if isinstance(x, Cut) else x, module, is_leaf=_is_cut)
    leaves, treedef = jax.tree.flatten(module, is_leaf=_is_cut)
    specs = jax.tree.leaves(param_specs(plain), is_leaf=lambda x: isinstance(x, ParamSpec))
    return jax.tree.unflatten(
        treedef, [_whole_leaf(x, s, parallel) for x, s in zip(leaves, specs, strict=True)]
    )


def whole_field(module: eqx.Module, name: str, parallel: Parallel | None) -> Array:
    """The parameter `name` of `module` alone, as `whole` has it."""
    leaf = getattr(module, name)
    if parallel is None:
        return leaf
    return _whole_leaf(leaf, field_spec(type(module), name), parallel)


def looked_up(
    module: eqx.Module, name: str, tokens: Int[Array, "B S"], dtype: str, parallel: Parallel
) -> Float[Array, "B S D"]:
    """Rows of the table `name` of `module` at `tokens`.

    The tokens travel to the cuts of the table and the cut rows travel back: B * S * D numbers instead of V
    * D.
    """
    table = getattr(module, name)
    names = cut_axes(field_spec(type(module), name), parallel)
    if isinstance(table, Cut) or not names:
        return whole_field(module, name, parallel)[tokens].astype(dtype)
    everywhere = gathered(tokens, 0, names, parallel)
    return jax.lax.all_to_all(table[everywhere].astype(dtype), names, split_axis=0, concat_axis=2, tiled=True)


def looks_up(spec: ParamSpec, is_tied: bool) -> bool:
    """True for a parameter that is never gathered: an embedding that is no output head as well."""
    return spec.role == "embedding" and not is_tied


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
    x: Float[Array, "..."], axis: int, names: tuple[str, ...], parallel: Parallel
) -> Float[Array, "..."]:
    """The sum of `x` over the devices along `names`; every device keeps its cut along `axis`, outermost name first.

    On TPUs in stages of at most `MAX_SUM` devices.
    """
    if parallel.platform != "tpu":
        return jax.lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)
    shape = list(x.shape)
    x = _padded(x, axis)
    for name, groups in _stages(names, parallel, MAX_SUM):
        x = jax.lax.psum_scatter(x, name, scatter_dimension=axis, axis_index_groups=groups, tiled=True)
    shape[axis] = x.shape[axis]
    return jax.lax.slice(x, [0] * x.ndim, shape)


def keep_cut(primitive: jax.extend.core.Primitive, *_: object, **params: Any) -> bool:
    """Rematerialization policy: everything is kept for the backward pass but what was gathered."""
    # A policy sees a custom derivative from outside: the gather of a weight is hidden in it.
    inside = params["call_jaxpr"].eqns if primitive.name == "custom_vjp_call" else ()
    return all(name != "all_gather" for name in (primitive.name, *(eqn.primitive.name for eqn in inside)))


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


def _whole_leaf(leaf: Array | Cut, spec: ParamSpec, parallel: Parallel) -> Array:
    axis, names = cut_dimension(spec), cut_axes(spec, parallel)
    if axis is None or not names:
        return leaf.shard if isinstance(leaf, Cut) else leaf
    # The router scores in float32 from float32 weights: its choices must not depend on the mesh.
    dtype = "float32" if "E" in spec.columns.split() else parallel.gather_dtype
    if isinstance(leaf, Cut):
        return _gather_to_sink(leaf.shard, leaf.sink, (axis, names, dtype, parallel, str(leaf.sink.dtype)))
    return _gather(leaf, (axis, names, dtype, parallel))


def _cast_cut(shard: Float[Array, "..."], dtype: str, parallel: Parallel) -> Float[Array, "..."]:
    """`shard` in another dtype.

    On TPUs float32 is rounded to bfloat16 as integers, in the layout that it is stored in: the compiler would else
    move the cast or the transposition out of the loop over layers, and a copy of the cuts of all layers would live
    beside the parameters.
    """
    if parallel.platform != "tpu" or (shard.dtype, dtype) != (jnp.float32, "bfloat16"):
        return shard.astype(dtype)
    stored = with_layout_constraint(shard, Layout(major_to_minor=tuple(range(shard.ndim))))
    bits = jax.lax.bitcast_convert_type(stored, jnp.uint32)
    # To the nearest, ties to even; a NaN stays one.
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    upper = jnp.where(jnp.isnan(stored), 0x7FC0, nearest).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(shard: Float[Array, "..."], options: GatherOptions) -> Float[Array, "..."]:
    axis, names, dtype, parallel = options
    return gathered(_cast_cut(shard, dtype, parallel), axis, names, parallel)


def _gather_forward(shard: Array, options: GatherOptions) -> tuple[Array, None]:
    return _gather(shard, options), None


def _gather_backward(options: GatherOptions, residuals: None, grad: Array) -> tuple[Array]:
    del residuals
    axis, names, _, parallel = options
    # Without the explicit cast the sum over devices would be in the dtype the weights travel in.
    part = sum_scattered(grad.astype(parallel.reduce_dtype), axis, names, parallel)
    return (part.astype(jnp.float32),)


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_to_sink(
    shard: Float[Array, "..."],
    sink: Float[Array, "..."],
    options: SinkOptions,
) -> Float[Array, "..."]:
    axis, names, dtype, parallel, _ = options
    return gathered(_cast_cut(shard, dtype, parallel), axis, names, parallel)


def _sink_forward(shard: Array, sink: Array, options: SinkOptions) -> tuple[Array, None]:
    return _gather_to_sink(shard, sink, options), None


def _sink_backward(options: SinkOptions, residuals: None, grad: Array) -> tuple[Array, Array]:
    del residuals
    axis, names, _, parallel, sink_dtype = options
    shape = list(grad.shape)
    shape[axis] //= math.prod(parallel.size(name) for name in names)
    return jnp.zeros(shape, jnp.float32), grad.astype(sink_dtype)


_gather_to_sink.defvjp(_sink_forward, _sink_backward)


def _is_cut(leaf: object) -> bool:
    return isinstance(leaf, Cut)
