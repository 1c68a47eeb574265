"""Loss weights as a release of Megatron-Core has them, warts included.

Notation of the formulas: rows are arranged micro-batch by micro-batch; `n`, `n_k` and `tau` are the
lm tokens, MTP tokens and router positions of one (micro-batch, context rank); `T` is the sum of
`n`; `G` the micro-batches of all data ranks, `C` the context ranks. Reference: the table in
`docs/semantics.md`, checked against the real thing in `tests/golden/megatron`.
"""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._layout import BatchLayout, RankCut, context_ranks
from ._loss_weights import LossWeights, RouterWeights
from ._release_rules import (
    ContextFactor,
    EmptyGroup,
    LmGroup,
    MegatronRules,
    MtpDivisor,
    RouterPadding,
    SequenceTokens,
)
from ._router import LoadBalanceScope
from ._semantics import LossSemantics
from ._targets import joined_to_next, shift_left


class MegatronCounts(eqx.Module):
    """Votes and counts of every output head, from which Megatron's weights and logs are made.

    Attributes:
        cut: The positions of each (micro-batch, context rank).
        votes: Loss mask (fractional where weights are) of the lm head.
        mtp_votes: The mask shifted to each MTP depth.
        tokens: `n`, cast to int as Megatron does.
        raw_tokens: `n` before the cast.
        mtp_tokens: `n_k`, never cast.
        total: `T`.
    """

    cut: RankCut
    votes: Float[Array, "B S"]
    mtp_votes: Float[Array, "M B S"]
    tokens: Float[Array, "G C"]
    raw_tokens: Float[Array, "G C"]
    mtp_tokens: Float[Array, "M G C"]
    total: Float[Array, ""]


class CountedPositions(NamedTuple):
    """Positions that some routers count, and whether a padding mask says so."""

    mask: Bool[Array, "B S"]
    is_padded: bool


def megatron_counts(
    votes: Float[Array, "B S"],
    rules: MegatronRules,
    *,
    num_mtp_layers: int,
    num_groups: int,
    segment_ids: Int[Array, "B S"] | None,
    roll_across_documents: bool,
) -> MegatronCounts:
    """Counts of a whole global batch, rows arranged.

    Raises:
        ValueError: Context parallelism does not cut the rows evenly, or the release does not
            shift MTP targets across context ranks.
    """
    num_contexts = rules.context_parallel_size
    if num_contexts > 1 and num_mtp_layers and not rules.mtp_shift_context:
        raise ValueError(
            f"Megatron {rules.release} does not shift MTP targets across context ranks, got "
            f"context_parallel_size={num_contexts} and {num_mtp_layers} MTP layers; name a release from 0.14"
        )
    packed = segment_ids if rules.packed_sequences else None
    cut = RankCut(context_ranks(votes.shape, num_contexts, packed), num_groups, num_contexts)
    joined = joined_to_next(votes.shape, None if roll_across_documents else segment_ids)
    shifted = [shift_left(votes, joined, depth=depth) for depth in range(1, num_mtp_layers + 1)]
    raw = cut.sums(votes)
    tokens = raw
    if rules.lm_group is LmGroup.MICRO_BATCH:
        tokens = jnp.sum(raw, axis=1, keepdims=True)
    tokens = jnp.floor(tokens)
    return MegatronCounts(
        cut=cut,
        votes=votes,
        mtp_votes=jnp.stack(shifted) if shifted else jnp.zeros((0, *votes.shape), votes.dtype),
        tokens=jnp.broadcast_to(tokens, raw.shape),
        raw_tokens=raw,
        mtp_tokens=jnp.stack([cut.sums(v) for v in shifted]) if shifted else jnp.zeros((0, *raw.shape)),
        total=jnp.sum(tokens),
    )


