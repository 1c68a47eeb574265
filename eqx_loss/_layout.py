"""How another framework's run cuts the global batch: micro-batches, data ranks, context ranks.

Our own rules do not depend on any of it. A profile that reproduces a release may.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Which rows of the global batch each micro-batch of each data rank holds.

    Attributes:
        num_micro_batches: Micro-batches (accumulation steps) of each data rank, at least 1.
        data_parallel_size: Data ranks, at least 1. A framework that writes its loss for all
            devices at once (MaxText, Levanter) has 1.
        row_order: Row indices, micro-batch by micro-batch, in each rank by rank, in each row by
            row. None is `0, 1, 2, ...` (Megatron's sampler).
    """

    num_micro_batches: int
    data_parallel_size: int = 1
    row_order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("num_micro_batches", self.num_micro_batches),
            ("data_parallel_size", self.data_parallel_size),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.row_order is not None and sorted(self.row_order) != list(range(len(self.row_order))):
            raise ValueError(
                f"row_order must name each of {len(self.row_order)} rows once, got {self.row_order}"
            )

    @classmethod
    def strided(cls, num_micro_batches: int, num_rows: int) -> "BatchLayout":
        """Micro-batch `i` holds rows `i, i + G, i + 2 G, ...`, as MaxText reshapes its batch.

        Source: MaxText 0.2.5, `maxtext/utils/gradient_accumulation.py`
        (`reshape_to_microbatch_accumulations`).
        """
        order = [
            row for start in range(num_micro_batches) for row in range(start, num_rows, num_micro_batches)
        ]
        return cls(num_micro_batches=num_micro_batches, row_order=tuple(order))

    @property
    def num_groups(self) -> int:
        """Micro-batches of all data ranks."""
        return self.num_micro_batches * self.data_parallel_size

    def micro_batch_size(self, num_rows: int) -> int:
        """Rows of one micro-batch of one rank.

        Raises:
            ValueError: The layout does not cut `num_rows` rows evenly.
        """
        if num_rows % self.num_groups or (self.row_order is not None and len(self.row_order) != num_rows):
            raise ValueError(
                f"a layout of {self.num_micro_batches} micro-batches x {self.data_parallel_size} ranks"
                f"{'' if self.row_order is None else f' over {len(self.row_order)} rows'} does not fit "
                f"{num_rows} rows; give the layout of the whole global batch"
            )
        return num_rows // self.num_groups

    def arranged(self, array: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
        """Rows in the order of the layout, so that groups are consecutive."""
        return array if self.row_order is None else array[np.asarray(self.row_order)]

    def restored(self, array: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
        """The inverse of `arranged`."""
        return array if self.row_order is None else array[np.argsort(np.asarray(self.row_order))]


class RankCut(eqx.Module):
    """The positions of each (micro-batch, context rank), rows arranged so that groups are consecutive.

    Attributes:
        context: Context rank of each position.
        num_groups: Micro-batches of all data ranks; groups are consecutive rows.
        num_contexts: Context ranks.
    """

    context: Int[Array, "B S"]
    num_groups: int = eqx.field(static=True)
    num_contexts: int = eqx.field(static=True)

    def sums(self, values: Float[Array, "B S"]) -> Float[Array, "G C"]:
        """Sum of `values` over each (micro-batch, context rank)."""
        by_row = self.row_sums(values)
        return jnp.sum(by_row.reshape(self.num_groups, -1, self.num_contexts), axis=1)

    def row_sums(self, values: Float[Array, "B S"]) -> Float[Array, "B C"]:
        """Sum of `values` over the part of each row that each context rank holds."""
        held = self.context[..., None] == jnp.arange(self.num_contexts)
        return jnp.sum(jnp.where(held, values[..., None], 0), axis=1)

    def spread(self, table: Float[Array, "G C"]) -> Float[Array, "B S"]:
        """The entry of each position's (micro-batch, context rank)."""
        by_row = self.spread_rows(table)
        return jnp.take_along_axis(by_row, self.context, axis=1)

    def spread_rows(self, table: Float[Array, "G C"]) -> Float[Array, "B C"]:
        """The entries of each row's micro-batch."""
        return jnp.repeat(table, self.context.shape[0] // self.num_groups, axis=0)


def context_ranks(
    shape: tuple[int, ...], context_parallel_size: int, segment_ids: Int[Array, "B S"] | None
) -> Int[Array, "B S"]:
    """Context rank of each position: a sequence in 2C pieces, rank c holding c and 2C - 1 - c.

    With `segment_ids` every document is cut for itself (packed sequences), else every row. Source:
    Megatron-LM, `get_batch_on_this_cp_rank`; Transformer Engine's `thd` partition when packed.

    Raises:
        ValueError: A row does not split into 2C equal pieces.
    """
    num_positions = shape[1]
    pieces = 2 * context_parallel_size
    if context_parallel_size == 1:
        return jnp.zeros(shape, int)
    if num_positions % pieces:
        raise ValueError(
            f"context parallelism over {context_parallel_size} ranks cuts a row into {pieces} equal pieces, "
            f"but rows have {num_positions} positions; pad the rows"
        )
    if segment_ids is None:
        index = jnp.broadcast_to(jnp.arange(num_positions), shape)
        piece = index * pieces // num_positions
    else:
        index, length = jax.vmap(_within_document)(segment_ids)
        piece = index * pieces // length
    return jnp.minimum(piece, pieces - 1 - piece)


def row_pieces(
    values: Float[Array, "*L B S E"],
    context_parallel_size: int,
    segment_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "*L U E"]:
    """Sums of per-position `values` over each row's part on each context rank, `U = B * C`.

    What `RouterTerms.score_sums` and `counts` hold under a Megatron profile with context
    parallelism: row 0's ranks first, then row 1's. Positions outside the router mask must be 0.
    `segment_ids` as in `context_ranks`.
    """
    *layers, num_rows, num_positions, num_experts = values.shape
    ranks = context_ranks((num_rows, num_positions), context_parallel_size, segment_ids)
    held = (ranks[..., None] == jnp.arange(context_parallel_size)).astype(values.dtype)
    summed = jnp.einsum("...bse,bsc->...bce", values, held)
    return summed.reshape(*layers, num_rows * context_parallel_size, num_experts)


def _within_document(segment_ids: Int[Array, " S"]) -> tuple[Int[Array, " S"], Int[Array, " S"]]:
    """Position within the document, and the document's length; padding is a document of its own."""
    num_positions = segment_ids.shape[0]
    starts = jnp.concatenate([jnp.ones((1,), bool), segment_ids[1:] != segment_ids[:-1]])
    document = jnp.cumsum(starts) - 1
    place = jnp.arange(num_positions)
    first = jax.ops.segment_min(place, document, num_segments=num_positions)
    length = jax.ops.segment_sum(jnp.ones_like(place), document, num_segments=num_positions)
    return place - first[document], length[document]
