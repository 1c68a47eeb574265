"""Experts cut over devices that travel: the weights of each device's experts visit every other device in turn.

Every device multiplies the copies of its own tokens with the experts that are there. No copy travels, none is ever
dropped, and no device holds the weights of more than two devices of one layer. Nothing of the visits is kept: the
backward pass sends the weights around again, and their gradients, added to at every device, home with them.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ._parallel import Parallel

C = TypeVar("C")
# (experts, rows sorted by expert, their weights, rows of each expert, SwiGLU clamp) -> rows; those of no expert come
# out undefined.
ExpertProducts = Callable[
    [Any, Float[Array, "N D"], Float[Array, " N"], Int[Array, " E"], Float[Array, ""] | None],
    Float[Array, "N D"],
]
# Copies of one visit that are multiplied at a time, as a multiple of the even share of a device's experts.
CHUNK = 1.25


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_visited(
    products: ExpertProducts,
    parallel: Parallel,
    experts: PyTree[Float[Array, "..."]],
    rows: Float[Array, "N D"],
    weights: Float[Array, " N"],
    group_sizes: Int[Array, " E"],
    limit: Float[Array, ""] | None,
) -> Float[Array, "N D"]:
    """`products` of this device's copies with the experts of all devices.

    Weights travel in `parallel.gather_dtype`, their gradients in `parallel.reduce_dtype`. `limit` has no gradient.

    Args:
        products: A function at the top level of its module.
        parallel: Names the expert axis.
        experts: Those of this device.
        rows: One for each copy, sorted by expert.
        weights: Factor of each.
        group_sizes: Copies for each expert of all devices.
        limit: SwiGLU clamp.
    """
    visits = _Visits(parallel, rows.shape[0], group_sizes)
    rows, weights = visits.padded(rows), visits.padded(weights)

    def multiply(visiting: PyTree, chunk: _Chunk, done: Array) -> Array:
        own = products(visiting, chunk.of(rows), chunk.of(weights), chunk.sizes, limit)
        return chunk.put(done, own)

    def turn(step: Int[Array, ""], carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        visiting, done = carry
        following = visits.sent_on(visiting)  # while this device multiplies
        return following, visits.through(step, functools.partial(multiply, visiting), done)

    last = visits.count - 1
    start = (_cast(experts, parallel.gather_dtype), jnp.zeros_like(rows))
    visiting, done = jax.lax.fori_loop(0, last, turn, start)
    return visits.through(last, functools.partial(multiply, visiting), done)[: visits.num_rows]


def _visited_forward(
    products: ExpertProducts, parallel: Parallel, *arguments: Any
) -> tuple[Array, tuple[Any, ...]]:
    return run_visited(products, parallel, *arguments), arguments


def _visited_backward(
    products: ExpertProducts, parallel: Parallel, arguments: tuple[Any, ...], g: Array
) -> tuple[PyTree, Array, Array, None, None]:
    experts, rows, weights, group_sizes, limit = arguments
    visits = _Visits(parallel, rows.shape[0], group_sizes)
    rows, weights, g = visits.padded(rows), visits.padded(weights), visits.padded(g)
    home = _cast(experts, parallel.gather_dtype)

    def pull(visiting: PyTree, chunk: _Chunk, carry: tuple[PyTree, Array, Array]) -> Any:
        def multiply(visiting: PyTree, rows: Array, weights: Array) -> Array:
            return products(visiting, rows, weights, chunk.sizes, limit)

        # Of copies for other experts nothing may be added, whatever a kernel makes of rows in no group.
        _, back = jax.vjp(multiply, visiting, chunk.of(rows), chunk.of(weights))
        of_experts, *of_rows = back(chunk.own(chunk.of(g), 0))
        added = jax.tree.map(lambda total, part: total + part.astype(total.dtype), carry[0], of_experts)
        return (added, *(chunk.put(x, part) for x, part in zip(carry[1:], of_rows, strict=True)))

    def turn(step: Int[Array, ""], carry: tuple[PyTree, Any]) -> tuple[PyTree, Any]:
        visiting = visits.sent_on(carry[0])
        of_experts, *of_rows = visits.through(step, functools.partial(pull, visiting), carry[1])
        # Started where the experts come first, their gradient is home after the last turn.
        return visiting, (visits.sent_on(of_experts), *of_rows)

    zeros = (
        jax.tree.map(lambda x: jnp.zeros(x.shape, parallel.reduce_dtype), experts),
        jnp.zeros_like(rows),
        jnp.zeros_like(weights),
    )
    _, carry = jax.lax.fori_loop(1, visits.count, turn, (home, zeros))
    of_experts, *of_rows = visits.through(0, functools.partial(pull, home), carry)
    of_experts = jax.tree.map(lambda x, like: x.astype(like.dtype), of_experts, experts)
    return of_experts, *(x[: visits.num_rows] for x in of_rows), None, None


run_visited.defvjp(_visited_forward, _visited_backward)


class _Chunk:
    """Consecutive copies for the experts that are visiting, `sizes` of each; the last rows may be others' copies."""

    def __init__(self, start: Int[Array, ""], sizes: Int[Array, " E"], length: int) -> None:
        self.sizes = sizes
        self._start, self._length = start, length

    def of(self, x: Shaped[Array, "N ..."]) -> Shaped[Array, "M ..."]:
        """The chunk's rows of all rows."""
        return jax.lax.dynamic_slice_in_dim(x, self._start, self._length)

    def own(self, x: Shaped[Array, "M ..."], other: Shaped[Array, "M ..."] | int) -> Shaped[Array, "M ..."]:
        """`x` at copies for the visiting experts, `other` elsewhere."""
        is_own = jnp.arange(self._length) < jnp.sum(self.sizes)
        return jnp.where(is_own.reshape(-1, *[1] * (x.ndim - 1)), x, other)

    def put(self, x: Shaped[Array, "N ..."], part: Shaped[Array, "M ..."]) -> Shaped[Array, "N ..."]:
        """All rows with the chunk's own replaced."""
        return jax.lax.dynamic_update_slice_in_dim(x, self.own(part, self.of(x)), self._start, 0)