def megatron_weights(
    clean: LossWeights,
    semantics: LossSemantics,
    rules: MegatronRules,
    *,
    segment_ids: Int[Array, "B S"] | None,
    router_mask: Bool[Array, "B S"] | None,
    layout: BatchLayout | None,
) -> LossWeights:
    """`clean` with the objective weights of the release; logs keep our rules.

    Args:
        clean: Our weights of the same batch, rows arranged.
        semantics: Flags and coefficients.
        rules: The release.
        segment_ids: Packed documents of the arranged rows.
        router_mask: True where a position is no padding; None when the run passes no padding mask.
        layout: Cut of the batch; only the global load balance needs it.

    Raises:
        ValueError: As `megatron_counts`; a global load balance without a layout, or in a release
            that has none.
    """
    num_groups = clean.lm_mask.shape[0] // semantics.micro_batch_size
    counts = megatron_counts(
        jnp.where(clean.lm_mask, clean.token_scale, 0),
        rules,
        num_mtp_layers=clean.mtp_mask.shape[0],
        num_groups=num_groups,
        segment_ids=segment_ids,
        roll_across_documents=semantics.mtp_roll_across_documents,
    )
    masks = router_masks(router_mask, counts, rules, segment_ids, semantics.mtp_roll_across_documents)
    routers = [_router_weights(counted, counts, semantics, rules, layout) for counted in masks]
    lm_empty, mtp_empty = _scored_anyway(counts, semantics, rules)
    lm = _lm_objective(counts, semantics, rules)
    return dataclasses.replace(
        clean,
        lm_objective=lm if semantics.train_lm else jnp.zeros_like(lm),
        mtp_objective=_mtp_objective(counts, semantics, rules),
        # 0 / 0 reaches every position of the group, so all of them carry the NaN weight.
        lm_mask=clean.lm_mask | lm_empty,
        mtp_mask=clean.mtp_mask | mtp_empty,
        token_scale=jnp.where(clean.lm_mask, clean.token_scale, 0),
        router_objective=routers[0].objective,
        router_mask=routers[0].mask,
        router_mean=routers[0].mean,
        load_balance_objective=routers[0].load_balance_objective,
        load_balance_mean=routers[0].load_balance_mean,
        mtp_routers=tuple(routers[1:]),
    )


def router_masks(
    router_mask: Bool[Array, "B S"] | None,
    counts: MegatronCounts,
    rules: MegatronRules,
    segment_ids: Int[Array, "B S"] | None,
    roll_across_documents: bool,
) -> list[CountedPositions]:
    """Counted positions of the decoder's routers, then of each MTP depth's if they differ."""
    everything = CountedPositions(jnp.ones(counts.votes.shape, bool), is_padded=False)
    num_mtp_layers = counts.mtp_votes.shape[0]
    if router_mask is None:
        return [everything]
    match rules.router_padding:
        case RouterPadding.NONE:
            return [everything]
        case RouterPadding.DECODER:
            return [CountedPositions(router_mask, is_padded=True), *[everything] * num_mtp_layers]
        case RouterPadding.DECODER_AND_MTP:
            # The padding mask is shifted like the tokens; a freed slot is 0, no padding.
            joined = joined_to_next(router_mask.shape, None if roll_across_documents else segment_ids)
            depths = range(1, num_mtp_layers + 1)
            shifted = [~shift_left(~router_mask, joined, depth=depth) for depth in depths]
            return [CountedPositions(mask, is_padded=True) for mask in (router_mask, *shifted)]


def mean_over(
    votes: Float[Array, "B S"], tokens: Float[Array, "G C"], empty: EmptyGroup, cut: RankCut
) -> Float[Array, "B S"]:
    """`votes / tokens` of each position's group, with the rule for empty groups."""
    match empty:
        case EmptyGroup.NAN:
            return votes / cut.spread(tokens)
        case EmptyGroup.ZERO:
            return (
                votes
                / cut.spread(jnp.where(tokens > 0, tokens, 1))
                * cut.spread((tokens > 0).astype(votes.dtype))
            )
        case EmptyGroup.CLAMP:
            return votes / cut.spread(jnp.maximum(tokens, 1))


