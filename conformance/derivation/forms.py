"""Float64 NumPy building blocks of the generator. Imports NumPy only."""

import numpy as np


def quarters(seed, *shape, low=-8, high=9):
    """Multiples of 1/4, exact in bfloat16, from a fixed seed."""
    return np.random.default_rng(seed).integers(low, high, shape) / 4.0


def integers(seed, high, *shape):
    return np.random.default_rng(seed).integers(0, high, shape)


def logsumexp(logits):
    top = logits.max(-1, keepdims=True)
    return (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]


def softmax(logits):
    return np.exp(logits - logsumexp(logits)[..., None])


def onehot(targets, size):
    return np.eye(size)[targets]


def xent(logits, targets, mask=None):
    """Cross-entropy in nats; rows outside the mask are replaced before any arithmetic."""
    if mask is not None:
        logits = np.where(mask[..., None] > 0, logits, 0.0)
        targets = np.where(mask > 0, targets, 0)
    return logsumexp(logits) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]


def xent_grad(logits, targets, weights):
    """Gradient of `sum(weights * xent)` with respect to the logits; exact 0 where the weight is 0."""
    used = weights[..., None] != 0
    logits = np.where(used, logits, 0.0)
    targets = np.where(weights != 0, targets, 0)
    return np.where(used, weights[..., None] * (softmax(logits) - onehot(targets, logits.shape[-1])), 0.0)


def ratio(numerator, denominator):
    """The one guarded mean: 0 where the denominator is 0."""
    denominator = np.asarray(denominator, float)
    return np.where(denominator == 0, 0.0, numerator / np.where(denominator == 0, 1.0, denominator))


def group_weights(mask, groups):
    """Weights of the mean over groups of group means; `groups` is a list of boolean [B, S] arrays."""
    weights = np.zeros(mask.shape)
    for group in groups:
        weights += ratio(mask * group, (mask * group).sum()) / len(groups)
    return weights


def row_group(shape, rows):
    """True on the given rows."""
    group = np.zeros(shape, bool)
    group[np.asarray(rows, int)] = True
    return group


def to_bfloat16(values):
    """The nearest bfloat16 numbers (eight significant bits)."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.round(fraction * 256) / 256, exponent)


def plain(value):
    """JSON-ready: lists, ints, floats; NaN and infinities as the strings of the protocol."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        number = float(value)
        return number if np.isfinite(number) else str(number)  # "nan", "inf", "-inf"
    return value


def case(
    name, *, tier, task, title, question, inputs, right, bugs, source, explanation, float32=(2e-5, 2e-6)
):
    """One case document. `bugs` maps a bug's name to (values, remark)."""
    return {
        "id": f"{tier}/{name}",
        "version": 1,
        "tier": tier,
        "task": task,
        "title": title,
        "question": question,
        "inputs": plain(inputs),
        "expected": plain(right),
        "tolerance": {
            "float64": {"rtol": 1e-9, "atol": 1e-12},
            "float32": {"rtol": float32[0], "atol": float32[1]},
        },
        "known_bugs": [{"name": bug, "values": plain(values)} for bug, values in bugs.items()],
        "provenance": {
            "source": source,
            "generated_by": f"derivation/{tier}.py",
            "rederived_by": "derivation/rederive.py",
        },
        "explanation": explanation,
    }