class _Visits:
    """Which experts are on this device at which step, and which copies are theirs."""

    def __init__(self, parallel: Parallel, num_rows: int, group_sizes: Int[Array, " E"]) -> None:
        self.count, self.num_rows = parallel.size(parallel.expert_axis), num_rows
        self._axis, self._group_sizes = parallel.expert_axis, group_sizes
        self._chunk = min(num_rows, -(-int(CHUNK * num_rows) // self.count))

    def padded(self, x: Shaped[Array, "N ..."]) -> Shaped[Array, "M ..."]:
        """Rows with room for a last chunk that is not full."""
        return jnp.pad(x, [(0, self._chunk), *[(0, 0)] * (x.ndim - 1)])

    def sent_on(self, tree: PyTree) -> PyTree:
        """What travels, one device further: after k times a device has what belongs to the k-th after it."""
        way = [(i, (i - 1) % self.count) for i in range(self.count)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self._axis, way), tree)

    def through(self, step: int | Int[Array, ""], body: Callable[[_Chunk, C], C], carry: C) -> C:
        """`body(chunk, carry)` of every chunk of copies for the experts that are here at `step`."""
        owner = (jax.lax.axis_index(self._axis) + step) % self.count
        table = self._group_sizes.reshape(self.count, -1)
        start = jnp.sum(jnp.where(jnp.arange(self.count) < owner, jnp.sum(table, axis=1), 0))
        sizes = jax.lax.dynamic_index_in_dim(table, owner, keepdims=False)
        ends, length = jnp.cumsum(sizes), self._chunk

        def next_chunk(i: Int[Array, ""], carry: C) -> C:
            first = i * length
            here = jnp.clip(ends, first, first + length) - jnp.clip(ends - sizes, first, first + length)
            return body(_Chunk(start + first, here, length), carry)

        return jax.lax.fori_loop(0, -(-ends[-1] // length), next_chunk, carry)


def _cast(tree: PyTree, dtype: str) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype), tree)
