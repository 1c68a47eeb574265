"""Per-token values with a mask: aggregation modes, shares, multipliers."""

import math

import jax
import jax.numpy as jnp
import numpy as np

import eqx_loss
from eqx_loss import Granularity

from ._registry import (
    MASKS,
    TOKEN_VALUES,
    Values,
    config_of,
    first_name,
    grid,
    nested_like,
    solver,
)

MODES = {
    "token_mean": ("token", None),
    "sample_mean": ("row", None),
    "seq_mean_token_mean": ("row", None),
    "seq_mean_token_sum": ("row", 1.0),
    "seq_mean_token_sum_norm": ("row", "max_length"),
    "sum_over_constant": ("row", "constant"),
    "group_mean_token_mean": ("prompt", None),
    "microbatch_mean": ("microbatch", None),
    "micro_batch_mean": ("microbatch", None),
    "sum": ("all", 1.0),
    "token_sum": ("all", 1.0),
}


@solver
def token_values(kind: str, inputs: dict) -> Values:
    name = first_name(inputs, TOKEN_VALUES)
    if name is None:
        return {}
    values, there = grid(inputs[name])
    mask_name = first_name(inputs, MASKS)
    mask = there & (grid(inputs[mask_name])[0] != 0) if mask_name else there
    config = config_of(inputs)
    out = _modes(values, mask, config)
    objective = str(config.get("objective", "token_mean")).split()[0]
    mode = objective if objective in out else "token_mean"
    weights = mode_weights(mask, mode, config)
    out.update(
        loss=out[mode],
        mean=out[mode],
        logged=out[mode],
        n_tokens=mask.sum(),
        n_targets=mask.sum(),
        grad_per_token=nested_like(weights, inputs[name]),
        perplexity=math.exp(out["token_mean"]),
        **_partitioned(values, mask, config),
    )
    if name.endswith("_by_rank"):
        out.update(_rank_scales(mask))
    return out


def mode_weights(mask: np.ndarray, mode: str, config: dict) -> jax.Array:
    """Weights of a named aggregation mode."""
    grouping, divisor = MODES[mode]
    rows, length = mask.shape
    scored = jnp.asarray(mask)
    if isinstance(divisor, str):
        divisor = float(
            config.get("constant_length", config.get("max_length", config.get("constant", length)))
        )
    match grouping:
        case "token":
            return eqx_loss.token_weights(scored, Granularity.TOKEN)
        case "row":
            ids, number_of_groups = np.arange(rows), rows
        case "all":
            ids, number_of_groups = np.zeros(rows, int), 1
        case "prompt":
            ids = np.asarray(config["prompt_group_of_row"])
            number_of_groups = int(ids.max()) + 1
        case _:
            ids = _ids_of(config["microbatches_of_rows"], rows)
            number_of_groups = len(config["microbatches_of_rows"])
    return eqx_loss.weights_by_group(scored, jnp.asarray(ids), number_of_groups, divisor=divisor)


def _ids_of(groups: list[list[int]], rows: int) -> np.ndarray:
    ids = np.full(rows, -1)
    for group, members in enumerate(groups):
        ids[members] = group
    return ids


def _weighted(values: np.ndarray, mask: np.ndarray, weights: jax.Array) -> float:
    losses = eqx_loss.TokenLosses(jnp.where(jnp.asarray(mask), jnp.asarray(values), 0), jnp.zeros(mask.shape))
    return float(eqx_loss.head_loss(losses, weights).objective)


def _modes(values: np.ndarray, mask: np.ndarray, config: dict) -> Values:
    """Every aggregation mode whose groups the inputs define."""
    out: Values = {}
    for mode, (grouping, _) in MODES.items():
        needed = {"prompt": "prompt_group_of_row", "microbatch": "microbatches_of_rows"}.get(grouping)
        if needed is None or needed in config:
            out[mode] = _weighted(values, mask, mode_weights(mask, mode, config))
    out["global_token_mean"] = out["token_mean"]
    if "data_ranks" in config:
        out.update(_rank_estimators(values, mask, config))
    return out


def _rank_estimators(values: np.ndarray, mask: np.ndarray, config: dict) -> Values:
    """Estimators of data-parallel trainers: groups are micro-batches, ranks, or steps across ranks."""
    ranks, size = config["data_ranks"], config.get("microbatch_rows", 1)
    rows, scored = len(mask), jnp.asarray(mask)

    def mean(groups: list[list[int]]) -> float:
        ids = jnp.asarray(_ids_of(groups, rows))
        return _weighted(values, mask, eqx_loss.weights_by_group(scored, ids, len(groups)))

    pieces = [[rank[i : i + size] for i in range(0, len(rank), size)] for rank in ranks]
    steps = [[row for piece in step for row in piece] for step in zip(*pieces)]
    return {
        "mean_over_microbatches_and_ranks_of_token_means": mean([p for rank in pieces for p in rank]),
        "mean_over_ranks_of_rank_token_means": mean(ranks),
        "mean_over_steps_of_cross_rank_token_means": mean(steps),
    }


def _partitioned(values: np.ndarray, mask: np.ndarray, config: dict) -> Values:
    """Shares and multipliers of the parts of a batch; every cut must give the same loss."""
    weights = eqx_loss.token_weights(jnp.asarray(mask), Granularity.TOKEN)
    losses = jnp.where(jnp.asarray(mask), jnp.asarray(values), 0)
    out: Values = {"loss_with_accumulation_steps_1": float(jnp.sum(weights * losses))}
    if "microbatches_of_rows" in config:
        parts = [
            float(jnp.sum((weights * losses)[jnp.asarray(part)])) for part in config["microbatches_of_rows"]
        ]
        np.testing.assert_allclose(sum(parts), out["loss_with_accumulation_steps_1"], rtol=1e-12)
        out["multiplier_of_each_microbatch_sum"] = float(weights.max())
        out["multiplier_of_microbatch_sum"] = float(weights.max())
    for splits in (config.get("splits") or {}).values():
        flat_weights, flat_mask = np.asarray(weights).ravel(), mask.ravel()
        out["share_of_rank_in_denominator"] = [float(flat_weights[part].sum()) for part in splits]
        assert flat_mask.size >= sum(len(part) for part in splits)
    return out


def _rank_scales(mask: np.ndarray) -> Values:
    """What each rank multiplies when the all-reduce averages gradients over ranks."""
    weights = np.asarray(eqx_loss.token_weights(jnp.asarray(mask), Granularity.TOKEN))
    ranks = len(mask)
    counts = mask.sum(axis=1)
    return {
        "multiplier_of_local_sum": ranks * weights.max(),
        "multiplier_of_local_mean": (ranks * weights.max() * counts).tolist(),
    }


@solver
def rank_gradients(kind: str, inputs: dict) -> Values:
    name = first_name(inputs, r"per_token_gradient(_by_\w+)?")
    if name is None:
        return {}
    gradients, there = grid(inputs[name])
    weights = eqx_loss.token_weights(jnp.asarray(there), Granularity.TOKEN)
    count = len(inputs[name])
    return {
        "gradient": float(jnp.sum(weights * gradients)),
        "factor_to_apply_after_the_mean_all_reduce_of_summed_gradients": float(count * weights.max()),
    }
