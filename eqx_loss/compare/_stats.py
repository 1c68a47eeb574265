"""Differences between two curves, in numbers."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from ._align import Pairs

_MIN_DRIFT = 8  # steps; a slope's error from fewer means nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drift:
    """Least-squares slope of the signed relative difference.

    Attributes:
        per_1k_steps: Change of the relative difference over 1000 steps.
        error: Standard error of the slope, widened for noise that lasts over steps.
    """

    per_1k_steps: float
    error: float

    @property
    def significant(self) -> bool:
        """True when the slope is more than four standard errors from 0."""
        return abs(self.per_1k_steps) > 4 * self.error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Relative differences `(candidate - reference) / |reference|` of one channel.

    Attributes:
        num_steps: Common steps.
        first_step: First common step, in the reference's numbering.
        last_step: Last common step.
        first_step_rel: Size of the difference at the first common step; NaN if not finite there.
        mean_rel: Mean size over the steps at which both values are finite.
        max_rel: Largest size.
        final_rel: Size at the last finite step.
        mean_signed_rel: Mean with sign.
        drift: Slope of the signed difference, or None for fewer than eight finite steps.
        first_step_beyond: First step beyond the tolerance or with one value not finite, or None.
        num_beyond: Number of such steps.
        num_not_finite: Steps with a NaN or infinity in either run.
    """

    num_steps: int
    first_step: int
    last_step: int
    first_step_rel: float
    mean_rel: float
    max_rel: float
    final_rel: float
    mean_signed_rel: float
    drift: Drift | None
    first_step_beyond: int | None
    num_beyond: int
    num_not_finite: int


def relative(pairs: Pairs) -> NDArray[np.float64]:
    """`(candidate - reference) / |reference|` per step.

    0 where both are equal, infinite for a difference from an exact 0, NaN where either value is
    not finite.
    """
    finite = np.isfinite(pairs.reference) & np.isfinite(pairs.candidate)
    difference = np.where(finite, pairs.candidate, 0) - np.where(finite, pairs.reference, 0)
    size = np.abs(np.where(finite, pairs.reference, 1))
    ratio = np.where(size > 0, difference / np.where(size > 0, size, 1), np.copysign(np.inf, difference))
    return np.where(finite, np.where(difference == 0, 0.0, ratio), np.nan)


def statistics(pairs: Pairs, tolerance: float, first_tolerance: float) -> Statistics:
    """The statistics of one channel.

    Steps at which both runs are not finite are counted but do not differ. Means over no finite
    step are NaN.

    Args:
        pairs: At least one common step.
        tolerance: Largest allowed relative difference; infinity for none.
        first_tolerance: The same for the first common step.
    """
    signed = relative(pairs)
    finite = signed[~np.isnan(signed)]
    sizes = np.abs(finite)
    limits = np.full(len(signed), tolerance)
    limits[0] = min(first_tolerance, tolerance)
    beyond = np.abs(np.nan_to_num(signed, nan=0.0, posinf=np.inf, neginf=-np.inf)) > limits
    if np.isfinite(tolerance):
        beyond |= one_sided(pairs)
    at = np.flatnonzero(beyond)
    return Statistics(
        num_steps=len(signed),
        first_step=int(pairs.steps[0]),
        last_step=int(pairs.steps[-1]),
        first_step_rel=float(abs(signed[0])),
        mean_rel=float(np.mean(sizes)) if len(sizes) else float("nan"),
        max_rel=float(np.max(sizes)) if len(sizes) else float("nan"),
        final_rel=float(sizes[-1]) if len(sizes) else float("nan"),
        mean_signed_rel=float(np.mean(finite)) if len(finite) else float("nan"),
        drift=drift(pairs.steps, signed),
        first_step_beyond=int(pairs.steps[at[0]]) if len(at) else None,
        num_beyond=len(at),
        num_not_finite=int(np.count_nonzero(np.isnan(signed))),
    )


def one_sided(pairs: Pairs) -> NDArray[np.bool_]:
    """True where exactly one of the two values is finite."""
    return np.isfinite(pairs.reference) != np.isfinite(pairs.candidate)


def drift(steps: NDArray[np.int64], signed: NDArray[np.float64]) -> Drift | None:
    """The slope of `signed` over steps, or None for fewer than eight finite values.

    The error is that of ordinary least squares, times `sqrt((1 + r) / (1 - r))` for a positive
    lag-one correlation `r` of the residuals: neighbouring steps are not independent.
    """
    usable = np.isfinite(signed)
    x = steps[usable].astype(np.float64)
    y = signed[usable]
    if len(x) < _MIN_DRIFT:
        return None
    x = x - np.mean(x)
    slope = float(np.sum(x * y) / np.sum(x * x))
    residual = y - np.mean(y) - slope * x
    variance = float(np.sum(residual**2) / (len(x) - 2))
    power = float(np.sum(residual**2))
    lag_one = float(np.sum(residual[1:] * residual[:-1]) / power) if power > 0 else 0.0
    widen = np.sqrt((1 + lag_one) / (1 - lag_one)) if 0 < lag_one < 1 else 1.0
    error = float(np.sqrt(variance / np.sum(x * x)) * widen)
    return Drift(per_1k_steps=1000 * slope, error=1000 * error)
