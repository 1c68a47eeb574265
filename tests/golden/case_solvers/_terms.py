"""Sums and counts of terms, packing, fractional weights, domains."""

import re

import jax.numpy as jnp
import numpy as np

import eqx_loss
from eqx_loss import Granularity

from ._registry import MASKS, TOKEN_VALUES, Values, config_of, first_name, grid, nested_like, numbers, solver
from ._tokens import rank_scales, segments_of

GRANULARITIES = {
    "sample_mean": Granularity.SAMPLE,
    "seq_mean_token_mean": Granularity.SAMPLE,
    "microbatch_mean": Granularity.MICRO_BATCH,
    "micro_batch_mean": Granularity.MICRO_BATCH,
    "document_mean": Granularity.DOCUMENT,
}


@solver
def sums_and_counts(kind: str, inputs: dict) -> Values:
    """Pairs named TERM_sum.../TERM_n...: each term is pooled by itself and divided once."""
    config, terms, ranks = config_of(inputs), {}, {}
    for name, value in inputs.items():
        match = re.fullmatch(r"(?:(\w+?)_)??(?:xent_|loss_)?sums?(?:_by_\w+)?", name)
        if match is None:
            continue
        term = match[1] or ""
        # Byte counts are no token counts.
        count = first_name(
            {key: None for key in inputs if "bytes" not in key},
            rf"(?:{term}_)?(?:n|num|count)(?:_tokens|_targets|_by_\w+)*"
            if term
            else r"n(_\w+)?|num_\w+|counts?(_\w+)?|tokens?_by_\w+",
        )
        if count is not None:
            sums, counts = np.ravel(numbers(value)), np.ravel(numbers(inputs[count]))
            by_depth = (name.startswith("mtp") and "_by_" not in name) or name.endswith("_by_depth")
            terms[term] = (eqx_loss.SumCount(jnp.asarray(sums), jnp.asarray(counts)), by_depth)
            if name.endswith("_by_rank"):
                ranks = rank_scales(counts, config)
    if not terms:
        return {}
    pooled = {t: eqx_loss.SumCount(jnp.sum(pair.sum), jnp.sum(pair.count)) for t, (pair, _) in terms.items()}
    out: Values = {term: float(pair.value()) for term, pair in pooled.items() if term} | ranks
    if len(pooled) == 1:
        out.update(_one_term(next(iter(pooled.values())), inputs))
    second = next((term for term in pooled if term not in ("", "main", "lm")), None)
    first = next((term for term in ("main", "lm") if term in pooled), None)
    if first is not None and second is not None:
        main = float(pooled[first].value())
        out["total"] = main + sum(
            _weight_of(term, config) * float(pair.value()) for term, pair in pooled.items() if term != first
        )
        pair, by_depth = terms[second]
        if by_depth:
            weight, depths = _weight_of(second, config), pair.value()
            out["depth_losses"] = np.asarray(depths).tolist()
            out["total_mean_of_depth_means"] = main + weight * float(jnp.mean(depths))
            out["total_pooled_over_depths"] = main + weight * float(pooled[second].value())
    return out


def _one_term(pair: eqx_loss.SumCount, inputs: dict) -> Values:
    out: Values = {
        "loss": float(pair.value()),
        "logged": float(pair.value()),
        "mean": float(pair.value()),
        "sum": float(pair.sum),
        "n_tokens": float(pair.count),
        "perplexity": float(eqx_loss.perplexity(pair)),
    }
    name = first_name(inputs, r"(n|num|total)_bytes(_by_\w+)?|bytes(_by_\w+)?")
    if name is not None:
        num_bytes = jnp.sum(jnp.asarray(np.ravel(numbers(np.atleast_1d(inputs[name]).tolist()))))
        out["bits_per_byte"] = float(eqx_loss.bits_per_byte(pair, num_bytes))
        out["n_bytes"] = float(num_bytes)
    return out


def _weight_of(term: str, config: dict) -> float:
    name = first_name(
        config, rf"({term}|extra)_(loss_)?(weight|coefficient|coef|scale|scaling_factor|scaling)"
    )
    name = name or first_name(config, rf"{term}_loss_scaling_factor|lambda|weight|coefficient")
    return 0.0 if name is None else float(config[name])


@solver
def means_and_counts(kind: str, inputs: dict) -> Values:
    """Means with the counts that they are of, by rank, batch or step: sums are what adds."""
    for name, value in inputs.items():
        match = re.fullmatch(r"(?:mean_)?(?:xent|loss(?:es)?)(?:_mean)?_by_(\w+)|(\w+)_mean_loss", name)
        count = match and first_name(
            inputs, rf"(n|num)_(\w+_)?by_{match[1] or match[2]}|tokens_(by|per)_{match[1] or match[2]}"
        )
        if count:
            means, counts = np.ravel(numbers(value)), np.ravel(numbers(inputs[count]))
            pair = eqx_loss.SumCount(jnp.sum(jnp.asarray(means * counts)), jnp.sum(jnp.asarray(counts)))
            return _one_term(pair, inputs)
    return {}


