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
from jaxtyping import Array, Float, Int

from ._param import ParamSpec, field_spec, param_specs

M = TypeVar("M", bound=eqx.Module)

# Of the axes a parameter has, the first of these is cut. Experts are cut over their own mesh axis as well.
CUT_LETTERS = ("D", "Q", "C", "K", "U", "F")
# Too small to be worth a gather in every layer: whole on every device.
WHOLE_ROLES = frozenset({"norm", "bias", "router_bias", "conv", "decay"})


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
    """

    fsdp_axes: tuple[str, ...] = ()
    expert_axis: str | None = None
    context_axis: str | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    gather_dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    platform: str = "cpu"

    def size(self, name: str | None) -> int:
        """Devices along a mesh axis; 1 for None."""
        return 1 if name is None else dict(self.sizes)[name]


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
    everywhere = jax.lax.all_gather(tokens, names, axis=0, tiled=True)
    return jax.lax.all_to_all(table[everywhere].astype(dtype), names, split_axis=0, concat_axis=2, tiled=True)


def looks_up(spec: ParamSpec, is_tied: bool) -> bool:
    """True for a parameter that is never gathered: an embedding that is no output head as well."""
    return spec.role == "embedding" and not is_tied


def sum_scattered(
    x: Float[Array, "..."], axis: int, names: tuple[str, ...], parallel: Parallel
) -> Float[Array, "..."]:
    """The sum of `x` over the devices along `names`; every device keeps its cut along `axis`, outermost name first.

    On TPUs in stages of at most 4 devices: the compiler turns one reduce-scatter over 8 or more devices of an axis into
    an all-reduce, which sends twice the bytes and makes the whole sum everywhere (libtpu 0.0.52, v5p:2x2x2 and 4x4x4).
    """
    if parallel.platform != "tpu":
        return jax.lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)
    for name in names:
        stages = _stages(dict(parallel.sizes).get(name, 1))
        devices = np.arange(math.prod(stages)).reshape(stages)
        for stage, count in enumerate(stages):
            groups = np.moveaxis(devices, stage, -1).reshape(-1, count).tolist()
            x = jax.lax.psum_scatter(x, name, scatter_dimension=axis, axis_index_groups=groups, tiled=True)
    return x


def keep_cut(primitive: jax.extend.core.Primitive, *_: object, **params: Any) -> bool:
    """Rematerialization policy: everything is kept for the backward pass but what was gathered."""
    # A policy sees a custom derivative from outside: the gather of a weight is hidden in it.
    inside = params["call_jaxpr"].eqns if primitive.name == "custom_vjp_call" else ()
    return all(name != "all_gather" for name in (primitive.name, *(eqn.primitive.name for eqn in inside)))


def _stages(size: int) -> tuple[int, ...]:
    """Factors of `size` of at most 4; `size` alone when there are none."""
    factors: list[int] = []
    while size > 4 and size % 4 == 0:
        factors.append(4)
        size //= 4
    return (*factors, size)


def _whole_leaf(leaf: Array | Cut, spec: ParamSpec, parallel: Parallel) -> Array:
    axis, names = cut_dimension(spec), cut_axes(spec, parallel)
    if axis is None or not names:
        return leaf.shard if isinstance(leaf, Cut) else leaf
    # The router scores in float32 from float32 weights: its choices must not depend on the mesh.
    dtype = "float32" if "E" in spec.columns.split() else parallel.gather_dtype
    if isinstance(leaf, Cut):
        count = math.prod(parallel.size(name) for name in names)
        return _gather_to_sink(leaf.shard, leaf.sink, (axis, names, dtype, str(leaf.sink.dtype), count))
    return _gather(leaf, (axis, names, dtype, parallel))


def _all_gather(shard: Array, axis: int, names: tuple[str, ...], dtype: str) -> Array:
    return jax.lax.all_gather(shard.astype(dtype), names, axis=axis, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(
    shard: Float[Array, "..."], options: tuple[int, tuple[str, ...], str, Parallel]
) -> Float[Array, "..."]:
    axis, names, dtype, _ = options
    return _all_gather(shard, axis, names, dtype)


def _gather_forward(shard: Array, options: tuple[int, tuple[str, ...], str, Parallel]) -> tuple[Array, None]:
    return _gather(shard, options), None


def _gather_backward(
    options: tuple[int, tuple[str, ...], str, Parallel], residuals: None, grad: Array
) -> tuple[Array]:
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
    options: tuple[int, tuple[str, ...], str, str, int],
) -> Float[Array, "..."]:
    axis, names, dtype, *_ = options
    return _all_gather(shard, axis, names, dtype)


def _sink_forward(
    shard: Array, sink: Array, options: tuple[int, tuple[str, ...], str, str, int]
) -> tuple[Array, None]:
    return _gather_to_sink(shard, sink, options), None


def _sink_backward(
    options: tuple[int, tuple[str, ...], str, str, int], residuals: None, grad: Array
) -> tuple[Array, Array]:
    del residuals
    axis, _, _, sink_dtype, count = options
    shape = list(grad.shape)
    shape[axis] //= count
    return jnp.zeros(shape, jnp.float32), grad.astype(sink_dtype)


_gather_to_sink.defvjp(_sink_forward, _sink_backward)


def _is_cut(leaf: object) -> bool:
    return isinstance(leaf, Cut)
