"""Known bugs of the core tier in plain Python: what each faulty method gives.

Written from the bug's name and the case's inputs, without the NumPy generator.
"""

import decimal
import math
import struct
from fractions import Fraction

import plain_core
from arithmetic import cells, derivative, exact, grid, group_means_weights, logsumexp, rows_group, xent_of_row


def objective(inputs, right):
    mask = inputs["loss_mask"]
    everything = grid(mask)
    num_tokens = sum(1 for b, s in everything if mask[b][s])
    parts = [rows_group(mask, rows) for rows in cells(inputs["schedule"])]
    steps = [rows_group(mask, [b for rows in step for b in rows]) for step in inputs["schedule"]]
    single_rows = [rows_group(mask, [b]) for b in range(len(mask))]
    pairs = [rows_group(mask, [b, b + 1]) for b in range(0, len(mask), 2)]
    nan, inf = {"loss": "nan"}, {"loss": "inf"}

    def token(factor=Fraction(1)):
        return weighted(inputs, {at: factor * mask[at[0]][at[1]] / num_tokens for at in everything})

    def groups(members, factor=Fraction(1)):
        weights = group_means_weights(mask, members)
        return weighted(inputs, {at: factor * weight for at, weight in weights.items()})

    def filled(members):
        return [part for part in members if any(mask[b][s] for b, s in part)]

    def everywhere(factor):
        return weighted(inputs, dict.fromkeys(everything, factor))

    rules = {
        "divided_by_all_positions": lambda: token(Fraction(num_tokens, len(everything))),
        "mask_in_denominator_only": lambda: everywhere(Fraction(1, num_tokens)),
        "mean_of_micro_batch_means": lambda: groups(parts),
        "sum_of_micro_batch_means": lambda: groups(parts, Fraction(len(parts))),
        "token_mean_divided_again_by_steps": lambda: token(Fraction(1, len(inputs["schedule"]))),
        "mean_of_rank_means": lambda: groups(parts),
        "sum_of_rank_means": lambda: groups(parts, Fraction(len(parts))),
        "loss_times_ranks": lambda: token(Fraction(len(parts))),
        "divided_by_ranks_and_tokens": lambda: token(Fraction(1, len(parts))),
        "mean_over_micro_batches_and_ranks": lambda: groups(parts),
        "mean_over_steps_of_global_means": lambda: groups(steps),
        "divided_by_configured_steps": lambda: token(Fraction(len(parts), inputs["configured_steps"])),
        "local_means_with_clamped_count": lambda: groups(parts),
        "nanmean_of_local_means": lambda: groups(filled(parts)),
        "token_mean": token,
        "sample_mean": lambda: groups(single_rows),
        "micro_batch_mean": lambda: groups(pairs),
        "empty_rows_not_counted": lambda: groups(filled(single_rows)),
        "documents_without_tokens_not_counted": lambda: groups(filled(plain_core.groups_of(inputs))),
        "loss_masked_but_gradient_nan": lambda: {
            "loss": right["loss"],
            "grad_logits": poisoned(inputs, right),
        },
    }
    rules.update(dict.fromkeys(("nan_from_0_over_0", "nan_times_zero"), lambda: nan))
    rules["exp_without_maximum"] = lambda: inf
    return rules


def weighted(inputs, weights):
    """Loss and gradient under any weights."""
    loss = decimal.Decimal(0)
    gradients = [[[0.0] * len(row) for row in rows] for rows in inputs["logits"]]
    for (b, s), weight in weights.items():
        if not weight:
            continue
        weight = Fraction(weight)
        factor = decimal.Decimal(weight.numerator) / decimal.Decimal(weight.denominator)
        row, target = [exact(x) for x in inputs["logits"][b][s]], inputs["targets"][b][s]
        loss += factor * xent_of_row(row, target)
        gradients[b][s] = [
            float(factor * derivative(lambda moved, t=target: xent_of_row(moved, t), row, v))
            for v in range(len(row))
        ]
    return {"loss": float(loss), "grad_logits": gradients}


def poisoned(inputs, right):
    """The right gradient, NaN in every row whose logits are not all finite."""
    return [
        [
            ["nan"] * len(row) if any(isinstance(x, str) for x in row) else right["grad_logits"][b][s]
            for s, row in enumerate(rows)
        ]
        for b, rows in enumerate(inputs["logits"])
    ]


def per_token(inputs, right):
    rows = [[exact(x) for x in row] for row in inputs["logits"]]
    targets = inputs["targets"]

    def xent(changed):
        return {"xent": [float(xent_of_row(row, t)) for row, t in zip(changed, targets)]}

    def target_not_capped():
        cap = exact(inputs["logit_soft_cap"])
        capped = [[cap * (1 - 2 / ((2 * x / cap).exp() + 1)) for x in row] for row in rows]
        return {"xent": [float(logsumexp(c) - row[t]) for c, row, t in zip(capped, rows, targets)]}

    def others():
        share = exact(inputs["label_smoothing"])
        answers = []
        for row, t in zip(rows, targets):
            wrong = [xent_of_row(row, v) for v in range(len(row)) if v != t]
            answers.append(float((1 - share) * xent_of_row(row, t) + share * sum(wrong) / len(wrong)))
        return {"xent": answers}

    return {
        "returned_in_bfloat16": lambda: {"xent": [to_bfloat16(x) for x in right["xent"]]},
        "padding_columns_in_the_logsumexp": lambda: xent(rows),
        "padding_columns_as_zero_logits": lambda: xent(
            [
                [x if v < inputs["vocab_size"] else decimal.Decimal(0) for v, x in enumerate(row)]
                for row in rows
            ]
        ),
        "replicas_summed": lambda: {"xent": [x + math.log(inputs["num_replicas"]) for x in right["xent"]]},
        "not_capped": lambda: xent(rows),
        "target_logit_not_capped": target_not_capped,
        "not_smoothed": lambda: xent(rows),
        "spread_over_other_classes": others,
    }


def to_bfloat16(value):
    """Round to nearest even on the upper 16 bits of the float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def evaluation(inputs, right):
    def batch_loss(rows):
        one = {**inputs, "batches": [rows]}
        return plain_core.evaluation(one)["loss"]

    def of(loss):
        return {"loss": loss, "perplexity": math.exp(loss)}

    return {
        "mean_of_batch_means": lambda: of(
            math.fsum(map(batch_loss, inputs["batches"])) / len(inputs["batches"])
        ),
        "scaled_by_batches_as_in_training": lambda: of(right["loss"] * len(inputs["batches"])),
    }


def next_token(inputs, right):
    labels = inputs["labels"]
    unshifted = [
        xent_of_row([exact(x) for x in inputs["logits"][b][t]], label)
        for b, row in enumerate(labels)
        for t, label in enumerate(row)
        if label >= 0
    ]
    return {
        "labels_counted_before_the_shift": lambda: {
            "loss": right["loss"] * right["num_tokens"] / len(unshifted)
        },
        "not_shifted": lambda: {"loss": float(sum(unshifted) / len(unshifted))},
    }


def targets(inputs, right):
    depth = inputs["depth"]

    def across():
        mask = [
            [int(t + depth < len(row) and row[t] != 0 and row[t + depth] != 0) for t in range(len(row))]
            for row in inputs["segment_ids"]
        ]
        return {"mask": mask, "num_tokens": sum(map(sum, mask))}

    every = sum(len(row) - depth for row in inputs["tokens"])
    return {"across_documents": across, "padding_scored": lambda: {"num_tokens": every}}