@solver
def depths_of_tokens(kind: str, inputs: dict) -> Values:
    """Per-token MTP losses of several depths; the mask of a depth is the given one, shifted, or its own."""
    name = first_name(inputs, r"mtp_(per_token_)?(xent|loss|ce|nll)(_by_depth|_per_depth)?")
    if name is None or np.asarray(inputs[name], dtype=object).ndim < 2:
        return {}
    config = config_of(inputs)
    losses = jnp.asarray(numbers(inputs[name]))
    losses = losses[:, None] if losses.ndim == 2 else losses
    own = first_name(inputs, r"mtp_(loss_)?masks?(_by_depth)?|loss_mask_by_depth")
    if own is not None:
        masks = jnp.asarray(numbers(inputs[own])).reshape(losses.shape) != 0
    else:
        mask_name = first_name(inputs, MASKS)
        shape = losses.shape[1:]
        mask = jnp.ones(shape, bool)
        if mask_name is not None:
            mask = jnp.asarray(numbers(inputs[mask_name])).reshape(shape) != 0
        ids = jnp.asarray(np.asarray(inputs.get("segment_ids", np.ones(shape, int))).reshape(shape))
        empty = jnp.zeros(shape, int)
        masks = jnp.stack(
            [
                eqx_loss.shift_targets(empty, mask, depth=k, segment_ids=ids)[1]
                for k in range(1, len(losses) + 1)
            ]
        )
    pairs = [eqx_loss.sum_count(values, mask) for values, mask in zip(losses, masks)]
    means = [float(pair.value()) for pair in pairs]
    pooled = eqx_loss.sum_count(losses.reshape(-1, losses.shape[-1]), masks.reshape(-1, losses.shape[-1]))
    return {
        "depth_losses": means,
        "n_targets_by_depth": [float(pair.count) for pair in pairs],
        "mask_by_depth": np.asarray(masks).tolist(),
        "mtp": float(np.mean(means)),
        "mean_of_depth_means": float(np.mean(means)),
        "pooled_over_depths": float(pooled.value()),
        "mtp_weighted": _weight_of("mtp", config) * float(np.mean(means)),
    }


@solver
def packed_targets(kind: str, inputs: dict) -> Values:
    if "tokens" not in inputs:
        return {}
    tokens = np.atleast_2d(np.asarray(inputs["tokens"]))
    segments = np.asarray(inputs.get("segment_ids", np.ones_like(tokens))).reshape(tokens.shape)
    scored_name = first_name(inputs, MASKS)
    token_mask = None
    if scored_name is not None and np.asarray(inputs[scored_name]).size == tokens.size:
        token_mask = jnp.asarray(inputs[scored_name]).reshape(tokens.shape) != 0
    targets, mask = eqx_loss.next_token_targets(jnp.asarray(tokens), jnp.asarray(segments), token_mask)
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
    config = config_of(inputs)
    depth_name = first_name(
        config, r"(mtp_)?(num_|n_)?(depths?|layers)|mtp_num_layers|num_mtp_(layers|depths)|max_depth"
    )
    depths = int(config[depth_name]) if depth_name is not None else 0
    shifted = [
        eqx_loss.shift_targets(targets, mask, depth=k, segment_ids=jnp.asarray(segments))
        for k in range(1, depths + 1)
    ]
    for k, (own_targets, own_mask) in enumerate(shifted, start=1):
        for prefix in ("mtp_", ""):
            out[f"{prefix}targets_{k}"] = out[f"{prefix}targets_depth_{k}"] = pick(own_targets)
            out[f"{prefix}mask_{k}"] = out[f"{prefix}mask_depth_{k}"] = pick(own_mask)
            out[f"{prefix}n_targets_{k}"] = out[f"{prefix}n_targets_depth_{k}"] = float(own_mask.sum())
    if shifted:
        out["targets_by_depth"] = [pick(own) for own, _ in shifted]
        out["mask_by_depth"] = out["loss_mask_by_depth"] = [pick(own) for _, own in shifted]
        out["n_targets_by_depth"] = [float(own.sum()) for _, own in shifted]
    return out


@solver
def fractional_weights(kind: str, inputs: dict) -> Values:
    scale_name = first_name(inputs, r"loss_weights?|token_weights?|weights?")
    name = first_name(inputs, TOKEN_VALUES)
    if scale_name is None or name is None:
        return {}
    config = config_of(inputs)
    values, there = grid(inputs[name])
    scale = grid(inputs[scale_name])[0].reshape(values.shape)
    mask_name = first_name(inputs, MASKS)
    mask = there & (grid(inputs[mask_name])[0].reshape(values.shape) != 0) if mask_name else there
    objective = str(config.get("objective", "token_mean")).split()[0]
    granularity = GRANULARITIES.get(objective, Granularity.TOKEN)
    size_name = first_name(config, r"micro_?batch_(size|rows)")
    out: Values = {}
    for by, label in (("sum", "divide_by_sum_of_weights"), ("count", "divide_by_count_of_weighted_tokens")):
        weights = eqx_loss.token_weights(
            jnp.asarray(mask),
            granularity,
            micro_batch_size=int(config[size_name]) if size_name else 1,
            segment_ids=segments_of(inputs, mask),
            count_empty=bool(config.get("count_empty", True)),
            token_scale=jnp.asarray(scale),
            scale_denominator=by,
        )
        out[label] = float(jnp.sum(weights * jnp.where(jnp.asarray(mask), values, 0)))
        if by == "sum":
            gradient = nested_like(weights, inputs[name])
            out |= {"loss": out[label], "weighted_loss": out[label], "grad_per_token": gradient}
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
