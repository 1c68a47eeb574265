"""Sums and counts of terms, packing, mixture of experts, fractional weights, domains."""

import re

import jax
import jax.numpy as jnp
import numpy as np

import eqx_loss
from eqx_loss import Granularity

from ._registry import MASKS, TOKEN_VALUES, Values, config_of, first_name, grid, nested_like, numbers, solver


@solver
def sums_and_counts(kind: str, inputs: dict) -> Values:
    """Pairs named TERM_sum.../TERM_n...: each term is pooled by itself and divided once."""
    config, terms = config_of(inputs), {}
    for name, value in inputs.items():
        match = re.fullmatch(r"(?:(\w+?)_)??(?:xent_|loss_)?sums?(?:_by_\w+)?", name)
        if match is None:
            continue
        term = match[1] or ""
        count = first_name(
            inputs,
            rf"(?:{term}_)?(?:n|num|count)(?:_tokens|_targets|_by_\w+)*"
            if term
            else r"n(_\w+)?|num_\w+|counts?(_\w+)?",
        )
        if count is not None:
            sums, counts = np.atleast_1d(numbers(value)), np.atleast_1d(numbers(inputs[count]))
            terms[term] = (
                eqx_loss.SumCount(jnp.asarray(sums), jnp.asarray(counts)),
                name.startswith("mtp") and "_by_" not in name,
            )
    if not terms:
        return {}
    pooled = {t: eqx_loss.SumCount(jnp.sum(pair.sum), jnp.sum(pair.count)) for t, (pair, _) in terms.items()}
    out: Values = {term: float(pair.value()) for term, pair in pooled.items() if term}
    only = next(iter(pooled.values()))
    if len(pooled) == 1:
        out.update(
            loss=float(only.value()),
            logged=float(only.value()),
            mean=float(only.value()),
            n_tokens=float(only.count),
            perplexity=float(eqx_loss.perplexity(only)),
        )
    weight = float(config.get("mtp_loss_weight", config.get("extra_weight", 0.0)))
    second = next((term for term in pooled if term not in ("", "main")), None)
    if "main" in pooled and second is not None:
        pair, by_depth = terms[second]
        main = float(pooled["main"].value())
        out["total"] = main + weight * float(pooled[second].value())
        if by_depth:
            depths = pair.value()
            out["depth_losses"] = np.asarray(depths).tolist()
            out["total_mean_of_depth_means"] = main + weight * float(jnp.mean(depths))
            out["total_pooled_over_depths"] = main + weight * float(pooled[second].value())
    return out


@solver
def packed_targets(kind: str, inputs: dict) -> Values:
    if not {"tokens", "segment_ids"} <= set(inputs):
        return {}
    tokens, segments = (np.atleast_2d(np.asarray(inputs[name])) for name in ("tokens", "segment_ids"))
    targets, mask = eqx_loss.next_token_targets(jnp.asarray(tokens), jnp.asarray(segments))
    flat = np.asarray(inputs["tokens"]).ndim == 1
    pick = (lambda a: np.asarray(a)[0].tolist()) if flat else (lambda a: np.asarray(a).tolist())
    out: Values = {"targets": pick(targets), "loss_mask": pick(mask), "n_targets": float(mask.sum())}
    name = first_name(inputs, r"xent_of_predicting_next|per_token_xent|per_token_loss")
    if name is not None:
        xent, there = grid(inputs[name])
        width = xent.shape[1]
        scored = mask[:, :width] & jnp.asarray(there)
        out.update(
            loss_mask=pick(scored.astype(float)),
            loss=float(eqx_loss.granular_mean(jnp.asarray(xent), scored, Granularity.TOKEN)),
            document_mean=float(
                eqx_loss.granular_mean(
                    jnp.asarray(xent),
                    scored,
                    Granularity.DOCUMENT,
                    segment_ids=jnp.asarray(segments[:, :width]),
                )
            ),
        )
    depths = int(config_of(inputs).get("mtp_num_layers", config_of(inputs).get("depth", 0)) or 0)
    for depth in range(1, depths + 1):
        shifted, shifted_mask = eqx_loss.shift_targets(
            targets, mask, depth=depth, segment_ids=jnp.asarray(segments)
        )
        out[f"mtp_targets_{depth}"], out[f"mtp_mask_{depth}"] = pick(shifted), pick(shifted_mask)
        out[f"mtp_n_targets_{depth}"] = float(shifted_mask.sum())
    return out


