"""Advanced tier: gradients through a head, weights, logs, resumption, scales of foreign reductions."""

import numpy as np
from forms import case, integers, quarters, ratio, xent, xent_grad


def build():
    """All advanced cases."""
    return [*_linear_head(), *_weighting(), *_logs(), *_steps(), *_scales(), *_estimators()]


# --- gradients ------------------------------------------------------------------------------


def _head_answers(hidden, head, targets, weights):
    logits = hidden @ head
    grad = xent_grad(logits, targets, weights)
    return {
        "loss": (weights * xent(logits, targets)).sum(),
        "grad_hidden": grad @ head.T,
        "grad_head": hidden.T @ grad,
    }


def _linear_head():
    hidden, head, targets = (
        quarters(501, 6, 3, low=-5, high=6),
        quarters(502, 3, 4, low=-4, high=5),
        integers(503, 4, 6),
    )
    mask = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    parts = [[0, 1], [2, 3, 4], [5]]
    means = sum((_part(mask, part) / mask[part].sum() for part in parts), np.zeros(6)) / 3
    upstream = np.array([0.5, 0.0, -1.0, 2.0, 0.25, -0.5])
    wrong = _head_answers(hidden, head, targets, np.full(6, upstream[0]))
    return [
        case(
            "linear_head_any_partition", tier="advanced", task="linear_head",
            title="Loss and gradients of a linear head do not depend on the partition",
            question="Token-mean loss of logits = hidden @ head, and its gradients by hidden and head; "
            "`parts` is how the rows are cut.",
            inputs={"hidden": hidden, "head": head, "targets": targets, "loss_mask": mask, "parts": parts},
            right=_head_answers(hidden, head, targets, mask / mask.sum()),
            bugs={"mean_of_part_means": _head_answers(hidden, head, targets, means),
                  "sum_of_part_means": _head_answers(hidden, head, targets, 3 * means)},
            source="https://github.com/verl-project/verl/issues/907",
            explanation="Accumulate the gradient of the sums, divide once. A masked row has an exactly "
            "zero hidden gradient.",
        ),
        case(
            "upstream_gradient_per_token", tier="advanced", task="linear_head",
            title="Weights of an unreduced fused loss act inside the sum",
            question="The same for sum(weights * xent), weights of any sign.",
            inputs={"hidden": hidden, "head": head, "targets": targets, "weights": upstream, "parts": parts},
            right=_head_answers(hidden, head, targets, upstream),
            bugs={"first_weight_for_all_tokens": {key: wrong[key] for key in ("grad_hidden", "grad_head")}},
            source="https://github.com/linkedin/Liger-Kernel/issues/968",
            explanation="A token's weight cannot be applied to an already summed head gradient.",
        ),
    ]  # fmt: skip


def _part(mask, rows):
    selected = np.zeros_like(mask)
    selected[rows] = mask[rows]
    return selected


# --- weights --------------------------------------------------------------------------------


