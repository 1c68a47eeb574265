"""The mathematics of one tile: scores, log-sum-exp over vocabulary tiles, gradient of the scores.

With scores `x = hidden @ unembed` (soft-capped), `p = softmax(x)`, smoothing `e` and `C` classes,

    xent = logsumexp(x) - (1 - e) x[target] - e mean(x)
    d(a xent + b logsumexp^2) / dx = p (a + 2 b logsumexp) - a ((1 - e) onehot(target) + e / C)
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import layout
from jaxtyping import Array, Bool, Float, Int, UInt16

from ._linear_xent_cut import ColumnTile, VocabCut, column_tile, slice_columns
from ._linear_xent_narrow import KeptScores, Sum, add_to_columns, keep_scores, narrow_shares
from ._linear_xent_types import XentRules

Carry = TypeVar("Carry")


class TokenTile(NamedTuple):
    """Tokens of one tile; hidden is an operand already, and 0 outside `scored`.

    `fresh` is False on positions that an earlier tile has counted (a ragged last tile).
    """

    hidden: Float[Array, "B S D"]
    targets: Int[Array, "B S"]
    scored: Bool[Array, "B S"]
    fresh: Bool[Array, "B S"]
    xent_weight: Float[Array, "B S"]
    z_weight: Float[Array, "B S"]


class ScoreSums(NamedTuple):
    """Running sums over vocabulary tiles; `score_sum` is None without label smoothing."""

    peak: Float[Array, "B S"]
    partition: Float[Array, "B S"]
    target_score: Float[Array, "B S"]
    score_sum: Float[Array, "B S"] | None


class TileLoss(NamedTuple):
    """Per-token results of one tile: cross-entropy (0 where not scored), log-partition and its parts."""

    xent: Float[Array, "B S"]
    log_partition: Float[Array, "B S"]
    norm: "Norm"


class Norm(NamedTuple):
    """`softmax(x) = exp(x - peak) / partition`.

    Two numbers, not `peak + log(partition)`: rounding the logarithm of a large vocabulary's
    partition (near 10) would scale a whole row of the gradient by up to 5e-7 in float32.
    """

    peak: Float[Array, "B S"]
    partition: Float[Array, "B S"]


def tile_loss(
    tile: TokenTile,
    unembed: Float[Array, "D V"],
    kept: KeptScores | None,
    rules: XentRules,
    cut: VocabCut,
) -> tuple[TileLoss, KeptScores | None]:
    """Cross-entropy and log-partition of a token tile; its scores replace those in `kept`, if given."""
    dtype = cut.accumulator_dtype
    shape = tile.targets.shape

    def add_columns(
        j: Int[Array, ""], carry: tuple[ScoreSums, KeptScores | None]
    ) -> tuple[ScoreSums, KeptScores | None]:
        sums, kept = carry
        columns = column_tile(j, cut)
        scores = tile_scores(tile.hidden, slice_columns(unembed, columns, cut), rules, cut)
        counted = scores if columns.counted is None else jnp.where(columns.counted, scores, -jnp.inf)
        peak = jnp.max(counted, axis=-1)
        if kept is not None:
            kept = keep_scores(kept, scores, peak, j)
        return _add_scores(sums, scores, counted, peak, columns, tile.targets, cut), kept

    start = ScoreSums(
        peak=jnp.full(shape, float(np.finfo(dtype).min), dtype),
        partition=jnp.zeros(shape, dtype),
        target_score=jnp.zeros(shape, dtype),
        score_sum=jnp.zeros(shape, dtype) if rules.label_smoothing > 0 else None,
    )
    sums, kept = repeat(cut.num_tiles, add_columns, (start, kept))
    return _finish(combine_shards(sums, cut), tile, rules, cut), kept


def tile_gradient(
    tile: TokenTile,
    unembed: Float[Array, "D V"],
    norm: Norm,
    kept: KeptScores | None,
    unembed_gradient: Sum,
    rules: XentRules,
    cut: VocabCut,
) -> tuple[Float[Array, "B S D"], Sum]:
    """Gradient of `hidden` from this device's columns, and `unembed_gradient` plus this tile's part."""
    dtype = cut.accumulator_dtype
    weighted = (tile.xent_weight != 0) | (tile.z_weight != 0)
    # A row without weight may hold NaN, and 0 * NaN is NaN: its hidden state must go, not its weight only.
    own = jnp.where((weighted & tile.fresh)[..., None], tile.hidden, 0)
    own = jnp.moveaxis(own, -1, 0)

    def add_columns(j: Int[Array, ""], carry: tuple[Array, Sum]) -> tuple[Array, Sum]:
        hidden_gradient, total = carry
        columns = column_tile(j, cut)
        block = slice_columns(unembed, columns, cut)
        if kept is None:
            scores = tile_scores(tile.hidden, block, rules, cut)
        else:
            scores = cast(Array, lax.dynamic_index_in_dim(kept.scores, j, 0, keepdims=False))
        tile_peak = None
        if kept is not None and kept.peaks is not None:
            tile_peak = cast(Array, lax.dynamic_index_in_dim(kept.peaks, j, 0, keepdims=False))
        slope = _score_gradient(scores, tile_peak, norm, columns, tile, weighted, rules, cut)
        slope = slope.astype(cut.operand_dtype)
        hidden_gradient = hidden_gradient + jnp.einsum(
            "bsv,dv->bsd", slope, block, preferred_element_type=dtype
        )
        part = jnp.einsum("dbs,bsv->dv", own, slope, preferred_element_type=dtype)
        if cut.row_major_gradient:
            part = _row_major(part)
        return hidden_gradient, add_to_columns(total, part, columns.start)

    zero = jnp.zeros(tile.hidden.shape, dtype)
    return repeat(cut.num_tiles, add_columns, (zero, unembed_gradient))


def repeat(
    count: int | Array, body: Callable[[Array, Carry], Carry], start: Carry, *, expected: int | None = None
) -> Carry:
    """`lax.fori_loop` from 0 to `count` that keeps the type of what it carries.

    `expected` names the loop `trips_N`, for whoever counts the costs of the compiled program: the
    trips of a loop whose count depends on the batch are not in it otherwise.
    """
    if expected is None:
        return cast(Carry, lax.fori_loop(0, count, cast(Any, body), start))
    with jax.named_scope(f"trips_{expected}"):
        return cast(Carry, lax.fori_loop(0, count, cast(Any, body), start))


def tile_scores(
    hidden: Float[Array, "B S D"],
    block: Float[Array, "D X"],
    rules: XentRules,
    cut: VocabCut,
) -> Float[Array, "B S X"]:
    """Logits of one tile after the soft cap, in the accumulator's type."""
    scores = jnp.einsum("bsd,dv->bsv", hidden, block, preferred_element_type=cut.accumulator_dtype)
    if rules.logit_soft_cap is not None:
        scores = rules.logit_soft_cap * jnp.tanh(scores / rules.logit_soft_cap)
    return scores