def _scored_anyway(
    counts: MegatronCounts, semantics: LossSemantics, rules: MegatronRules
) -> tuple[Bool[Array, "B S"], Bool[Array, "M B S"]]:
    """Positions of groups whose mean is 0 / 0."""
    nothing = jnp.zeros(counts.votes.shape, bool)
    lm, mtp = nothing, jnp.zeros(counts.mtp_votes.shape, bool)
    if semantics.calculate_per_token_loss:
        return lm, mtp
    if rules.empty_lm is EmptyGroup.NAN:
        lm = counts.cut.spread(counts.tokens) == 0
    if rules.empty_mtp is EmptyGroup.NAN and mtp.shape[0]:
        mtp = jnp.stack([counts.cut.spread(n) == 0 for n in counts.mtp_tokens])
    return lm, mtp


def _lm_objective(
    counts: MegatronCounts, semantics: LossSemantics, rules: MegatronRules
) -> Float[Array, "B S"]:
    """`m / T`; or `m / n` over G C groups, over G groups when a micro-batch is averaged as a whole."""
    if semantics.calculate_per_token_loss:
        return counts.votes / jnp.maximum(counts.total, 1)
    num_means = counts.cut.num_groups
    if rules.lm_group is LmGroup.MICRO_BATCH_AND_CONTEXT:
        num_means *= counts.cut.num_contexts
    return mean_over(counts.votes, counts.tokens, rules.empty_lm, counts.cut) / num_means


def _mtp_objective(
    counts: MegatronCounts, semantics: LossSemantics, rules: MegatronRules
) -> Float[Array, "M B S"]:
    """`lambda / M` times `m_k / n_k` over G C, `m_k / T`, or `m_k (n / max(n_k, 1)) / T`."""
    num_depths = counts.mtp_votes.shape[0]
    cut = counts.cut
    weights: list[Float[Array, "B S"]] = []
    for votes, tokens in zip(counts.mtp_votes, counts.mtp_tokens):
        if not semantics.calculate_per_token_loss:
            mean = mean_over(votes, tokens, rules.empty_mtp, cut)
            weight = mean / (cut.num_groups * cut.num_contexts)
        else:
            weight = votes / jnp.maximum(counts.total, 1)
            match rules.mtp_divisor:
                case MtpDivisor.LM_TOKENS:
                    pass
                case MtpDivisor.RESCALED:
                    weight = weight * cut.spread(counts.raw_tokens / jnp.maximum(tokens, 1))
        weights.append(semantics.mtp_loss_scaling_factor / num_depths * weight)
    return jnp.stack(weights) if weights else counts.mtp_votes


def _router_weights(
    counted: CountedPositions,
    counts: MegatronCounts,
    semantics: LossSemantics,
    rules: MegatronRules,
    layout: BatchLayout | None,
) -> RouterWeights:
    """Router weights for one set of counted positions."""
    cut = counts.cut
    votes = counted.mask.astype(counts.votes.dtype)
    tau = cut.sums(votes)
    if semantics.calculate_per_token_loss:
        # Megatron injects coefficient / C times the mean, times tau, and divides all by T.
        objective = votes / (cut.num_contexts * jnp.maximum(counts.total, 1))
    else:
        objective = mean_over(votes, tau, EmptyGroup.CLAMP, cut) / (cut.num_groups * cut.num_contexts)
    of_row = jnp.repeat(jnp.sum(tau, axis=1), semantics.micro_batch_size)
    row_positions = jnp.sum(votes, axis=1)
    of_unit = row_positions if semantics.load_balance_scope is LoadBalanceScope.SEQUENCE else of_row
    if semantics.load_balance_scope is LoadBalanceScope.GLOBAL_BATCH:
        of_unit = jnp.broadcast_to(jnp.sum(votes), of_row.shape)
    whole = jnp.repeat(jnp.sum(tau, axis=1, keepdims=True), semantics.micro_batch_size, axis=0)
    return RouterWeights(
        objective=objective * _context_scale(semantics, rules),
        mask=counted.mask,
        mean=votes / jnp.maximum(whole, 1),
        load_balance_objective=_load_balance_objective(
            tau, counted.is_padded, counts, semantics, rules, layout
        ),
        load_balance_mean=jnp.where(of_unit > 0, 1 / jnp.maximum(of_unit, 1), 0),
    )