def _weighting():
    losses, weights = np.array([2.0, 3.0, 1.0, 4.0]), np.array([1.0, 0.25, 0.5, 0.0])
    weighted = (weights * losses).sum()
    domain_losses = np.array([2.0, 3.0, 1.0, 4.0, 2.5, 1.5, 5.0, 3.5])
    domains = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    sampling, objective = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    counts = np.bincount(domains)
    means = np.bincount(domains, domain_losses) / counts
    token_loss = np.array(
        [[1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, 0.0]]
    )
    mask = np.array([[1.0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
    groups = np.array([0, 0, 1, 1])
    return [
        case(
            "fractional_weights_once", tier="advanced", task="weighted",
            title="Fractional token weights are applied once",
            question="Weighted loss, divided by the sum of weights and by the number of tokens with a "
            "weight.",
            inputs={"xent": losses, "loss_weight": weights},
            right={"by_sum_of_weights": weighted / weights.sum(), "by_count": weighted / 3},
            bugs={"weights_applied_twice": {"by_sum_of_weights": (weights**2 * losses).sum() / weights.sum()},
                  "weights_cast_to_integers": {"by_sum_of_weights": 2.0},
                  "zero_weights_counted": {"by_count": weighted / 4}},
            source="https://github.com/Open-Athena/marin-dna/issues/499",
            explanation="With 0/1 masks applying a mask twice is harmless, so the bug hides until weights "
            "are fractional.",
        ),
        case(
            "domain_losses_and_mixture", tier="advanced", task="domains",
            title="Per-domain losses and a re-weighted mixture",
            question="Loss and token count per domain; plain token mean; mean weighted by objective / "
            "sampling weight of the domain and divided by the token count; weighted mean of the domain "
            "losses.",
            inputs={"xent": domain_losses, "domain": domains, "sampling_weight": sampling,
            "objective_weight": objective},
            right={"domain_loss": means, "domain_tokens": counts, "token_mean": domain_losses.mean(),
                   "importance_weighted": ((objective / sampling)[domains] * domain_losses).mean(),
                   "weighted_mean_of_domains": (objective * means).sum()},
            bugs={"mean_of_domain_losses": {"token_mean": means.mean()},
                  "divided_by_sum_of_weights": {
                      "importance_weighted": np.average(domain_losses, weights=(objective / sampling)[domains])}},
            source="https://github.com/NVIDIA-NeMo/Automodel/pull/3303",
            explanation="Domain numbers are ratios of sums over all ranks; they must add up to the token "
            "mean.",
        ),
        case(
            "aggregation_modes", tier="advanced", task="aggregation",
            title="Five aggregation modes, any micro-batch size",
            question="Loss in every mode; `prompt_group` names the group of each row, `max_length` the "
            "constant.",
            inputs={"xent": token_loss, "loss_mask": mask, "prompt_group": groups, "max_length": 4,
                    "micro_batch_sizes": [1, 2, 4]},
            right=_modes(token_loss * mask, mask, groups),
            bugs={"scaled_by_share_of_samples": {"token_mean": ratio((token_loss * mask).sum(1), mask.sum(1)).mean()},
                  "not_divided_by_sequences": {"seq_mean_token_sum_norm": (token_loss * mask).sum() / 4}},
            source="https://github.com/verl-project/verl/issues/5625",
            explanation="Each mode fixes one global denominator. Scaling a micro-batch's token mean by "
            "its share of samples turns token_mean into seq_mean_token_mean when a micro-batch holds one "
            "sequence.",
        ),
    ]  # fmt: skip


def _modes(losses, mask, groups):
    by_row = losses.sum(1)
    by_group = np.array([losses[groups == g].sum() / mask[groups == g].sum() for g in np.unique(groups)])
    return {
        "token_mean": losses.sum() / mask.sum(),
        "seq_mean_token_mean": ratio(by_row, mask.sum(1)).mean(),
        "seq_mean_token_sum": by_row.mean(),
        "seq_mean_token_sum_norm": by_row.mean() / 4,
        "group_mean_token_mean": by_group.mean(),
    }


# --- logs and resumption -----------------------------------------------------------------------


def _logs():
    sums, counts = np.array([9.0, 1.0, 20.0, 0.0]), np.array([3, 1, 4, 0])
    losses = np.array([3.0, 2.8, 2.9, 2.6, 2.5, 2.4, 2.45, 2.2, 2.1, 2.0])
    tokens = np.array([16, 12, 8, 10, 10, 6, 14, 10, 10, 4])
    tail = (losses * tokens)[6:].sum()
    return [
        case(
            "logged_ratio_of_sums", tier="advanced", task="logged_ratio",
            title="A logged metric over ranks with unequal counts",
            question="Logged value.", inputs={"sum_by_rank": sums, "count_by_rank": counts},
            right={"logged": sums.sum() / counts.sum()},
            bugs={"mean_of_rank_ratios": {"logged": ratio(sums, counts).mean()},
                  "mean_of_rank_ratios_without_empty_rank": {"logged": ratio(sums, counts)[:3].mean()},
                  "nan_from_empty_rank": {"logged": np.nan}},
            source="https://github.com/NVIDIA/Megatron-LM/issues/4896",
            explanation="Averaging pre-divided ratios drifts with the layout although gradients are right.",
        ),
        case(
            "second_term_own_count", tier="advanced", task="second_term",
            title="A second term has its own global count",
            question="Both terms (token mean over their own tokens) and the weighted total.",
            inputs={"main_sum": [8.0, 5.0, 7.0], "main_count": [8, 5, 7], "extra_sum": [6.0, 0.0, 10.0],
                    "extra_count": [3, 0, 2], "extra_weight": 0.1},
            right={"main": 1.0, "extra": 3.2, "total": 1.0 + 0.1 * 3.2},
            bugs={"sum_of_local_means": {"extra": 2.0 + 5.0, "total": 1.7},
                  "divided_by_main_count": {"extra": 16 / 20}},
            source="https://github.com/NVIDIA-NeMo/RL/pull/3791",
            explanation="A local denominator makes a term's weight proportional to the number of "
            "micro-batches.",
        ),
        case(
            "log_accumulator_survives_resume", tier="advanced", task="resume",
            title="An interrupted logging interval continues",
            question="Sum, count and steps to store after step 6, and the value logged at step 10 of the "
            "resumed run.",
            inputs={"loss_by_step": losses, "tokens_by_step": tokens, "checkpoint_after_step": 6},
            right={"stored_sum": (losses * tokens)[:6].sum(), "stored_count": int(tokens[:6].sum()), "stored_steps": 6,
                   "logged": (losses * tokens).sum() / tokens.sum()},
            bugs={"interval_restarted": {"logged": tail / tokens[6:].sum()},
                  "restarted_sum_full_interval": {"logged": tail / tokens.sum()},
                  "unweighted_mean_of_steps": {"logged": losses.mean()}},
            source="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/446",
            explanation="That needs sums, counts and the step number in the checkpoint.",
        ),
    ]  # fmt: skip


# --- the optimizer step ---------------------------------------------------------------------------


def _steps():
    passes = np.array([[4.0, -2.0], [2.0, 6.0], [-1.0, 3.0]])
    geometric = np.zeros(2)
    for gradient in passes:
        geometric = (geometric + gradient) / 4
    return [
        case(
            "normalize_then_clip", tier="advanced", task="clip", title="Normalize, then clip by the global norm",
            question="Reported gradient norm and clipped gradient.",
            inputs={"summed_gradient": [30.0, -40.0], "num_tokens": 20, "max_norm": 1.0},
            right={"grad_norm": 2.5, "clipped": [0.6, -0.8]},
            bugs={"norm_of_the_sum": {"grad_norm": 50.0}, "clipped_then_divided": {"clipped": [0.03, -0.04]}},
            source="https://github.com/pytorch/torchtitan/issues/2972",
            explanation="Clipping hides gradients that are N times too large; dividing after clipping "
            "makes the step N times too small.",
        ),
        case(
            "pipeline_scale_once", tier="advanced", task="pipeline",
            title="Pipeline scaling inside an accumulation loop",
            question="Mean gradient over all micro-batches: each accumulation step sums "
            "`pipeline_micro_batches` of them.",
            inputs={"summed_gradients": passes, "pipeline_micro_batches": 4},
            right={"gradient": passes.sum(0) / 12},
            bugs={"scaled_in_place_every_step": {"gradient": geometric},
                  "scaled_in_place_then_divided": {"gradient": geometric / 3},
                  "summed": {"gradient": passes.sum(0) / 4}},
            source="https://github.com/pytorch/torchtitan/issues/1733",
            explanation="Scaling the shared gradient buffer after every pass rescales what earlier passes "
            "left in it.",
        ),
    ]  # fmt: skip


def _scales():
    counts = np.array([[6, 2], [1, 3]])  # [micro-steps, ranks]
    total = counts.sum()
    question = (
        "Factor of each local loss SUM and of each local MEAN ([micro-steps, ranks]) such that the "
        "gradient after the framework's reductions is that of the global token mean."
    )

    def one(name, over_ranks, over_steps, title):
        undo = (2 if over_ranks == "mean" else 1) * (2 if over_steps == "mean" else 1)
        right = {"of_sum": np.full((2, 2), undo / total), "of_mean": undo * counts / total}
        return case(
            name, tier="advanced", task="gradient_scale", title=title, question=question,
            inputs={"count": counts, "over_ranks": over_ranks, "over_micro_steps": over_steps},
            right=right,
            bugs={"local_mean_left_as_it_is": {"of_mean": np.ones((2, 2))},
                  **({"reduction_not_undone": {"of_sum": np.full((2, 2), 1 / total)}} if undo > 1 else {})},
            source="https://github.com/meta-pytorch/torchtune/pull/2172",
            explanation="A reduction that averages over R divides by R once: multiply by R, never twice.",
        )  # fmt: skip

    return [
        one(
            "scale_for_mean_over_ranks",
            "mean",
            "sum",
            "Gradients averaged over ranks, summed over micro-steps (DDP)",
        ),
        one("scale_for_mean_over_both", "mean", "mean", "Gradients averaged over ranks and micro-steps"),
        one("scale_for_sums", "sum", "sum", "Gradients summed everywhere"),
    ]


# --- estimators -----------------------------------------------------------------------------------


def _estimators():
    losses = np.array([[1.0, 1, 1, 1, 1, 5], [4, 2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [2, 2, 2, 6, 0, 0]])
    mask = (np.arange(6) < np.array([6, 2, 1, 4])[:, None]).astype(float)
    sums, counts = (losses * mask).sum(1), mask.sum(1)
    ranks = [[0, 1], [2, 3]]
    steps = [[0, 2], [1, 3]]  # one row of each rank per micro-step
    token, sample = sums.sum() / counts.sum(), ratio(sums, counts).mean()
    ragged_sums, ragged_counts = np.array([12.0, 0.0, 7.5, 3.0, 10.0]), np.array([6, 0, 3, 1, 4])
    means = ratio(ragged_sums, ragged_counts)
    covariance = ((ragged_counts - ragged_counts.mean()) * (means - means.mean())).mean()
    return [
        case(
            "named_estimators", tier="advanced", task="estimators", title="One batch, five published estimators",
            question="The value of each estimator; one row is a micro-batch, `ranks` lists the rows of "
            "each rank.",
            inputs={"xent": losses, "loss_mask": mask, "ranks": ranks, "constant_length": 6},
            right={
                "global_token_mean": token,
                "mean_over_micro_batches": sample,
                "mean_over_ranks": np.mean([sums[r].sum() / counts[r].sum() for r in ranks]),
                "mean_over_steps": np.mean([sums[s].sum() / counts[s].sum() for s in steps]),
                "sum_over_constant": sums.mean() / 6,
            },
            bugs={"all_the_same": {"mean_over_micro_batches": token, "mean_over_ranks": token}},
            source="https://github.com/NVIDIA/Megatron-LM/issues/936",
            explanation="All agree on equal counts, which is why parity tests on full sequences pass and "
            "masked data then disagrees. State the estimator next to the number.",
        ),
        case(
            "covariance_gap", tier="advanced", task="estimator_gap",
            title="Per-sample minus per-token mean is a covariance",
            question="Per-token mean, per-sample mean (an empty row counts, with mean 0), and their "
            "difference.",
            inputs={"sum_by_row": ragged_sums, "count_by_row": ragged_counts},
            right={"token": ragged_sums.sum() / ragged_counts.sum(), "sample": means.mean(),
                   "gap": -covariance / ragged_counts.mean()},
            bugs={"sample_covariance": {"gap": -covariance * 5 / 4 / ragged_counts.mean()},
                  "empty_row_left_out": {"sample": means[ragged_counts > 0].mean()},
                  "sign_reversed": {"gap": covariance / ragged_counts.mean()}},
            source="RFC-0032, per-sample loss normalization in MaxText",
            explanation="sample - token = -Cov(n, mean) / E[n], exactly, with the population covariance "
            "over all rows.",
        ),
    ]  # fmt: skip
