"""Auxiliary tier: further loss terms, each with its own mask, count and coefficient."""

import numpy as np
from forms import case, group_weights, integers, logsumexp, quarters, ratio, row_group, softmax, xent

_EMPTY_AT = 2


def build():
    """All auxiliary cases."""
    return [*_mtp(), *_router_z(), *_load_balance(), *_lm_z(), *_shapes_of_xent()]


# --- multi-token prediction ------------------------------------------------------------------


def _mtp_batch(seed, lengths, positions, depths):
    """Per-token losses of the main head and of every depth, with their masks."""
    shape = (len(lengths), positions)
    rng = np.random.default_rng(seed)
    masks = np.stack(
        [(np.arange(positions) < np.maximum(np.asarray(lengths) - k, 0)[:, None]) for k in range(depths + 1)]
    ).astype(float)
    losses = rng.integers(4, 25, (depths + 1, *shape)) / 8.0
    return losses[0], masks[0], losses[1:], masks[1:]


def _mtp_answers(batch, groups, *, per_token, coefficient):
    """Objective and log of design rules: =True divides every depth by the lm count, =False by its own."""
    main, mask, losses, masks = batch
    num_depths = len(losses)
    own = [group_weights(depth_mask, groups) for depth_mask in masks]
    if per_token:
        weights = [depth_mask / max(mask.sum(), 1) for depth_mask in masks]
        lm_weights = mask / max(mask.sum(), 1)
    else:
        weights, lm_weights = own, group_weights(mask, groups)
    lm = (lm_weights * main).sum()
    mtp = coefficient / num_depths * sum((w * x).sum() for w, x in zip(weights, losses))
    return {
        "objective_lm": lm,
        "objective_mtp": mtp,
        "objective_total": lm + mtp,
        "log_lm": ratio((mask * main).sum(), mask.sum()),
        "log_mtp": [(w * x).sum() for w, x in zip(own, losses)],
    }


def _mtp_case(name, batch, schedule, bugs, *, per_token, title, source, explanation, coefficient=0.1):
    groups = [row_group(batch[1].shape, rows) for step in schedule for rows in step]
    right = _mtp_answers(batch, groups, per_token=per_token, coefficient=coefficient)
    return case(
        name,
        tier="auxiliary",
        task="mtp",
        title=title,
        question="Objective of the main and the multi-token-prediction term, their sum, the logged main "
        "loss, and the logged loss of every depth (mean over micro-batches of the depth's own mean, "
        "without the coefficient).",
        inputs={
            "xent": batch[0], "loss_mask": batch[1], "mtp_xent": batch[2], "mtp_mask": batch[3],
            "schedule": schedule, "calculate_per_token_loss": per_token, "mtp_loss_scaling_factor": coefficient,
        },
        right=right,
        bugs=bugs(batch, groups, right, coefficient),
        source=source,
        explanation=explanation,
    )  # fmt: skip


def _objectives(right, mtp):
    return {"objective_mtp": mtp, "objective_total": right["objective_lm"] + mtp}


