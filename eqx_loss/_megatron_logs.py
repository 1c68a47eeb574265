"""What a run of Megatron-Core prints, rank by rank."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._layout import BatchLayout
from ._megatron_weights import MegatronCounts, mean_over, megatron_counts, router_masks
from ._profile_weights import check_layout
from ._release_rules import EmptyGroup, LogRanks, MegatronRules
from ._router import LoadBalanceScope
from ._router_output import RouterTerms, load_balance_rows
from ._semantics import LossSemantics
from ._xent import HeadLoss


class MegatronLogs(NamedTuple):
    """Values by data rank `R` and context rank `C`; Megatron writes the last rank's.

    Attributes:
        lm: `[R, C]`, "lm loss" (nats); NaN without tokens.
        mtp: `[M, R, C]`, "mtp_k loss" (nats), without `mtp_loss_scaling_factor`.
        router_z: `[R, C]`, "z_loss", mean over layers, no coefficient; NaN without routers.
        load_balance: `[R, C]`, "load_balancing_loss", "seq_load_balancing_loss" (from 0.14) or
            "global_load_balancing_loss", mean over layers, no coefficient; NaN without routers.
    """

    lm: Float[Array, "R C"]
    mtp: Float[Array, "M R C"]
    router_z: Float[Array, "R C"]
    load_balance: Float[Array, "R C"]


def megatron_logs(
    lm: HeadLoss,
    mtp: tuple[HeadLoss, ...],
    router: RouterTerms | None,
    loss_mask: Bool[Array, "B S"],
    semantics: LossSemantics,
    *,
    layout: BatchLayout,
    segment_ids: Int[Array, "B S"] | None = None,
    token_scale: Float[Array, "B S"] | None = None,
    router_mask: Bool[Array, "B S"] | None = None,
) -> MegatronLogs:
    """The logs that the release of `semantics` prints for a whole global batch.

    `LossLogs` are sums and counts under our rules, whatever the profile; these are Megatron's own:
    some are one rank's value, some NaN. No gradient.

    Args:
        lm: Main head of all rows.
        mtp: One head per depth.
        router: Router facts of all rows, or None.
        loss_mask: As given to `loss_weights`.
        semantics: A profile made by `LossSemantics.megatron`.
        layout: Micro-batches and data ranks.
        segment_ids: As given to `loss_weights`.
        token_scale: As given to `loss_weights`.
        router_mask: As given to `loss_weights`.

    Raises:
        ValueError: `semantics` is no Megatron profile, or as `loss_weights`.
    """
    rules = semantics.rules
    if not isinstance(rules, MegatronRules):
        raise ValueError(f"megatron_logs needs a profile made by LossSemantics.megatron, got rules={rules!r}")
    check_layout(semantics, layout, loss_mask.shape[0])
    arrange = layout.arranged
    votes = loss_mask.astype(lm.xent.dtype)
    if token_scale is not None:
        votes = jnp.where(loss_mask, token_scale.astype(votes.dtype), 0)
    segments = None if segment_ids is None else arrange(segment_ids)
    counts = megatron_counts(
        arrange(votes),
        rules,
        num_mtp_layers=len(mtp),
        num_groups=layout.num_groups,
        segment_ids=segments,
        roll_across_documents=semantics.mtp_roll_across_documents,
    )
    padding = None if router_mask is None else arrange(router_mask)
    if padding is None and semantics.mask_padding_in_router_losses and segments is not None:
        padding = segments != 0
    nothing = jnp.full((layout.data_parallel_size, rules.context_parallel_size), jnp.nan)
    logs = MegatronLogs(
        lm=jnp.full_like(nothing, jnp.sum(counts.votes * arrange(lm.xent)) / counts.total),
        mtp=_mtp(counts, [arrange(head.xent) for head in mtp], rules, layout),
        router_z=nothing
        if router is None
        else _router_z(router, counts, padding, segments, semantics, rules, layout),
        load_balance=nothing
        if router is None
        else _load_balance(router, counts, padding, segments, semantics, rules, layout),
    )
    return jax.lax.stop_gradient(logs)


def _mtp(
    counts: MegatronCounts, xent: list[Float[Array, "B S"]], rules: MegatronRules, layout: BatchLayout
) -> Float[Array, "M R C"]:
    """Mean over micro-batches of `S_k / n_k`."""
    depths: list[Float[Array, "R C"]] = []
    for values, votes, tokens in zip(xent, counts.mtp_votes, counts.mtp_tokens):
        mean = mean_over(votes, tokens, rules.empty_mtp_log, counts.cut)
        by_group = counts.cut.sums(mean * values)
        depths.append(_reduced(_over_steps(by_group, layout), rules.mtp_log_ranks))
    shape = (0, layout.data_parallel_size, rules.context_parallel_size)
    return jnp.stack(depths) if depths else jnp.zeros(shape)


def _router_z(
    router: RouterTerms,
    counts: MegatronCounts,
    padding: Bool[Array, "B S"] | None,
    segments: Int[Array, "B S"] | None,
    semantics: LossSemantics,
    rules: MegatronRules,
    layout: BatchLayout,
) -> Float[Array, "R C"]:
    """Sum over layers of each micro-batch's mean, over layers and micro-batches."""
    counted = router_masks(padding, counts, rules, segments, semantics.mtp_roll_across_documents)
    masks = [entry.mask for entry in counted]
    total = jnp.zeros(counts.tokens.shape)
    for layer, mask in zip(router.logsumexp, _masks_by_layer(masks, router.logsumexp.shape[0])):
        votes = mask.astype(layer.dtype)
        mean = mean_over(votes, counts.cut.sums(votes), EmptyGroup.CLAMP, counts.cut)
        total = total + counts.cut.sums(mean * jnp.square(layout.arranged(layer)))
    return _reduced(_over_steps(total, layout) / _log_layers(router, counts, rules), rules.router_z_log_ranks)


