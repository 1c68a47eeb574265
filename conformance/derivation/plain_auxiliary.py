"""Auxiliary tier re-derived in plain Python."""

import decimal
from fractions import Fraction

from arithmetic import (
    CONTEXT,
    cells,
    derivative,
    exact,
    grid,
    group_mean,
    logsumexp,
    masked_count,
    masked_sum,
    mean,
    rows_group,
    xent_of_row,
)


def mtp(inputs):
    main, mask = inputs["xent"], inputs["loss_mask"]
    depths = list(zip(inputs["mtp_xent"], inputs["mtp_mask"]))
    groups = [rows_group(mask, rows) for rows in cells(inputs["schedule"])]
    everything = grid(mask)
    num_tokens = max(masked_count(mask, everything), 1)
    lam = Fraction(str(inputs["mtp_loss_scaling_factor"])) / len(depths)
    logs = [mean(group_mean(x, m, group) for group in groups) for x, m in depths]
    if inputs["calculate_per_token_loss"]:
        lm = masked_sum(main, mask, everything) / num_tokens
        extra = sum(lam * masked_sum(x, m, everything) / num_tokens for x, m in depths)
    else:
        lm = mean(group_mean(main, mask, group) for group in groups)
        extra = sum(lam * value for value in logs)
    return {
        "objective_lm": float(lm),
        "objective_mtp": float(extra),
        "objective_total": float(lm + extra),
        "log_lm": float(masked_sum(main, mask, everything) / num_tokens),
        "log_mtp": [float(value) for value in logs],
    }


def router_z(inputs):
    mask = inputs["loss_mask"]
    groups = [rows_group(mask, rows) for rows in cells(inputs["schedule"])]
    counted = mask if inputs.get("padding_masked") else [[1] * len(row) for row in mask]
    per_layer, sums = [], []
    for layer in inputs["router_logits"]:
        squares = [[logsumexp([exact(x) for x in logits]) ** 2 for logits in row] for row in layer]
        values = []
        for group in groups:
            kept = [squares[b][s] for b, s in group if counted[b][s]]
            values.append(sum(kept) / len(kept))
        per_layer.append(sum(values) / len(values))
        sums.append(sum(squares[b][s] for b, s in grid(mask)))
    coefficient = exact(inputs["coefficient"])
    if inputs["calculate_per_token_loss"]:
        objective_value = coefficient * sum(sums) / masked_count(mask, grid(mask))
    else:
        objective_value = coefficient * sum(per_layer)
    return {"objective": float(objective_value), "log": [float(value) for value in per_layer]}


def load_balance(inputs):
    logits = [[exact(x) for x in row] for row in inputs["router_logits"]]
    num_tokens, num_experts = len(logits), len(logits[0])
    chosen = [row.index(max(row)) for row in logits]
    share = [decimal.Decimal(chosen.count(e)) / num_tokens for e in range(num_experts)]

    def probability(row, expert):
        return CONTEXT.exp(CONTEXT.subtract(row[expert], logsumexp(row)))

    mean_prob = [sum(probability(row, e) for row in logits) / num_tokens for e in range(num_experts)]

    def value(rows):
        means = [sum(probability(row, e) for row in rows) / num_tokens for e in range(num_experts)]
        return num_experts * sum(f * p for f, p in zip(share, means))

    gradients = [
        [
            float(derivative(lambda moved, t=t: value([*logits[:t], moved, *logits[t + 1 :]]), row, e))
            for e in range(num_experts)
        ]
        for t, row in enumerate(logits)
    ]
    return {
        "aux": float(value(logits)),
        "f": [float(f) for f in share],
        "P": [float(p) for p in mean_prob],
        "grad_router_logits": gradients,
    }


def lm_z(inputs):
    coefficient, count = exact(inputs["z_loss_multiplier"]), sum(1 for m in inputs["loss_mask"] if m)
    rows = [[exact(x) for x in row] for row in inputs["logits"]]
    scored = [t for t, m in enumerate(inputs["loss_mask"]) if m]
    cross_entropy = sum(xent_of_row(rows[t], inputs["targets"][t]) for t in scored) / count
    z_loss = coefficient * sum(logsumexp(rows[t]) ** 2 for t in scored) / count

    def share(row, target):
        return (xent_of_row(row, target) + coefficient * logsumexp(row) ** 2) / count

    gradients = [
        [
            float(derivative(lambda moved, t=t: share(moved, inputs["targets"][t]), row, v))
            if t in scored
            else 0.0
            for v in range(len(row))
        ]
        for t, row in enumerate(rows)
    ]
    return {
        "cross_entropy": float(cross_entropy),
        "z_loss": float(z_loss),
        "total": float(cross_entropy + z_loss),
        "grad_logits": gradients,
        "perplexity": float(CONTEXT.exp(cross_entropy)),
    }
