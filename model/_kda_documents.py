"""Where the recurrent state restarts: documents of a packed row as non-decreasing numbers."""

from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Int, Shaped

Tree = TypeVar("Tree")


class Documents(eqx.Module):
    """Documents of each row, numbered 0, 1, ... in the order they appear.

    Attributes:
        number: Document a position belongs to. A padding position has the number of the document before it, so the
            numbers never decrease along a row.
        scored: False at padding (segment id 0), where the state must not change.
    """

    number: Int[Array, "B S"]
    scored: Bool[Array, "B S"]


def number_documents(segment_ids: Int[Array, "B S"]) -> Documents:
    """Documents of packed rows, from ids that are unique within a row.

    A document starts at a position whose id differs from that of the last position before it that is not padding;
    padding in the middle of a document does not end it. Padding before the first document has number 0, as the first
    document, so a row of padding is one document without positions.

    Args:
        segment_ids: Document ids; 0 is padding.
    """
    scored = segment_ids != 0
    if segment_ids.shape[1] == 0:
        return Documents(segment_ids, scored)
    # Each position's id, padding taking the id before it; 0 only before the first document.
    filled = jax.lax.associative_scan(lambda a, b: jnp.where(b == 0, a, b), segment_ids, axis=1)
    before = jnp.pad(filled[:, :-1], ((0, 0), (1, 0)))
    starts = (filled != before) & (before != 0)
    return Documents(jnp.cumsum(starts, axis=1, dtype=segment_ids.dtype), scored)


def vary_together(tree: Tree) -> Tree:
    """The tree with each array marked as varying over every `shard_map` axis that any of them varies over.

    Outside `shard_map`, and inside one with `check_vma=False`, it comes back as it is. The mark's transpose is the sum
    over the axis, so the gradient of an array that was the same on all shards is complete.
    """
    axes = frozenset[str]().union(*(_axes(x) for x in jax.tree.leaves(tree)))

    def mark(x: Array) -> Array:
        missing = tuple(axes - _axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def zeros_beside(x: Shaped[Array, "..."], shape: tuple[int, ...], dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Zeros that vary over the `shard_map` axes that `x` varies over, as a loop's carry next to `x` must."""
    axes = tuple(_axes(x))
    zeros = jnp.zeros(shape, dtype)
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def zero_cotangent(x: Shaped[Array, "..."]) -> np.ndarray:
    """The cotangent of an integer or boolean array."""
    return np.zeros(x.shape, dtype=jax.dtypes.float0)


def _axes(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
