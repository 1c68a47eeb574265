"""The likeliest cause of a difference, by its signature."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ._align import Alignment, Pairs
from ._meanings import GAP_SIZES, Cause, Signature, factor_cause, gap_cause, offset_cause, term_cause
from ._stats import Drift, one_sided, relative

_Z_COEFFICIENTS = (1e-7, 1e-1)
_CLEAN = 0.1  # residual / difference, below which a model explains a difference
_MIN_STEPS = 4
_RESOLUTION = 2e-6  # relative; logs carry about six digits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the search for a cause may use.

    Attributes:
        channel: The channel that differs.
        pairs: Its values at common steps.
        tolerance: Allowed relative difference.
        alignment: How steps were matched.
        drift: Slope of the relative difference.
        terms: Other channels at the same steps (router_z, lm_z, mtp, ...), NaN where missing.
        gap: Logged estimator gap `sample - token` at the same steps, or None.
        restarts: Reference steps at which either log restarts.
    """

    channel: str
    pairs: Pairs
    tolerance: float
    alignment: Alignment
    drift: Drift | None
    terms: Mapping[str, NDArray[np.float64]]
    gap: NDArray[np.float64] | None
    restarts: tuple[int, ...]


def likeliest_cause(evidence: Evidence) -> Cause:
    """The cause whose signature fits best; `Signature.UNKNOWN` when none does.

    Order: values that are not finite, a step shift, a start that is forgotten, models that hold
    from the first step on (factor, logged term, offset), then what changes over the run.
    """
    signed = relative(evidence.pairs)
    usable = np.isfinite(signed)
    if np.any(one_sided(evidence.pairs)):
        return _not_finite(evidence)
    shift = evidence.alignment.found_offset - evidence.alignment.offset
    if shift:
        return _step_shift(shift)
    if np.count_nonzero(usable) == 0:
        return _unknown("no step has two finite, comparable values")
    if not _from_the_start(signed[usable], evidence.tolerance):
        return _later(evidence, signed, usable)
    start = _start_only(evidence, signed)
    return start or _model(evidence, signed, usable) or _later(evidence, signed, usable)


def _not_finite(evidence: Evidence) -> Cause:
    at = int(np.flatnonzero(one_sided(evidence.pairs))[0])
    who = "reference" if np.isfinite(evidence.pairs.candidate[at]) else "candidate"
    return Cause(
        signature=Signature.NOT_FINITE,
        text=f"NaN or infinity in the {who} from step {evidence.pairs.steps[at]}: a mean over no scored "
        "token (0/0), an overflow, or masked rows reaching the loss",
    )


def _step_shift(shift: int) -> Cause:
    steps = "one step" if abs(shift) == 1 else f"{abs(shift)} steps"
    return Cause(
        signature=Signature.STEP_SHIFT,
        text=f"{steps} shift: the curves agree when the candidate's steps are moved by {shift:+d}: one "
        "batch more or less was consumed, or a metric is written late; if only the numbering differs, add "
        f"{shift:+d} to --offset",
    )


