"""Does a loss depend on how its batch is cut? A check for the loss of any JAX trainer.

from eqx_loss import testing

testing.assert_partition_invariant(
    loss_fn, batch, [testing.micro_steps(4), testing.sequence_shards(2)], params=params
)
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._causes import likeliest_cause as likeliest_cause
from ._hlo import collectives_in_loops as collectives_in_loops

Combine = Literal["sum", "mean"]
LossFn = Callable[[Any, Any], Float[Array, ""]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """A way to cut a batch: the grid of `row_cuts` x `position_cuts`.

    Attributes:
        name: For messages.
        row_cuts: Interior cut points of the rows, increasing; empty leaves the rows whole.
        position_cuts: The same for positions (the second axis of arrays that have one).
    """

    name: str
    row_cuts: tuple[int, ...] = ()
    position_cuts: tuple[int, ...] = ()


def micro_steps(num_steps: int) -> Callable[[int, int], Partition]:
    """Rows in `num_steps` equal consecutive parts, as gradient accumulation cuts them."""
    return lambda rows, positions: Partition(
        name=f"{num_steps} micro-steps", row_cuts=_even_cuts(rows, num_steps, "rows")
    )


def row_shards(num_shards: int) -> Callable[[int, int], Partition]:
    """Rows in `num_shards` equal consecutive parts, as data parallelism cuts them."""
    return lambda rows, positions: Partition(
        name=f"{num_shards} row shards", row_cuts=_even_cuts(rows, num_shards, "rows")
    )


def sequence_shards(num_shards: int) -> Callable[[int, int], Partition]:
    """Positions in `num_shards` equal parts, as context parallelism cuts them."""
    return lambda rows, positions: Partition(
        name=f"{num_shards} sequence shards",
        position_cuts=_even_cuts(positions, num_shards, "positions"),
    )


def tiles(num_row_tiles: int, num_position_tiles: int) -> Callable[[int, int], Partition]:
    """The grid of equal row and position parts, as a tiled output layer cuts them."""
    return lambda rows, positions: Partition(
        name=f"{num_row_tiles} x {num_position_tiles} tiles",
        row_cuts=_even_cuts(rows, num_row_tiles, "rows"),
        position_cuts=_even_cuts(positions, num_position_tiles, "positions"),
    )


def assert_partition_invariant(
    loss_fn: LossFn,
    batch: Any,
    partitions: Sequence[Partition | Callable[[int, int], Partition]],
    *,
    params: Any,
    prepare: Callable[[Any], Any] | None = None,
    combine: Combine = "sum",
    num_tokens: Callable[[Any], Any] | None = None,
    vocab_size: int | None = None,
    rtol: float | None = None,
) -> None:
    """Fails unless loss and gradient are those of the whole batch, however the batch is cut.

    For every partition it forms `combine` over parts of `loss_fn(params, part)` and its gradient,
    and compares both with `loss_fn(params, batch)`.

    Args:
        loss_fn: The trainer's loss of a part of a batch, `(params, part) -> scalar`. It may use
            jit, vmap, scan, remat or shard_map inside.
        batch: Arrays of shape `[B, S, ...]`, or `[B]` for per-row facts (not cut along positions).
        partitions: `Partition`s, or what `micro_steps`, `row_shards`, `sequence_shards` and
            `tiles` return.
        params: What the gradient is taken of.
        prepare: Run once on the whole batch before cutting; the place to add token weights.
        combine: How the trainer joins the parts: "sum", or "mean" over parts.
        num_tokens: Scored tokens of a batch, for the diagnosis of a failure.
        vocab_size: If given, a loss equal to its logarithm is refused as vacuous.
        rtol: Largest relative difference; None takes 1e-4 in float32 and 1e-10 in float64.

    Raises:
        AssertionError: A partition changes value or gradient (the message names the likeliest
            cause), or the check is vacuous: zero or non-finite gradient, a loss of exactly
            `log(vocab_size)`, a batch that no partition cuts.
        ValueError: The arrays do not share `[B, S]`, or a part count does not divide them.
    """
    rows, positions = _extent(batch)
    whole = batch if prepare is None else prepare(batch)
    grad_fn = jax.value_and_grad(loss_fn)
    value, gradient = grad_fn(params, whole)
    tolerance = rtol if rtol is not None else (1e-10 if value.dtype == jnp.float64 else 1e-4)
    _refuse_vacuous(float(value), gradient, vocab_size)
    resolved = [p if isinstance(p, Partition) else p(rows, positions) for p in partitions]
    if not any(partition.row_cuts or partition.position_cuts for partition in resolved):
        raise AssertionError("vacuous: no partition cuts the batch; pass for example micro_steps(2)")
    for partition in resolved:
        parts = cut(whole, partition)
        results = [grad_fn(params, part) for part in parts]
        scale = 1 / len(parts) if combine == "mean" else 1.0
        found = scale * sum(float(v) for v, _ in results)
        found_gradient = jax.tree.map(functools.partial(_scaled_sum, scale), *[g for _, g in results])
        value_error = abs(found - float(value)) / max(abs(float(value)), 1e-30)
        gradient_error = _distance(found_gradient, gradient)
        if value_error > tolerance or not gradient_error <= tolerance:
            counts = [float(num_tokens(part)) for part in parts] if num_tokens is not None else None
            raise AssertionError(
                f"{partition.name}: loss {found:.9g} against {float(value):.9g} of the whole batch (relative "
                f"difference {value_error:.2e}), gradient off by {gradient_error:.2e}, allowed {tolerance:.0e}. "
                + likeliest_cause(
                    found=found,
                    expected=float(value),
                    part_values=[float(v) for v, _ in results],
                    part_tokens=counts,
                    num_rows=rows,
                    gradient_ratio=_norm(found_gradient) / _norm(gradient),
                )
            )


def cut(batch: Any, partition: Partition) -> list[Any]:
    """The parts of `batch`, row part by row part; arrays of one axis are cut by rows only."""
    rows, positions = _extent(batch)
    return [
        jax.tree.map(functools.partial(_part, row_part, position_part), batch)
        for row_part in _slices(partition.row_cuts, rows)
        for position_part in _slices(partition.position_cuts, positions)
    ]


def _refuse_vacuous(value: float, gradient: Any, vocab_size: int | None) -> None:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]
    if not math.isfinite(value) or not all(np.isfinite(leaf).all() for leaf in leaves):
        raise AssertionError(f"vacuous: the loss of the whole batch is {value} or its gradient is not finite")
    if not any(leaf.any() for leaf in leaves):
        raise AssertionError(
            "vacuous: the gradient of the whole batch is 0; use parameters and data that give one"
        )
    if vocab_size is not None and abs(value - math.log(vocab_size)) < 1e-6 * math.log(vocab_size):
        raise AssertionError(
            f"vacuous: the loss is log({vocab_size}), a uniform prediction for which token and sample means "
            "agree; use random, not zero, parameters"
        )


def _extent(batch: Any) -> tuple[int, int]:
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch)]
    if not shapes or any(len(shape) == 0 for shape in shapes):
        raise ValueError(f"batch arrays must be [B] or [B, S, ...], got shapes {shapes}")
    rows = {shape[0] for shape in shapes}
    positions = {shape[1] for shape in shapes if len(shape) > 1}
    if len(rows) != 1 or len(positions) > 1:
        raise ValueError(f"batch arrays must share B and S, got shapes {shapes}; close over other facts")
    return rows.pop(), positions.pop() if positions else 1


def _even_cuts(size: int, parts: int, name: str) -> tuple[int, ...]:
    if parts < 1 or size % parts:
        raise ValueError(f"{parts} parts must divide the {size} {name} of the batch; choose a divisor")
    return tuple(range(size // parts, size, size // parts))


def _slices(cuts: tuple[int, ...], size: int) -> list[slice]:
    edges = (0, *cuts, size)
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def _norm(gradient: Any) -> float:
    return math.sqrt(
        sum(float(np.square(np.asarray(g, np.float64)).sum()) for g in jax.tree.leaves(gradient))
    )


def _distance(found: Any, expected: Any) -> float:
    """Norm of the difference over the norm of the expected gradient."""
    return _norm(jax.tree.map(_difference, found, expected)) / _norm(expected)


def _difference(found: Array, expected: Array) -> Float[np.ndarray, "*shape"]:
    return np.asarray(found, np.float64) - np.asarray(expected, np.float64)


def _scaled_sum(scale: float, *parts: Array) -> Array:
    return scale * functools.reduce(jnp.add, parts)


def _part(rows: slice, positions: slice, array: Array) -> Array:
    return array[rows] if array.ndim == 1 else array[rows, positions]