def _load_balance_objective(
    tau: Float[Array, "G C"],
    is_padded: bool,
    counts: MegatronCounts,
    semantics: LossSemantics,
    rules: MegatronRules,
    layout: BatchLayout | None,
) -> Float[Array, " U"]:
    """Weight of `E * sum_e f_e (sum of scores)_e` of each row's part on each context rank.

    Megatron's loss of a rank is that sum over the positions of the unit. An empty unit divides by
    0 (NaN, in every release). With `calculate_per_token_loss=True` it is multiplied by the rank's
    positions; with a padding mask these are counted after an in-place all-reduce over the unit's
    ranks (`get_tokens_per_expert_and_token_count`), so they are the unit's.
    """
    if semantics.load_balance_scope is LoadBalanceScope.GLOBAL_BATCH:
        units = _over_data_ranks(tau, semantics, rules, layout)
    else:
        units = jnp.sum(tau, axis=1, keepdims=True)
    scale = _context_scale(semantics, rules)
    if semantics.calculate_per_token_loss:
        multiplier = jnp.broadcast_to(units, tau.shape) if is_padded else tau
        factor = multiplier * scale / jnp.maximum(counts.total, 1)
        if (
            semantics.load_balance_scope is LoadBalanceScope.SEQUENCE
            and rules.sequence_tokens is SequenceTokens.SEQUENCE
        ):
            factor = factor / semantics.micro_batch_size
    else:
        factor = jnp.full_like(tau, scale / counts.cut.num_groups)
    return counts.cut.spread_rows(factor / units).reshape(-1)


def _over_data_ranks(
    tau: Float[Array, "G C"], semantics: LossSemantics, rules: MegatronRules, layout: BatchLayout | None
) -> Float[Array, "G 1"]:
    """Router positions of a micro-batch on all ranks."""
    layout = required_layout(semantics, rules, layout)
    by_step = jnp.sum(tau.reshape(layout.num_micro_batches, -1), axis=1)
    return jnp.repeat(by_step, layout.data_parallel_size)[:, None]


def required_layout(
    semantics: LossSemantics, rules: MegatronRules, layout: BatchLayout | None
) -> BatchLayout:
    """The layout, which the global load balance cannot do without.

    Raises:
        ValueError: There is none, or the release has no global load balance.
    """
    if not rules.global_load_balance:
        raise ValueError(
            f"Megatron {rules.release} has no global_aux_loss; use another load_balance_scope or a release "
            "from 0.15"
        )
    if layout is None:
        raise ValueError(
            f"the global load balance of Megatron {rules.release} averages counts over the micro-batches so "
            "far, got no layout; pass layout=BatchLayout(num_micro_batches=..., data_parallel_size=...)"
        )
    return layout


def _context_scale(semantics: LossSemantics, rules: MegatronRules) -> float:
    """What is left of a router term when the release does not make up for context ranks."""
    num_contexts = rules.context_parallel_size
    match rules.context_factor:
        case ContextFactor.NEVER:
            right = False
        case ContextFactor.GROUP_MEANS:
            right = not semantics.calculate_per_token_loss
        case ContextFactor.ALWAYS:
            right = True
    if semantics.calculate_per_token_loss:
        return float(num_contexts) if right else 1.0
    return 1.0 if right else 1 / num_contexts
