"""Where the recurrent state restarts: documents of a packed row as non-decreasing numbers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Int, Shaped


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


def vary_together(*arrays: Shaped[Array, "..."] | None) -> tuple[Shaped[Array, "..."] | None, ...]:
    """The arrays, each marked as varying over every `shard_map` axis that any of them varies over.

    Outside `shard_map`, and inside one with `check_vma=False`, they come back as they are. The mark's transpose is the
    sum over the axis, so the gradient of an array that was the same on all shards is complete.
    """
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None))

    def mark(x: Shaped[Array, "..."] | None) -> Shaped[Array, "..."] | None:
        missing = () if x is None else tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(mark(x) for x in arrays)


def zeros_beside(x: Shaped[Array, "..."], shape: tuple[int, ...], dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Zeros that vary over the `shard_map` axes that `x` varies over, as a loop's carry next to `x` must."""
    axes = tuple(jax.typeof(x).manual_axis_type.varying)
    zeros = jnp.zeros(shape, dtype)
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def zero_cotangent(x: Shaped[Array, "..."]) -> np.ndarray:
    """The cotangent of an integer or boolean array."""
    return np.zeros(x.shape, dtype=jax.dtypes.float0)
