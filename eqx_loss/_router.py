"""Router terms of a mixture of experts: z-loss, load balance, expert-bias update."""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real

from ._reduce import guarded_ratio
from ._weights import check_micro_batch


class LoadBalanceScope(enum.Enum):
    """Over which positions the load-balance statistics are taken.

    Attributes:
        MICRO_BATCH: Groups of `micro_batch_size` rows (Megatron `aux_loss`).
        SEQUENCE: Every row by itself (Megatron `seq_aux_loss`; DeepSeek-V3,
            arXiv:2412.19437, eq. 17).
        GLOBAL_BATCH: The whole global batch (arXiv:2501.11873).
    """

    MICRO_BATCH = "micro_batch"
    SEQUENCE = "sequence"
    GLOBAL_BATCH = "global_batch"

    @property
    def is_row(self) -> bool:
        """True if every row is a unit by itself."""
        return self is LoadBalanceScope.SEQUENCE


def router_z_term(logits: Float[Array, "*L B S E"]) -> Float[Array, "*L B S"]:
    """`logsumexp(logits)^2` of each position, in at least float32; no coefficient.

    Source: ST-MoE, arXiv:2202.08906, eq. 5. `logits` are the raw router scores, before any
    sigmoid.
    """
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    return jnp.square(jax.nn.logsumexp(logits.astype(dtype), axis=-1))


def load_balance(
    score_sums: Float[Array, "*U E"],
    counts: Real[Array, "*U E"],
    num_positions: Real[Array, "*U"],
) -> Float[Array, "*U"]:
    """`E * sum_e f_e P_e` of each unit (row, micro-batch or global batch).

    `f_e` is the share of the unit's assignments sent to expert e (a constant: no gradient) and
    `P_e` the mean normalized score of e. 1 when the load is even. Source: Switch Transformer,
    arXiv:2101.03961, eq. 4; Megatron-Core 0.16.1 `megatron/core/transformer/moe/moe_utils.py`
    (`switch_load_balancing_loss_func`).

    Args:
        score_sums: Sum over the unit's counted positions of the scores, normalized over experts.
        counts: Assignments of the unit's counted positions to each expert.
        num_positions: Counted positions of the unit.

    Returns:
        The value per unit; 0 with zero gradient for a unit without positions.
    """
    num_experts = score_sums.shape[-1]
    assigned = jax.lax.stop_gradient(counts.astype(score_sums.dtype))
    share = guarded_ratio(assigned, jnp.broadcast_to(jnp.sum(assigned, -1, keepdims=True), assigned.shape))
    mean_scores = guarded_ratio(score_sums, jnp.broadcast_to(num_positions[..., None], score_sums.shape))
    return num_experts * jnp.sum(share * mean_scores, axis=-1)


def load_balance_units(
    values: Real[Array, "*L B E"], scope: LoadBalanceScope, *, micro_batch_size: int = 1
) -> Real[Array, "*L U E"]:
    """Sums over the rows of each unit of `scope`; `U` is `B`, the number of groups, or 1.

    Raises:
        ValueError: `micro_batch_size` does not divide the rows (MICRO_BATCH only).
    """
    num_rows = values.shape[-2]
    match scope:
        case LoadBalanceScope.SEQUENCE:
            return values
        case LoadBalanceScope.MICRO_BATCH:
            check_micro_batch(num_rows, micro_batch_size)
            shape = (*values.shape[:-2], num_rows // micro_batch_size, micro_batch_size, values.shape[-1])
            return jnp.sum(values.reshape(shape), axis=-2)
        case LoadBalanceScope.GLOBAL_BATCH:
            return jnp.sum(values, axis=-2, keepdims=True)


def updated_router_bias(
    bias: Float[Array, "*L E"],
    counts: Real[Array, "*L E"],
    *,
    rate: float,
    zero_mean: bool = False,
) -> Float[Array, "*L E"]:
    """The expert bias after one step: `b + rate * sign(mean(counts) - counts)`.

    `counts` are the assignments of the whole global batch, summed over micro-steps and devices
    before the sign is taken; equal counts leave the bias unchanged. Source: DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2 (auxiliary-loss-free balancing, arXiv:2408.15664);
    Megatron-Core 0.16.1 `megatron/core/transformer/moe/moe_utils.py`
    (`get_updated_expert_bias`). `zero_mean` then subtracts the mean over experts (Ling).

    Args:
        bias: Selection bias of each expert.
        counts: Assignments per expert of the global batch.
        rate: Step size, at least 0 (1e-3 in DeepSeek-V3 and Ling).
        zero_mean: True keeps the mean over experts at 0.

    Raises:
        ValueError: `rate` is negative.
    """
    if rate < 0:
        raise ValueError(f"rate must be >= 0, got {rate}; use 0 to keep the bias")
    load = counts.astype(bias.dtype)
    updated = bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    if zero_mean:
        updated = updated - jnp.mean(updated, axis=-1, keepdims=True)
    return jax.lax.stop_gradient(updated)


def expert_counts(
    selected: Int[Array, "*B S A"], mask: Bool[Array, "*B S"], num_experts: int
) -> Int[Array, "*B E"]:
    """Number of counted positions of each row that chose each expert.

    `selected` are expert indices in `[0, num_experts)`; positions outside `mask` count nothing.
    """
    one_hot = jax.nn.one_hot(selected, num_experts, dtype=jnp.int32) * mask[..., None, None]
    return jnp.sum(one_hot, axis=(-3, -2))