def combine_shards(sums: ScoreSums, cut: VocabCut) -> ScoreSums:
    """The sums over all vocabulary shards, by one gather of four numbers a token."""
    if not cut.axes:
        return sums
    stacked = jnp.stack([part for part in sums if part is not None])
    shards = cast(Array, lax.all_gather(stacked, cut.axes))
    peak = jnp.max(shards[:, 0], axis=0)
    partition = jnp.sum(shards[:, 1] * jnp.exp(shards[:, 0] - peak), axis=0)
    target_score = jnp.sum(shards[:, 2], axis=0)
    score_sum = None if sums.score_sum is None else jnp.sum(shards[:, 3], axis=0)
    return ScoreSums(peak=peak, partition=partition, target_score=target_score, score_sum=score_sum)


def _row_major(part: Array) -> Array:
    constrain = cast(Callable[..., Array], layout.with_layout_constraint)
    return constrain(part, layout.Layout(major_to_minor=(0, 1)))


def _add_scores(
    sums: ScoreSums,
    scores: Float[Array, "B S X"],
    counted: Float[Array, "B S X"],
    tile_peak: Float[Array, "B S"],
    columns: ColumnTile,
    targets: Int[Array, "B S"],
    cut: VocabCut,
) -> ScoreSums:
    """`counted` are the scores with -inf in columns that do not count, `tile_peak` the largest of them."""
    peak = jnp.maximum(sums.peak, tile_peak)
    partition = sums.partition * jnp.exp(sums.peak - peak)
    partition = partition + jnp.sum(jnp.exp(counted - peak[..., None]), axis=-1)
    score_sum = sums.score_sum
    if score_sum is not None:
        zeroed = scores if columns.counted is None else jnp.where(columns.counted, scores, 0)
        score_sum = score_sum + jnp.sum(zeroed, axis=-1)
    target_score = sums.target_score + _target_scores(scores, columns, targets, cut)
    return ScoreSums(peak=peak, partition=partition, target_score=target_score, score_sum=score_sum)


