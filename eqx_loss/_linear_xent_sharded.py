"""The passes on the devices of a mesh: every device tiles its own tokens and its own columns.

Layouts of `unembed` inside a pass. Gathered: its axes other than the vocabulary's are gathered
once, its gradient is summed over devices and cut again at the end. Stationary: those axes become
vocabulary axes by one all-to-all, and hidden states travel a tile at a time instead.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ._linear_xent_narrow import Sum, reshape_sum, whole_sum
from ._linear_xent_pass import Gradients, Losses, Tokens, fused_pass, gradient_pass, loss_pass
from ._linear_xent_plan import XentPlan
from ._linear_xent_types import XentRules, XentSharding

# Gradients of hidden and unembed; a plain tuple, for the specs of `shard_map`.
Pair = tuple[Sum, Sum]


def losses_on_devices(
    tokens: Tokens, unembed: Float[Array, "D V"], rules: XentRules, plan: XentPlan
) -> Losses:
    """`loss_pass` under the plan's layout."""

    def body(tokens: Tokens, unembed: Array) -> Losses:
        own = _enter(unembed, plan)
        flat = Tokens(*(_flatten(part, plan) for part in tokens))
        losses = loss_pass(flat, own, rules, plan.token_cut, plan.vocab_cut)
        return Losses(*(part.reshape(tokens.targets.shape) for part in losses))

    return _map(body, plan, "tu", "t")(tokens, unembed)


def fused_on_devices(
    tokens: Tokens, unembed: Float[Array, "D V"], rules: XentRules, plan: XentPlan
) -> tuple[Losses, Gradients]:
    """`fused_pass` under the plan's layout; gradients are complete and laid out as the arguments."""

    def body(tokens: Tokens, unembed: Array) -> tuple[Losses, Pair]:
        own = _enter(unembed, plan)
        flat = Tokens(*(_flatten(part, plan) for part in tokens))
        losses, gradients = fused_pass(flat, own, rules, plan.token_cut, plan.vocab_cut)
        losses = Losses(*(part.reshape(tokens.targets.shape) for part in losses))
        return losses, _leave(gradients, tokens, plan)

    losses, gradients = _map(body, plan, "tu", "tg")(tokens, unembed)
    return losses, Gradients(*gradients)


def gradient_on_devices(
    tokens: Tokens,
    log_partition: Float[Array, "M B S"],
    unembed: Float[Array, "D V"],
    start: Gradients,
    rules: XentRules,
    plan: XentPlan,
    *,
    is_usual: bool,
) -> Gradients:
    """`start` plus the gradients at these weights, under the plan's layout.

    `start` is laid out as the arguments. Costs nothing on one device, and one reduction of the
    gradient of `unembed` on a mesh, when all weights are 0.
    """

    def body(tokens: Tokens, known: Array, unembed: Array, start: Pair) -> Pair:
        own = _enter(unembed, plan)
        flat = Tokens(*(_flatten(part, plan) for part in tokens))
        if plan.sharding is None:
            begin = Gradients(hidden=reshape_sum(start[0], flat.hidden.shape), unembed=start[1])
        else:
            dtype = plan.vocab_cut.accumulator_dtype
            begin = Gradients(hidden=jnp.zeros(flat.hidden.shape, dtype), unembed=jnp.zeros(own.shape, dtype))
        known = _flatten(known, plan)
        gradients = gradient_pass(
            flat, known, own, begin, rules, plan.token_cut, plan.vocab_cut, is_usual=is_usual
        )
        hidden, total = _leave(gradients, tokens, plan)
        if plan.sharding is None:
            return hidden, total
        return whole_sum(start[0]) + whole_sum(hidden), whole_sum(start[1]) + whole_sum(total)

    mapped = _map(body, plan, "ttug", "g")
    return Gradients(*mapped(tokens, log_partition, unembed, tuple(start)))


def _map(body: Callable[..., Any], plan: XentPlan, arguments: str, results: str) -> Callable[..., Any]:
    """`body` on every device of the plan's mesh; letters: t per token, u unembed, g gradients."""
    sharding = plan.sharding
    if sharding is None or sharding.inside_shard_map:
        return body
    per_token = PartitionSpec(None, sharding.rows or None, sharding.positions or None)
    specs: dict[str, Any] = {
        "t": per_token,
        "u": sharding.unembed,
        "g": (per_token, sharding.unembed),
    }
    outputs = [specs[letter] for letter in results]
    # Gradients are summed by hand below, so the replication check has nothing to add.
    is_nested = len(sharding.mapped_axes) < len(sharding.mesh.axis_names)
    return jax.shard_map(
        body,
        mesh=None if is_nested else sharding.mesh,  # that of the `shard_map` around
        axis_names=frozenset(sharding.mapped_axes),
        in_specs=tuple(specs[letter] for letter in arguments),
        out_specs=tuple(outputs) if len(outputs) > 1 else outputs[0],
        check_vma=False,
    )


def _flatten(per_token: Array, plan: XentPlan) -> Array:
    """All tokens of a head in one row, unless the compiler partitions the rows."""
    if plan.keep_rows:
        return per_token
    heads, rows, positions, *rest = per_token.shape
    return per_token.reshape(heads, 1, rows * positions, *rest)


def _enter(unembed: Float[Array, "D V"], plan: XentPlan) -> Array:
    """The columns this device works on, all of D."""
    sharding = plan.sharding
    if sharding is None:
        return unembed
    if plan.residency == "stationary":
        for axis in reversed(sharding.unembed_axes(0)):
            unembed = lax.all_to_all(unembed, axis, split_axis=1, concat_axis=0, tiled=True)
        return unembed
    for dimension, axes in _gathered_axes(sharding):
        for axis in reversed(axes):
            unembed = cast(Array, lax.all_gather(unembed, axis, axis=dimension, tiled=True))
    return unembed


def _leave(gradients: Gradients, tokens: Tokens, plan: XentPlan) -> Pair:
    """Gradients summed over the devices that hold other tokens, laid out as the arguments."""
    hidden = reshape_sum(gradients.hidden, tokens.hidden.shape)
    sharding = plan.sharding
    if sharding is None:
        return hidden, gradients.unembed
    unembed = whole_sum(gradients.unembed)
    pending = [
        axis for axis in (*sharding.rows, *sharding.positions) if axis not in plan.token_cut.travel_axes
    ]
    if plan.residency == "stationary":
        for axis in sharding.unembed_axes(0):
            unembed = lax.all_to_all(unembed, axis, split_axis=0, concat_axis=1, tiled=True)
    else:
        for dimension, axes in _gathered_axes(sharding):
            for axis in axes:
                if axis in pending:
                    unembed = cast(
                        Array, lax.psum_scatter(unembed, axis, scatter_dimension=dimension, tiled=True)
                    )
                    pending.remove(axis)
                else:
                    size = unembed.shape[dimension] // sharding.size((axis,))
                    start = lax.axis_index(axis) * size
                    unembed = lax.dynamic_slice_in_dim(unembed, start, size, dimension)
    if pending:
        unembed = cast(Array, lax.psum(unembed, tuple(pending)))
    return hidden, unembed


def _gathered_axes(sharding: XentSharding) -> tuple[tuple[int, tuple[str, ...]], ...]:
    return (0, sharding.unembed_axes(0)), (1, sharding.unembed_axes(1)[len(sharding.vocab) :])
