"""The weights of every term under our own rules, from masks alone, before the backward pass."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._reduce import guarded_ratio
from ._router import LoadBalanceScope
from ._semantics import LossSemantics
from ._targets import joined_to_next, shift_left
from ._weights import group_mean_weights, token_weights


class RouterWeights(eqx.Module):
    """Weights of the routers of one MTP depth, where a release masks them differently.

    Attributes:
        objective: As `LossWeights.router_objective`.
        mask: As `LossWeights.router_mask`.
        mean: As `LossWeights.router_mean`.
        load_balance_objective: As in `LossWeights`.
        load_balance_mean: As in `LossWeights`.
    """

    objective: Float[Array, "B S"]
    mask: Bool[Array, "B S"]
    mean: Float[Array, "B S"]
    load_balance_objective: Float[Array, " U"]
    load_balance_mean: Float[Array, " B"]


class LossWeights(eqx.Module):
    """Weights of one global batch, row by row: cut the rows in any way and terms still add.

    `*_objective` make the objective (coefficients left out, but for the MTP factor). `*_mean`
    and `*_groups` make the logs that are means over micro-batches: the sum over micro-batches of
    each one's mean, and the number of micro-batches, a group's 1 standing at its first row.

    Attributes:
        lm_objective: Weights of lm cross-entropy and of the lm-head z term.
        mtp_objective: Weights of each MTP depth, `mtp_loss_scaling_factor` included.
        router_objective: Weights of the router z term of each position.
        load_balance_objective: Weight of a row's share of its load-balance unit, per position.
            `U = B`, or `B` times the context ranks under a Megatron profile.
        lm_mask: Tokens scored by the lm head.
        mtp_mask: Tokens scored by each MTP depth.
        router_mask: Positions that router terms count.
        token_scale: Fractional token weights; 1 where none were given.
        lm_mean: Group-mean weights of the lm loss (for the estimator gap).
        mtp_mean: Group-mean weights of each MTP depth.
        router_mean: Group-mean weights of the router z term.
        load_balance_mean: 1 / positions of the row's load-balance unit.
        lm_groups: Counted micro-batches of the lm loss.
        mtp_groups: Counted micro-batches of each MTP depth.
        router_groups: Counted micro-batches of the router z term.
        load_balance_groups: Counted load-balance units.
        mtp_routers: Router weights of each MTP depth; empty when they are those of all layers.
    """

    lm_objective: Float[Array, "B S"]
    mtp_objective: Float[Array, "M B S"]
    router_objective: Float[Array, "B S"]
    load_balance_objective: Float[Array, " U"]
    lm_mask: Bool[Array, "B S"]
    mtp_mask: Bool[Array, "M B S"]
    router_mask: Bool[Array, "B S"]
    token_scale: Float[Array, "B S"]
    lm_mean: Float[Array, "B S"]
    mtp_mean: Float[Array, "M B S"]
    router_mean: Float[Array, "B S"]
    load_balance_mean: Float[Array, " B"]
    lm_groups: Float[Array, " B"]
    mtp_groups: Float[Array, "M B"]
    router_groups: Float[Array, " B"]
    load_balance_groups: Float[Array, " B"]
    mtp_routers: tuple[RouterWeights, ...] = ()


def clean_loss_weights(
    loss_mask: Bool[Array, "B S"],
    semantics: LossSemantics,
    *,
    num_mtp_layers: int,
    segment_ids: Int[Array, "B S"] | None,
    token_scale: Float[Array, "B S"] | None,
    router_mask: Bool[Array, "B S"] | None,
) -> LossWeights:
    """`loss_weights` under our own rules: the same for any cut of the batch.

    Arguments and errors are those of `loss_weights`.
    """
    if num_mtp_layers < 0:
        raise ValueError(f"num_mtp_layers must be >= 0, got {num_mtp_layers}")
    dtype = jnp.result_type(float)
    joined = joined_to_next(loss_mask.shape, None if semantics.mtp_roll_across_documents else segment_ids)
    depths = range(1, num_mtp_layers + 1)
    scale = jnp.ones(loss_mask.shape, dtype) if token_scale is None else token_scale.astype(dtype)
    heads = [
        _HeadMask(shift_left(loss_mask, joined, depth=k), shift_left(scale, joined, depth=k), semantics)
        for k in (0, *depths)
    ]
    lm, mtp = heads[0], heads[1:]
    router = _router_mask(loss_mask, semantics, segment_ids, router_mask)
    weights = LossWeights(
        lm_objective=lm.objective() if semantics.train_lm else jnp.zeros(loss_mask.shape, dtype),
        mtp_objective=_stack(_mtp_objective(lm, mtp, semantics), loss_mask.shape, dtype),
        router_objective=_router_objective(router, lm, semantics),
        load_balance_objective=_load_balance_objective(router, lm, semantics),
        lm_mask=loss_mask,
        mtp_mask=_stack([head.mask for head in mtp], loss_mask.shape, bool),
        router_mask=router,
        token_scale=scale,
        lm_mean=lm.group_mean(),
        mtp_mean=_stack([head.group_mean() for head in mtp], loss_mask.shape, dtype),
        router_mean=_group_mean(router, semantics),
        load_balance_mean=guarded_ratio(
            jnp.ones(router.shape[:1], dtype), _unit_positions(router, semantics)
        ),
        lm_groups=_group_starts(lm.counted, semantics),
        mtp_groups=_stack(
            [_group_starts(head.counted, semantics) for head in mtp], loss_mask.shape[:1], dtype
        ),
        router_groups=_group_starts(router, semantics),
        load_balance_groups=_unit_starts(router, semantics),
    )
    return jax.lax.stop_gradient(weights)


class _HeadMask(eqx.Module):
    """Mask and fractional weights of one output head."""

    mask: Bool[Array, "B S"]
    scale: Float[Array, "B S"]
    semantics: LossSemantics = eqx.field(static=True)

    @property
    def counted(self) -> Bool[Array, "B S"]:
        return self.mask & (self.scale != 0)

    def votes(self) -> Float[Array, "B S"]:
        return jnp.where(self.mask, self.scale, 0)

    def total(self) -> Float[Array, ""]:
        """The token count that divides, by `scale_denominator`."""
        by_sum = self.semantics.scale_denominator == "sum"
        return jnp.sum(self.votes() if by_sum else self.counted.astype(self.scale.dtype))

    def objective(self) -> Float[Array, "B S"]:
        return token_weights(
            self.mask,
            self.semantics.granularity,
            micro_batch_size=self.semantics.micro_batch_size,
            count_empty=self.semantics.count_empty,
            token_scale=self.scale,
            scale_denominator=self.semantics.scale_denominator,
        )

    def group_mean(self) -> Float[Array, "B S"]:
        return group_mean_weights(
            self.mask,
            self.semantics.group_granularity,
            micro_batch_size=self.semantics.micro_batch_size,
            token_scale=self.scale,
            scale_denominator=self.semantics.scale_denominator,
        )


def _mtp_objective(
    lm: _HeadMask, mtp: list[_HeadMask], semantics: LossSemantics
) -> list[Float[Array, "B S"]]:
    """Weights per depth. Megatron-Core 0.16.1 `multi_token_prediction.py`; MaxText when pooled."""
    factor = semantics.mtp_loss_scaling_factor
    if semantics.calculate_per_token_loss:
        # Megatron divides the raw sums by the lm count, not by their own (to 0.16; RFC-0032).
        per_token = factor / max(len(mtp), 1) / _at_least_one(lm.total())
        return [per_token * head.votes() for head in mtp]
    if semantics.mtp_per_layer_loss_norm:
        return [factor / len(mtp) * head.objective() for head in mtp]
    pooled = sum((head.total() for head in mtp), start=jnp.zeros(()))
    return [factor * guarded_ratio(head.votes(), jnp.broadcast_to(pooled, head.mask.shape)) for head in mtp]


def _router_objective(
    router: Bool[Array, "B S"], lm: _HeadMask, semantics: LossSemantics
) -> Float[Array, "B S"]:
    if semantics.calculate_per_token_loss:
        return router.astype(lm.scale.dtype) / _at_least_one(lm.total())
    return token_weights(
        router,
        semantics.group_granularity,
        micro_batch_size=semantics.micro_batch_size,
        count_empty=semantics.count_empty,
    )


def _load_balance_objective(
    router: Bool[Array, "B S"], lm: _HeadMask, semantics: LossSemantics
) -> Float[Array, " B"]:
    """Weight of one position's score in the objective, the same for all positions of a unit."""
    positions = _unit_positions(router, semantics)
    if semantics.calculate_per_token_loss:
        return jnp.where(positions > 0, 1 / _at_least_one(lm.total()), 0)
    units = jnp.sum(_unit_starts(router, semantics))
    return guarded_ratio(jnp.ones_like(positions), positions * units)


