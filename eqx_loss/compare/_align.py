"""Which step of the candidate is which step of the reference."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ._types import LogError, Series

_MAX_SHIFT = 8  # steps searched on both sides of the expected offset
_MIN_OVERLAP = 5  # steps; below, an offset cannot be told from chance
_FLOOR = 1e-6  # relative; logs carry about six digits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alignment:
    """How steps were matched: reference step = candidate step + offset.

    Attributes:
        offset: In steps; what was applied.
        found_offset: The offset that fits the values best; equals `offset` unless the numbering
            of the two logs forbids to apply it (then the candidate is shifted).
        source: "given", "expected" (from the numbering) or "found" (from the values).
    """

    offset: int
    found_offset: int
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Values of one channel at the steps that both runs have.

    Attributes:
        steps: Reference steps, increasing.
        reference: Reference values, maybe not finite.
        candidate: Candidate values, maybe not finite.
    """

    steps: NDArray[np.int64]
    reference: NDArray[np.float64]
    candidate: NDArray[np.float64]


def match_steps(reference: Series, candidate: Series, offset: int) -> Pairs:
    """The values at common steps; the candidate's steps are moved by `offset` first."""
    moved = candidate.steps + offset
    steps, in_reference, in_candidate = np.intersect1d(reference.steps, moved, return_indices=True)
    return Pairs(
        steps=steps,
        reference=reference.values[in_reference],
        candidate=candidate.values[in_candidate],
    )


def align(
    reference: Series,
    candidate: Series,
    *,
    given: int | None,
    first_steps: tuple[int | None, int | None],
) -> Alignment:
    """The offset given, or expected from the numbering, or found from the values.

    A found offset replaces the expected one only when it fits far better (five times in step to
    step noise, or ten times in level) and when the numbering allows it: the trainers number
    their first step differently or unknown, or the logs begin that far apart. Otherwise it is
    reported as `found_offset`: the same step number then carries another step's loss.

    Args:
        reference: The channel that decides (lm, or the first common one).
        candidate: The same channel of the candidate.
        given: The user's offset, or None.
        first_steps: Number of the first step by the rule of each log's trainer, None if unknown.

    Raises:
        LogError: No offset gives a common step.
    """
    rules_differ = None in first_steps or first_steps[0] != first_steps[1]
    begin = int(reference.steps[0] - candidate.steps[0])
    expected = 0
    if first_steps[0] is not None and first_steps[1] is not None:
        expected = first_steps[0] - first_steps[1]
    if given is None and not len(match_steps(reference, candidate, expected).steps):
        expected = begin  # nothing in common as numbered: put the beginnings together
    base = expected if given is None else given
    if not len(match_steps(reference, candidate, base).steps):
        raise LogError(
            f"the logs must share steps: reference has {reference.steps[0]}..{reference.steps[-1]}, "
            f"candidate {candidate.steps[0]}..{candidate.steps[-1]}, offset {base}; give another with "
            "--offset"
        )
    found = _best_offset(reference, candidate, base)
    if given is not None:
        return Alignment(offset=given, found_offset=found, source="given")
    known_and_different = rules_differ and None not in first_steps
    if found != base and (known_and_different or found == begin):
        return Alignment(offset=found, found_offset=found, source="found")
    return Alignment(offset=base, found_offset=found, source="expected")


def _best_offset(reference: Series, candidate: Series, base: int) -> int:
    """The offset with the smoothest ratio, or `base` unless another is far better."""
    begin = int(reference.steps[0] - candidate.steps[0])
    offsets = sorted(
        {begin, *range(base - _MAX_SHIFT, base + _MAX_SHIFT + 1)}, key=lambda o: (abs(o - base), o)
    )
    scores = {
        offset: score for offset in offsets if (score := _misfit(reference, candidate, offset)) is not None
    }
    if base not in scores:
        return base
    noise, level = scores[base]
    better = {
        offset: score
        for offset, score in scores.items()
        if score[0] < 0.2 * noise or (score[1] < 0.1 * level and score[0] <= noise)
    }
    return min(better, key=lambda offset: (better[offset], abs(offset - base))) if better else base


def _misfit(reference: Series, candidate: Series, offset: int) -> tuple[float, float] | None:
    """Step to step noise and level of the log ratio (medians), or None for too small an overlap.

    The noise is blind to a constant factor, a drift and a late divergence; only the wrong step
    makes the batch to batch noise of the two runs differ.
    """
    pairs = match_steps(reference, candidate, offset)
    usable = np.isfinite(pairs.reference) & np.isfinite(pairs.candidate)
    usable &= (pairs.reference > 0) & (pairs.candidate > 0)
    shorter = min(len(reference.steps), len(candidate.steps))
    if np.count_nonzero(usable) < max(_MIN_OVERLAP, shorter // 2):
        return None
    ratio = np.log(pairs.candidate[usable] / pairs.reference[usable])
    noise = float(np.median(np.abs(np.diff(ratio))))
    level = float(np.median(np.abs(ratio)))
    return max(noise, _FLOOR), max(level, _FLOOR)
