"""Answers to the weighting, logging and estimator tasks of the conformance kit."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from eqx_loss import (
    Granularity,
    Reductions,
    SumCount,
    by_domain,
    domain_scale,
    estimator_gap,
    scale_for,
    sum_count,
    token_weights,
    weights_by_group,
    zero_sum_count,
)

Inputs = Mapping[str, Any]
Outputs = dict[str, Any]


def weighted(inputs: Inputs) -> Outputs:
    losses, scale = _row(inputs["xent"]), _row(inputs["loss_weight"])
    mask = jnp.ones(losses.shape, bool)
    by_sum = token_weights(mask, Granularity.TOKEN, token_scale=scale)
    by_count = token_weights(mask, Granularity.TOKEN, token_scale=scale, scale_denominator="count")
    return {"by_sum_of_weights": _total(by_sum, losses), "by_count": _total(by_count, losses)}


def domains(inputs: Inputs) -> Outputs:
    losses, names = _row(inputs["xent"]), jnp.asarray(inputs["domain"])[None]
    mask = jnp.ones(losses.shape, bool)
    targets, sampling = jnp.asarray(inputs["objective_weight"]), jnp.asarray(inputs["sampling_weight"])
    parts = by_domain(losses, mask, names, len(inputs["sampling_weight"]))
    scale = jnp.broadcast_to(domain_scale(names, targets, sampling), losses.shape)
    weights = token_weights(mask, Granularity.TOKEN, token_scale=scale, scale_denominator="count")
    return {
        "domain_loss": parts.value().tolist(),
        "domain_tokens": parts.count.tolist(),
        "token_mean": float(SumCount(jnp.sum(parts.sum), jnp.sum(parts.count)).value()),
        "importance_weighted": _total(weights, losses),
        "weighted_mean_of_domains": float(jnp.sum(targets * parts.value())),
    }


def aggregation(inputs: Inputs) -> Outputs:
    losses, mask = jnp.asarray(inputs["xent"]), jnp.asarray(inputs["loss_mask"]) > 0
    rows, prompts = jnp.arange(losses.shape[0]), jnp.asarray(inputs["prompt_group"])
    num_rows = losses.shape[0]
    sums = weights_by_group(mask, rows, num_rows, divisor=1.0)
    constant = weights_by_group(mask, rows, num_rows, divisor=float(inputs["max_length"]))
    grouped = weights_by_group(mask, prompts, int(jnp.max(prompts)) + 1)
    return {
        "token_mean": _total(token_weights(mask, Granularity.TOKEN), losses),
        "seq_mean_token_mean": _total(token_weights(mask, Granularity.SAMPLE), losses),
        "seq_mean_token_sum": _total(sums, losses),
        "seq_mean_token_sum_norm": _total(constant, losses),
        "group_mean_token_mean": _total(grouped, losses),
    }


def logged_ratio(inputs: Inputs) -> Outputs:
    return {"logged": float(_pooled(inputs["sum_by_rank"], inputs["count_by_rank"]).value())}


def second_term(inputs: Inputs) -> Outputs:
    main = float(_pooled(inputs["main_sum"], inputs["main_count"]).value())
    extra = float(_pooled(inputs["extra_sum"], inputs["extra_count"]).value())
    return {"main": main, "extra": extra, "total": main + inputs["extra_weight"] * extra}


def resume(inputs: Inputs) -> Outputs:
    """The accumulator is state: what was stored after the checkpoint is where the rest is added."""
    losses, counts = inputs["loss_by_step"], inputs["tokens_by_step"]
    at = inputs["checkpoint_after_step"]
    sums = [loss * count for loss, count in zip(losses, counts)]
    stored = _pooled(sums[:at], counts[:at])
    whole = stored + _pooled(sums[at:], counts[at:])
    return {
        "stored_sum": float(stored.sum),
        "stored_count": float(stored.count),
        "stored_steps": at,
        "logged": float(whole.value()),
    }


def gradient_scale(inputs: Inputs) -> Outputs:
    counts = inputs["count"]
    reductions = Reductions(
        data_ranks=len(counts[0]),
        over_data=inputs["over_ranks"],
        micro_steps=len(counts),
        over_micro_steps=inputs["over_micro_steps"],
    )
    total = sum(map(sum, counts))
    one = scale_for(reductions, "token_sum", num_tokens=total)
    means = [
        [scale_for(reductions, "token_mean", num_tokens=total, local_num_tokens=count) for count in row]
        for row in counts
    ]
    return {"of_sum": [[one] * len(row) for row in counts], "of_mean": means}


def estimators(inputs: Inputs) -> Outputs:
    losses, mask = jnp.asarray(inputs["xent"]), jnp.asarray(inputs["loss_mask"]) > 0
    ranks = inputs["ranks"]
    rank_of_row = jnp.asarray([rank for row in range(losses.shape[0]) for rank in _places(ranks, row)])
    step_of_row = jnp.asarray([ranks[int(rank_of_row[row])].index(row) for row in range(losses.shape[0])])
    constant = weights_by_group(
        mask, jnp.arange(losses.shape[0]), losses.shape[0], divisor=float(inputs["constant_length"])
    )
    return {
        "global_token_mean": _total(token_weights(mask, Granularity.TOKEN), losses),
        "mean_over_micro_batches": _total(token_weights(mask, Granularity.SAMPLE), losses),
        "mean_over_ranks": _total(weights_by_group(mask, rank_of_row, len(ranks)), losses),
        "mean_over_steps": _total(weights_by_group(mask, step_of_row, len(ranks[0])), losses),
        "sum_over_constant": _total(constant, losses),
    }


def gap(inputs: Inputs) -> Outputs:
    sums, counts = jnp.asarray(inputs["sum_by_row"]), jnp.asarray(inputs["count_by_row"], float)
    pooled = SumCount(jnp.sum(sums), jnp.sum(counts))
    group = sum_count(SumCount(sums, counts).value(), jnp.ones(sums.shape, bool))
    return {
        "token": float(pooled.value()),
        "sample": float(group.value()),
        "gap": float(estimator_gap(group, pooled)),
    }


def _row(values: list[float]) -> Float[Array, "1 S"]:
    return jnp.asarray(values, float)[None]


def _total(weights: Float[Array, "B S"], losses: Float[Array, "B S"]) -> float:
    return float(jnp.sum(weights * losses))


def _pooled(sums: list[float], counts: list[int]) -> SumCount:
    """The parts added one by one, divided by nothing yet."""
    pooled = zero_sum_count()
    for part, count in zip(sums, counts):
        pooled = pooled + SumCount(jnp.asarray(part, float), jnp.asarray(count, float))
    return pooled


def _places(ranks: list[list[int]], row: int) -> list[int]:
    return [rank for rank, rows in enumerate(ranks) if row in rows]


WEIGHTING: Mapping[str, Callable[[Inputs], Outputs]] = {
    "weighted": weighted,
    "domains": domains,
    "aggregation": aggregation,
    "logged_ratio": logged_ratio,
    "second_term": second_term,
    "resume": resume,
    "gradient_scale": gradient_scale,
    "estimators": estimators,
    "estimator_gap": gap,
}