def _router_mask(
    loss_mask: Bool[Array, "B S"],
    semantics: LossSemantics,
    segment_ids: Int[Array, "B S"] | None,
    router_mask: Bool[Array, "B S"] | None,
) -> Bool[Array, "B S"]:
    if router_mask is not None:
        return router_mask
    if not semantics.mask_padding_in_router_losses:
        return jnp.ones(loss_mask.shape, bool)
    if segment_ids is None:
        raise ValueError(
            "mask_padding_in_router_losses=True needs segment_ids (0 = padding) or router_mask, got neither; "
            "pass one or set it to False"
        )
    return segment_ids != 0


def _group_mean(router: Bool[Array, "B S"], semantics: LossSemantics) -> Float[Array, "B S"]:
    return group_mean_weights(
        router, semantics.group_granularity, micro_batch_size=semantics.micro_batch_size
    )


def _unit_size(num_rows: int, semantics: LossSemantics) -> int:
    """Rows of a load-balance unit."""
    match semantics.load_balance_scope:
        case LoadBalanceScope.SEQUENCE:
            return 1
        case LoadBalanceScope.MICRO_BATCH:
            return semantics.micro_batch_size
        case LoadBalanceScope.GLOBAL_BATCH:
            return num_rows


def _unit_positions(router: Bool[Array, "B S"], semantics: LossSemantics) -> Float[Array, " B"]:
    """Counted positions of the unit of each row."""
    size = _unit_size(router.shape[0], semantics)
    by_row = jnp.sum(router, axis=1, dtype=jnp.result_type(float))
    return jnp.repeat(jnp.sum(by_row.reshape(-1, size), axis=1), size)


def _unit_starts(router: Bool[Array, "B S"], semantics: LossSemantics) -> Float[Array, " B"]:
    return _first_rows(router, _unit_size(router.shape[0], semantics), semantics.count_empty)


def _group_starts(counted: Bool[Array, "B S"], semantics: LossSemantics) -> Float[Array, " B"]:
    return _first_rows(counted, semantics.micro_batch_size, semantics.count_empty)


def _first_rows(counted: Bool[Array, "B S"], size: int, count_empty: bool) -> Float[Array, " B"]:
    """1 at the first row of every counted group of `size` rows."""
    num_rows = counted.shape[0]
    present = jnp.any(counted.reshape(num_rows // size, -1), axis=1) | count_empty
    first = jnp.arange(num_rows) % size == 0
    return (first & jnp.repeat(present, size)).astype(jnp.result_type(float))


def _at_least_one(total: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.where(total > 0, total, 1)


def _stack(arrays: list[Array], shape: tuple[int, ...], dtype: jnp.dtype | type) -> Array:
    return jnp.stack(arrays) if arrays else jnp.zeros((0, *shape), dtype)
