"""Known bugs of the advanced tier in plain Python."""

import math
from fractions import Fraction

import plain_advanced
from arithmetic import fraction, mean


def linear_head(inputs, right):
    def parts(factor):
        weights = [0.0] * len(inputs["hidden"])
        for part in inputs["parts"]:
            scored = [t for t in part if inputs["loss_mask"][t]]
            for t in scored:
                weights[t] = factor / len(scored)
        return plain_advanced.linear_head({**inputs, "weights": weights})

    def first():
        answers = plain_advanced.linear_head(
            {**inputs, "weights": [inputs["weights"][0]] * len(inputs["hidden"])}
        )
        return {name: answers[name] for name in ("grad_hidden", "grad_head")}

    return {
        "mean_of_part_means": lambda: parts(1 / len(inputs["parts"])),
        "sum_of_part_means": lambda: parts(1.0),
        "first_weight_for_all_tokens": first,
    }


def weighting(inputs, right):
    pairs = [(fraction(w), fraction(x)) for w, x in zip(inputs["loss_weight"], inputs["xent"])]
    total = sum(w for w, _ in pairs)
    whole = [(int(w), x) for w, x in pairs]
    return {
        "weights_applied_twice": lambda: {
            "by_sum_of_weights": float(sum(w * w * x for w, x in pairs) / total)
        },
        "weights_cast_to_integers": lambda: {
            "by_sum_of_weights": float(sum(w * x for w, x in whole) / sum(w for w, _ in whole))
        },
        "zero_weights_counted": lambda: {"by_count": float(mean(w * x for w, x in pairs))},
    }


def domains(inputs, right):
    ratios = [o / s for o, s in zip(inputs["objective_weight"], inputs["sampling_weight"])]
    weights = [ratios[d] for d in inputs["domain"]]
    total = math.fsum(w * x for w, x in zip(weights, inputs["xent"]))
    return {
        "mean_of_domain_losses": lambda: {
            "token_mean": math.fsum(right["domain_loss"]) / len(right["domain_loss"])
        },
        "divided_by_sum_of_weights": lambda: {"importance_weighted": total / math.fsum(weights)},
    }


def aggregation(inputs, right):
    return {
        "scaled_by_share_of_samples": lambda: {"token_mean": right["seq_mean_token_mean"]},
        "not_divided_by_sequences": lambda: {
            "seq_mean_token_sum_norm": right["seq_mean_token_sum"]
            * len(inputs["xent"])
            / inputs["max_length"]
        },
    }


def logged_ratio(inputs, right):
    ratios = [x / n for x, n in zip(inputs["sum_by_rank"], inputs["count_by_rank"]) if n]
    return {
        "mean_of_rank_ratios": lambda: {"logged": math.fsum(ratios) / len(inputs["sum_by_rank"])},
        "mean_of_rank_ratios_without_empty_rank": lambda: {"logged": math.fsum(ratios) / len(ratios)},
        "nan_from_empty_rank": lambda: {"logged": "nan"},
    }


def second_term(inputs, right):
    local = [x / n for x, n in zip(inputs["extra_sum"], inputs["extra_count"]) if n]
    total = math.fsum(local)
    return {
        "sum_of_local_means": lambda: {
            "extra": total,
            "total": right["main"] + inputs["extra_weight"] * total,
        },
        "divided_by_main_count": lambda: {
            "extra": math.fsum(inputs["extra_sum"]) / sum(inputs["main_count"])
        },
    }


def resume(inputs, right):
    losses, counts, at = inputs["loss_by_step"], inputs["tokens_by_step"], inputs["checkpoint_after_step"]
    tail = math.fsum(x * n for x, n in zip(losses[at:], counts[at:]))
    return {
        "interval_restarted": lambda: {"logged": tail / sum(counts[at:])},
        "restarted_sum_full_interval": lambda: {"logged": tail / sum(counts)},
        "unweighted_mean_of_steps": lambda: {"logged": math.fsum(losses) / len(losses)},
    }


def clip(inputs, right):
    gradient, norm = inputs["summed_gradient"], math.hypot(*inputs["summed_gradient"])
    factor = inputs["max_norm"] / norm / inputs["num_tokens"]
    return {
        "norm_of_the_sum": lambda: {"grad_norm": norm},
        "clipped_then_divided": lambda: {"clipped": [factor * x for x in gradient]},
    }


def pipeline(inputs, right):
    def in_place(last_divisor):
        totals = []
        for column in zip(*inputs["summed_gradients"]):
            buffer = Fraction(0)
            for value in column:
                buffer = (buffer + fraction(value)) / inputs["pipeline_micro_batches"]
            totals.append(float(buffer / last_divisor))
        return {"gradient": totals}

    steps = len(inputs["summed_gradients"])
    return {
        "scaled_in_place_every_step": lambda: in_place(1),
        "scaled_in_place_then_divided": lambda: in_place(steps),
        "summed": lambda: {"gradient": [steps * x for x in right["gradient"]]},
    }


def gradient_scale(inputs, right):
    counts = inputs["count"]
    total = sum(map(sum, counts))
    return {
        "local_mean_left_as_it_is": lambda: {"of_mean": [[1.0] * len(row) for row in counts]},
        "reduction_not_undone": lambda: {"of_sum": [[1 / total] * len(row) for row in counts]},
    }


def estimators(inputs, right):
    token = right["global_token_mean"]
    return {"all_the_same": lambda: {"mean_over_micro_batches": token, "mean_over_ranks": token}}


def estimator_gap(inputs, right):
    filled = [x / n for x, n in zip(inputs["sum_by_row"], inputs["count_by_row"]) if n]
    rows = len(inputs["count_by_row"])
    return {
        "sample_covariance": lambda: {"gap": right["gap"] * rows / (rows - 1)},
        "empty_row_left_out": lambda: {"sample": math.fsum(filled) / len(filled)},
        "sign_reversed": lambda: {"gap": right["token"] - right["sample"]},
    }
