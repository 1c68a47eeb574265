"""Token weights: every loss normalization as a `[B, S]` array made from masks and group ids.

With per-token losses `l` and weights `w` the objective is `sum(w * l)`. The weights need no
model, so they are made once for the whole global batch, before the backward pass. Cutting the
batch into micro-steps, shards or tiles then only splits a sum.
"""

import enum
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._reduce import guarded_ratio, sum_count

ScaleDenominator = Literal["sum", "count"]


class Granularity(enum.Enum):
    """What casts one equal vote in the objective.

    Attributes:
        TOKEN: Every scored token of the global batch (Megatron `calculate_per_token_loss=True`,
            MaxText's default, Hugging Face with `num_items_in_batch`).
        SAMPLE: Every row (Megatron `=False` with `micro_batch_size=1`; RFC-0032).
        MICRO_BATCH: Every group of `micro_batch_size` consecutive rows (Megatron `=False`).
        DOCUMENT: Every packed document, identified by its row and segment id.
    """

    TOKEN = "token"
    SAMPLE = "sample"
    MICRO_BATCH = "micro_batch"
    DOCUMENT = "document"


def token_weights(
    mask: Bool[Array, "B S"],
    granularity: Granularity,
    *,
    micro_batch_size: int = 1,
    segment_ids: Int[Array, "B S"] | None = None,
    count_empty: bool = True,
    token_scale: Float[Array, "B S"] | None = None,
    scale_denominator: ScaleDenominator = "sum",
) -> Float[Array, "B S"]:
    """Per-token weights `w` such that `sum(w * xent)` is the mean over groups of group means.

    `w = m / count(group) / num_groups`, with one group for TOKEN. An empty group weighs 0. No
    gradient flows through the weights. Source of the rules: Megatron-Core 0.16.1,
    `megatron/core/pipeline_parallel/schedules.py` (`forward_step_calc_loss`) and
    `megatron/core/distributed/finalize_model_grads.py`; RFC-0032.

    Args:
        mask: True where a token's prediction is scored; the whole global batch.
        granularity: Which groups have equal votes.
        micro_batch_size: Rows of a group for MICRO_BATCH, at least 1; must divide `B`.
            Ignored by the other granularities.
        segment_ids: Packed-document ids, each document contiguous in its row; 0 is padding.
            Needed by DOCUMENT only.
        count_empty: True counts groups without a scored token in `num_groups` (Megatron);
            False averages over non-empty groups. TOKEN has no groups and ignores it.
        token_scale: Non-negative factor of each token's vote (fractional loss weights, domain
            mixture weights). Applied once, to the numerator; None means 1 everywhere.
        scale_denominator: With `token_scale`, what a group mean divides by: "sum" is the sum
            of scales (a weighted mean), "count" the number of scored tokens with a non-zero
            scale (importance weighting).

    Returns:
        Weights, 0 where `mask` is False; all 0 when nothing is scored.

    Raises:
        ValueError: `micro_batch_size` does not divide the rows, or `segment_ids` is missing.
    """
    per_group = group_mean_weights(
        mask,
        granularity,
        micro_batch_size=micro_batch_size,
        segment_ids=segment_ids,
        token_scale=token_scale,
        scale_denominator=scale_denominator,
    )
    if granularity is Granularity.TOKEN:
        return per_group
    number = num_groups(
        mask if token_scale is None else mask & (token_scale != 0),
        granularity,
        micro_batch_size=micro_batch_size,
        segment_ids=segment_ids,
        count_empty=count_empty,
    )
    return guarded_ratio(per_group, jnp.broadcast_to(number, per_group.shape))


def group_mean_weights(
    mask: Bool[Array, "B S"],
    granularity: Granularity,
    *,
    micro_batch_size: int = 1,
    segment_ids: Int[Array, "B S"] | None = None,
    token_scale: Float[Array, "B S"] | None = None,
    scale_denominator: ScaleDenominator = "sum",
) -> Float[Array, "B S"]:
    """Weights that turn `sum(w * xent)` into the *sum* over groups of each group's mean.

    `token_weights` is this divided by the number of groups. An empty group weighs 0. Arguments
    and errors are those of `token_weights`; no gradient.
    """
    dtype = jnp.result_type(float)
    votes = mask.astype(dtype)
    divisors = votes
    if token_scale is not None:
        votes = jnp.where(mask, token_scale.astype(dtype), 0)
        divisors = votes if scale_denominator == "sum" else (votes != 0).astype(dtype)
    totals = _group_total(divisors, granularity, micro_batch_size, segment_ids)
    return jax.lax.stop_gradient(guarded_ratio(votes, totals))