def _mtp():
    one = _mtp_batch(201, [6, 3, 1, 5], 6, 1)
    two = _mtp_batch(211, [6, 4, 2], 6, 2)
    empty = _mtp_batch(221, [5, 1, 4], 5, 1)
    rows = [[[0]], [[1]], [[2]], [[3]]]
    masked = _mtp_batch(231, [3, 5], 6, 1)
    masked = (*masked[:2], np.where(masked[3] > 0, masked[2], 60.0), masked[3])

    def sums(batch):
        return [(m * x).sum() for m, x in zip(batch[3], batch[2])], [m.sum() for m in batch[3]]

    def per_sample_bugs(batch, groups, right, lam):
        totals, counts = sums(batch)
        return {
            "depth_divided_by_lm_count": _objectives(right, lam / len(totals) * sum(totals) / batch[1].sum()),
            "depth_pooled_over_samples": _objectives(
                right, lam / len(totals) * sum(t / n for t, n in zip(totals, counts))
            ),
            "coefficient_missing": _objectives(right, right["objective_mtp"] / lam),
        }

    def per_token_bugs(batch, groups, right, lam):
        totals, counts = sums(batch)
        local = sum(
            (batch[1] * g).sum() / max((m * g).sum(), 1) * (m * x * g).sum() / batch[1].sum()
            for m, x in zip(batch[3], batch[2])
            for g in groups
        )
        return {
            "depth_divided_by_own_count": _objectives(
                right, lam / len(totals) * sum(t / n for t, n in zip(totals, counts))
            ),
            "rescaled_by_local_counts": _objectives(
                right, lam / len(totals) * local
            ),  # Megatron 0.17 and later
            "mean_added_to_sum": _objectives(
                right, lam * np.mean(right["log_mtp"]) * len(groups) / batch[1].sum()
            ),
            "not_divided_by_depths": _objectives(right, lam * sum(totals) / batch[1].sum())
            if len(totals) > 1
            else {},
        }

    def empty_bugs(batch, groups, right, lam):
        keep = [g for g in groups if (batch[3][0] * g).sum() > 0]
        skipped = lam * (group_weights(batch[3][0], keep) * batch[2][0]).sum()
        return {
            "nan_from_0_over_0": {"objective_mtp": np.nan},
            "empty_not_counted": _objectives(right, skipped),
        }

    def mask_bugs(batch, groups, right, lam):
        ones = np.ones_like(batch[3][0])
        return {
            "missing_mask_taken_as_ones": _objectives(
                right, lam * (group_weights(ones, groups) * batch[2][0]).sum()
            )
        }

    cases = [
        _mtp_case(
            "mtp_per_sample", one, rows, per_sample_bugs, per_token=False, title="One depth, per-sample normalization",
            source="RFC-0032, per-sample loss normalization in MaxText",
            explanation="Each depth is divided by its own count within the sample, then samples have "
            "equal votes.",
        ),
        _mtp_case(
            "mtp_per_token", one, rows, per_token_bugs, per_token=True, title="One depth, per-token normalization",
            source="https://github.com/NVIDIA/Megatron-LM/issues/2417",
            explanation="Raw sum over the global lm count (Megatron to 0.16, RFC-0032). Megatron 0.17 and "
            "later rescale by local counts, which depends on how the batch is cut: listed as "
            "rescaled_by_local_counts.",
        ),
        _mtp_case(
            "mtp_two_depths", two, [[[0], [1], [2]]], per_token_bugs, per_token=True, title="Two depths on three ranks",
            source="https://github.com/NVIDIA/Megatron-LM/issues/1532",
            explanation="The coefficient is divided by the number of depths; depths are logged apart and "
            "unweighted.",
        ),
        _mtp_case(
            "mtp_empty_depth", empty, rows[:3], empty_bugs, per_token=False,
            title="A micro-batch without a target at depth 1",
            source="https://github.com/NVIDIA/Megatron-LM/issues/3396",
            explanation="One valid label at position 0 is enough: rolled once, nothing is left. The depth "
            "contributes 0 and the micro-batch still counts. Megatron before 0.17 gives NaN.",
        ),
        _mtp_case(
            "mtp_mask_forwarded", masked, [[[0], [1]]], mask_bugs, per_token=False,
            title="The mask reaches the extra head",
            source="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/6103",
            explanation="A missing mask must be an error: as all-ones, padding and prompts dominate the "
            "auxiliary loss.",
        ),
    ]  # fmt: skip
    for entry in cases:
        entry["known_bugs"] = [bug for bug in entry["known_bugs"] if bug["values"]]
    return cases


# --- router losses ---------------------------------------------------------------------------


