"""eqx_loss's answers to the conformance cases: which function of ours answers which task."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eqx_loss import (
    Granularity,
    HeadLoss,
    SumCount,
    TokenLosses,
    cross_entropy,
    head_loss,
    next_token_targets,
    perplexity,
    shift_targets,
    sum_count,
    token_weights,
)

from ._auxiliary_answers import AUXILIARY
from ._weight_answers import WEIGHTING

Inputs = Mapping[str, Any]
Outputs = dict[str, Any]


def answer(request: Mapping[str, Any]) -> Outputs:
    """Outputs of one request, or a skip with its reason. Float64 when JAX's x64 mode is on."""
    task = request["task"]
    if task in ("clip", "pipeline"):
        return {"skip": "eqx_loss neither clips nor accumulates gradients; that is the trainer's"}
    return _TASKS[task](request["inputs"])


def objective(inputs: Inputs) -> Outputs:
    """The sum over the schedule's cells of each cell's part, with weights of the whole batch."""
    mask = jnp.asarray(inputs["loss_mask"]) > 0
    targets = jnp.asarray(inputs["targets"])
    segments = inputs.get("segment_ids")
    weights = token_weights(
        mask,
        Granularity(inputs["granularity"]),
        micro_batch_size=inputs.get("micro_batch_size", 1),
        segment_ids=None if segments is None else jnp.asarray(segments),
    )
    cells = [jnp.asarray(rows) for step in inputs["schedule"] for rows in step]

    def total(logits: Float[Array, "B S V"]) -> Float[Array, ""]:
        parts = [
            head_loss(cross_entropy(logits[rows], targets[rows], mask[rows]), weights[rows]).objective
            for rows in cells
        ]
        return jnp.sum(jnp.stack(parts))

    result = cast("tuple[Array, Array]", jax.jit(jax.value_and_grad(total))(_floats(inputs["logits"])))
    return {"loss": float(result[0]), "num_tokens": int(jnp.sum(mask)), "grad_logits": result[1].tolist()}


def per_token(inputs: Inputs) -> Outputs:
    logits, targets = _floats(inputs["logits"]), jnp.asarray(inputs["targets"])
    losses = cross_entropy(
        logits,
        targets,
        jnp.ones(targets.shape, bool),
        logit_soft_cap=inputs.get("logit_soft_cap"),
        label_smoothing=inputs.get("label_smoothing", 0.0),
        vocab_size=inputs.get("vocab_size"),
    )
    return {"xent": losses.xent.tolist()}


def evaluation(inputs: Inputs) -> Outputs:
    """Sums and counts of the batches are pooled, then divided once."""
    parts = [_evaluated(inputs, jnp.asarray(rows)) for rows in inputs["batches"]]
    pooled = parts[0]
    for part in parts[1:]:
        pooled = pooled + part
    return {
        "loss": float(pooled.value()),
        "perplexity": float(perplexity(pooled)),
        "num_tokens": int(pooled.count),
    }


def next_token(inputs: Inputs) -> Outputs:
    labels = jnp.asarray(inputs["labels"])
    targets, mask = next_token_targets(labels, jnp.ones(labels.shape, int), token_mask=labels >= 0)
    pooled = sum_count(cross_entropy(_floats(inputs["logits"]), targets, mask).xent, mask)
    return {"loss": float(pooled.value()), "num_tokens": int(pooled.count)}


def targets_ahead(inputs: Inputs) -> Outputs:
    tokens, segments = jnp.asarray(inputs["tokens"]), jnp.asarray(inputs["segment_ids"])
    targets, mask = shift_targets(tokens, segments != 0, depth=inputs["depth"], segment_ids=segments)
    return {
        "targets": jnp.where(mask, targets, 0).tolist(),
        "mask": mask.astype(int).tolist(),
        "num_tokens": int(jnp.sum(mask)),
    }


def lm_z(inputs: Inputs) -> Outputs:
    logits, multiplier = _floats(inputs["logits"])[None], inputs["z_loss_multiplier"]
    targets, mask = jnp.asarray(inputs["targets"])[None], jnp.asarray(inputs["loss_mask"])[None] > 0
    weights = token_weights(mask, Granularity.TOKEN)

    def total(logits: Float[Array, "B S V"]) -> tuple[Float[Array, ""], HeadLoss]:
        head = head_loss(cross_entropy(logits, targets, mask), weights, z_loss_multiplier=multiplier)
        return head.objective + head.z_objective, head

    (value, head), gradient = jax.value_and_grad(total, has_aux=True)(logits)
    return {
        "cross_entropy": float(head.objective),
        "z_loss": float(head.z_objective),
        "total": float(value),
        "grad_logits": gradient[0].tolist(),
        "perplexity": float(perplexity(sum_count(head.xent, mask))),
    }


def _evaluated(inputs: Inputs, rows: Int[Array, " B"]) -> SumCount:
    mask: Bool[Array, "B S"] = jnp.asarray(inputs["loss_mask"])[rows] > 0
    losses: TokenLosses = cross_entropy(
        _floats(inputs["logits"])[rows], jnp.asarray(inputs["targets"])[rows], mask
    )
    return sum_count(losses.xent, mask)


def _floats(values: Any) -> Float[Array, "*shape"]:
    """An array of nested lists that may hold the strings nan, inf, -inf."""
    return jnp.asarray(jax.tree.map(float, values))


_TASKS: Mapping[str, Callable[[Inputs], Outputs]] = {
    "objective": objective,
    "per_token": per_token,
    "evaluation": evaluation,
    "next_token": next_token,
    "targets": targets_ahead,
    "lm_z": lm_z,
    **AUXILIARY,
    **WEIGHTING,
}
