"""Running stacked layers, the body of each kind compiled once, in whatever order the layers come."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from ._layer_plan import StackPlan
from ._uneven import run_uneven

X = TypeVar("X")


def run_layers(
    layer: Callable[[X, Any, Any], tuple[X, PyTree]],
    x: X,
    shared: PyTree,
    inputs: Sequence[PyTree],
    stack: StackPlan,
    *,
    alone: Callable[[X, Any, Any], tuple[X, PyTree]] | None = None,
) -> tuple[X, tuple[PyTree, ...]]:
    """`x` after all layers, and what they return, by kind.

    Groups that are alike are scanned over. Where they differ in how many layers of a kind they have, loops run as often
    as each group says.

    Args:
        layer: `x, output = layer(x, shared, input)` of one layer. It closes over no traced array.
        x: What the layers pass on; its shapes and dtypes stay.
        shared: What every layer sees; it has no gradient.
        inputs: Of each kind of `stack`, with its `stack_shape` as leading axes of every array.
        stack: The plan. Outputs have leading axes as the inputs have.
        alone: `layer` for a layer outside of any loop, if it differs there.
    """
    outside = layer if alone is None else alone

    def one(x: X, own: PyTree) -> tuple[X, PyTree]:
        return layer(x, shared, own)

    def through(
        single: Callable[[X, Any, Any], tuple[X, PyTree]],
        x: X,
        lengths: Sequence[int],
        given: Sequence[PyTree],
    ) -> tuple[X, tuple[PyTree, ...]]:
        outputs = []
        for length, own in zip(lengths, given, strict=True):
            x, output = single(x, shared, own) if length == 1 else jax.lax.scan(one, x, own)
            outputs.append(output)
        return x, tuple(outputs)

    start = stack.num_leading
    x, first = through(outside, x, stack.lengths[0][:start], inputs[:start])
    groups, given = tuple(group[start:] for group in stack.lengths), tuple(inputs[start:])
    if not given:
        return x, first
    if len(set(groups)) == 1:
        cut = tuple(_grouped(own, len(groups)) for own in given)
        x, rest = jax.lax.scan(lambda x, own: through(layer, x, groups[0], own), x, cut)
        return x, (*first, *(_joined(output, length) for output, length in zip(rest, groups[0], strict=True)))
    is_one = [sum(lengths) == 1 for lengths in zip(*groups, strict=True)]
    many = tuple(
        jax.tree.map(lambda a: a[None], own) if alone else own
        for own, alone in zip(given, is_one, strict=True)
    )
    x, rest = run_uneven(layer, groups, x, shared, many)
    return x, (
        *first,
        *(
            jax.tree.map(lambda a: a[0], output) if alone else output
            for output, alone in zip(rest, is_one, strict=True)
        ),
    )


def in_layer_order(
    outputs: Sequence[Shaped[Array, "..."] | None], stack: StackPlan
) -> Shaped[Array, "L ..."] | None:
    """Outputs of `run_layers` with one leading axis of layers, in order.

    Args:
        outputs: Of each kind; None for a kind whose layers have no such output.
        stack: The plan.

    Returns:
        The layers that have it; None when none has.
    """
    found = [
        (own.layers, value if own.stack_shape else value[None])
        for own, value in zip(stack.alike, outputs, strict=True)
        if value is not None
    ]
    if not found:
        return None
    if len(found) == 1:
        return found[0][1]
    order = np.argsort([layer for layers, _ in found for layer in layers])
    return jnp.concatenate([value for _, value in found]).at[order].get(unique_indices=True)


def _grouped(own: PyTree, num_groups: int) -> PyTree:
    """Arrays of the layers of all groups, with the groups in front and an axis of one layer left out."""

    def cut(a: Array) -> Array:
        length = a.shape[0] // num_groups
        return jnp.reshape(a, (num_groups, *([length] if length > 1 else []), *a.shape[1:]))

    return jax.tree.map(cut, own)


def _joined(output: PyTree, length: int) -> PyTree:
    """The way back of `_grouped`."""
    return jax.tree.map(
        lambda a: a if length == 1 else jnp.reshape(a, (a.shape[0] * length, *a.shape[2:])), output
    )
