"""Naming the fault behind a loss that changes with the cut of its batch."""

import math
from collections.abc import Sequence


def likeliest_cause(
    *,
    found: float,
    expected: float,
    part_values: Sequence[float],
    part_tokens: Sequence[float] | None,
    num_rows: int,
    gradient_ratio: float,
    rtol: float = 1e-3,
) -> str:
    """The fault whose number is nearest to `found / expected`, as a sentence with its remedy.

    Args:
        found: Combined loss of the parts, in nats.
        expected: Loss of the whole batch.
        part_values: Loss of each part.
        part_tokens: Scored tokens of each part, or None if unknown.
        num_rows: Rows of the batch.
        gradient_ratio: Norm of the found gradient over that of the expected one.
        rtol: How near a ratio must be to count as hit.
    """
    parts, ratio = len(part_values), found / expected if expected else math.nan
    total = sum(part_tokens) if part_tokens is not None else math.nan
    candidates = [
        (
            float(parts),
            "the parts' means are summed: divide by the number of parts (steps or ranks), or weight tokens",
        ),
        (1 / parts, "the sum is divided by the number of parts (steps or ranks) once too often"),
        (
            total,
            "a sum is used where the whole batch has a mean: divide by the token count of the whole batch",
        ),
        (1 / total if total else math.nan, "a mean is divided by the token count once more"),
        (
            total / (total + num_rows),
            "the count includes one label a row that is no target: count after the label shift",
        ),
        (
            (total + num_rows) / total if total else math.nan,
            "one target a row is missing from the count: the shift is applied twice",
        ),
    ]
    for candidate, text in candidates:
        if math.isfinite(candidate) and abs(ratio / candidate - 1) < rtol:
            return f"Likeliest cause (ratio {ratio:.4g}): {text}."
    if part_tokens is not None and total > 0:
        pooled = sum(v * n for v, n in zip(part_values, part_tokens)) / total
        if abs(pooled / expected - 1) < rtol:
            return (
                f"Likeliest cause (ratio {ratio:.4g}): a mean of the parts' own means, although their token counts "
                f"differ ({', '.join(f'{n:g}' for n in part_tokens)}): divide by the count of the whole batch."
            )
    if abs(ratio - 1) < rtol and abs(gradient_ratio - 1) >= rtol:
        return f"The value agrees, the gradient is {gradient_ratio:.4g} times as large: a scale sits outside the loss."
    return f"No known fault has this ratio ({ratio:.6g}): a part probably needs facts of the whole batch."
