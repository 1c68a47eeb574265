"""Loss normalizations by explicit loops over tokens, in float64. Imports nothing of ours."""

import numpy as np


def groups_of(mask, granularity, micro_batch_size=1, segment_ids=None):
    """Lists of (row, position) of every group, empty ones included; scored or not."""
    rows, length = mask.shape
    if granularity == "token":
        return [[(b, s) for b in range(rows) for s in range(length)]]
    if granularity == "sample":
        return [[(b, s) for s in range(length)] for b in range(rows)]
    if granularity == "micro_batch":
        return [
            [(b, s) for b in range(start, start + micro_batch_size) for s in range(length)]
            for start in range(0, rows, micro_batch_size)
        ]
    documents = {}
    for b in range(rows):
        for s in range(length):
            if segment_ids[b, s] != 0:
                documents.setdefault((b, int(segment_ids[b, s])), []).append((b, s))
    return list(documents.values())


def objective(
    xent, mask, granularity, micro_batch_size=1, segment_ids=None, count_empty=True, scale=None, by="sum"
):
    """Mean over groups of each group's mean, formed group by group."""
    scale = np.ones(mask.shape) if scale is None else scale
    means = []
    for group in groups_of(mask, granularity, micro_batch_size, segment_ids):
        numerator, denominator = 0.0, 0.0
        for b, s in group:
            if mask[b, s]:
                numerator += float(scale[b, s]) * float(xent[b, s])
                denominator += float(scale[b, s]) if by == "sum" else float(scale[b, s] != 0)
        if denominator > 0:
            means.append(numerator / denominator)
        elif count_empty or granularity == "token":
            means.append(0.0)
    return float(np.sum(means) / len(means)) if means else 0.0


def weights(mask, granularity, **options):
    """The derivative of `objective` by each token's loss: one unit vector at a time."""
    out = np.zeros(mask.shape)
    for index in np.ndindex(*mask.shape):
        unit = np.zeros(mask.shape)
        unit[index] = 1.0
        out[index] = objective(unit, mask, granularity, **options)
    return out


def softmax_xent(logits, targets, mask):
    """Cross-entropy and squared log-partition of each token by exact shifting; 0 outside mask."""
    xent, z_term = np.zeros(mask.shape), np.zeros(mask.shape)
    for index in np.ndindex(*mask.shape):
        if not mask[index]:
            continue
        row = logits[index].astype(np.float64)
        top = row.max()
        log_partition = top + np.log(np.exp(row - top).sum())
        xent[index] = log_partition - row[targets[index]]
        z_term[index] = log_partition**2
    return xent, z_term


def shifted(values, segment_ids, depth, across):
    """`values[t + depth]` if every position on the way belongs to one document, else 0."""
    out = np.zeros_like(values)
    rows, length = values.shape
    for b in range(rows):
        for t in range(length):
            if t + depth >= length:
                continue
            way = segment_ids[b, t : t + depth + 1]
            if across or depth == 0 or (np.all(way == way[0]) and way[0] != 0):
                out[b, t] = values[b, t + depth]
    return out
