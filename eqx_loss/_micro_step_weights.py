"""Loss weights of frameworks that form their loss micro-step by micro-step.

Each micro-step of each rank has its own means; how they are combined is what the profiles differ
in. Reference: the table in `docs/semantics.md`.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._layout import BatchLayout, RankCut
from ._loss_weights import LossWeights
from ._reduce import guarded_ratio
from ._release_rules import AuxiliaryShare, EmptyGroup, LmMean, MicroStepRules
from ._semantics import LossSemantics


def micro_step_weights(
    clean: LossWeights, semantics: LossSemantics, rules: MicroStepRules, layout: BatchLayout | None
) -> LossWeights:
    """`clean` with the objective weights of the framework; logs keep our rules.

    Args:
        clean: Our weights of the same batch, rows arranged.
        semantics: Flags and coefficients.
        rules: The framework.
        layout: Micro-steps and ranks. Not needed for a global token mean without auxiliary terms.

    Raises:
        ValueError: The rules depend on the layout and there is none.
    """
    has_auxiliary = clean.mtp_mask.shape[0] > 0 or semantics.load_balance_loss_weight > 0
    if layout is None:
        if rules.lm_mean is not LmMean.GLOBAL or has_auxiliary:
            raise ValueError(
                f"{rules.framework} {rules.release} forms its loss per micro-step, got no layout; pass "
                "layout=BatchLayout(num_micro_batches=..., data_parallel_size=...) "
                "(MaxText: BatchLayout.strided(gradient_accumulation_steps, rows))"
            )
        layout = BatchLayout(num_micro_batches=1)
    cut = RankCut(jnp.zeros(clean.lm_mask.shape, int), layout.num_groups, 1)
    votes = jnp.where(clean.lm_mask, clean.token_scale, 0)
    lm, lm_mask = _lm_objective(votes, clean.lm_mask, cut, rules, layout)
    share = auxiliary_shares(cut.sums(votes), rules, layout)
    return dataclasses.replace(
        clean,
        lm_objective=lm if semantics.train_lm else jnp.zeros_like(lm),
        mtp_objective=_mtp_objective(clean.mtp_mask, cut, share, semantics),
        lm_mask=lm_mask,
        token_scale=votes,
        load_balance_objective=_load_balance_objective(clean, cut, share, semantics),
    )


def auxiliary_shares(
    tokens: Float[Array, "G 1"], rules: MicroStepRules, layout: BatchLayout
) -> Float[Array, "G 1"]:
    """Factor of the auxiliary mean of each micro-step of each rank in the objective."""
    num_steps, num_ranks = layout.num_micro_batches, layout.data_parallel_size
    whole = jnp.full_like(tokens, 1 / num_ranks)
    if num_steps == 1:
        return whole
    total = jnp.sum(tokens)
    safe_total = jnp.where(total > 0, total, 1)
    match rules.auxiliary_share:
        case AuxiliaryShare.EQUAL:
            return whole / num_steps
        case AuxiliaryShare.TOKENS:
            return tokens / safe_total
        case AuxiliaryShare.OVER_TOKENS:
            # Without tokens the framework sets the whole gradient to 0.
            return jnp.where(total > 0, jnp.ones_like(tokens) / safe_total, 0)
        case AuxiliaryShare.WHOLE:
            return whole


def _lm_objective(
    votes: Float[Array, "B S"],
    mask: Bool[Array, "B S"],
    cut: RankCut,
    rules: MicroStepRules,
    layout: BatchLayout,
) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
    """Weights, and the mask widened to groups whose mean is 0 / 0."""
    tokens = cut.sums(votes)
    match rules.lm_mean:
        case LmMean.GLOBAL:
            tokens, num_means = jnp.broadcast_to(jnp.sum(tokens), tokens.shape), 1
        case LmMean.RANK:
            by_rank = jnp.sum(tokens.reshape(layout.num_micro_batches, -1), axis=0)
            tokens = jnp.tile(by_rank, layout.num_micro_batches)[:, None]
            num_means = layout.data_parallel_size
        case LmMean.MICRO_STEP:
            num_means = layout.num_groups
    of_position = cut.spread(tokens)
    if rules.empty is EmptyGroup.NAN:
        return votes / of_position / num_means, mask | (of_position == 0)
    return votes / jnp.where(of_position > 0, of_position, 1) / num_means, mask


def _mtp_objective(
    masks: Bool[Array, "M B S"], cut: RankCut, share: Float[Array, "G 1"], semantics: LossSemantics
) -> Float[Array, "M B S"]:
    """`lambda` times the share times the mean of the micro-step, depths pooled or each its own."""
    if masks.shape[0] == 0:
        return jnp.zeros(masks.shape)
    votes = masks.astype(share.dtype)
    tokens = jnp.stack([cut.sums(v) for v in votes])
    if semantics.mtp_per_layer_loss_norm:
        divisors = tokens * masks.shape[0]
    else:
        divisors = jnp.broadcast_to(jnp.sum(tokens, axis=0), tokens.shape)
    factor = semantics.mtp_loss_scaling_factor * share / jnp.where(divisors > 0, divisors, 1)
    return jnp.stack([v * cut.spread(f) for v, f in zip(votes, factor)])


def _load_balance_objective(
    clean: LossWeights, cut: RankCut, share: Float[Array, "G 1"], semantics: LossSemantics
) -> Float[Array, " U"]:
    """The share, over the units of the micro-step and the positions of each.

    A unit is a row, or all rows of the micro-step on one rank.
    """
    if semantics.load_balance_scope.is_row:
        rows = clean.router_mask.shape[0] // cut.num_groups
        return clean.load_balance_mean * cut.spread_rows(share / rows)[:, 0]
    positions = cut.sums(clean.router_mask.astype(share.dtype))
    return cut.spread_rows(guarded_ratio(share, positions))[:, 0]