def weights_by_group(
    mask: Bool[Array, "B S"],
    group_ids: Int[Array, "B S"] | Int[Array, " B"],
    num_groups: int,
    *,
    divisor: float | None = None,
    count_empty: bool = True,
) -> Float[Array, "B S"]:
    """Weights for groups of any shape: data ranks, prompts, domains, sequences.

    `sum(w * l)` is the mean over groups of each group's mean, or, with `divisor`, of each group's
    sum over a constant (`divisor=1` for a plain sum; Dr. GRPO, arXiv:2503.20783, divides by the
    maximal length). An empty group weighs 0. No gradient.

    Args:
        mask: True where a token is scored.
        group_ids: In `[0, num_groups)`, one per token or one per row. Tokens with an id outside
            the range weigh 0.
        num_groups: Number of groups, at least 1.
        divisor: None divides each group by its own token count; a positive constant by itself.
        count_empty: False leaves groups without a scored token out of the mean over groups.

    Raises:
        ValueError: `num_groups` is below 1 or `divisor` is not positive.
    """
    if num_groups < 1:
        raise ValueError(f"num_groups must be at least 1, got {num_groups}")
    if divisor is not None and not divisor > 0:
        raise ValueError(f"divisor must be positive, got {divisor}; use None to divide by token counts")
    dtype = jnp.result_type(float)
    ids = jnp.broadcast_to(group_ids if group_ids.ndim == 2 else group_ids[:, None], mask.shape)
    scored = mask & (ids >= 0) & (ids < num_groups)
    counts = jax.ops.segment_sum(
        scored.astype(dtype).ravel(), jnp.where(scored, ids, 0).ravel(), num_segments=num_groups
    )
    own = counts[jnp.where(scored, ids, 0)] if divisor is None else jnp.full(mask.shape, divisor, dtype)
    present = jnp.sum(counts > 0, dtype=dtype) if not count_empty else jnp.asarray(num_groups, dtype)
    return jax.lax.stop_gradient(guarded_ratio(scored.astype(dtype), own * present))


def num_groups(
    mask: Bool[Array, "B S"],
    granularity: Granularity,
    *,
    micro_batch_size: int = 1,
    segment_ids: Int[Array, "B S"] | None = None,
    count_empty: bool = True,
) -> Float[Array, ""]:
    """Number of groups that `token_weights` averages over.

    TOKEN is one group. With `count_empty=False` groups without a scored token are left out, so
    the result may be 0. DOCUMENT counts documents (runs of one non-zero segment id in a row).
    Arguments and errors are those of `token_weights`.
    """
    dtype = jnp.result_type(float)
    num_rows = mask.shape[0]
    match granularity:
        case Granularity.TOKEN:
            present = jnp.ones((1,), bool) if count_empty else jnp.any(mask)[None]
        case Granularity.SAMPLE:
            present = jnp.ones((num_rows,), bool) if count_empty else jnp.any(mask, axis=1)
        case Granularity.MICRO_BATCH:
            check_micro_batch(num_rows, micro_batch_size)
            grouped = mask.reshape(num_rows // micro_batch_size, -1)
            present = jnp.ones(grouped.shape[:1], bool) if count_empty else jnp.any(grouped, axis=1)
        case Granularity.DOCUMENT:
            starts = _document_starts(_required(segment_ids))
            if count_empty:
                present = starts
            else:
                scored = _group_total(mask.astype(dtype), granularity, micro_batch_size, segment_ids)
                present = starts & (scored > 0)
    return jnp.sum(present, dtype=dtype)


def granular_mean(
    values: Float[Array, "B S"],
    mask: Bool[Array, "B S"],
    granularity: Granularity,
    *,
    micro_batch_size: int = 1,
    segment_ids: Int[Array, "B S"] | None = None,
    count_empty: bool = True,
) -> Float[Array, ""]:
    """The objective of one undivided batch: `sum(token_weights * values)`.

    TOKEN is computed as `sum(where(mask, values, 0)) / max(count, 1)`, bit for bit the plain
    formula in the dtype of `values`; its gradient is bit for bit `token_weights`. Values outside
    the mask may be NaN or Inf. 0 when nothing is scored. Arguments and errors are those of
    `token_weights`.
    """
    if granularity is Granularity.TOKEN:
        return sum_count(values, mask).value()
    weights = token_weights(
        mask,
        granularity,
        micro_batch_size=micro_batch_size,
        segment_ids=segment_ids,
        count_empty=count_empty,
    )
    return jnp.sum(weights.astype(values.dtype) * jnp.where(mask, values, 0))


def _group_total(
    values: Float[Array, "B S"],
    granularity: Granularity,
    micro_batch_size: int,
    segment_ids: Int[Array, "B S"] | None,
) -> Float[Array, "B S"]:
    """Sum of `values` over the group of each position, at that position."""
    match granularity:
        case Granularity.TOKEN:
            total = jnp.sum(values)
        case Granularity.SAMPLE:
            total = jnp.sum(values, axis=1, keepdims=True)
        case Granularity.MICRO_BATCH:
            check_micro_batch(values.shape[0], micro_batch_size)
            by_row = jnp.sum(values, axis=1)
            by_group = jnp.sum(by_row.reshape(-1, micro_batch_size), axis=1)
            total = jnp.repeat(by_group, micro_batch_size)[:, None]
        case Granularity.DOCUMENT:
            index = jnp.cumsum(_document_starts(_required(segment_ids)), axis=1)
            index = jnp.where(_required(segment_ids) == 0, 0, index)
            total = jax.vmap(_sum_by_index)(values, index)
    return jnp.broadcast_to(total, values.shape)


def _sum_by_index(values: Float[Array, " S"], index: Int[Array, " S"]) -> Float[Array, " S"]:
    totals = jax.ops.segment_sum(values, index, num_segments=values.shape[0] + 1)
    return totals[index]


def _document_starts(segment_ids: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    """True at the first position of every document; padding (id 0) is no document."""
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    return (segment_ids != before) & (segment_ids != 0)


def check_micro_batch(num_rows: int, micro_batch_size: int) -> None:
    if micro_batch_size < 1 or num_rows % micro_batch_size != 0:
        raise ValueError(
            f"micro_batch_size must be at least 1 and divide the {num_rows} rows of the batch, got "
            f"{micro_batch_size}; choose a divisor or change the batch"
        )


def _required(segment_ids: Int[Array, "B S"] | None) -> Int[Array, "B S"]:
    if segment_ids is None:
        raise ValueError(
            "granularity DOCUMENT needs segment_ids, got None; pass the packed-document ids of the batch"
        )
    return segment_ids
