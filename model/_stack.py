"""Running stacked layers: a scan over the layers of a run, inside a scan over groups of runs."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from ._layer_plan import LayerRun, StackPlan

X = TypeVar("X")


def run_layers(
    layer: Callable[[X, Any], tuple[X, PyTree]], x: X, inputs: Sequence[PyTree], stack: StackPlan
) -> tuple[X, tuple[PyTree, ...]]:
    """`x` after all layers, and what they return, by run.

    Args:
        layer: `x, output = layer(x, input)` of one layer. It is traced once for each run.
        x: What the layers pass on; its shapes and dtypes stay.
        inputs: Of each run of `stack`, with the run's `stack_shape` as leading axes of every array.
        stack: The runs. Outputs have leading axes as the inputs have.
    """

    def through(x: X, runs: tuple[LayerRun, ...], given: tuple[PyTree, ...]) -> tuple[X, tuple[PyTree, ...]]:
        outputs = []
        for run, own in zip(runs, given, strict=True):
            x, output = layer(x, own) if run.length == 1 else jax.lax.scan(layer, x, own)
            outputs.append(output)
        return x, tuple(outputs)

    before, inside, after = stack.split(inputs)
    x, first = through(x, stack.prefix, before)
    middle: tuple[PyTree, ...] = ()
    if stack.groups:
        x, middle = jax.lax.scan(lambda x, given: through(x, stack.groups, given), x, inside)
    x, last = through(x, stack.suffix, after)
    return x, (*first, *middle, *last)


def in_layer_order(
    outputs: Sequence[Shaped[Array, "..."] | None], stack: StackPlan
) -> Shaped[Array, "L ..."] | None:
    """Outputs of `run_layers` with one leading axis of layers, in order.

    Args:
        outputs: Of each run; None for a run whose layers have no such output.
        stack: The runs.

    Returns:
        The layers that have it; None when none has.
    """
    sections = []
    for runs, values in zip((stack.prefix, stack.groups, stack.suffix), stack.split(outputs), strict=True):
        found = [
            jnp.reshape(value, (run.num_groups, run.length, *value.shape[len(run.stack_shape) :]))
            for run, value in zip(runs, values, strict=True)
            if value is not None
        ]
        if found:
            together = found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)
            sections.append(
                jnp.reshape(together, (together.shape[0] * together.shape[1], *together.shape[2:]))
            )
    return jnp.concatenate(sections) if sections else None
