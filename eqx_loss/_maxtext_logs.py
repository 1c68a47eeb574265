"""What a run of upstream MaxText prints under gradient accumulation."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._layout import BatchLayout
from ._loss_weights import LossWeights
from ._reduce import guarded_ratio
from ._release_rules import MicroStepRules
from ._router_output import RouterTerms, load_balance_rows
from ._semantics import LossSemantics
from ._xent import HeadLoss


class MaxTextLogs(NamedTuple):
    """Values of MaxText's metric names.

    Attributes:
        lm_loss: `learning/lm_loss`: cross-entropy plus the weighted lm-head z term, over tokens.
        z_loss: `learning/z_loss`: the weighted z term, summed over the means of micro-steps.
        mtp_loss: `learning/mtp_loss`, weighted.
        moe_lb_loss: `learning/moe_lb_loss`, weighted.
    """

    lm_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    mtp_loss: Float[Array, ""]
    moe_lb_loss: Float[Array, ""]


def maxtext_logs(
    lm: HeadLoss,
    mtp: tuple[HeadLoss, ...],
    router: RouterTerms | None,
    weights: LossWeights,
    semantics: LossSemantics,
    *,
    layout: BatchLayout,
) -> MaxTextLogs:
    """The logs that the MaxText release of `semantics` prints for a whole global batch.

    In 0.2.4 `mtp_loss` and `moe_lb_loss` are sums over micro-steps (as many times too large), in
    0.2.5 means; `z_loss` is a sum in both. No gradient. Source: MaxText 0.2.4 and 0.2.5,
    `maxtext/utils/gradient_accumulation.py` (`aux`), `maxtext/trainers/pre_train/train.py`.

    Args:
        lm: Main head of all rows.
        mtp: One head per depth.
        router: Router facts of all rows, or None.
        weights: `loss_weights` of the batch.
        semantics: A profile made by `LossSemantics.maxtext` for an upstream release.
        layout: Micro-steps, usually `BatchLayout.strided`.

    Raises:
        ValueError: `semantics` is no upstream MaxText profile, or the layout does not fit.
    """
    rules = semantics.rules
    if not isinstance(rules, MicroStepRules) or rules.framework != "MaxText":
        raise ValueError(f"maxtext_logs needs a profile made by LossSemantics.maxtext, got rules={rules!r}")
    layout.micro_batch_size(weights.lm_mask.shape[0])
    steps = layout.num_micro_batches

    def by_step(values: Float[Array, "B *rest"]) -> Float[Array, " G"]:
        return jnp.sum(layout.arranged(values).reshape(steps, -1), axis=1)

    votes = jnp.where(weights.lm_mask, weights.token_scale, 0)
    z_sums = semantics.z_loss_multiplier * by_step(votes * lm.z_term)
    tokens = by_step(votes)
    divisor = steps if rules.log_divides_auxiliary else 1
    lm_sum = jnp.sum(by_step(votes * lm.xent) + z_sums)
    logs = MaxTextLogs(
        lm_loss=guarded_ratio(lm_sum, jnp.sum(tokens)),
        z_loss=jnp.sum(guarded_ratio(z_sums, tokens)),
        mtp_loss=_mtp(mtp, weights.mtp_mask, by_step, semantics) / divisor,
        moe_lb_loss=_load_balance(router, weights, semantics, layout) / divisor,
    )
    return jax.lax.stop_gradient(logs)


def _mtp(
    heads: tuple[HeadLoss, ...],
    masks: Bool[Array, "M B S"],
    by_step: Callable[[Array], Array],
    semantics: LossSemantics,
) -> Float[Array, ""]:
    """Sum over micro-steps of the mean over depths and positions, pooled."""
    if not heads:
        return jnp.zeros(())
    sums = [by_step(head.xent) for head in heads]
    counts = [by_step(mask.astype(sums[0].dtype)) for mask in masks]
    means = guarded_ratio(jnp.sum(jnp.stack(sums), axis=0), jnp.sum(jnp.stack(counts), axis=0))
    return semantics.mtp_loss_scaling_factor * jnp.sum(means)


def _load_balance(
    router: RouterTerms | None, weights: LossWeights, semantics: LossSemantics, layout: BatchLayout
) -> Float[Array, ""]:
    """Sum over micro-steps of the mean over layers and rows."""
    if router is None:
        return jnp.zeros(())
    rows = weights.load_balance_mean * load_balance_rows(router, semantics, layout)
    rows_of_step = rows.shape[1] // layout.num_micro_batches
    return semantics.load_balance_loss_weight * jnp.sum(jnp.mean(rows, axis=0)) / rows_of_step
