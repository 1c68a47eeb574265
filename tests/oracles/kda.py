"""Kimi Delta Attention, lightning attention and the causal convolution, one position at a time in float64 NumPy."""

import numpy as np


def _document_steps(segment_ids, row, length):
    """Pairs (position, whether the state restarts there) of the positions that are not padding."""
    current = None
    for t in range(length):
        name = 1 if segment_ids is None else int(segment_ids[row, t])
        if name == 0:
            continue
        yield t, current is not None and name != current
        current = name


def kda(q, k, v, g, beta, segment_ids=None, initial_state=None):
    """Output [B S H U] and last state [B H K U]; the first document goes on from `initial_state`."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    batch, length, heads, size = v.shape
    state = np.zeros((batch, heads, k.shape[3], size))
    if initial_state is not None:
        state += np.asarray(initial_state, np.float64)
    out = np.zeros(v.shape)
    for b in range(batch):
        for t, restarts in _document_steps(segment_ids, b, length):
            if restarts:
                state[b] = 0
            for h in range(heads):
                s = state[b, h]
                s *= np.exp(g[b, t, h])[:, None]
                s += np.outer(k[b, t, h], beta[b, t, h] * (v[b, t, h] - s.T @ k[b, t, h]))
                out[b, t, h] = s.T @ q[b, t, h]
    return out, state


def lightning(q, k, v, slope, segment_ids=None, initial_state=None):
    """Output [B S H U] and last state [B H K U] of linear attention that decays by `slope` [H] per token."""
    q, k, v, slope = (np.asarray(x, np.float64) for x in (q, k, v, slope))
    batch, length, heads, size = v.shape
    state = np.zeros((batch, heads, k.shape[3], size))
    if initial_state is not None:
        state += np.asarray(initial_state, np.float64)
    out = np.zeros(v.shape)
    for b in range(batch):
        for t, restarts in _document_steps(segment_ids, b, length):
            if restarts:
                state[b] = 0
            for h in range(heads):
                state[b, h] = np.exp(-slope[h]) * state[b, h] + np.outer(k[b, t, h], v[b, t, h])
                out[b, t, h] = state[b, h].T @ q[b, t, h]
    return out, state


def conv(x, weight, segment_ids=None):
    """Causal depthwise cross-correlation [B S C] with taps [C W]; 0 at padding and across documents."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out = np.zeros(x.shape)
    width = weight.shape[1]
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for lag in range(min(width, t + 1)):
                if segment_ids is not None:
                    here, there = segment_ids[b, t], segment_ids[b, t - lag]
                    if here == 0 or here != there:
                        continue
                out[b, t] += weight[:, width - 1 - lag] * x[b, t - lag]
    return out
