"""Losses of other frameworks, rank by rank and micro-batch by micro-batch, by loops in float64.

Imports nothing of ours. Every function takes per-token losses of the global batch and returns the
scalar whose gradient the framework hands to its optimizer, so weights are read off by giving one
token the loss 1 and all others 0.
"""

import itertools

import numpy as np


def context_positions(length, ranks, bounds=None):
    """Positions of each context rank: rank c holds pieces c and 2C - 1 - c of every document."""
    bounds = [0, length] if bounds is None else bounds
    held = [[] for _ in range(ranks)]
    for start, end in itertools.pairwise(bounds):
        size = (end - start) // (2 * ranks)
        for rank in range(ranks):
            if ranks == 1:
                held[0] += list(range(start, end))
                continue
            for piece in (rank, 2 * ranks - 1 - rank):
                held[rank] += list(range(start + piece * size, start + (piece + 1) * size))
    return held


def roll(row, bounds=None):
    """One position to the left; 0 in the freed slot of the row, or of every document."""
    bounds = [0, len(row)] if bounds is None else bounds
    out = np.zeros_like(row)
    for start, end in itertools.pairwise(bounds):
        out[start : end - 1] = row[start + 1 : end]
    return out


def _divide(a, b):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.float64(a) / np.float64(b)


def megatron(losses, masks, router, padding, *, minor, per_token, size, dp, cp, factor, bounds=None):
    """(lm, mtp, z) objectives of one Megatron step; coefficient of z is 1, of MTP `factor`.

    Args:
        losses: Per-token loss of the lm head, then of each MTP depth; unmasked.
        masks: Loss mask, possibly fractional.
        router: Squared logsumexp of one decoder layer's router.
        padding: True = padding, or None.
        minor: 12 for 0.12, ..., 19 for 0.19 and main.
        per_token: calculate_per_token_loss.
        size: micro_batch_size.
        dp: Data ranks.
        cp: Context ranks.
        factor: mtp_loss_scaling_factor.
        bounds: Document bounds of each row, or None.
    """
    rows, length = masks.shape
    steps = rows // (size * dp)
    depths = len(losses) - 1
    rolled = [masks]
    for _ in range(depths):
        rolled.append(np.stack([roll(r, bounds and bounds[b]) for b, r in enumerate(rolled[-1])]))
    lm_sums, lm_means, mtp_sums, mtp_means, z_sums, z_means, total = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0
    for step in range(steps):
        for data in range(dp):
            mine = [(step * dp + data) * size + i for i in range(size)]
            whole = int(sum(masks[b].sum() for b in mine))
            if minor == 12:
                total += whole
            for rank in range(cp):
                at = [(b, t) for b in mine for t in context_positions(length, cp, bounds and bounds[b])[rank]]
                raw = sum(masks[b, t] for b, t in at)
                n = whole if minor == 12 else int(raw)
                if minor > 12:
                    total += n
                s = sum(losses[0][b, t] * masks[b, t] for b, t in at)
                lm_sums += s
                lm_means += _divide(s, n if minor < 15 else max(n, 1))
                for k in range(1, depths + 1):
                    n_k = sum(rolled[k][b, t] for b, t in at)
                    s_k = sum(losses[k][b, t] * rolled[k][b, t] for b, t in at)
                    mtp_means += _divide(s_k, n_k if minor < 17 else max(n_k, 1))
                    mtp_sums += s_k if minor < 17 else s_k * raw / max(n_k, 1)
                counted = [(b, t) for b, t in at if padding is None or not padding[b, t]]
                z = sum(router[b, t] for b, t in counted) / max(len(counted), 1)
                z_means += z
                z_sums += z * len(counted)
    ranks = steps * dp * cp
    divisor = max(total, 1)
    if per_token:
        z = z_sums / cp / divisor * (cp if minor >= 19 else 1)
        return lm_sums / divisor, factor / max(depths, 1) * mtp_sums / divisor, z
    lm = lm_means / (steps * dp) if minor == 12 else lm_means / ranks
    z = z_means / ranks * (1 if minor >= 16 else 1 / cp)
    return lm, factor / max(depths, 1) * mtp_means / ranks, z


def maxtext(lm_loss, mtp_losses, masks, *, release, steps, factor):
    """(lm, mtp) objectives of MaxText 0.2.4 or 0.2.5; micro-step i holds rows i, i + steps, ..."""
    rolled = [masks]
    for _ in mtp_losses:
        rolled.append(np.stack([roll(r) for r in rolled[-1]]))
    gradient_lm, gradient_mtp, tokens = 0.0, 0.0, 0.0
    for step in range(steps):
        rows = slice(step, None, steps)
        weights = masks[rows].sum()
        xent = (lm_loss[rows] * masks[rows]).sum()
        counts = sum(m[rows].sum() for m in rolled[1:])
        mtp = factor * sum((x[rows] * m[rows]).sum() for x, m in zip(mtp_losses, rolled[1:])) / max(counts, 1)
        if steps == 1:
            return xent / max(weights, 1), mtp
        gradient_lm += xent
        gradient_mtp += mtp * (weights if release == "0.2.5" else 1.0)
        tokens += weights
    return gradient_lm / max(tokens, 1), gradient_mtp / max(tokens, 1)


def hf_trainer(loss, masks, *, items, across, steps, dp):
    """transformers: per rank `sum / items` or the mean of means; DDP averages over ranks."""
    size = len(masks) // (steps * dp)

    def rows(step, rank):
        start = (step * dp + rank) * size
        return slice(start, start + size)

    total = 0.0
    for rank in range(dp):
        mine = sum(masks[rows(step, rank)].sum() for step in range(steps))
        for step in range(steps):
            s = (loss * masks)[rows(step, rank)].sum()
            n = masks[rows(step, rank)].sum()
            if not items:
                total += _divide(s, n) / steps
            elif across:
                total += _divide(s, masks.sum()) * dp
            else:
                total += _divide(s, mine)
    return total / dp


def levanter(loss, masks, *, steps):
    """Mean over consecutive micro-steps of each one's token mean."""
    parts = zip(np.split(loss, steps), np.split(masks, steps))
    return np.mean([_divide((x * m).sum(), m.sum()) for x, m in parts])
