"""The columns that one device holds, and their tiles."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabCut:
    """Static description of the columns that one device holds and of their tiles.

    Attributes:
        num_columns: Columns of this device.
        tile_size: Columns of a tile; the last tile starts early when it would run over.
        num_classes: Real classes of the whole vocabulary; columns from there on are padding.
        axes: Mesh axes that cut the vocabulary, outermost first; empty outside a mesh.
        num_shards: Devices along `axes`.
        keep_logits: Whether the scores of a token tile are kept for its gradient.
        narrow_scores: Whether they are kept in 16 bits.
        split_hidden: Whether the gradient of `hidden` is held in 24 bits a number.
        split_unembed: Whether that of `unembed` is.
        operand_dtype: Type of the operands of the matrix products.
        accumulator_dtype: Type of scores, losses and gradients before the last cast.
        row_major_gradient: Whether to fix the layout of the gradient of `unembed`: left alone, the
            compiler for TPU v6e transposes it, and back at the end through a second copy.
        gather_targets: Whether target scores are gathered, one a token, instead of summed under a
            comparison: cheaper on a CPU, where the comparison is one more pass over the tile.
    """

    num_columns: int
    tile_size: int
    num_classes: int
    axes: tuple[str, ...]
    num_shards: int
    keep_logits: bool
    narrow_scores: bool
    split_hidden: bool
    split_unembed: bool
    operand_dtype: jnp.dtype
    accumulator_dtype: jnp.dtype
    row_major_gradient: bool
    gather_targets: bool

    @property
    def num_tiles(self) -> int:
        """Vocabulary tiles of this device."""
        return -(-self.num_columns // self.tile_size)

    @property
    def score_bytes(self) -> int:
        """Bytes of one score while it is held."""
        return 2 if self.narrow_scores else self.accumulator_dtype.itemsize

    @property
    def sum_bytes(self) -> int:
        """Bytes of one number of the gradient of `unembed` while it grows."""
        return 3 if self.split_unembed else self.accumulator_dtype.itemsize

    @property
    def has_padding(self) -> bool:
        """Whether some column of the whole vocabulary is no class."""
        return self.num_classes < self.num_columns * self.num_shards


class ColumnTile(NamedTuple):
    """Columns of one vocabulary tile: where they start here, their global ids, which count."""

    start: Int[Array, ""]
    ids: Int[Array, " X"]
    counted: Bool[Array, " X"] | None


def column_tile(j: Int[Array, ""], cut: VocabCut) -> ColumnTile:
    """The j-th vocabulary tile; columns an earlier tile has counted, and padding, are not counted."""
    start = jnp.minimum(j * cut.tile_size, cut.num_columns - cut.tile_size)
    local = start + jnp.arange(cut.tile_size)
    ids = local + lax.axis_index(cut.axes) * cut.num_columns if cut.axes else local
    counted = None
    if cut.num_columns % cut.tile_size:
        counted = local >= j * cut.tile_size
    if cut.has_padding:
        real = ids < cut.num_classes
        counted = real if counted is None else counted & real
    return ColumnTile(start=start, ids=ids, counted=counted)


def slice_columns(unembed: Float[Array, "D V"], columns: ColumnTile, cut: VocabCut) -> Float[Array, "D X"]:
    """The columns of a tile as operand of a product; padding columns are 0, whatever they hold."""
    block = lax.dynamic_slice_in_dim(unembed, columns.start, cut.tile_size, 1).astype(cut.operand_dtype)
    if cut.has_padding:
        block = jnp.where(columns.ids < cut.num_classes, block, 0)
    return block