def _router_z():
    logits = quarters(301, 2, 4, 3, 4)
    mask = (np.arange(3) < np.array([3, 1, 2, 3])[:, None]).astype(float)
    squares = logsumexp(logits) ** 2  # [layers, rows, positions]
    coefficient, num_layers = 1e-3, 2
    per_layer = squares.mean((1, 2))
    schedule = [[[0], [1]], [[2], [3]]]
    padded = ratio((squares * mask).sum((1, 2)), mask.sum())
    by_row = ratio((squares * mask).sum(2), mask.sum(1)).mean(1)
    question = (
        "Objective of the router z-loss (coefficient times logsumexp squared, summed over layers) and the "
        "logged value of each layer without the coefficient."
    )

    def one(name, right, bugs, per_token, title, explanation, **extra):
        return case(
            name, tier="auxiliary", task="router_z", title=title, question=question,
            inputs={"router_logits": logits, "loss_mask": mask, "schedule": schedule, "coefficient": coefficient,
                    "calculate_per_token_loss": per_token, **extra},
            right=right, bugs=bugs, source="https://github.com/NVIDIA/Megatron-LM/pull/5047", explanation=explanation,
        )  # fmt: skip

    total = coefficient * per_layer.sum()
    token = coefficient * squares.sum() / mask.sum()
    return [
        one(
            "router_z_per_micro_batch", {"objective": total, "log": per_layer},
            {"multiplied_by_micro_steps": {"objective": 2 * total},
             "mean_over_layers": {"objective": total / num_layers},
             "masked_like_the_lm_loss": {"objective": coefficient * padded.sum(), "log": padded}},
            False, "Mean over positions, padding included, mean over micro-batches",
            "Without a padding mask all groups have equally many positions: the per-group and the global "
            "mean are equal.",
        ),
        one(
            "router_z_per_token", {"objective": token, "log": per_layer},
            {"divided_by_positions": {"objective": total}, "mean_divided_by_tokens": {"objective": total / mask.sum()}},
            True, "Summed over all positions, divided by the scored tokens",
            "Megatron injects mean x router tokens and divides by the global token count; positions "
            "outside the loss mask count in the sum. Injecting the mean makes the term "
            "positions-per-micro-batch times too small.",
        ),
        one(
            "router_z_padding_masked", {"objective": coefficient * by_row.sum(), "log": by_row},
            {"global_mean_over_unmasked": {"objective": coefficient * padded.sum(), "log": padded},
             "padding_counted": {"objective": total, "log": per_layer}},
            False, "With a padding mask groups differ in size",
            "Mean over the unmasked positions of each micro-batch (one row), then over micro-batches.",
            padding_masked=True,
        ),
    ]  # fmt: skip


def _load_balance():
    logits = np.array([[2.0, 0.5, -1.0], [1.5, 0.0, 0.5], [0.25, 1.75, 0.125], [1.0, 0.25, -0.5]])
    num_experts = 3
    probs = softmax(logits)
    share, mean_prob = np.eye(num_experts)[logits.argmax(-1)].mean(0), probs.mean(0)
    aux = num_experts * (share * mean_prob).sum()
    inner = num_experts * share / len(logits)
    grad = probs * (inner - (probs * inner).sum(-1, keepdims=True))
    halves = []
    for part in (slice(0, 2), slice(2, 4)):
        f, p = np.eye(num_experts)[logits[part].argmax(-1)].mean(0), probs[part].mean(0)
        halves.append(num_experts * (f * p).sum())
    return [
        case(
            "load_balance_over_shards", tier="auxiliary", task="load_balance",
            title="Load-balancing loss of one micro-batch cut over ranks",
            question="E * sum_e f_e P_e with f the share of tokens sent to expert e (top 1, no gradient) "
            "and P the mean router probability; f; P; gradient by the router logits. `shards` lists each "
            "rank's tokens.",
            inputs={"router_logits": logits, "top_k": 1, "shards": [[0, 1], [2, 3]]},
            right={"aux": aux, "f": share, "P": mean_prob, "grad_router_logits": grad},
            bugs={"mean_of_shard_values": {"aux": np.mean(halves)}, "sum_of_shard_values": {"aux": np.sum(halves)},
                  "without_num_experts": {"aux": aux / num_experts}},
            source="https://github.com/NVIDIA/Megatron-LM/pull/5047",
            explanation="Counts and probabilities are summed over the ranks that share the micro-batch "
            "before they are multiplied: the product of means is not the mean of products.",
        )
    ]  # fmt: skip


# --- z-loss of the output head and variants of the cross-entropy --------------------------------


