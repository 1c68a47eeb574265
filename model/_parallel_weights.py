"""How a layer that runs inside `jax.shard_map` gets its weights whole.

Every device holds a cut of each weight (ZeRO-3, arXiv:1910.02054). A layer gathers its own weights just before it uses
them and drops them after, so no more than a few layers are whole at a time; the backward pass gathers again and sends
every gradient back to the device that keeps the cut.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.extend.core
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from ._joined import Part, Together
from ._parallel import Parallel, cut_axes, cut_dimension, gathered, sum_scattered
from ._parallel_tensor import cut_along, on_own_cut, tensor_dimension
from ._param import ParamSpec, field_spec, param_specs
from ._quantized import current_quantization

M = TypeVar("M", bound=eqx.Module)

# Axis along which weights that are gathered as one lie side by side, and their sizes there.
Beside = tuple[int, tuple[int, ...]]
# Cut axis, mesh axes, dtype that travels, the mesh, axis cut over tensor, weights that are gathered as one, and for
# sinks the dtype of the gradient.
GatherOptions = tuple[int, tuple[str, ...], str, Parallel, int | None, Beside]
SinkOptions = tuple[int, tuple[str, ...], str, Parallel, int | None, Beside, str]


class Cut(eqx.Module):
    """A cut weight whose whole gradient is kept on the device, to be reduced later.

    Attributes:
        shard: The device's part of the weight.
        sink: Zeros shaped as the whole weight; the gradient arrives here, unreduced, and none at `shard`.
    """

    shard: Array
    sink: Array


def whole(module: M, parallel: Parallel | None) -> M:
    """`module` with its weights gathered from the devices that hold their cuts; itself when `parallel` is
    None.

    Gradients of the gathered weights are added over the devices and cut again. Weights of experts stay cut
    over the expert axis. Weights that a module says are `together` are joined before they travel, and a `Part` of
    what arrives takes the place of each, unless the tensor axis cuts them.
    """
    if parallel is None:
        return module
    plain = jax.tree.map(_shard, module, is_leaf=_is_cut)
    flat, treedef = jax.tree_util.tree_flatten_with_path(module, is_leaf=_is_cut)
    specs = jax.tree.leaves(param_specs(plain), is_leaf=lambda x: isinstance(x, ParamSpec))
    groups: dict[Any, list[int]] = {}
    for i, (path, _) in enumerate(flat):
        groups.setdefault(_group(module, path, parallel) or i, []).append(i)
    found: list[Any] = [None] * len(flat)
    for group, members in groups.items():
        leaves, spec = tuple(flat[i][1] for i in members), specs[members[0]]
        if len(members) == 1:
            found[members[0]] = _whole_leaves(leaves, spec, parallel)
            continue
        axis = group[1].axis
        joined = _whole_leaves(leaves, spec, parallel, axis)
        for i in members:
            found[i] = Part(joined=joined, axis=axis, sizes=_sizes(leaves, axis))
    return jax.tree.unflatten(treedef, found)


def _group(
    module: eqx.Module, path: tuple[Any, ...], parallel: Parallel
) -> tuple[tuple[Any, ...], Together] | None:
    """Names the weights that the one at `path` is joined with; None for one that stays alone."""
    # Not on CPUs, whose products of one input share what is made of it; in 8 bits each has scales of its own.
    is_apart = (
        parallel.platform == "cpu" or parallel.tensor_axis is not None or current_quantization() is not None
    )
    travels = parallel.fsdp_axes or parallel.expert_axis or parallel.context_axis
    if is_apart or not travels:
        return None
    owner: Any = module
    for key in path[:-1]:
        owner = getattr(owner, key.name)
    together: Together | None = getattr(owner, "together", None)
    if together is None or path[-1].name not in together.names:
        return None
    return path[:-1], together


def whole_field(module: eqx.Module, name: str, parallel: Parallel | None) -> Array:
    """The parameter `name` of `module` alone, as `whole` has it."""
    leaf = getattr(module, name)
    if parallel is None:
        return leaf
    return _whole_leaves((leaf,), field_spec(type(module), name), parallel)


def whole_beside(module: eqx.Module, names: tuple[str, ...], parallel: Parallel) -> Array:
    """The parameters `names` of `module`, alike in shape and not cut along their last axis, as `whole` has them, side
    by side along it.

    Their cuts are joined before they travel: to join whole weights would copy them.
    """
    leaves = tuple(getattr(module, name) for name in names)
    return _whole_leaves(leaves, field_spec(type(module), names[0]), parallel, _shard(leaves[0]).ndim - 1)


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


def keep_cut(primitive: jax.extend.core.Primitive, *_: object, **params: Any) -> bool:
    """Rematerialization policy: everything is kept for the backward pass but what was gathered."""
    # A policy sees a custom derivative from outside: the gather of a weight is hidden in it, or in a `shard_map` in it.
    if primitive.name not in ("custom_vjp_call", "shard_map"):
        return primitive.name != "all_gather"
    inside = params["call_jaxpr" if primitive.name == "custom_vjp_call" else "jaxpr"]
    return all(keep_cut(eqn.primitive, **eqn.params) for eqn in inside.eqns)


def _whole_leaves(
    leaves: tuple[Array | Cut, ...], spec: ParamSpec, parallel: Parallel, beside: int = 0
) -> Array:
    """The leaves gathered, side by side along the axis `beside`."""
    axis, names = cut_dimension(spec, parallel), cut_axes(spec, parallel)
    shards = tuple(map(_shard, leaves))
    if axis is None or not names:
        return _joined(shards, beside)
    # The router scores in float32 from float32 weights: its choices must not depend on the mesh.
    dtype = "float32" if "E" in spec.columns.split() else parallel.gather_dtype
    sinks = tuple(leaf.sink for leaf in leaves if isinstance(leaf, Cut))
    options = (axis, names, dtype, parallel, tensor_dimension(spec), (beside, _sizes(leaves, beside)))
    if sinks:
        return _gather_to_sink(shards, sinks, (*options, str(sinks[0].dtype)))
    return _gather(shards, options)


def _joined(parts: Sequence[Array], axis: int) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def _apart(x: Array, beside: Beside) -> tuple[Array, ...]:
    """The way back of `_joined`, of whole weights or of their cuts along a tensor axis."""
    axis, sizes = beside
    own = [size * x.shape[axis] // sum(sizes) for size in sizes]
    return (x,) if len(sizes) == 1 else tuple(jax.lax.split(x, own, axis=axis))


def _sizes(leaves: Sequence[Array | Cut], axis: int) -> tuple[int, ...]:
    return tuple(_shard(leaf).shape[axis] for leaf in leaves)


def _shard(leaf: Any) -> Any:
    return leaf.shard if isinstance(leaf, Cut) else leaf


def _cast_cut(shard: Float[Array, "..."], dtype: str, parallel: Parallel) -> Float[Array, "..."]:
    """`shard` in another dtype.

    On TPUs float32 is rounded to bfloat16 as integers, in the layout that it is stored in: the compiler would else
    move the cast or the transposition out of the loop over layers, and a copy of the cuts of all layers would live
    beside the parameters.
    """
    if parallel.platform != "tpu" or (shard.dtype, dtype) != (jnp.float32, "bfloat16"):
        return shard.astype(dtype)
    stored = _as_declared(shard)
    bits = jax.lax.bitcast_convert_type(stored, jnp.uint32)
    # To the nearest, ties to even; a NaN stays one.
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    upper = jnp.where(jnp.isnan(stored), 0x7FC0, nearest).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16)


def _as_declared(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x`, its axes laid out in their order."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(shards: tuple[Float[Array, "..."], ...], options: GatherOptions) -> Float[Array, "..."]:
    axis, names, dtype, parallel, tensor, (beside, _) = options

    def gather(shards: tuple[Array, ...]) -> Array:
        joined = _joined([_cast_cut(x, dtype, parallel) for x in shards], beside)
        out = gathered(joined, axis, names, parallel)
        # As it comes from the others. A product would else ask for another layout, and a copy be made each time.
        return _as_declared(out) if parallel.platform == "tpu" else out

    part = cut_along(tensor, parallel)
    return on_own_cut(gather, parallel, (part,), part)(shards)


def _gather_forward(shards: tuple[Array, ...], options: GatherOptions) -> tuple[Array, None]:
    return _gather(shards, options), None


def _gather_backward(options: GatherOptions, residuals: None, grad: Array) -> tuple[tuple[Array, ...]]:
    del residuals
    axis, names, _, parallel, tensor, beside = options

    def scatter(grad: Array) -> tuple[Array, ...]:
        own = sum_scattered(grad, axis, names, parallel.reduce_dtype, parallel)
        return _apart(own.astype(jnp.float32), beside)

    part = cut_along(tensor, parallel)
    return (on_own_cut(scatter, parallel, part, part)(grad),)


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_to_sink(
    shards: tuple[Float[Array, "..."], ...], sinks: tuple[Float[Array, "..."], ...], options: SinkOptions
) -> Float[Array, "..."]:
    del sinks
    return _gather(shards, options[:-1])


def _sink_forward(
    shards: tuple[Array, ...], sinks: tuple[Array, ...], options: SinkOptions
) -> tuple[Array, None]:
    return _gather_to_sink(shards, sinks, options), None


def _sink_backward(
    options: SinkOptions, residuals: None, grad: Array
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    del residuals
    axis, names, _, parallel, tensor, beside, sink_dtype = options

    def keep(grad: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        shape = list(grad.shape)
        shape[axis] //= math.prod(parallel.size(name) for name in names)
        return _apart(jnp.zeros(shape, jnp.float32), beside), _apart(grad.astype(sink_dtype), beside)

    part = cut_along(tensor, parallel)
    return on_own_cut(keep, parallel, part, part)(grad)


_gather_to_sink.defvjp(_sink_forward, _sink_backward)


def _is_cut(leaf: object) -> bool:
    return isinstance(leaf, Cut)
