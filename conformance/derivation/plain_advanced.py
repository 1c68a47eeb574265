"""Advanced tier re-derived in plain Python."""

import decimal
import math
from fractions import Fraction

from arithmetic import derivative, exact, fraction, mean, xent_of_row


def linear_head(inputs):
    hidden = [[exact(x) for x in row] for row in inputs["hidden"]]
    head = [[exact(x) for x in row] for row in inputs["head"]]
    num_tokens, width, vocab = len(hidden), len(head), len(head[0])
    if "weights" in inputs:
        weights = [exact(w) for w in inputs["weights"]]
    else:
        count = sum(1 for m in inputs["loss_mask"] if m)
        weights = [decimal.Decimal(1) / count if m else decimal.Decimal(0) for m in inputs["loss_mask"]]

    def loss(t, row, matrix):
        logits = [
            sum((row[d] * matrix[d][v] for d in range(width)), decimal.Decimal(0)) for v in range(vocab)
        ]
        return weights[t] * xent_of_row(logits, inputs["targets"][t])

    def total(matrix):
        return sum(loss(t, hidden[t], matrix) for t in range(num_tokens))

    def moved(d, row):
        return [*head[:d], row, *head[d + 1 :]]

    return {
        "loss": float(total(head)),
        "grad_hidden": [
            [float(derivative(lambda row, t=t: loss(t, row, head), hidden[t], d)) for d in range(width)]
            for t in range(num_tokens)
        ],
        "grad_head": [
            [float(derivative(lambda row, d=d: total(moved(d, row)), head[d], v)) for v in range(vocab)]
            for d in range(width)
        ],
    }


def weighted(inputs):
    pairs = [(fraction(w), fraction(x)) for w, x in zip(inputs["loss_weight"], inputs["xent"])]
    total = sum(w * x for w, x in pairs)
    return {
        "by_sum_of_weights": float(total / sum(w for w, _ in pairs)),
        "by_count": float(total / sum(1 for w, _ in pairs if w)),
    }


def domains(inputs):
    losses, names = [fraction(x) for x in inputs["xent"]], inputs["domain"]
    members = [[x for x, n in zip(losses, names) if n == d] for d in range(len(inputs["sampling_weight"]))]
    ratios = [
        Fraction(str(o)) / Fraction(str(s))
        for o, s in zip(inputs["objective_weight"], inputs["sampling_weight"])
    ]
    return {
        "domain_loss": [float(mean(group)) for group in members],
        "domain_tokens": [len(group) for group in members],
        "token_mean": float(mean(losses)),
        "importance_weighted": float(mean(ratios[n] * x for x, n in zip(losses, names))),
        "weighted_mean_of_domains": float(
            sum(Fraction(str(o)) * mean(group) for o, group in zip(inputs["objective_weight"], members))
        ),
    }


def aggregation(inputs):
    rows = [[fraction(x) for x, m in zip(*pair) if m] for pair in zip(inputs["xent"], inputs["loss_mask"])]
    names = inputs["prompt_group"]
    groups = [[x for row, n in zip(rows, names) if n == name for x in row] for name in sorted(set(names))]
    return {
        "token_mean": float(mean(x for row in rows for x in row)),
        "seq_mean_token_mean": float(mean(mean(row) for row in rows)),
        "seq_mean_token_sum": float(mean(sum(row) for row in rows)),
        "seq_mean_token_sum_norm": float(mean(sum(row) / inputs["max_length"] for row in rows)),
        "group_mean_token_mean": float(mean(mean(group) for group in groups)),
    }


def logged_ratio(inputs):
    return {"logged": float(sum(map(fraction, inputs["sum_by_rank"])) / sum(inputs["count_by_rank"]))}


def second_term(inputs):
    main = sum(map(fraction, inputs["main_sum"])) / sum(inputs["main_count"])
    extra = sum(map(fraction, inputs["extra_sum"])) / sum(inputs["extra_count"])
    total = main + Fraction(str(inputs["extra_weight"])) * extra
    return {"main": float(main), "extra": float(extra), "total": float(total)}


def resume(inputs):
    losses = [Fraction(str(x)) for x in inputs["loss_by_step"]]
    sums, counts, stored = Fraction(0), 0, None
    for step, (loss, count) in enumerate(zip(losses, inputs["tokens_by_step"]), 1):
        sums, counts = sums + loss * count, counts + count
        if step == inputs["checkpoint_after_step"]:
            stored = (float(sums), counts, step)
    return {
        "stored_sum": stored[0],
        "stored_count": stored[1],
        "stored_steps": stored[2],
        "logged": float(sums / counts),
    }


def clip(inputs):
    gradient = [x / inputs["num_tokens"] for x in inputs["summed_gradient"]]
    norm = math.hypot(*gradient)
    factor = min(1.0, inputs["max_norm"] / norm)
    return {"grad_norm": norm, "clipped": [factor * x for x in gradient]}


def pipeline(inputs):
    passes = inputs["summed_gradients"]
    number = inputs["pipeline_micro_batches"] * len(passes)
    return {"gradient": [float(sum(map(fraction, column)) / number) for column in zip(*passes)]}


def gradient_scale(inputs):
    counts = inputs["count"]
    undo = len(counts[0]) if inputs["over_ranks"] == "mean" else 1
    undo *= len(counts) if inputs["over_micro_steps"] == "mean" else 1
    total = sum(map(sum, counts))
    return {
        "of_sum": [[float(Fraction(undo, total)) for _ in row] for row in counts],
        "of_mean": [[float(Fraction(undo * n, total)) for n in row] for row in counts],
    }


def estimators(inputs):
    rows = [[fraction(x) for x, m in zip(*pair) if m] for pair in zip(inputs["xent"], inputs["loss_mask"])]
    ranks = inputs["ranks"]
    by_step = [[x for rank in ranks for x in rows[rank[i]]] for i in range(len(ranks[0]))]
    return {
        "global_token_mean": float(mean(x for row in rows for x in row)),
        "mean_over_micro_batches": float(mean(mean(row) for row in rows)),
        "mean_over_ranks": float(mean(mean(x for b in rank for x in rows[b]) for rank in ranks)),
        "mean_over_steps": float(mean(mean(step) for step in by_step)),
        "sum_over_constant": float(mean(sum(row) for row in rows) / inputs["constant_length"]),
    }


def estimator_gap(inputs):
    sums, counts = [fraction(x) for x in inputs["sum_by_row"]], inputs["count_by_row"]
    token = sum(sums) / Fraction(sum(counts))
    sample = mean(x / Fraction(n) if n else Fraction(0) for x, n in zip(sums, counts))
    return {"token": float(token), "sample": float(sample), "gap": float(sample - token)}
