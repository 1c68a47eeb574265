"""Mixture of experts: load balance, router z-loss, expert bias."""

import jax
import jax.numpy as jnp
import numpy as np

import eqx_loss
from eqx_loss import Granularity, LoadBalanceScope

from ._registry import Values, config_of, first_name, numbers, solver

PADDING = r"padding_mask|is_padding"
_WEIGHT = r"(\w+_)?(weight|coefficient|coef|coeff)"


@solver
def router(kind: str, inputs: dict) -> Values:
    """Router logits `[tokens, experts]`, or `[rows, tokens, experts]`; one unit unless a scope is named."""
    if "router_logits" not in inputs:
        return {}
    config = config_of(inputs)
    given = numbers(inputs["router_logits"])
    rows = jnp.asarray(given if given.ndim == 3 else given[None])
    mask = _counted(inputs, rows.shape[:2])
    logits, flat = rows.reshape(1, -1, rows.shape[-1]), mask.reshape(1, -1)
    counts = _counts(logits, flat, config)

    def aux(x: jax.Array, parts: list[list[int]]) -> jax.Array:
        kept = jnp.where(flat[..., None], _scores(x, config), 0)
        sums = sum(jnp.sum(kept[:, jnp.asarray(part)], axis=1) for part in parts)
        return eqx_loss.load_balance(sums, counts, jnp.sum(flat, axis=1))[0]

    def z_loss(x: jax.Array) -> jax.Array:
        return eqx_loss.granular_mean(eqx_loss.router_z_term(x), flat, Granularity.TOKEN)

    shardings = config.get("shardings") or [[list(range(logits.shape[1]))]]
    results = [jax.value_and_grad(aux)(logits, parts) for parts in shardings]
    # float64 sums in another order; the first is judged against the file. 1e-15: gradients of exactly 0.
    for value, gradient in results[1:]:
        np.testing.assert_allclose(value, results[0][0], rtol=1e-12)
        np.testing.assert_allclose(gradient, results[0][1], rtol=1e-12, atol=1e-15)
    z_value, z_gradient = jax.value_and_grad(z_loss)(logits)
    share = np.asarray(counts[0], float)
    is_z = "z" in kind or "logsumexp" in str(config.get("formula", ""))
    weight_name = first_name(config, _WEIGHT)
    weight = 1.0 if weight_name is None else float(config[weight_name])
    gradient = z_gradient if is_z else results[0][1]
    probabilities = jnp.sum(jnp.where(flat[..., None], _scores(logits, config), 0), axis=1)[0]
    units = _units(rows, mask, config)
    scope = str(config.get("load_balance_scope", config.get("scope", "global_batch")))
    value = units.get(f"{scope}_aux", float(results[0][0]))
    return {
        "aux": value,
        "load_balance": value,
        "weighted_aux": weight * value,
        "f": (share / share.sum()).tolist() if share.sum() else share.tolist(),
        "counts": share.tolist(),
        "tokens_per_expert": share.tolist(),
        "P": np.asarray(probabilities / jnp.maximum(jnp.sum(flat), 1)).tolist(),
        "z_loss": float(z_value),
        "router_z": float(z_value),
        "weighted_z_loss": weight * float(z_value),
        "grad_router_logits": np.asarray(gradient).reshape(given.shape).tolist(),
        "n_tokens": float(jnp.sum(flat)),
        **units,
    }


def _counted(inputs: dict, shape: tuple[int, ...]) -> jax.Array:
    name = first_name(inputs, rf"{PADDING}|token_mask|loss_mask|mask|valid_mask|router_mask")
    if name is None:
        return jnp.ones(shape, bool)
    mask = jnp.asarray(np.asarray(inputs[name]).reshape(shape) != 0)
    return ~mask if first_name({name: 0}, PADDING) else mask


def _counts(logits: jax.Array, mask: jax.Array, config: dict) -> jax.Array:
    selected = jax.lax.top_k(logits, int(config.get("top_k", config.get("num_experts_per_tok", 1))))[1]
    return eqx_loss.expert_counts(selected, mask, logits.shape[-1])


def _scores(logits: jax.Array, config: dict) -> jax.Array:
    """Scores normalized over experts."""
    if "sigmoid" in str(config.get("score_function", config.get("scores", ""))):
        raw = jax.nn.sigmoid(logits)
        return raw / jnp.sum(raw, axis=-1, keepdims=True)
    return jax.nn.softmax(logits, axis=-1)


def _units(logits: jax.Array, mask: jax.Array, config: dict) -> Values:
    """Load balance in every scope that the rows allow: mean over units of each one's value."""
    sums = jnp.sum(jnp.where(mask[..., None], _scores(logits, config), 0), axis=1)
    counts, positions = _counts(logits, mask, config), jnp.sum(mask, axis=1)
    size = int(config.get("micro_batch_size", config.get("microbatch_rows", 1)))
    out: Values = {}
    for scope in LoadBalanceScope:
        pooled = [
            eqx_loss.load_balance_units(values, scope, micro_batch_size=size)
            for values in (sums, counts, positions[:, None])
        ]
        values = eqx_loss.load_balance(pooled[0], pooled[1], pooled[2][:, 0])
        out[f"{scope.value}_aux"] = float(jnp.mean(values))
        out[f"aux_{scope.value}"] = float(jnp.mean(values))
    return out


@solver
def counts_and_probabilities(kind: str, inputs: dict) -> Values:
    """Load balance from counts and mean scores of units: f pooled over them or each its own."""
    counts_name = first_name(inputs, r"(tokens_per_expert|expert_counts|counts)(_by_\w+)?")
    sums_name = first_name(inputs, r"(score|prob(ability)?|router_prob)_sums?(_by_\w+)?")
    positions_name = first_name(inputs, r"(n|num)_(tokens|positions)(_by_\w+)?")
    if counts_name is None or sums_name is None or positions_name is None:
        return {}
    counts, sums = (np.atleast_2d(numbers(inputs[name])) for name in (counts_name, sums_name))
    positions = np.ravel(numbers(np.atleast_1d(inputs[positions_name]).tolist()))

    def balance(sums: np.ndarray, counts: np.ndarray, positions: np.ndarray) -> float:
        values = eqx_loss.load_balance(jnp.asarray(sums), jnp.asarray(counts), jnp.asarray(positions))
        return float(jnp.mean(values))

    whole = balance(sums.sum(0)[None], counts.sum(0)[None], positions.sum()[None])
    return {
        "aux": whole,
        "global_batch_aux": whole,
        "micro_batch_aux": balance(sums, counts, positions),
        "mean_of_microbatch_aux": balance(sums, counts, positions),
    }


@solver
def router_bias(kind: str, inputs: dict) -> Values:
    name = first_name(inputs, r"(tokens_per_expert|expert_counts|counts)(_by_\w+)?")
    rate = config_of(inputs).get(
        "update_rate", config_of(inputs).get("bias_update_rate", config_of(inputs).get("rate"))
    )
    if name is None or rate is None:
        return {}
    counts = np.atleast_2d(numbers(inputs[name])).sum(axis=0)
    bias = numbers(inputs.get("bias", inputs.get("expert_bias", [0.0] * len(counts))))
    zero_mean = bool(config_of(inputs).get("zero_mean", False))
    updated = eqx_loss.updated_router_bias(
        jnp.asarray(bias), jnp.asarray(counts), rate=float(rate), zero_mean=zero_mean
    )
    values = np.asarray(updated).tolist()
    return dict.fromkeys(("bias", "new_bias", "updated_bias", "expert_bias"), values) | {
        "total_counts": counts.tolist()
    }