def _from_the_start(signed: NDArray[np.float64], tolerance: float) -> bool:
    """True when the difference is there in the first tenth already, at a third of its later size."""
    head = np.abs(signed[: max(1, len(signed) // 10)])
    typical = float(np.median(np.abs(signed)))
    return float(np.median(head)) > max(typical / 3, tolerance / 10)


def _model(evidence: Evidence, signed: NDArray[np.float64], usable: NDArray[np.bool_]) -> Cause | None:
    """A one-parameter model `candidate - reference = k * x` that explains the difference."""
    reference = evidence.pairs.reference[usable]
    difference = evidence.pairs.candidate[usable] - reference
    if evidence.gap is not None:
        logged = _logged_gap(evidence.gap[usable], difference)
        if logged is not None:
            return logged
    # Ordered by preference: a later one must fit better.
    regressors = {"factor": reference, "offset": np.ones_like(reference)}
    regressors.update({name: term[usable] for name, term in evidence.terms.items()})
    fits = {name: _fit(x, difference) for name, x in regressors.items()}
    fits = {name: fit for name, fit in fits.items() if fit is not None and _plausible(name, fit[0])}
    best = min(fits, key=lambda name: max(fits[name][1], 1e-4)) if fits else None
    if best is not None and fits[best][1] < _CLEAN and len(reference) >= _MIN_STEPS:
        coefficient = fits[best][0]
        if best == "factor":
            return factor_cause(evidence.channel, 1 + coefficient)
        if best == "offset":
            return offset_cause(coefficient, float(np.mean(signed[usable])))
        return term_cause(best, coefficient)
    if "factor" in fits and abs(fits["factor"][0]) > 0.05 and fits["factor"][1] < 0.3:
        return factor_cause(evidence.channel, 1 + fits["factor"][0])
    return _noisy_gap(evidence, signed[usable])


def _fit(x: NDArray[np.float64], difference: NDArray[np.float64]) -> tuple[float, float] | None:
    """Robust coefficient (median of ratios) and unexplained share (median residual / difference)."""
    present = np.isfinite(x) & (x != 0)
    if np.count_nonzero(present) < max(1, len(x) // 2):
        return None
    coefficient = float(np.median(difference[present] / x[present]))
    size = float(np.median(np.abs(difference[present])))
    if size == 0:
        return None
    residual = difference[present] - coefficient * x[present]
    return coefficient, float(np.median(np.abs(residual))) / size


def _plausible(name: str, coefficient: float) -> bool:
    match name:
        case "router_z" | "load_balance":
            return _Z_COEFFICIENTS[0] <= abs(coefficient) <= _Z_COEFFICIENTS[1]
        case "lm_z":  # some logs carry the coefficient already
            return _Z_COEFFICIENTS[0] <= abs(coefficient) <= 2
        case "mtp" | "mtp_weighted":
            return 1e-3 <= abs(coefficient) <= 2
        case _:
            return True


def _logged_gap(gap: NDArray[np.float64], difference: NDArray[np.float64]) -> Cause | None:
    fit = _fit(gap, difference)
    if fit is None or fit[1] > 0.3 or not 0.8 < abs(fit[0]) < 1.25:
        return None
    first, second = ("per sample", "per token") if fit[0] > 0 else ("per token", "per sample")
    return Cause(
        signature=Signature.COVARIANCE_GAP,
        text=f"the difference is {fit[0]:+.3f} times the logged covariance gap: the candidate is "
        f"normalized {first}, the reference {second} (calculate_per_token_loss)",
    )


def _noisy_gap(evidence: Evidence, signed: NDArray[np.float64]) -> Cause | None:
    """A covariance gap changes from batch to batch, but keeps its mean and mostly its sign."""
    if len(signed) < 8 or (evidence.drift is not None and evidence.drift.significant):
        return None
    mean = float(np.mean(signed))
    error = float(np.std(signed, ddof=1)) / math.sqrt(len(signed))
    same_sign = np.count_nonzero(signed * mean > 0) / len(signed)
    if abs(mean) > 4 * error and same_sign > 0.7 and GAP_SIZES[0] <= abs(mean) <= GAP_SIZES[1]:
        return gap_cause(mean)
    return None


def _start_only(evidence: Evidence, signed: NDArray[np.float64]) -> Cause | None:
    """Curves that begin apart and then meet."""
    sizes = np.abs(signed[np.isfinite(signed)])
    tail = sizes[-max(1, len(sizes) // 4) :]
    if len(sizes) >= _MIN_STEPS and float(np.median(tail)) < min(evidence.tolerance, float(sizes[0]) / 10):
        return Cause(
            signature=Signature.DIFFERENT_START,
            text=f"the runs begin {sizes[0]:.3%} apart and come together: other initial weights, a "
            "converted checkpoint with an error, or another first batch",
        )
    return None


def _later(evidence: Evidence, signed: NDArray[np.float64], usable: NDArray[np.bool_]) -> Cause:
    """Signatures of runs that agree at first, or differ without a pattern from the start."""
    steps = evidence.pairs.steps[usable]
    sizes = np.abs(signed[usable])
    beyond = sizes > evidence.tolerance
    if _other_data(evidence, usable):
        return Cause(
            signature=Signature.DIFFERENT_DATA,
            text="batch to batch changes of the two curves are unrelated: other data or another sample "
            "order (seed, blend, shard before shuffle)",
        )
    begin = None if _is_ramp(evidence, signed[usable]) else _divergence(sizes, evidence.tolerance)
    if begin is not None:
        restart = [step for step in evidence.restarts if abs(step - int(steps[begin])) <= 2]
        after = (
            "; a log restarts there: compare the resumed state (data position, optimizer, log sums)"
            if restart
            else ""
        )
        return Cause(
            signature=Signature.DIVERGENCE,
            text=f"divergence from step {steps[begin]} on: median difference "
            f"{np.median(sizes[:begin]):.2e} before, {np.median(sizes[begin:]):.2e} after: look at that "
            f"step's batch, learning rate, gradient norm and skipped updates{after}",
        )
    if evidence.drift is not None and evidence.drift.significant:
        return Cause(
            signature=Signature.DRIFT,
            text=f"steady drift of {evidence.drift.per_1k_steps:+.2e} +- {evidence.drift.error:.1e} per "
            "1000 steps: an optimizer difference (learning rate, weight decay groups, epsilon, moment "
            "dtype) or a state that one run does not update (router bias)",
        )
    if np.count_nonzero(beyond) <= max(1, len(beyond) // 20):
        return Cause(
            signature=Signature.ISOLATED_STEPS,
            text=f"{np.count_nonzero(beyond)} isolated steps beyond tolerance, first at "
            f"{steps[np.argmax(beyond)]}: noise close to the tolerance, or single batches that differ",
        )
    return _unknown("no known pattern; look at the picture (--plot) and at the first step beyond tolerance")


def _is_ramp(evidence: Evidence, signed: NDArray[np.float64]) -> bool:
    """True when a straight line explains the difference: a drift that began with the run."""
    if evidence.drift is None or not evidence.drift.significant:
        return False
    steps = evidence.pairs.steps[np.isfinite(relative(evidence.pairs))].astype(np.float64)
    steps = steps - np.mean(steps)
    slope = float(np.sum(steps * signed) / np.sum(steps * steps))
    return float(np.std(signed - slope * steps)) < 0.25 * float(np.sqrt(np.mean(signed**2)))


def _divergence(sizes: NDArray[np.float64], tolerance: float) -> int | None:
    """Index from which on most steps are beyond tolerance while few were before, or None.

    The split that puts most steps on their side, moved back over what already stands out of the
    differences before it.
    """
    beyond = sizes > tolerance
    if len(beyond) < _MIN_STEPS or not np.any(beyond):
        return None
    within_before = np.concatenate([[0], np.cumsum(~beyond)[:-1]])
    beyond_after = np.cumsum(beyond[::-1])[::-1]
    begin = int(np.argmax(within_before + beyond_after))
    num_after = len(beyond) - begin
    few_before = np.count_nonzero(beyond[:begin]) <= 0.2 * begin
    if begin == 0 or num_after < 2 or not few_before or np.count_nonzero(beyond[begin:]) <= num_after / 2:
        return None
    usual = 5 * float(np.median(sizes[:begin])) + _RESOLUTION
    while begin > 1 and sizes[begin - 1] > usual:
        begin -= 1
    return begin


def _other_data(evidence: Evidence, usable: NDArray[np.bool_]) -> bool:
    """True when batch to batch changes correlate by less than a half although they are not tiny.

    Second differences: they leave the noise of the batches and hardly anything of the curve.
    """
    reference = np.diff(evidence.pairs.reference[usable], n=2)
    candidate = np.diff(evidence.pairs.candidate[usable], n=2)
    if len(reference) < 16:
        return False
    level = float(np.median(np.abs(evidence.pairs.reference[usable])))
    if min(np.std(reference), np.std(candidate)) <= evidence.tolerance * level:
        return False
    return float(np.corrcoef(reference, candidate)[0, 1]) < 0.5


def _unknown(why: str) -> Cause:
    return Cause(signature=Signature.UNKNOWN, text=why)
