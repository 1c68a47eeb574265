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

PROMPTS = r"(prompt|question)_(group_)?(of_row|ids?)|prompt_group_of_row|group_of_row"
MODES = {
    "token_mean": ("token", None),
    "sample_mean": ("row", None),
    "seq_mean_token_mean": ("row", None),
    "seq_mean_token_sum": ("row", 1.0),
    "seq_mean_token_sum_norm": ("row", "max_length"),
    "sum_over_constant": ("row", "constant"),
    "group_mean_token_mean": ("prompt", None),
    "row_mean": ("row", None),
    "sequence_mean": ("row", None),
    "microbatch_mean": ("microbatch", None),
    "mean_of_microbatch_means": ("microbatch", None),
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
    out = _modes(values, mask, config, segments_of(inputs, mask))
    objective = str(config.get("objective", "token_mean")).split()[0]
    has_weights = objective in MODES or objective.startswith(("document_mean", "sample_mean"))
    mode = objective if objective in out and has_weights else "token_mean"
    weights = _objective_weights(mask, mode, config, segments_of(inputs, mask))
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
        ranks = len(inputs[name])
        out.update(rank_scales(mask.reshape(ranks, -1).sum(axis=1), config))
    bytes_name = first_name(inputs, r"(num_|n_)?bytes_(of|per)_token|token_(num_)?bytes|byte_counts?")
    if bytes_name is not None:
        log = eqx_loss.sum_count(jnp.asarray(values), jnp.asarray(mask))
        num_bytes = jnp.sum(jnp.where(jnp.asarray(mask), grid(inputs[bytes_name])[0], 0))
        out.update(
            bits_per_byte=float(eqx_loss.bits_per_byte(log, num_bytes)),
            n_bytes=float(num_bytes),
            bits_per_token=float(log.value()) / math.log(2),
        )
    return out


def segments_of(inputs: dict, mask: np.ndarray) -> jax.Array | None:
    name = first_name(inputs, r"segment_ids|document_ids|documents?_of_token")
    if name is None:
        return None
    ids = np.asarray(inputs[name]).reshape(-1)
    return jnp.asarray(ids.reshape(mask.shape)) if ids.size == mask.size else None


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
            name = first_name(config, PROMPTS)
            ids = np.unique(np.asarray(config[name]), return_inverse=True)[1]
            number_of_groups = int(ids.max()) + 1
        case _:
            groups = _microbatches(config, rows)
            ids, number_of_groups = _ids_of(groups, rows), len(groups)
    return eqx_loss.weights_by_group(
        scored,
        jnp.asarray(ids),
        number_of_groups,
        divisor=divisor,
        count_empty=bool(config.get("count_empty", True)),
    )


def _microbatches(config: dict, rows: int) -> list[list[int]]:
    """Rows of each micro-batch: as listed, or blocks of the size given; empty when there is neither."""
    listed = first_name(config, r"micro_?batches(_of_rows)?|rows_by_micro_?batch")
    if listed is not None:
        return config[listed]
    size = config.get(first_name(config, r"micro_?batch_(size|rows)|rows_per_micro_?batch") or "", 0)
    return [list(range(rows))[i : i + size] for i in range(0, rows, size)] if size else []


def _objective_weights(mask: np.ndarray, mode: str, config: dict, segments: jax.Array | None) -> jax.Array:
    if mode in MODES:
        return mode_weights(mask, mode, config)
    count_empty = bool(config.get("count_empty", True)) and not mode.endswith("_without_empty")
    granularity = Granularity.DOCUMENT if mode.startswith("document") else Granularity.SAMPLE
    return eqx_loss.token_weights(
        jnp.asarray(mask), granularity, segment_ids=segments, count_empty=count_empty
    )


def _ids_of(groups: list[list[int]], rows: int) -> np.ndarray:
    ids = np.full(rows, -1)
    for group, members in enumerate(groups):
        ids[members] = group
    return ids


def _weighted(values: np.ndarray, mask: np.ndarray, weights: jax.Array) -> float:
    losses = eqx_loss.TokenLosses(jnp.where(jnp.asarray(mask), jnp.asarray(values), 0), jnp.zeros(mask.shape))
    return float(eqx_loss.head_loss(losses, weights).objective)


def _modes(values: np.ndarray, mask: np.ndarray, config: dict, segments: jax.Array | None) -> Values:
    """Every aggregation mode whose groups the inputs define."""
    out: Values = {}
    for mode, (grouping, _) in MODES.items():
        if grouping == "prompt" and first_name(config, PROMPTS) is None:
            continue
        if grouping == "microbatch" and not _microbatches(config, len(mask)):
            continue
        out[mode] = _weighted(values, mask, mode_weights(mask, mode, config))
    out["global_token_mean"] = out["token_mean"]
    dropping = {**config, "count_empty": False}
    for name in ("sample_mean", "seq_mean_token_mean"):
        out[f"{name}_without_empty"] = _weighted(values, mask, mode_weights(mask, name, dropping))
    if segments is not None:
        for name in ("document_mean", "document_mean_without_empty"):
            out[name] = _weighted(values, mask, _objective_weights(mask, name, config, segments))
    if "data_ranks" in config:
        out.update(_rank_estimators(values, mask, config))
    out["estimator_gap"] = out["sample_mean"] - out["token_mean"]
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
    groups = _microbatches(config, len(mask))
    if groups:
        parts = [float(jnp.sum((weights * losses)[jnp.asarray(part)])) for part in groups]
        np.testing.assert_allclose(sum(parts), out["loss_with_accumulation_steps_1"], rtol=1e-12)
        out["multiplier_of_each_microbatch_sum"] = float(weights.max())
        out["multiplier_of_microbatch_sum"] = float(weights.max())
    for splits in (config.get("splits") or {}).values():
        flat_weights, flat_mask = np.asarray(weights).ravel(), mask.ravel()
        out["share_of_rank_in_denominator"] = [float(flat_weights[part].sum()) for part in splits]
        out["n_tokens_by_rank"] = [float(flat_mask[part].sum()) for part in splits]
        assert flat_mask.size >= sum(len(part) for part in splits)
    return out


def rank_scales(counts: np.ndarray, config: dict) -> Values:
    """What each rank multiplies before the all-reduce that the framework does."""
    averages = "mean" in str(config.get("gradient_all_reduce", "mean over ranks"))
    reductions = eqx_loss.Reductions(data_ranks=len(counts), over_data="mean" if averages else "sum")
    total = float(counts.sum())
    return {
        "multiplier_of_local_sum": eqx_loss.scale_for(reductions, "token_sum", num_tokens=total),
        "multiplier_of_local_mean": [
            eqx_loss.scale_for(reductions, "token_mean", num_tokens=total, local_num_tokens=float(count))
            for count in counts
        ],
        "n_tokens_by_rank": counts.tolist(),
    }


@solver
def rank_gradients(kind: str, inputs: dict) -> Values:
    name = first_name(inputs, r"per_token_gradient(_by_\w+)?")
    if name is None:
        return {}
    gradients, there = grid(inputs[name])
    weights = eqx_loss.token_weights(jnp.asarray(there), Granularity.TOKEN)
    factor = rank_scales(there.reshape(len(inputs[name]), -1).sum(axis=1), config_of(inputs))
    return {
        "gradient": float(jnp.sum(weights * gradients)),
        "factor_to_apply_after_the_mean_all_reduce_of_summed_gradients": factor["multiplier_of_local_sum"],
        **factor,
    }
