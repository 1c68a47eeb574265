"""Router terms of a step: objective and logs from the model's router facts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Real

from ._layout import BatchLayout
from ._loss_weights import LossWeights
from ._megatron_weights import required_layout
from ._reduce import SumCount, guarded_ratio
from ._release_rules import MegatronRules
from ._router import LoadBalanceScope, load_balance_units
from ._semantics import LossSemantics


class RouterTerms(NamedTuple):
    """Router facts of the rows at hand, decoder layers first, then MTP depths.

    Attributes:
        logsumexp: `[L, B, S]`, of the raw router logits.
        score_sums: `[L, B, E]`, per row, normalized scores summed over counted positions. Under a
            Megatron profile with C context ranks `[L, B * C, E]`, made by `row_pieces`.
        counts: Like `score_sums`, assignments of counted positions.
        batch_counts: `[L, E]`, assignments of the whole global batch; needed by the
            load-balance scope GLOBAL_BATCH when the rows are a part of the batch, else None.
    """

    logsumexp: Float[Array, "L B S"]
    score_sums: Float[Array, "L U E"]
    counts: Real[Array, "L U E"]
    batch_counts: Real[Array, "L E"] | None = None


class RouterOutput(NamedTuple):
    """Objective and logs of all routers.

    Attributes:
        z_objective: Router z-loss, coefficient included.
        load_balance_objective: Load balance, coefficient included.
        z: Log of the router z term per layer.
        load_balance: Log of the load balance per layer.
        z_global: Log of the router z term over all counted positions, per layer.
    """

    z_objective: Float[Array, ""]
    load_balance_objective: Float[Array, ""]
    z: SumCount
    load_balance: SumCount
    z_global: SumCount


def router_output(
    router: RouterTerms | None,
    weights: LossWeights,
    semantics: LossSemantics,
    layout: BatchLayout | None,
    zero: Float[Array, ""],
) -> RouterOutput:
    """Router terms of the rows that `weights` is cut to; `zero` has the dtype of the objective.

    Raises:
        ValueError: As `loss_output`.
    """
    if router is None:
        for name in ("moe_z_loss_weight", "load_balance_loss_weight"):
            if getattr(semantics, name) > 0:
                raise ValueError(
                    f"{name} is {getattr(semantics, name)} but no router facts were passed; pass the "
                    "model's router statistics or set it to 0"
                )
        empty = SumCount(jnp.zeros((0,), zero.dtype), jnp.zeros((0,), zero.dtype))
        return RouterOutput(zero, zero, empty, empty, empty)
    num_layers = router.logsumexp.shape[0]
    by_layer = _by_layer(weights, num_layers)
    z_term = jnp.where(by_layer.mask, jnp.square(router.logsumexp), 0)
    z_objective = jnp.sum(by_layer.objective * z_term)
    balance = load_balance_rows(router, semantics, layout)
    layer_scale = 1 / num_layers if semantics.load_balance_layer_mean else 1.0
    log_balance = _log_balance(router, semantics, layout)

    def per_layer(sums: Float[Array, " L"], count: Float[Array, ""]) -> SumCount:
        return SumCount(sums, jnp.broadcast_to(count, (num_layers,)))

    return RouterOutput(
        z_objective=_scaled(semantics.moe_z_loss_weight, z_objective),
        load_balance_objective=_scaled(
            semantics.load_balance_loss_weight * layer_scale,
            jnp.sum(by_layer.load_balance_objective * balance),
        ),
        z=per_layer(jnp.sum(by_layer.mean * z_term, axis=(1, 2)), jnp.sum(weights.router_groups)),
        load_balance=per_layer(
            jnp.sum(by_layer.load_balance_mean * log_balance, axis=1), jnp.sum(weights.load_balance_groups)
        ),
        z_global=SumCount(
            jnp.sum(z_term, axis=(1, 2)),
            jnp.broadcast_to(jnp.sum(by_layer.mask, axis=(1, 2), dtype=z_term.dtype), (num_layers,)),
        ),
    )


def load_balance_rows(
    router: RouterTerms, semantics: LossSemantics, layout: BatchLayout | None
) -> Float[Array, "L U"]:
    """`E * sum_e f_e * (sum of scores)_e` of each row or row piece, `f` being that of its unit.

    Raises:
        ValueError: The facts do not have the rows that the profile needs, or a layout is missing.
    """
    if isinstance(semantics.rules, MegatronRules):
        return _megatron_rows(router, semantics, semantics.rules, layout)
    return _rows(router.score_sums, router, semantics, layout)


def _rows(
    score_sums: Float[Array, "L B E"],
    router: RouterTerms,
    semantics: LossSemantics,
    layout: BatchLayout | None,
) -> Float[Array, "L B"]:
    """Our rule: `f` is the unit's own share, 0 for an empty unit."""
    num_rows, num_experts = router.counts.shape[1:]
    scope = semantics.load_balance_scope
    if scope is LoadBalanceScope.GLOBAL_BATCH and router.batch_counts is not None:
        units = router.batch_counts[:, None, :]
    else:
        counts = _arranged(router.counts, layout)
        units = load_balance_units(counts, scope, micro_batch_size=_unit_rows(semantics, layout, num_rows))
    assigned = jax.lax.stop_gradient(units.astype(score_sums.dtype))
    share = guarded_ratio(assigned, jnp.broadcast_to(jnp.sum(assigned, -1, keepdims=True), assigned.shape))
    by_row = jnp.repeat(share, num_rows // share.shape[1], axis=1)
    return num_experts * jnp.sum(_restored(by_row, layout) * score_sums, axis=-1)


def _log_balance(
    router: RouterTerms, semantics: LossSemantics, layout: BatchLayout | None
) -> Float[Array, "L B"]:
    """`_rows` of whole rows, whatever pieces the facts come in."""
    num_rows = router.logsumexp.shape[1]
    whole = router._replace(
        score_sums=_whole_rows(router.score_sums, num_rows), counts=_whole_rows(router.counts, num_rows)
    )
    return _rows(whole.score_sums, whole, semantics, layout)


def _megatron_rows(
    router: RouterTerms, semantics: LossSemantics, rules: MegatronRules, layout: BatchLayout | None
) -> Float[Array, "L U"]:
    """Megatron's rule: divided by the router positions of the unit, 0 / 0 when it has none.

    Source: Megatron-Core 0.16.1 `megatron/core/transformer/moe/router.py` (`_apply_aux_loss`,
    `_apply_seq_aux_loss`, `_apply_global_aux_loss`).
    """
    num_layers, num_pieces, num_experts = router.counts.shape
    num_rows = router.logsumexp.shape[1]
    if num_pieces != num_rows * rules.context_parallel_size:
        raise ValueError(
            f"score_sums and counts must have {num_rows} rows x {rules.context_parallel_size} context ranks, "
            f"got {num_pieces}; make them with row_pieces"
        )
    counts = _whole_rows(router.counts, num_rows).astype(router.score_sums.dtype)
    counts = jax.lax.stop_gradient(_arranged(counts, layout))
    size = semantics.micro_batch_size
    groups = jnp.sum(counts.reshape(num_layers, -1, size, num_experts), axis=2)
    assigned = jnp.sum(groups, axis=-1, keepdims=True)
    match semantics.load_balance_scope:
        case LoadBalanceScope.MICRO_BATCH:
            share = jnp.repeat(groups / assigned, size, axis=1)
        case LoadBalanceScope.SEQUENCE:
            # Divided by the mean length of the micro-batch's sequences, not by each one's own.
            share = counts * size / jnp.repeat(assigned, size, axis=1)
        case LoadBalanceScope.GLOBAL_BATCH:
            layout = required_layout(semantics, rules, layout)
            layout.micro_batch_size(num_rows)
            steps = jnp.sum(groups.reshape(num_layers, layout.num_micro_batches, -1, num_experts), axis=2)
            so_far = jnp.cumsum(steps, axis=1) / jnp.arange(1, layout.num_micro_batches + 1)[:, None]
            share = so_far / jnp.sum(steps, axis=-1, keepdims=True)
            share = jnp.repeat(share, num_rows // layout.num_micro_batches, axis=1)
    by_piece = jnp.repeat(_restored(share, layout), rules.context_parallel_size, axis=1)
    return num_experts * jnp.sum(by_piece * router.score_sums, axis=-1)


class _LayerWeights(NamedTuple):
    """Router weights by layer, or one for all with a leading axis of 1."""

    objective: Float[Array, "L B S"]
    mask: Bool[Array, "L B S"]
    mean: Float[Array, "L B S"]
    load_balance_objective: Float[Array, "L U"]
    load_balance_mean: Float[Array, "L B"]


def _by_layer(weights: LossWeights, num_layers: int) -> _LayerWeights:
    decoder = (
        weights.router_objective,
        weights.router_mask,
        weights.router_mean,
        weights.load_balance_objective,
        weights.load_balance_mean,
    )
    layers = [decoder] * max(num_layers - len(weights.mtp_routers), 0) if weights.mtp_routers else [decoder]
    depths = [
        (r.objective, r.mask, r.mean, r.load_balance_objective, r.load_balance_mean)
        for r in weights.mtp_routers
    ]
    return _LayerWeights(*(jnp.stack(arrays) for arrays in zip(*layers, *depths)))


def _unit_rows(semantics: LossSemantics, layout: BatchLayout | None, num_rows: int) -> int:
    """Rows of a micro-batch."""
    return semantics.micro_batch_size if layout is None else layout.micro_batch_size(num_rows)


def _whole_rows(values: Real[Array, "L U E"], num_rows: int) -> Real[Array, "L B E"]:
    return jnp.sum(values.reshape(values.shape[0], num_rows, -1, values.shape[2]), axis=2)


def _arranged(values: Real[Array, "L B E"], layout: BatchLayout | None) -> Real[Array, "L B E"]:
    if layout is None or layout.row_order is None:
        return values
    return jnp.moveaxis(layout.arranged(jnp.moveaxis(values, 1, 0)), 0, 1)


def _restored(values: Real[Array, "L B E"], layout: BatchLayout | None) -> Real[Array, "L B E"]:
    if layout is None or layout.row_order is None:
        return values
    return jnp.moveaxis(layout.restored(jnp.moveaxis(values, 1, 0)), 0, 1)


def _scaled(coefficient: float, value: Float[Array, ""]) -> Float[Array, ""]:
    """0 without a gradient when the coefficient is 0, so that a switched-off term is free."""
    return coefficient * value if coefficient > 0 else jnp.zeros_like(value)
