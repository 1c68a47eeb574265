"""Softmax attention of packed rows, query by query in float64."""

import numpy as np


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, segment_ids: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Output [B S H U], and the largest logit of each head over pairs outside padding.

    Query head h uses key head `h // (H / J)`. A query sees its own segment up to itself.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, length, heads, _ = q.shape
    group = heads // k.shape[2]
    out = np.zeros((batch, length, heads, v.shape[-1]))
    top = np.full(heads, -np.inf)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                seen = [j for j in range(i + 1) if segment_ids[b, j] == segment_ids[b, i]]
                logits = scale * k[b, seen, h // group] @ q[b, i, h]
                weights = np.exp(logits - logits.max())
                out[b, i, h] = weights / weights.sum() @ v[b, seen, h // group]
                if segment_ids[b, i]:
                    top[h] = max(top[h], logits.max())
    return out, top