@solver
def router(kind: str, inputs: dict) -> Values:
    if "router_logits" not in inputs:
        return {}
    config = config_of(inputs)
    logits = jnp.asarray(numbers(inputs["router_logits"]))[None]
    positions, experts = logits.shape[1], logits.shape[2]
    mask_name = first_name(inputs, r"padding_mask|token_mask|loss_mask|mask|valid_mask")
    mask = np.ones((1, positions), bool)
    if mask_name:
        mask = np.asarray(inputs[mask_name]).reshape(1, -1) != 0
        mask = ~mask if mask_name == "padding_mask" else mask
    top_k, sigmoid = (
        int(config.get("top_k", 1)),
        "sigmoid" in str(config.get("score_function", config.get("scores", ""))),
    )
    selected = jax.lax.top_k(logits, top_k)[1]
    counts = eqx_loss.expert_counts(selected, jnp.asarray(mask), experts)

    def scores(x: jax.Array) -> jax.Array:
        raw = jax.nn.sigmoid(x) if sigmoid else jax.nn.softmax(x, axis=-1)
        return raw / jnp.sum(raw, axis=-1, keepdims=True) if sigmoid else raw

    def aux(x: jax.Array, parts: list[list[int]]) -> jax.Array:
        kept = jnp.where(jnp.asarray(mask)[..., None], scores(x), 0)
        sums = sum(jnp.sum(kept[:, jnp.asarray(part)], axis=1) for part in parts)
        return eqx_loss.load_balance(sums, counts, jnp.asarray(mask.sum(1)))[0]

    def z_loss(x: jax.Array) -> jax.Array:
        return eqx_loss.granular_mean(eqx_loss.router_z_term(x), jnp.asarray(mask), Granularity.TOKEN)

    shardings = config.get("shardings") or [[list(range(positions))]]
    results = [jax.value_and_grad(aux)(logits, parts) for parts in shardings]
    for value, gradient in results[1:]:
        np.testing.assert_allclose(value, results[0][0], rtol=1e-12)
        np.testing.assert_allclose(gradient, results[0][1], rtol=1e-12, atol=1e-15)
    z_value, z_gradient = jax.value_and_grad(z_loss)(logits)
    share = np.asarray(counts[0], float)
    is_z = "z" in kind or "logsumexp" in str(config.get("formula", ""))
    return {
        "aux": float(results[0][0]),
        "load_balance": float(results[0][0]),
        "f": (share / share.sum()).tolist() if share.sum() else share.tolist(),
        "counts": share.tolist(),
        "tokens_per_expert": share.tolist(),
        "P": np.asarray(
            jnp.sum(jnp.where(jnp.asarray(mask)[..., None], scores(logits), 0), axis=1)[0]
            / max(mask.sum(), 1)
        ).tolist(),
        "z_loss": float(z_value),
        "router_z": float(z_value),
        "grad_router_logits": np.asarray((z_gradient if is_z else results[0][1])[0]).tolist(),
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


@solver
def fractional_weights(kind: str, inputs: dict) -> Values:
    scale_name = first_name(inputs, r"loss_weights?|token_weights?|weights?")
    name = first_name(inputs, TOKEN_VALUES)
    if scale_name is None or name is None:
        return {}
    values, there = grid(inputs[name])
    scale, _ = grid(inputs[scale_name])
    out: Values = {}
    for by, label in (("sum", "divide_by_sum_of_weights"), ("count", "divide_by_count_of_weighted_tokens")):
        weights = eqx_loss.token_weights(
            jnp.asarray(there), Granularity.TOKEN, token_scale=jnp.asarray(scale), scale_denominator=by
        )
        out[label] = float(jnp.sum(weights * values))
        if by == "sum":
            out |= {
                "loss": out[label],
                "weighted_loss": out[label],
                "grad_per_token": nested_like(weights, inputs[name]),
            }
    return out


@solver
def domains(kind: str, inputs: dict) -> Values:
    ids_name = first_name(inputs, r"domain(_ids?)?_of_(token|row)|domain_ids?|domains")
    name = first_name(inputs, TOKEN_VALUES)
    if ids_name is None or name is None:
        return {}
    values, there = grid(inputs[name])
    mask_name = first_name(inputs, MASKS)
    mask = jnp.asarray(there & (grid(inputs[mask_name])[0] != 0) if mask_name else there)
    raw = np.asarray(inputs[ids_name])
    ids = jnp.asarray(raw if raw.ndim == 2 or raw.shape[0] == values.shape[0] != 1 else raw[None])
    number_of_domains = int(raw.max()) + 1
    for key in ("sampling_weight", "objective_weight"):
        number_of_domains = max(number_of_domains, len(inputs.get(key, ())))
    by_domain = eqx_loss.by_domain(jnp.asarray(values), mask, ids, number_of_domains)
    pooled = eqx_loss.SumCount(jnp.sum(by_domain.sum), jnp.sum(by_domain.count))
    out: Values = {
        "domain_loss": np.asarray(by_domain.value()).tolist(),
        "domain_tokens": np.asarray(by_domain.count).tolist(),
        "token_mean": float(pooled.value()),
    }
    if {"sampling_weight", "objective_weight"} <= set(inputs):
        objective = jnp.asarray(numbers(inputs["objective_weight"]))
        scale = eqx_loss.domain_scale(ids, objective, jnp.asarray(numbers(inputs["sampling_weight"])))
        weights = eqx_loss.token_weights(
            mask,
            Granularity.TOKEN,
            token_scale=jnp.broadcast_to(scale, mask.shape),
            scale_denominator="count",
        )
        out["importance_weighted"] = float(jnp.sum(weights * values))
        out["weighted_mean_of_domain_losses"] = float(
            jnp.sum(objective * by_domain.value()) / jnp.sum(objective)
        )
    return out
