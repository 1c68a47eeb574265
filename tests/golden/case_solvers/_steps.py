"""Accumulation windows, log intervals, order of optimizer operations."""

import jax.numpy as jnp
import numpy as np
import optax

import eqx_loss
from eqx_loss import Granularity

from ._registry import Values, numbers, solver


@solver
def mean_losses_in_windows(kind: str, inputs: dict) -> Values:
    if not {"microbatch_mean_loss", "tokens_per_microbatch"} <= set(inputs):
        return {}
    steps = int(inputs["config"]["accumulation_steps"])
    means, counts = numbers(inputs["microbatch_mean_loss"]), numbers(inputs["tokens_per_microbatch"])
    losses, multipliers = [], []
    for start in range(0, len(means), steps):
        part = slice(start, start + steps)
        pair = eqx_loss.SumCount(jnp.asarray(means[part] * counts[part]), jnp.asarray(counts[part]))
        pooled = eqx_loss.SumCount(jnp.sum(pair.sum), jnp.sum(pair.count))
        losses.append(float(pooled.value()))
        shares = np.asarray(
            eqx_loss.guarded_ratio(pair.count, jnp.broadcast_to(pooled.count, pair.count.shape))
        )
        multipliers.append(
            float(shares[0]) if np.allclose(shares, shares[0], rtol=1e-15) else shares.tolist()
        )
    return {"step_losses": losses, "multiplier_per_step": multipliers}


@solver
def resumed_log(kind: str, inputs: dict) -> Values:
    if not {"loss_by_step", "n_tokens_by_step"} <= set(inputs):
        return {}
    config = inputs["config"]
    saved_at, interval = config["checkpoint_after_step"], config["log_interval"]
    pairs = [
        eqx_loss.SumCount(jnp.asarray(loss * n), jnp.asarray(float(n)))
        for loss, n in zip(inputs["loss_by_step"], inputs["n_tokens_by_step"])
    ]
    total = eqx_loss.zero_logs(pairs[0])
    out: Values = {}
    for step, pair in enumerate(pairs[:interval], start=1):
        total = eqx_loss.add_logs(total, pair)
        if step == saved_at:
            state = {"xent_sum": float(total.sum), "n_tokens": float(total.count), "steps": step}
            out[f"state_at_step_{step}"] = state
            total = eqx_loss.SumCount(jnp.asarray(state["xent_sum"]), jnp.asarray(state["n_tokens"]))
    out[f"logged_at_step_{interval}"] = float(total.value())
    out["tokens_seen"] = float(sum(inputs["n_tokens_by_step"]))
    return out


@solver
def pipeline_gradients(kind: str, inputs: dict) -> Values:
    if "summed_gradient_by_accumulation_step" not in inputs:
        return {}
    config = inputs["config"]
    gradients = jnp.asarray(numbers(inputs["summed_gradient_by_accumulation_step"]))
    parts = config["pipeline_microbatches"] * config["accumulation_steps"]
    # Equal votes of all micro-batches: the weight of each is known before any backward pass.
    weights = eqx_loss.token_weights(jnp.ones((parts, 1), bool), Granularity.SAMPLE)
    return {"gradient": np.asarray(jnp.sum(gradients * weights[0, 0], axis=0)).tolist()}


@solver
def clipped_gradient(kind: str, inputs: dict) -> Values:
    if not {"summed_gradient", "n_tokens"} <= set(inputs):
        return {}
    count = jnp.asarray(float(inputs["n_tokens"]))
    summed = jnp.asarray(numbers(inputs["summed_gradient"]))
    gradient = eqx_loss.guarded_ratio(summed, jnp.broadcast_to(count, summed.shape))
    clip = optax.clip_by_global_norm(float(inputs["config"]["clip_global_norm"]))
    clipped, _ = clip.update(gradient, clip.init(gradient))
    return {
        "grad_norm": float(optax.global_norm(gradient)),
        "gradient": np.asarray(gradient).tolist(),
        "clipped": np.asarray(clipped).tolist(),
    }
