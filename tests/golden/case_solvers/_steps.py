"""Accumulation windows, log intervals, order of optimizer operations."""

import jax.numpy as jnp
import numpy as np
import optax

import eqx_loss
from eqx_loss import Granularity

from ._registry import Values, config_of, first_name, numbers, solver


@solver
def mean_losses_in_windows(kind: str, inputs: dict) -> Values:
    if not {"microbatch_mean_loss", "tokens_per_microbatch"} <= set(inputs):
        return {}
    steps = int(config_of(inputs)["accumulation_steps"])
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
    config = config_of(inputs)
    saved_at, interval = config["checkpoint_after_step"], config["log_interval"]
    pairs = [
        eqx_loss.SumCount(jnp.asarray(float(loss * n)), jnp.asarray(float(n)))
        for loss, n in zip(inputs["loss_by_step"], inputs["n_tokens_by_step"])
    ]
    total, steps = eqx_loss.zero_logs(pairs[0]), 0
    out: Values = {"tokens_seen": float(sum(inputs["n_tokens_by_step"]))}
    for step, pair in enumerate(pairs, start=1):
        total, steps = eqx_loss.add_logs(total, pair), steps + 1
        if step % interval == 0:
            out[f"logged_at_step_{step}"] = float(total.value())
            total, steps = eqx_loss.zero_logs(total), 0
        if step in np.ravel(saved_at):
            # All that a resumed run has: three numbers of the interval in progress.
            state = {"xent_sum": float(total.sum), "n_tokens": float(total.count), "steps": steps}
            out[f"state_at_step_{step}"] = state
            out["tokens_seen_at_save"] = float(sum(inputs["n_tokens_by_step"][:step]))
            total = eqx_loss.SumCount(jnp.asarray(state["xent_sum"]), jnp.asarray(state["n_tokens"]))
    return out


@solver
def pipeline_gradients(kind: str, inputs: dict) -> Values:
    if "summed_gradient_by_accumulation_step" not in inputs:
        return {}
    config = config_of(inputs)
    gradients = jnp.asarray(numbers(inputs["summed_gradient_by_accumulation_step"]))
    steps = config.get("accumulation_steps", len(gradients))
    parts = config["pipeline_microbatches"] * steps * config.get("data_parallel_size", 1)
    # Equal votes of all micro-batches: the weight of each is known before any backward pass.
    weights = eqx_loss.token_weights(jnp.ones((parts, 1), bool), Granularity.SAMPLE)
    return {"gradient": np.asarray(jnp.sum(gradients * weights[0, 0], axis=0)).tolist()}


@solver
def gradients_with_counts(kind: str, inputs: dict) -> Values:
    """Summed gradients of parts with their token counts: one division by all tokens, then the clip."""
    name = first_name(inputs, r"summed_gradients?(_by_\w+)?|gradient_sums?(_by_\w+)?")
    count_name = first_name(inputs, r"(n|num)_tokens(_by_\w+)?")
    if name is None or count_name is None:
        return {}
    config = config_of(inputs)
    count = jnp.asarray(float(np.sum(numbers(np.atleast_1d(inputs[count_name]).tolist()))))
    summed = jnp.asarray(numbers(inputs[name]))
    summed = jnp.sum(summed, axis=0) if "_by_" in name else summed
    gradient = eqx_loss.guarded_ratio(summed, jnp.broadcast_to(count, summed.shape))
    out: Values = {
        "grad_norm": float(optax.global_norm(gradient)),
        "gradient": np.asarray(gradient).tolist(),
        "n_tokens": float(count),
    }
    limit = first_name(config, r"clip_(global_)?norm|max_(grad_)?norm|gradient_clipping(_threshold)?")
    if limit is not None:
        clip = optax.clip_by_global_norm(float(config[limit]))
        clipped, _ = clip.update(gradient, clip.init(gradient))
        out["clipped"] = np.asarray(clipped).tolist()
        out["clipped_norm"] = float(optax.global_norm(clipped))
    return out