def _target_scores(
    scores: Float[Array, "B S X"], columns: ColumnTile, targets: Int[Array, "B S"], cut: VocabCut
) -> Float[Array, "B S"]:
    """The score of each token's target, 0 where another tile counts it."""
    counted = columns.counted
    if not cut.gather_targets:
        hit = columns.ids == targets[..., None]
        if counted is not None:
            hit = hit & counted
        return jnp.sum(jnp.where(hit, scores, 0), axis=-1)
    place = targets - columns.ids[0]
    hit = (place >= 0) & (place < cut.tile_size)
    place = jnp.clip(place, 0, cut.tile_size - 1)
    if counted is not None:
        hit = hit & counted[place]
    return jnp.where(hit, jnp.take_along_axis(scores, place[..., None], axis=-1)[..., 0], 0)


def _finish(sums: ScoreSums, tile: TokenTile, rules: XentRules, cut: VocabCut) -> TileLoss:
    log_partition = sums.peak + jnp.log(sums.partition)
    # The difference of scores first: it is small and often exact, the log-partition has lost its last bits.
    xent = jnp.log(sums.partition) + (sums.peak - sums.target_score)
    if sums.score_sum is not None:
        xent = xent + rules.label_smoothing * (sums.target_score - sums.score_sum / cut.num_classes)
    # A scored target that is no class must not become a silent number.
    xent = jnp.where(_in_range(tile.targets, cut), xent, jnp.nan)
    norm = Norm(peak=sums.peak, partition=sums.partition)
    return TileLoss(xent=jnp.where(tile.scored, xent, 0), log_partition=log_partition, norm=norm)


def _score_gradient(
    scores: Float[Array, "B S X"] | UInt16[Array, "B S X"],
    tile_peak: Float[Array, "B S"] | None,
    norm: Norm,
    columns: ColumnTile,
    tile: TokenTile,
    weighted: Bool[Array, "B S"],
    rules: XentRules,
    cut: VocabCut,
) -> Float[Array, "B S X"]:
    xent_weight = jnp.where(_in_range(tile.targets, cut), tile.xent_weight, 0)
    log_partition = norm.peak + jnp.log(norm.partition)
    mass = (xent_weight + 2 * tile.z_weight * log_partition) / norm.partition
    hit = columns.ids == tile.targets[..., None]
    if tile_peak is None:
        shares = jnp.exp(scores - norm.peak[..., None])
    else:
        shares = narrow_shares(scores, tile_peak, norm.peak)
    slope = mass[..., None] * shares
    slope = slope - jnp.where(hit, (xent_weight * (1 - rules.label_smoothing))[..., None], 0)
    if rules.label_smoothing > 0:
        slope = slope - (xent_weight * (rules.label_smoothing / cut.num_classes))[..., None]
    if rules.logit_soft_cap is not None:
        slope = slope * (1 - jnp.square(scores / rules.logit_soft_cap))
    alive = weighted[..., None]
    if columns.counted is not None:
        alive = alive & columns.counted
    return jnp.where(alive, slope, 0)


def _in_range(targets: Int[Array, "B S"], cut: VocabCut) -> Bool[Array, "B S"]:
    return (targets >= 0) & (targets < cut.num_classes)
