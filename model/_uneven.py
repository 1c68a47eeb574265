"""Groups of layers of which some have more layers of a kind than others: loops with a count of their own in each group.

`jax.lax.scan` runs as often in every group, so such groups would be compiled apart. Loops whose count depends on data
have no derivative in jax; here each layer keeps what its own backward pass needs, and the loops run backwards.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

X = TypeVar("X")
Layer = Callable[[Any, Any, Any], tuple[Any, PyTree]]
# For each group, how many layers of each kind follow one another.
Lengths = tuple[tuple[int, ...], ...]
# (kind, number of the layer among those of its kind, what the loops carry) -> what they carry
Step = Callable[[int, Int[Array, ""], Any], Any]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_uneven(
    layer: Layer, lengths: Lengths, x: X, shared: PyTree, inputs: tuple[PyTree, ...]
) -> tuple[X, tuple[PyTree, ...]]:
    """`x` after all layers, and what they return, by kind and with an axis of the kind's layers in front.

    Args:
        layer: `x, output = layer(x, shared, input)`. It closes over no traced array.
        lengths: Groups, run one after the other; in a group, kinds one after the other.
        x: What the layers pass on; its shapes and dtypes stay.
        shared: What every layer sees; no arrays of floats.
        inputs: Of each kind, with an axis of its layers in front of every array.

    Raises:
        ValueError: `shared` holds floats, whose gradient would be lost.
    """
    return _forward(layer, lengths, x, shared, inputs)


class _Saved(eqx.Module):
    """What the backward pass of a layer needs.

    Attributes:
        arrays: Made by the layer, or what it was given of `x`.
        places: Of every array of the backward pass, its number among those of `shared` and the layer's input, which
            are not kept twice; None for one of `arrays`.
        treedef: Makes the backward pass of all of them.
    """

    arrays: list[Array]
    places: tuple[int | None, ...] = eqx.field(static=True)
    treedef: Any = eqx.field(static=True)

    def backward(self, shared: PyTree, own: PyTree) -> Callable:
        """From gradients of the layer's results to those of `x` and of its input."""
        known, arrays = jax.tree.leaves((shared, own)), iter(self.arrays)
        leaves = [next(arrays) if place is None else known[place] for place in self.places]
        return jax.tree.unflatten(self.treedef, leaves)


def _forward(layer: Layer, lengths: Lengths, x: Any, shared: PyTree, inputs: tuple[PyTree, ...]) -> Any:
    if any(eqx.is_inexact_array(a) for a in jax.tree.leaves(shared)):
        raise ValueError("what all layers share has no gradient; pass arrays of floats by layer")
    # One trace of each kind, for the shapes of its results and for the loop.
    one = jax.jit(layer, inline=True)
    shapes = [jax.eval_shape(one, x, shared, _at(own, 0))[1] for own in inputs]
    counts = np.sum(lengths, axis=0)
    empty = [
        jax.tree.map(lambda s, n=n: jnp.zeros((n, *s.shape), s.dtype), shape)
        for shape, n in zip(shapes, counts, strict=True)
    ]

    def step(kind: int, index: Int[Array, ""], carry: tuple[Any, list[PyTree]]) -> tuple[Any, list[PyTree]]:
        x, outputs = carry
        x, new = one(x, shared, _at(inputs[kind], index))
        return x, [_put(o, new, index) if k == kind else o for k, o in enumerate(outputs)]

    x, outputs = _walk(lengths, step, (x, empty))
    return x, tuple(outputs)


def _forward_saving(
    layer: Layer, lengths: Lengths, x: Any, shared: PyTree, inputs: tuple[PyTree, ...]
) -> tuple[Any, Any]:
    def saving(x: Any, shared: PyTree, own: PyTree) -> tuple[Any, tuple[PyTree, _Saved]]:
        trained, rest = eqx.partition(own, eqx.is_inexact_array)

        def call(x: Any, trained: PyTree) -> tuple[tuple[Any, PyTree], PyTree]:
            x, output = layer(x, shared, eqx.combine(trained, rest))
            floats, others = eqx.partition(output, eqx.is_inexact_array)
            return (x, floats), others

        (x, floats), backward, others = jax.vjp(call, x, trained, has_aux=True)
        leaves, treedef = jax.tree.flatten(backward)
        known = {id(a): i for i, a in enumerate(jax.tree.leaves((shared, own)))}
        places = tuple(known.get(id(leaf)) for leaf in leaves)
        arrays = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
        return x, (eqx.combine(floats, others), _Saved(arrays, places, treedef))

    x, kept = _forward(saving, lengths, x, shared, inputs)
    outputs, saved = tuple(zip(*kept, strict=True))
    return (x, outputs), (shared, inputs, saved)


def _backward(layer: Layer, lengths: Lengths, residuals: Any, cotangents: Any) -> tuple[Any, None, Any]:
    del layer
    shared, inputs, saved = residuals
    d_x, d_outputs = cotangents
    d_floats = eqx.filter(d_outputs, lambda a: a.dtype != jax.dtypes.float0)
    empty = [jax.tree.map(jnp.zeros_like, eqx.filter(own, eqx.is_inexact_array)) for own in inputs]

    def step(kind: int, index: Int[Array, ""], carry: tuple[Any, list[PyTree]]) -> tuple[Any, list[PyTree]]:
        d_x, grads = carry
        backward = _at(saved[kind], index).backward(shared, _at(inputs[kind], index))
        d_x, d_own = backward((d_x, _at(d_floats[kind], index)))
        return d_x, [_put(g, d_own, index) if k == kind else g for k, g in enumerate(grads)]

    d_x, grads = _walk(lengths, step, (d_x, empty), reverse=True)
    return d_x, None, tuple(grads)


run_uneven.defvjp(_forward_saving, _backward)


def _walk(lengths: Lengths, step: Step, carry: Any, *, reverse: bool = False) -> Any:
    """`carry` after a `step` for every layer, group by group."""
    counts = np.asarray(lengths, dtype=np.int32)
    starts = np.cumsum(counts, axis=0, dtype=np.int32) - counts
    num_groups, num_kinds = counts.shape

    def group(place: Int[Array, ""], carry: Any) -> Any:
        place = num_groups - 1 - place if reverse else place
        for kind in reversed(range(num_kinds)) if reverse else range(num_kinds):
            start, own = jnp.asarray(starts[:, kind])[place], counts[:, kind]
            count = int(own[0]) if (own == own[0]).all() else jnp.asarray(own)[place]

            def layer(i: Any, carry: Any, kind: int = kind, start: Any = start, count: Any = count) -> Any:
                return step(kind, start + (count - 1 - i if reverse else i), carry)

            if isinstance(count, int) and count == 1:
                carry = layer(0, carry)
            else:
                carry = _loop(count, layer, carry, f"trips_{own.sum()}_{num_groups}")
        return carry

    return jax.lax.fori_loop(0, num_groups, group, carry)


def _loop(count: Any, body: Callable, carry: Any, scope: str) -> Any:
    """A loop named `trips_A_B`, for whoever counts the costs of the compiled program: A runs in B loops."""
    with jax.named_scope(scope):
        return jax.lax.fori_loop(0, count, body, carry)


def _at(tree: PyTree, index: Int[Array, ""] | int) -> PyTree:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree)


def _put(tree: PyTree, new: Sequence[PyTree] | PyTree, index: Int[Array, ""]) -> PyTree:
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_index_in_dim(a, b, index, 0), tree, new)
