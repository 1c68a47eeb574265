"""Objective and logs of a step: two channels of one named tuple, both only ever added.

Build the named tuples through the functions of this file: jaxtyping checks function signatures,
not the fields of a `NamedTuple`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from ._loss_weights import LossWeights
from ._reduce import SumCount, guarded_ratio
from ._router import LoadBalanceScope, load_balance_units
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


class RouterTerms(NamedTuple):
    """Router facts of the rows at hand, layers first.

    Attributes:
        logsumexp: `[L, B, S]`, of the raw router logits.
        score_sums: `[L, B, E]`, per row, normalized scores summed over counted positions.
        counts: `[L, B, E]`, per row, assignments of counted positions.
        batch_counts: `[L, E]`, assignments of the whole global batch; needed by the
            load-balance scope GLOBAL_BATCH when the rows are a part of the batch, else None.
    """

    logsumexp: Float[Array, "L B S"]
    score_sums: Float[Array, "L B E"]
    counts: Real[Array, "L B E"]
    batch_counts: Real[Array, "L E"] | None = None


def loss_output(
    lm: HeadLoss,
    mtp: tuple[HeadLoss, ...],
    router: RouterTerms | None,
    weights: LossWeights,
    semantics: LossSemantics,
    *,
    extra: tuple[ExtraTerm, ...] = (),
) -> LossOutput:
    """Objective and logs of the rows that `weights` is cut to. Outputs of all cuts add up.

    Args:
        lm: Main head, made with `weights.lm_objective` and the z coefficient.
        mtp: One head per depth, made with `weights.mtp_objective`.
        router: Router facts of the same rows, or None for a model without MoE layers.
        weights: The rows' part of `loss_weights`.
        semantics: The normalization that made `weights`.
        extra: Further terms of the same rows.

    Raises:
        ValueError: A router term has a coefficient but `router` is None; the number of heads is
            not that of the weights; or a global load balance lacks `batch_counts`.
    """
    if len(mtp) != weights.mtp_objective.shape[0]:
        raise ValueError(
            f"got {len(mtp)} MTP heads but weights for {weights.mtp_objective.shape[0]}; pass the same "
            "num_mtp_layers to loss_weights"
        )
    zero = jnp.zeros((), lm.objective.dtype)
    router_z, balance, router_logs = _router_terms(router, weights, semantics, zero)
    mtp_objective = sum((head.objective for head in mtp), start=zero)
    extra_objective = sum((term.objective() for term in extra), start=zero)
    objective = Objective(
        total=lm.objective + mtp_objective + router_z + balance + lm.z_objective + extra_objective,
        lm=lm.objective,
        mtp=mtp_objective,
        router_z=router_z,
        load_balance=balance,
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
        **router_logs,
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


def _router_terms(
    router: RouterTerms | None, weights: LossWeights, semantics: LossSemantics, zero: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, SumCount]]:
    if router is None:
        for name in ("moe_z_loss_weight", "load_balance_loss_weight"):
            if getattr(semantics, name) > 0:
                raise ValueError(
                    f"{name} is {getattr(semantics, name)} but no router facts were passed; pass the "
                    "model's router statistics or set it to 0"
                )
        empty = SumCount(jnp.zeros((0,), zero.dtype), jnp.zeros((0,), zero.dtype))
        return zero, zero, {"router_z": empty, "load_balance": empty, "router_z_global": empty}
    num_layers = router.logsumexp.shape[0]
    z_term = jnp.where(weights.router_mask, jnp.square(router.logsumexp), 0)
    z_by_layer = jnp.sum(weights.router_objective * z_term, axis=(1, 2))
    balance = _load_balance_rows(router, semantics)
    balance_by_layer = jnp.sum(weights.load_balance_objective * balance, axis=1)
    layer_scale = 1 / num_layers if semantics.load_balance_layer_mean else 1.0

    def per_layer(sums: Float[Array, " L"], count: Float[Array, ""]) -> SumCount:
        return SumCount(sums, jnp.broadcast_to(count, (num_layers,)))

    logs = {
        "router_z": per_layer(
            jnp.sum(weights.router_mean * z_term, axis=(1, 2)), jnp.sum(weights.router_groups)
        ),
        "load_balance": per_layer(
            jnp.sum(weights.load_balance_mean * balance, axis=1), jnp.sum(weights.load_balance_groups)
        ),
        "router_z_global": per_layer(
            jnp.sum(z_term, axis=(1, 2)), jnp.sum(weights.router_mask, dtype=z_term.dtype)
        ),
    }
    return (
        _scaled(semantics.moe_z_loss_weight, jnp.sum(z_by_layer)),
        _scaled(semantics.load_balance_loss_weight * layer_scale, jnp.sum(balance_by_layer)),
        logs,
    )


def _load_balance_rows(router: RouterTerms, semantics: LossSemantics) -> Float[Array, "L B"]:
    """`E * sum_e f_e * (sum of scores)_e` of each row, `f` being that of the row's unit."""
    num_rows, num_experts = router.counts.shape[1:]
    scope = semantics.load_balance_scope
    if scope is LoadBalanceScope.GLOBAL_BATCH and router.batch_counts is not None:
        units = router.batch_counts[:, None, :]
    else:
        units = load_balance_units(router.counts, scope, micro_batch_size=semantics.micro_batch_size)
    assigned = jax.lax.stop_gradient(units.astype(router.score_sums.dtype))
    share = guarded_ratio(assigned, jnp.broadcast_to(jnp.sum(assigned, -1, keepdims=True), assigned.shape))
    by_row = jnp.repeat(share, num_rows // share.shape[1], axis=1)
    return num_experts * jnp.sum(by_row * router.score_sums, axis=-1)


def _scaled(coefficient: float, value: Float[Array, ""]) -> Float[Array, ""]:
    """0 without a gradient when the coefficient is 0, so that a switched-off term is free."""
    return coefficient * value if coefficient > 0 else jnp.zeros_like(value)
