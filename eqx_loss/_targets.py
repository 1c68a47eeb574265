"""Targets and masks: next-token alignment, document edges, and the shifts of MTP depths."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


def same_document_as_next(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    """True where position `t + 1` exists and lies in the same non-padding document as `t`."""
    following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    return (segment_ids == following) & (segment_ids != 0)


def next_token_targets(
    tokens: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"],
    token_mask: Bool[Array, "B S"] | None = None,
) -> tuple[Int[Array, "B S"], Bool[Array, "B S"]]:
    """Targets `tokens[t + 1]` and the mask of positions that have one.

    A target must lie in the same non-padding document as its input, so the last token of a
    document and a one-token document have none, and position 0 of a row is never a target.

    Args:
        tokens: Token ids of the rows.
        segment_ids: Packed-document ids; 0 is padding.
        token_mask: True where a token may be a target (for labels with ignored entries).

    Returns:
        Targets (0 where there is none) and mask (True = scored).
    """
    ones = jnp.ones(tokens.shape, bool) if token_mask is None else token_mask
    return shift_targets(tokens, ones, depth=1, segment_ids=segment_ids)


def shift_targets(
    targets: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    *,
    depth: int,
    segment_ids: Int[Array, "B S"] | None,
    roll_across_documents: bool = False,
) -> tuple[Int[Array, "B S"], Bool[Array, "B S"]]:
    """Targets and mask of MTP depth `depth`: those of position `t + depth`, at position `t`.

    The mask is the target's own, `m[t + k]`, as in Megatron-Core 0.16.1,
    `megatron/core/transformer/multi_token_prediction.py` (`roll_tensor`). A target beyond the row
    or in another document is not scored.

    Args:
        targets: Next-token targets (depth 0).
        mask: True where a depth-0 prediction is scored.
        depth: Positions to look further ahead, at least 0.
        segment_ids: Packed-document ids of the inputs, contiguous; 0 is padding. None treats
            every row as one document.
        roll_across_documents: True ignores document edges (Megatron's pretraining without
            packed-sequence parameters); only the end of the row stops the shift.

    Returns:
        Shifted targets (0 in freed slots) and shifted mask (False in freed slots).

    Raises:
        ValueError: `depth` is negative.
    """
    joined = joined_to_next(targets.shape, None if roll_across_documents else segment_ids)
    return shift_left(targets, joined, depth=depth), shift_left(mask, joined, depth=depth)


def shift_left(
    values: Shaped[Array, "B S"], joined: Bool[Array, "B S"], *, depth: int
) -> Shaped[Array, "B S"]:
    """`values[t + depth]` at position `t`; 0 (False) where the way there is not all `joined`.

    One position at a time, so that a shift never jumps over a document.

    Raises:
        ValueError: `depth` is negative.
    """
    if depth < 0:
        raise ValueError(f"depth must be >= 0 (0 is the main head), got {depth}")
    for _ in range(depth):
        values = jnp.where(joined, jnp.roll(values, -1, axis=1), jnp.zeros((), values.dtype))
    return values


def joined_to_next(shape: tuple[int, ...], segment_ids: Int[Array, "B S"] | None) -> Bool[Array, "B S"]:
    """True where position `t` may look at `t + 1`; without segment ids, all but the last."""
    if segment_ids is not None:
        return same_document_as_next(segment_ids)
    return jnp.broadcast_to(jnp.arange(shape[1]) < shape[1] - 1, shape)
