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


def expert_gradients(
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    tokens: np.ndarray,
    chosen: np.ndarray,
    weights: np.ndarray,
    probe: np.ndarray,
    has_place: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Outputs, and gradients of `sum(probe * outputs)`: outputs, gate, up, down, tokens, weights.

    A copy without a place [T A] adds nothing to any of them.
    """
    gate, up, down, tokens, weights, probe = (
        np.asarray(x, np.float64) for x in (gate, up, down, tokens, weights, probe)
    )
    out, d_tokens, d_weights = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros_like(weights)
    d_gate, d_up, d_down = np.zeros_like(gate), np.zeros_like(up), np.zeros_like(down)
    for t, a in np.argwhere(has_place):
        x, e, w, g = tokens[t], chosen[t, a], weights[t, a], probe[t]
        before, factor = x @ gate[e], x @ up[e]
        share = 1 / (1 + np.exp(-before))
        hidden = before * share * factor
        out[t] += w * (hidden @ down[e])
        d_weights[t, a] = (hidden @ down[e]) @ g
        d_hidden = w * (down[e] @ g)
        d_before = d_hidden * factor * share * (1 + before * (1 - share))
        d_factor = d_hidden * before * share
        d_gate[e] += np.outer(x, d_before)
        d_up[e] += np.outer(x, d_factor)
        d_down[e] += w * np.outer(hidden, g)
        d_tokens[t] += gate[e] @ d_before + up[e] @ d_factor
    return out, d_gate, d_up, d_down, d_tokens, d_weights


def copies_with_a_place(chosen: np.ndarray, num_devices: int, num_experts: int, capacity: int) -> np.ndarray:
    """Which copies [T A] find a place; tokens are cut evenly over devices, experts too, in order.

    A device takes `capacity` copies: those of the first device first, of one device those for its first expert first,
    of one expert the first tokens.
    """
    num_tokens, num_local = chosen.shape[0] // num_devices, num_experts // num_devices
    taken, has_place = np.zeros(num_devices, int), np.zeros(chosen.shape, bool)
    for device in range(num_devices):
        for expert in range(num_experts):
            for t in range(device * num_tokens, (device + 1) * num_tokens):
                for a in np.flatnonzero(chosen[t] == expert):
                    has_place[t, a] = taken[expert // num_local] < capacity
                    taken[expert // num_local] += has_place[t, a]
    return has_place
