"""Weighted cross-entropy of a linear output layer, token by token in float64, with gradients by hand."""

import math

import numpy as np


def token(row, unembed, target, *, cap=None, smoothing=0.0, classes=None):
    """(xent, log-partition, d xent / d logits, d log-partition / d logits) of one token."""
    columns = unembed.shape[1]
    classes = columns if classes is None else classes
    raw = np.array([math.fsum(row[d] * unembed[d, v] for d in range(len(row))) for v in range(columns)])
    scores = raw if cap is None else cap * np.tanh(raw / cap)
    real = scores[:classes]
    top = real.max()
    lse = top + math.log(math.fsum(np.exp(real - top)))
    q = np.zeros(columns)
    q[:classes] += smoothing / classes
    q[target] += 1 - smoothing
    xent = lse - math.fsum(q * scores)
    p = np.zeros(columns)
    p[:classes] = np.exp(real - lse)
    inner = np.ones(columns) if cap is None else 1 - np.tanh(raw / cap) ** 2
    return xent, lse, (p - q) * inner, p * inner


def head(hidden, unembed, targets, mask, weights, *, z=0.0, **options):
    """Objective, z objective, per-token losses and gradients of `objective + z objective`."""
    hidden, unembed = np.asarray(hidden, np.float64), np.asarray(unembed, np.float64)
    rows, positions, _ = hidden.shape
    xent, square = np.zeros((rows, positions)), np.zeros((rows, positions))
    d_hidden, d_unembed = np.zeros(hidden.shape), np.zeros(unembed.shape)
    for b in range(rows):
        for s in range(positions):
            if not mask[b, s]:
                continue
            loss, lse, d_loss, d_lse = token(hidden[b, s], unembed, targets[b, s], **options)
            xent[b, s], square[b, s] = loss, lse**2
            slope = weights[b, s] * (d_loss + z * 2 * lse * d_lse)
            d_hidden[b, s] = unembed @ slope
            d_unembed += np.outer(hidden[b, s], slope)
    kept = np.where(mask, weights, 0)
    return {
        "objective": math.fsum((kept * xent).ravel()),
        "z_objective": math.fsum((z * kept * square).ravel()),
        "xent": xent,
        "z_term": square,
        "d_hidden": d_hidden,
        "d_unembed": d_unembed,
    }


def dense(hidden, unembed, targets, weights):
    """The same without options, vectorized in float64, for sizes that a loop cannot reach."""
    hidden, unembed = np.asarray(hidden, np.float64), np.asarray(unembed, np.float64)
    logits = hidden @ unembed
    top = logits.max(-1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(logits - top).sum(-1))
    index = np.arange(len(targets))
    slope = np.exp(logits - lse[:, None])
    slope[index, targets] -= 1
    slope *= np.asarray(weights, np.float64)[:, None]
    return lse - logits[index, targets], slope @ unembed.T, hidden.T @ slope
