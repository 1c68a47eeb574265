"""Objective and logs of one step, term by term, by loops in float64. Imports nothing of ours.

Written from the table of channels (design section 2), group by group and without any weights.
"""

import numpy as np


def _ratio(numerator, denominator):
    return numerator / denominator if denominator > 0 else 0.0


def _mean_over_groups(values, mask, size):
    """Mean over groups of `size` rows of each group's mean; an empty group is 0 and counts."""
    means = [
        _ratio((values * mask)[start : start + size].sum(), mask[start : start + size].sum())
        for start in range(0, len(mask), size)
    ]
    return float(np.mean(means))


def lm(xent, mask, per_token, size):
    return _ratio((xent * mask).sum(), mask.sum()) if per_token else _mean_over_groups(xent, mask, size)


def mtp(xents, masks, lm_mask, per_token, per_layer, size, factor):
    """`xents`, `masks`: one array per depth."""
    if per_token:
        total = sum((x * m).sum() for x, m in zip(xents, masks))
        return factor / len(xents) * total / max(lm_mask.sum(), 1)
    if per_layer:
        return factor / len(xents) * sum(_mean_over_groups(x, m, size) for x, m in zip(xents, masks))
    return factor * _ratio(sum((x * m).sum() for x, m in zip(xents, masks)), sum(m.sum() for m in masks))


def router_z(logsumexp, positions, lm_mask, per_token, size, coefficient):
    total = 0.0
    for layer in logsumexp**2:
        if per_token:
            total += (layer * positions).sum() / max(lm_mask.sum(), 1)
        else:
            total += _mean_over_groups(layer, positions, size)
    return coefficient * total


def load_balance_value(scores, selected, positions):
    """`E sum_e f_e P_e` of one unit: scores [..., E] normalized, selected [..., A] indices."""
    num_experts = scores.shape[-1]
    if positions.sum() == 0:
        return 0.0
    share = np.zeros(num_experts)
    for expert in selected[positions].ravel():
        share[expert] += 1
    share /= share.sum()
    return num_experts * float(share @ scores[positions].mean(axis=0))


def load_balance(scores, selected, positions, lm_mask, per_token, unit, coefficient):
    """`scores` [L, B, S, E], `selected` [L, B, S, A], `unit` rows a unit."""
    total, rows = 0.0, positions.shape[0]
    for layer_scores, layer_selected in zip(scores, selected):
        for start in range(0, rows, unit):
            part = slice(start, start + unit)
            value = load_balance_value(layer_scores[part], layer_selected[part], positions[part])
            if per_token:
                total += value * positions[part].sum() / max(lm_mask.sum(), 1)
            else:
                total += value / (rows // unit)
    return coefficient * total