def _load_balance(
    router: RouterTerms,
    counts: MegatronCounts,
    padding: Bool[Array, "B S"] | None,
    segments: Int[Array, "B S"] | None,
    semantics: LossSemantics,
    rules: MegatronRules,
    layout: BatchLayout,
) -> Float[Array, "R C"]:
    """Megatron's loss of each micro-batch, summed over context ranks (global: over all ranks)."""
    num_layers, num_rows = router.logsumexp.shape[:2]
    counted = router_masks(padding, counts, rules, segments, semantics.mtp_roll_across_documents)
    masks = [entry.mask for entry in counted]
    by_row = load_balance_rows(router, semantics, layout).reshape(num_layers, num_rows, -1).sum(-1)
    size = semantics.micro_batch_size
    total = jnp.zeros((layout.num_groups,))
    for layer, mask in zip(by_row, _masks_by_layer(masks, num_layers)):
        positions = jnp.sum(mask, axis=1, dtype=layer.dtype).reshape(-1, size).sum(1)
        if semantics.load_balance_scope is LoadBalanceScope.GLOBAL_BATCH:
            by_step = positions.reshape(layout.num_micro_batches, -1).sum(1)
            positions = jnp.repeat(by_step, layout.data_parallel_size)
        total = total + layout.arranged(layer).reshape(-1, size).sum(1) / positions
    by_rank = total.reshape(layout.num_micro_batches, -1).mean(0) / _log_layers(router, counts, rules)
    by_rank = jnp.broadcast_to(by_rank[:, None], (layout.data_parallel_size, rules.context_parallel_size))
    if semantics.load_balance_scope is LoadBalanceScope.GLOBAL_BATCH:
        return jnp.full_like(by_rank, jnp.sum(by_rank[:, 0]))
    return _reduced(by_rank, rules.load_balance_log_ranks)


def _masks_by_layer(masks: list[Bool[Array, "B S"]], num_layers: int) -> list[Bool[Array, "B S"]]:
    """Decoder layers have the first mask, the last layers those of the MTP depths, if any differ."""
    depths = masks[1:]
    return [masks[0]] * (num_layers - len(depths)) + depths


def _log_layers(router: RouterTerms, counts: MegatronCounts, rules: MegatronRules) -> int:
    num_layers = router.logsumexp.shape[0]
    return num_layers if rules.log_counts_mtp_layers else max(num_layers - counts.mtp_votes.shape[0], 1)


def _over_steps(by_group: Float[Array, "G C"], layout: BatchLayout) -> Float[Array, "R C"]:
    """Mean over the micro-batches of each rank."""
    return jnp.mean(by_group.reshape(layout.num_micro_batches, layout.data_parallel_size, -1), axis=0)


def _reduced(by_rank: Float[Array, "R C"], ranks: LogRanks) -> Float[Array, "R C"]:
    """Every rank's value after the mean over `ranks`."""
    match ranks:
        case LogRanks.LOCAL:
            return by_rank
        case LogRanks.CONTEXT:
            mean = jnp.mean(by_rank, axis=1, keepdims=True)
        case LogRanks.DATA:
            mean = jnp.mean(by_rank, axis=0, keepdims=True)
        case LogRanks.DATA_AND_CONTEXT:
            mean = jnp.mean(by_rank)
    return jnp.broadcast_to(mean, by_rank.shape)