def _lm_z():
    logits, targets = quarters(401, 3, 5), np.array([4, 0, 2])
    mask = np.array([1.0, 1.0, 0.0])
    coefficient = 0.01
    lse = logsumexp(logits)
    count = mask.sum()
    cross_entropy = (mask * xent(logits, targets)).sum() / count
    z_loss = coefficient * (mask * lse**2).sum() / count
    weights = mask / count
    grad = weights[:, None] * (softmax(logits) * (1 + 2 * coefficient * lse[:, None]) - np.eye(5)[targets])
    return [
        case(
            "lm_z_loss_reported_apart", tier="auxiliary", task="lm_z",
            title="Output z-loss: separate values, one gradient",
            question="Cross-entropy, weighted z-loss, their sum, its gradient by the logits, and the "
            "perplexity.",
            inputs={"logits": logits, "targets": targets, "loss_mask": mask, "z_loss_multiplier": coefficient},
            right={"cross_entropy": cross_entropy, "z_loss": z_loss, "total": cross_entropy + z_loss,
                   "grad_logits": grad,
                   "perplexity": np.exp(cross_entropy)},
            bugs={"z_over_all_positions": {"z_loss": coefficient * (lse**2).mean()},
                  "perplexity_of_total": {"perplexity": np.exp(cross_entropy + z_loss)},
                  "z_in_the_reported_loss": {"cross_entropy": cross_entropy + z_loss}},
            source="https://github.com/allenai/OLMo-core/pull/702",
            explanation="The gradient is softmax * (1 + 2 c logsumexp) - onehot, masked and divided by "
            "the same count.",
        ),
        case(
            "lm_z_loss_off_is_off", tier="auxiliary", task="lm_z", title="A multiplier of 0 leaves no trace",
            question="The same with the z-loss switched off.",
            inputs={"logits": logits, "targets": targets, "loss_mask": mask, "z_loss_multiplier": 0.0},
            right={"cross_entropy": cross_entropy, "z_loss": 0.0, "total": cross_entropy,
                   "grad_logits": weights[:, None] * (softmax(logits) - np.eye(5)[targets]),
                   "perplexity": np.exp(cross_entropy)},
            bugs={"default_multiplier_applied": {"z_loss": 1e-4 * (mask * lse**2).sum() / count}},
            source="https://github.com/allenai/OLMo-core/pull/702",
            explanation="Off means an exact 0, not a small default.",
        ),
    ]  # fmt: skip


def _shapes_of_xent():
    logits, targets = 8 * quarters(411, 3, 6), integers(412, 6, 3)
    cap, smoothing = 10.0, 0.1
    capped = cap * np.tanh(logits / cap)
    log_probs = logits / 8 - logsumexp(logits / 8)[:, None]
    picked = np.take_along_axis(log_probs, targets[:, None], 1)[:, 0]
    smooth = -(1 - smoothing) * picked - smoothing * log_probs.mean(1)
    question = "Cross-entropy of each token, nats."
    return [
        case(
            "logit_soft_cap", tier="auxiliary", task="per_token",
            title="Logits capped before the softmax", question=question,
            inputs={"logits": logits, "targets": targets, "logit_soft_cap": cap},
            right={"xent": xent(capped, targets)},
            bugs={"not_capped": {"xent": xent(logits, targets)},
                  "target_logit_not_capped": {
                      "xent": logsumexp(capped) - np.take_along_axis(logits, targets[:, None], 1)[:, 0]}},
            source="https://github.com/unslothai/unsloth/issues/10616",
            explanation="cap * tanh(logits / cap), for the logsumexp and for the target's logit alike.",
        ),
        case(
            "label_smoothing", tier="auxiliary", task="per_token", title="Label smoothing over the whole vocabulary",
            question=question, inputs={"logits": logits / 8, "targets": targets, "label_smoothing": smoothing},
            right={"xent": smooth},
            bugs={"not_smoothed": {"xent": -picked},
                  "spread_over_other_classes": {
                      "xent": -(1 - smoothing) * picked - smoothing * (log_probs.sum(1) - picked) / 5}},
            source="https://github.com/google-deepmind/optax/issues/1020",
            explanation="(1 - s) on the target plus s / V on every class, the target included (PyTorch's "
            "and optax's rule).",
        ),
    ]  # fmt: skip
