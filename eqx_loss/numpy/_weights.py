"""`token_weights` of `eqx_loss` in NumPy, float64. Imports nothing but NumPy."""

import enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

GRANULARITIES = ("token", "sample", "micro_batch", "document")
ScaleDenominator = Literal["sum", "count"]


def token_weights(
    mask: NDArray[np.bool_],
    granularity: str | enum.Enum,
    *,
    micro_batch_size: int = 1,
    segment_ids: NDArray[np.integer] | None = None,
    count_empty: bool = True,
    token_scale: NDArray[np.floating] | None = None,
    scale_denominator: ScaleDenominator = "sum",
) -> NDArray[np.float64]:
    """Per-token weights `w` such that `sum(w * xent)` is the mean over groups of group means.

    The same values as `eqx_loss.token_weights`, from the whole global batch: all rows of all
    ranks and micro-steps. A rank then takes its rows of the result. An empty group weighs 0.

    Args:
        mask: `[B, S]`, True where a token's prediction is scored.
        granularity: "token", "sample", "micro_batch" or "document", or the `Granularity` of that
            value.
        micro_batch_size: Rows of a group for "micro_batch"; must divide `B`.
        segment_ids: `[B, S]` packed-document ids, each document contiguous in its row; 0 is
            padding. Needed by "document" only.
        count_empty: True counts groups without a scored token in the number of groups.
        token_scale: `[B, S]` factor of each token's vote, at least 0; None means 1.
        scale_denominator: With `token_scale`, a group mean divides by the "sum" of scales or by
            the "count" of scored tokens with a non-zero scale.

    Returns:
        `[B, S]` weights, 0 where `mask` is False; all 0 when nothing is scored.

    Raises:
        ValueError: An argument is outside its range or missing.
    """
    if mask.ndim != 2:
        raise ValueError(f"mask must be [B, S], got shape {mask.shape}; add an axis for a single row")
    if scale_denominator not in ("sum", "count"):
        raise ValueError(f"scale_denominator must be 'sum' or 'count', got {scale_denominator!r}")
    scored = mask.astype(bool)
    votes = scored.astype(np.float64)
    if token_scale is not None:
        votes = np.where(scored, token_scale, 0.0)
        scored = scored & (votes != 0)
    divisors = votes if scale_denominator == "sum" else scored.astype(np.float64)
    groups, num_groups = _groups(mask.shape, granularity, micro_batch_size, segment_ids)
    # Group 0 holds positions that belong to no group (padding).
    totals = np.bincount(groups.ravel(), divisors.ravel(), minlength=num_groups + 1)
    if granularity_name(granularity) != "token" and not count_empty:
        filled = np.bincount(groups.ravel(), scored.ravel(), minlength=num_groups + 1)[1:]
        num_groups = int(np.count_nonzero(filled))
    return _ratio(votes, totals[groups] * num_groups)


def granularity_name(granularity: str | enum.Enum) -> str:
    """The name of a granularity given by name or as an enum member."""
    name = str(granularity.value) if isinstance(granularity, enum.Enum) else granularity
    if name not in GRANULARITIES:
        raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    return name


def _groups(
    shape: tuple[int, ...],
    granularity: str | enum.Enum,
    micro_batch_size: int,
    segment_ids: NDArray[np.integer] | None,
) -> tuple[NDArray[np.int64], int]:
    """Group number (from 1) of each position, and the number of groups."""
    num_rows = shape[0]
    rows = np.arange(num_rows)[:, None]
    name = granularity_name(granularity)
    if name == "document":
        return _documents(segment_ids)
    if name == "token":
        by_row, number = np.zeros_like(rows), 1
    elif name == "sample":
        by_row, number = rows, num_rows
    else:
        if micro_batch_size < 1 or num_rows % micro_batch_size:
            raise ValueError(
                f"micro_batch_size must be at least 1 and divide the {num_rows} rows of the batch, got "
                f"{micro_batch_size}; choose a divisor or change the batch"
            )
        by_row, number = rows // micro_batch_size, num_rows // micro_batch_size
    return np.broadcast_to(by_row + 1, shape).astype(np.int64), number


def _documents(segment_ids: NDArray[np.integer] | None) -> tuple[NDArray[np.int64], int]:
    """Number (from 1) of the document of each position, 0 for padding; and how many there are."""
    if segment_ids is None:
        raise ValueError("granularity document needs segment_ids, got None; pass the packed-document ids")
    before = np.zeros_like(segment_ids)
    before[:, 1:] = segment_ids[:, :-1]
    starts = (segment_ids != before) & (segment_ids != 0)
    number = np.cumsum(starts.ravel()).reshape(segment_ids.shape)
    return np.where(segment_ids == 0, 0, number).astype(np.int64), int(np.count_nonzero(starts))


def _ratio(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> NDArray[np.float64]:
    present = denominator != 0
    return np.where(present, numerator / np.where(present, denominator, 1.0), 0.0)
