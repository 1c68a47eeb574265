"""Objective and logs of a step: two channels of one named tuple, both only ever added.

Build the named tuples through the functions of this file: jaxtyping checks function signatures,
not the fields of a `NamedTuple`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._layout import BatchLayout
from ._loss_weights import LossWeights
from ._reduce import SumCount
from ._router_output import RouterTerms, router_output
from ._semantics import LossSemantics
from ._terms import ExtraTerm
from ._xent import HeadLoss


class Objective(NamedTuple):
    """What is differentiated: coefficient-weighted terms, each a scalar in nats.

    Attributes:
        total: Sum of all others.
        lm: Language-model cross-entropy.
        mtp: Multi-token prediction, `mtp_loss_scaling_factor` included.
        router_z: Router z-loss, summed over layers, coefficient included.
        load_balance: Load-balance loss over all layers, coefficient included.
        lm_z: lm-head z term, coefficient included.
        extra: Every further term, coefficients included.
    """

    total: Float[Array, ""]
    lm: Float[Array, ""]
    mtp: Float[Array, ""]
    router_z: Float[Array, ""]
    load_balance: Float[Array, ""]
    lm_z: Float[Array, ""]
    extra: Float[Array, ""]


class LossLogs(NamedTuple):
    """What is reported: sums and counts without coefficients, divided once at the end.

    No flag changes `lm`; `mtp`, `router_z` and `load_balance` are means over micro-batches of
    each one's own mean, and 0 for an empty micro-batch.

    Attributes:
        lm: Cross-entropy over scored tokens (nats).
        mtp: Per MTP depth.
        router_z: Per MoE layer, `logsumexp(router logits)^2`.
        load_balance: Per MoE layer, 1 when the load is even.
        lm_z: `logsumexp(logits)^2` over scored tokens.
        lm_group: Mean over micro-batches of the lm loss; minus `lm` it is the estimator gap.
        router_z_global: Per MoE layer, the router z term over all counted positions; `router_z`
            minus it is the router's estimator gap.
        extra: Further terms, in the order given.
    """

    lm: SumCount
    mtp: SumCount
    router_z: SumCount
    load_balance: SumCount
    lm_z: SumCount
    lm_group: SumCount
    router_z_global: SumCount
    extra: tuple[SumCount, ...] = ()


class LossOutput(NamedTuple):
    """The two channels. The objective never feeds the log, and no flag changes a log."""

    objective: Objective
    logs: LossLogs


def loss_output(
    lm: HeadLoss,
    mtp: tuple[HeadLoss, ...],
    router: RouterTerms | None,
    weights: LossWeights,
    semantics: LossSemantics,
    *,
    extra: tuple[ExtraTerm, ...] = (),
    layout: BatchLayout | None = None,
) -> LossOutput:
    """Objective and logs of the rows that `weights` is cut to. Outputs of all cuts add up.

    Args:
        lm: Main head, made with `weights.lm_objective` and the z coefficient.
        mtp: One head per depth, made with `weights.mtp_objective`.
        router: Router facts of the same rows, or None for a model without MoE layers.
        weights: The rows' part of `loss_weights`.
        semantics: The normalization that made `weights`.
        extra: Further terms of the same rows.
        layout: The layout that made `weights`, if it has a `row_order` or Megatron's global load
            balance is on; the rows must then be the whole batch.

    Raises:
        ValueError: A router term has a coefficient but `router` is None; the number of heads is
            not that of the weights; or the load balance lacks `batch_counts` or a layout.
    """
    if len(mtp) != weights.mtp_objective.shape[0]:
        raise ValueError(
            f"got {len(mtp)} MTP heads but weights for {weights.mtp_objective.shape[0]}; pass the same "
            "num_mtp_layers to loss_weights"
        )
    zero = jnp.zeros((), lm.objective.dtype)
    routers = router_output(router, weights, semantics, layout, zero)
    mtp_objective = sum((head.objective for head in mtp), start=zero)
    extra_objective = sum((term.objective() for term in extra), start=zero)
    objective = Objective(
        total=lm.objective
        + mtp_objective
        + routers.z_objective
        + routers.load_balance_objective
        + lm.z_objective
        + extra_objective,
        lm=lm.objective,
        mtp=mtp_objective,
        router_z=routers.z_objective,
        load_balance=routers.load_balance_objective,
        lm_z=lm.z_objective,
        extra=extra_objective,
    )
    votes = jnp.where(weights.lm_mask, weights.token_scale, 0)
    lm_count = jnp.sum(votes)
    mtp_sums = [jnp.sum(weights.mtp_mean[k] * head.xent) for k, head in enumerate(mtp)]
    logs = LossLogs(
        lm=SumCount(jnp.sum(votes * lm.xent), lm_count),
        mtp=SumCount(
            jnp.stack(mtp_sums) if mtp else jnp.zeros((0,), zero.dtype), jnp.sum(weights.mtp_groups, axis=1)
        ),
        lm_z=SumCount(jnp.sum(votes * lm.z_term), lm_count),
        lm_group=SumCount(jnp.sum(weights.lm_mean * lm.xent), jnp.sum(weights.lm_groups)),
        extra=tuple(term.log() for term in extra),
        router_z=routers.z,
        load_balance=routers.load_balance,
        router_z_global=routers.z_global,
    )
    return LossOutput(objective=objective, logs=jax.lax.stop_gradient(logs))


def add_outputs(first: LossOutput, second: LossOutput) -> LossOutput:
    """The output of both parts of a batch together: everything adds."""
    return jax.tree.map(jnp.add, first, second)


def reported_loss(
    output: LossOutput, semantics: LossSemantics, *, gradient_accumulation_steps: int
) -> Float[Array, ""]:
    """MaxText's `learning/loss`, a reporting convention and not the objective.

    Without accumulation it is the objective. With it, it is the lm log plus the
    coefficient-weighted means of the auxiliary terms. Source: MaxText fork of RFC-0032,
    `src/maxtext/utils/gradient_accumulation.py`.

    Args:
        output: The summed output of a step.
        semantics: Its normalization.
        gradient_accumulation_steps: Micro-steps of the step, at least 1.
    """
    if gradient_accumulation_steps == 1:
        return output.objective.total
    logs = output.logs
    mtp = logs.mtp.value()
    balance = logs.load_balance.value()
    layers = jnp.mean if semantics.load_balance_layer_mean else jnp.sum
    return (
        logs.lm.value()
        + semantics.mtp_loss_scaling_factor * (jnp.mean(mtp) if mtp.size else 0)
        + semantics.moe_z_loss_weight * jnp.sum(logs.router_z.value())
        + semantics.load_balance_loss_weight * (layers(balance) if balance.size else 0)
        + output.objective.lm_z
    )
