"""Mixture of experts, one token and one expert at a time in float64."""

import numpy as np


def run_experts(
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    tokens: np.ndarray,
    chosen: np.ndarray,
    weights: np.ndarray,
    limit: float = np.inf,
) -> np.ndarray:
    """Each token's weighted sum of SwiGLU experts; gate, up [E D F], down [E F D], tokens [T D], chosen [T A]."""
    gate, up, down, tokens = (np.asarray(x, np.float64) for x in (gate, up, down, tokens))
    out = np.zeros_like(tokens)
    for t, x in enumerate(tokens):
        for e, w in zip(chosen[t], weights[t]):
            a, b = x @ gate[e], x @ up[e]
            hidden = np.minimum(a / (1 + np.exp(-a)), limit) * np.clip(b, -limit, limit)
            out[t] += w * (hidden @ down[e])
    return out
