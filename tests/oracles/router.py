"""Group-limited top-k routing, token by token in float64."""

import math

import numpy as np


def route(
    logits: np.ndarray,
    bias: np.ndarray,
    *,
    num_groups: int,
    kept_groups: int,
    num_chosen: int,
    normalize: bool,
    scale: float,
    softmax: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Chosen experts of each token in ascending order, and their weights.

    Args:
        logits: [tokens, experts].
        bias: [experts], takes part in the choice only.
        num_groups: Groups of consecutive experts.
        kept_groups: Groups a token may choose from, by the sum of their two best experts.
        num_chosen: Experts a token is sent to.
        normalize: Divide the chosen scores by their sum.
        scale: Factor of the weights.
        softmax: Scores are a softmax instead of sigmoids.
    """
    chosen_rows, weight_rows = [], []
    for row in np.asarray(logits, np.float64):
        if softmax:
            total = sum(math.exp(x) for x in row)
            scores = [math.exp(x) / total for x in row]
        else:
            scores = [1 / (1 + math.exp(-x)) for x in row]
        choice = [s + float(b) for s, b in zip(scores, bias)]
        size = len(choice) // num_groups
        groups = [choice[i * size : (i + 1) * size] for i in range(num_groups)]
        ranks = sorted(range(num_groups), key=lambda i: -sum(sorted(groups[i])[-2:]))
        allowed = [e for i in ranks[:kept_groups] for e in range(i * size, (i + 1) * size)]
        chosen = sorted(sorted(allowed, key=lambda e: -choice[e])[:num_chosen])
        weights = [scores[e] for e in chosen]
        if normalize:
            weights = [w / (sum(scores[e] for e in chosen) + 1e-20) for w in weights]
        chosen_rows.append(chosen)
        weight_rows.append([w * scale for w in weights])
    return np.array(chosen_rows), np.array(weight_rows)
