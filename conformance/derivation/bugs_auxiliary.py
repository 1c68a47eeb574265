"""Known bugs of the auxiliary tier in plain Python."""

import math
from fractions import Fraction

import plain_auxiliary
from arithmetic import (
    cells,
    exact,
    fraction,
    grid,
    group_mean,
    logsumexp,
    masked_count,
    masked_sum,
    mean,
    rows_group,
)


def mtp(inputs, right):
    mask = inputs["loss_mask"]
    depths = list(zip(inputs["mtp_xent"], inputs["mtp_mask"]))
    everything = grid(mask)
    groups = [rows_group(mask, rows) for rows in cells(inputs["schedule"])]
    lam = Fraction(str(inputs["mtp_loss_scaling_factor"]))
    num_tokens = masked_count(mask, everything)
    ones = [[1] * len(row) for row in mask]

    def total(x, m):
        return masked_sum(x, m, everything)

    def of(value):
        return {"objective_mtp": float(value), "objective_total": right["objective_lm"] + float(value)}

    def local():
        parts = [
            Fraction(masked_count(mask, group), max(masked_count(m, group), 1)) * masked_sum(x, m, group)
            for x, m in depths
            for group in groups
        ]
        return of(lam / len(depths) * sum(parts) / num_tokens)

    def filled(m):
        return [group for group in groups if masked_count(m, group)]

    def per_group(x, m, parts):
        return mean(group_mean(x, m, group) for group in parts)

    return {
        "depth_divided_by_lm_count": lambda: of(lam * mean(total(x, m) for x, m in depths) / num_tokens),
        "depth_pooled_over_samples": lambda: of(lam * mean(group_mean(x, m, everything) for x, m in depths)),
        "depth_divided_by_own_count": lambda: of(lam * mean(group_mean(x, m, everything) for x, m in depths)),
        "coefficient_missing": lambda: of(fraction(right["objective_mtp"]) / lam),
        "rescaled_by_local_counts": local,
        "mean_added_to_sum": lambda: of(
            lam * mean(per_group(x, m, groups) for x, m in depths) * len(groups) / num_tokens
        ),
        "not_divided_by_depths": lambda: of(lam * sum(total(x, m) for x, m in depths) / num_tokens),
        "nan_from_0_over_0": lambda: {"objective_mtp": "nan"},
        "empty_not_counted": lambda: of(lam * mean(per_group(x, m, filled(m)) for x, m in depths)),
        "missing_mask_taken_as_ones": lambda: of(lam * mean(per_group(x, ones, groups) for x, _ in depths)),
    }


def router_z(inputs, right):
    mask = inputs["loss_mask"]
    coefficient = exact(inputs["coefficient"])
    positions = grid(mask)
    squares = [
        [[logsumexp([exact(x) for x in logits]) ** 2 for logits in row] for row in layer]
        for layer in inputs["router_logits"]
    ]

    def means(kept):
        return [sum(layer[b][s] for b, s in kept) / len(kept) for layer in squares]

    def of(values):
        return {"objective": float(coefficient * sum(values)), "log": [float(value) for value in values]}

    unmasked = [(b, s) for b, s in positions if mask[b][s]]
    plain_total = coefficient * sum(means(positions))
    return {
        "multiplied_by_micro_steps": lambda: {"objective": float(plain_total * len(inputs["schedule"]))},
        "mean_over_layers": lambda: {"objective": float(plain_total / len(squares))},
        "masked_like_the_lm_loss": lambda: of(means(unmasked)),
        "global_mean_over_unmasked": lambda: of(means(unmasked)),
        "padding_counted": lambda: of(means(positions)),
        "divided_by_positions": lambda: {"objective": float(plain_total)},
        "mean_divided_by_tokens": lambda: {"objective": float(plain_total / len(unmasked))},
    }


def load_balance(inputs, right):
    shards = [
        plain_auxiliary.load_balance(
            {**inputs, "router_logits": [inputs["router_logits"][t] for t in shard]}
        )["aux"]
        for shard in inputs["shards"]
    ]
    return {
        "mean_of_shard_values": lambda: {"aux": math.fsum(shards) / len(shards)},
        "sum_of_shard_values": lambda: {"aux": math.fsum(shards)},
        "without_num_experts": lambda: {"aux": right["aux"] / len(right["f"])},
    }


def lm_z(inputs, right):
    squares = [logsumexp([exact(x) for x in row]) ** 2 for row in inputs["logits"]]
    kept = [square for square, m in zip(squares, inputs["loss_mask"]) if m]
    return {
        "default_multiplier_applied": lambda: {"z_loss": float(exact(1e-4) * sum(kept) / len(kept))},
        "z_over_all_positions": lambda: {
            "z_loss": float(exact(inputs["z_loss_multiplier"]) * sum(squares) / len(squares))
        },
        "perplexity_of_total": lambda: {"perplexity": math.exp(right["total"])},
        "z_in_the_reported_loss": lambda: {"cross_entropy": right["total"]},
    }
