"""Compare two runs channel by channel."""

import dataclasses
import enum
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ._align import Alignment, Pairs, align, match_steps
from ._cause import Evidence, likeliest_cause
from ._channels import Channels, find_channels, first_step_rule
from ._meanings import Cause, Signature
from ._stats import Statistics, statistics
from ._types import LogError, Run, Series, series_of

# Relative. lm and mtp: nightly tolerances of RFC-0032; the first step of the same weights and
# the same batch leaves no room for training noise.
DEFAULT_TOLERANCES: Mapping[str, float] = {"lm": 2e-4, "mtp": 2e-3}
DEFAULT_FIRST_TOLERANCE = 1e-4
_TERMS = ("router_z", "lm_z", "load_balance", "mtp", "mtp_weighted")
_LOSS_CHANNELS = ("lm", "loss", "objective", "objective_lm")


class Verdict(enum.Enum):
    """PASS and FAIL for channels with a tolerance; INFO for the others."""

    PASS = "pass"
    FAIL = "fail"
    INFO = "info"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to compare.

    Attributes:
        tolerances: Channel to largest relative difference at any step. Depth channels (`mtp_1`)
            take the tolerance of `mtp`. Channels without one are reported, not judged.
        first_tolerance: The same at the first common step, for every judged channel.
        offset: Reference step minus candidate step; None finds it.
        reference_names: Channel to name in the reference log.
        candidate_names: Channel to name in the candidate log.
        channels: Only these; empty for all that both logs have.
        first_step: Leave out reference steps before this one; None for none.
        last_step: Leave out reference steps after this one; None for none.
        min_steps: Fewer common steps of a judged channel fail it.
        average: Compare means over the interval of the sparser log (it must log means).
    """

    tolerances: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(DEFAULT_TOLERANCES))
    first_tolerance: float = DEFAULT_FIRST_TOLERANCE
    offset: int | None = None
    reference_names: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    candidate_names: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    channels: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    min_steps: int = 1
    average: bool = False

    def __post_init__(self) -> None:
        for channel, tolerance in (*self.tolerances.items(), ("first step", self.first_tolerance)):
            if not tolerance >= 0:
                raise ValueError(f"a tolerance must be a number >= 0, got {tolerance} for {channel}")
        if self.min_steps < 1:
            raise ValueError(f"min_steps must be at least 1, got {self.min_steps}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelResult:
    """One channel's comparison; `cause` is None where nothing needs explaining."""

    channel: str
    reference_name: str
    candidate_name: str
    pairs: Pairs
    tolerance: float | None
    statistics: Statistics
    verdict: Verdict
    cause: Cause | None
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """All channels, and how the logs were read and aligned."""

    reference: Run
    candidate: Run
    alignment: Alignment
    channels: tuple[ChannelResult, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True when no judged channel fails."""
        return all(result.verdict is not Verdict.FAIL for result in self.channels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sides:
    """Channels of reference (ours) and candidate (theirs), and how their steps match."""

    ours: Channels
    theirs: Channels
    alignment: Alignment
    restarts: tuple[int, ...]


def compare_runs(reference: Run, candidate: Run, options: Options | None = None) -> Comparison:
    """The comparison of two runs.

    Raises:
        LogError: No common channel, no common step, or no channel with a tolerance.
    """
    options = Options() if options is None else options
    ours = find_channels(reference, options.reference_names)
    theirs = find_channels(candidate, options.candidate_names)
    names = _common(ours, theirs, options, reference, candidate)
    decider = next((name for name in _LOSS_CHANNELS if name in names), names[0])
    alignment = align(
        ours.series[decider],
        theirs.series[decider],
        given=options.offset,
        first_steps=(first_step_rule(reference), first_step_rule(candidate)),
    )
    matched = {
        name: pairs
        for name in names
        if len((pairs := _pairs(ours.series[name], theirs.series[name], alignment.offset, options)).steps)
    }
    if not matched:
        raise LogError("no common step is left; widen --first-step and --last-step")
    if not any(_tolerance(name, options) is not None for name in matched):
        raise LogError(
            f"no common channel has a tolerance, got {', '.join(matched)}; give one with --tol "
            "CHANNEL=RELATIVE"
        )
    restarts = (*reference.restarts, *(step + alignment.offset for step in candidate.restarts))
    sides = _Sides(ours=ours, theirs=theirs, alignment=alignment, restarts=restarts)
    results = tuple(_judge(name, pairs, sides, options) for name, pairs in matched.items())
    notes = (
        *_run_notes("reference", reference),
        *_run_notes("candidate", candidate),
        *_coverage(results, sides),
        *_one_sided(sides, options),
    )
    return Comparison(
        reference=reference, candidate=candidate, alignment=alignment, channels=results, notes=notes
    )


def _common(ours: Channels, theirs: Channels, options: Options, reference: Run, candidate: Run) -> list[str]:
    names = [name for name in ours.series if name in theirs.series]
    if "lm" in ours.notes and "lm" in theirs.notes:
        names = [name for name in names if name != "loss"]  # lm is the loss on both sides
    if "mtp_1" in names and "mtp_2" not in ours.series and "mtp_2" not in theirs.series:
        names.remove("mtp_1")  # one depth: the same as mtp
    if options.channels:
        missing = [name for name in options.channels if name not in names]
        if missing:
            raise LogError(
                f"channels must be in both logs, got {', '.join(missing)}; in both: {', '.join(names)}"
            )
        names = list(options.channels)
    if not names:
        raise LogError(
            "the logs must share a channel; map names with --map CHANNEL=REFERENCE_NAME::CANDIDATE_NAME. "
            f"{reference.path} has: {', '.join(reference.names)}. {candidate.path} has: "
            f"{', '.join(candidate.names)}"
        )
    return sorted(names, key=lambda name: (_tolerance(name, options) is None, name != "lm", name))


def _pairs(reference: Series, candidate: Series, offset: int, options: Options) -> Pairs:
    if options.average:
        reference, candidate = _averaged(reference, candidate, offset)
    pairs = match_steps(reference, candidate, offset)
    keep = np.ones(len(pairs.steps), bool)
    if options.first_step is not None:
        keep &= pairs.steps >= options.first_step
    if options.last_step is not None:
        keep &= pairs.steps <= options.last_step
    return Pairs(steps=pairs.steps[keep], reference=pairs.reference[keep], candidate=pairs.candidate[keep])


def _averaged(reference: Series, candidate: Series, offset: int) -> tuple[Series, Series]:
    """Replaces the denser log by its means over the intervals that end at the sparser one's steps."""
    strides = [
        int(np.median(np.diff(series.steps))) if len(series.steps) > 1 else 1
        for series in (reference, candidate)
    ]
    if strides[0] > strides[1]:
        return reference, _interval_means(candidate, reference.steps - offset, strides[0])
    return _interval_means(reference, candidate.steps + offset, strides[1]), candidate


def _interval_means(series: Series, ends: NDArray[np.int64], stride: int) -> Series:
    table: dict[int, float] = {}
    for end in ends:
        inside = (series.steps > end - stride) & (series.steps <= end)
        if np.count_nonzero(inside) == stride:
            table[int(end)] = float(np.mean(series.values[inside]))
    return series_of(series.name, table)


def _judge(name: str, pairs: Pairs, sides: _Sides, options: Options) -> ChannelResult:
    tolerance = _tolerance(name, options)
    limit = float("inf") if tolerance is None else tolerance
    first = float("inf") if tolerance is None else options.first_tolerance
    numbers = statistics(pairs, limit, first)
    short = tolerance is not None and numbers.num_steps < options.min_steps
    nothing = tolerance is not None and numbers.num_not_finite == numbers.num_steps
    failed = numbers.first_step_beyond is not None or short or nothing
    verdict = Verdict.INFO if tolerance is None else Verdict.FAIL if failed else Verdict.PASS
    notes = [channels.notes[name] for channels in (sides.ours, sides.theirs) if name in channels.notes]
    if short:
        notes.append(f"only {numbers.num_steps} common steps, at least {options.min_steps} are required")
    both = int(np.count_nonzero(~np.isfinite(pairs.reference) & ~np.isfinite(pairs.candidate)))
    if both:
        notes.append(f"{both} of {numbers.num_steps} steps are finite in neither log and show nothing")
    cause = None
    if numbers.first_step_beyond is not None:
        cause = likeliest_cause(_evidence(name, pairs, limit, numbers, sides))
        notes.extend(_inputs_differ(sides))
    elif sides.alignment.source == "found":
        cause = Cause(
            signature=Signature.STEP_SHIFT,
            text=f"agrees after an offset of {sides.alignment.offset:+d} was found; give --offset "
            f"{sides.alignment.offset} to have it checked",
        )
    return ChannelResult(
        channel=name,
        reference_name=sides.ours.series[name].name,
        candidate_name=sides.theirs.series[name].name,
        pairs=pairs,
        tolerance=tolerance,
        statistics=numbers,
        verdict=verdict,
        cause=cause,
        notes=tuple(notes),
    )


def _tolerance(name: str, options: Options) -> float | None:
    depth = name.startswith("mtp_") and name[4:].isdigit()
    return options.tolerances.get(name, options.tolerances.get("mtp") if depth else None)


def _evidence(name: str, pairs: Pairs, limit: float, numbers: Statistics, sides: _Sides) -> Evidence:
    terms: dict[str, NDArray[np.float64]] = {}
    if name in _LOSS_CHANNELS:
        logged = {term: _series_at(term, pairs, sides) for term in _TERMS}
        terms = {term: values for term, values in logged.items() if values is not None}
    if "mtp" in terms:
        terms.pop("mtp_weighted", None)
    return Evidence(
        channel=name,
        pairs=pairs,
        tolerance=limit,
        alignment=sides.alignment,
        drift=numbers.drift,
        terms=terms,
        gap=_series_at("lm_gap", pairs, sides) if name == "lm" else None,
        restarts=sides.restarts,
    )


def _series_at(name: str, pairs: Pairs, sides: _Sides) -> NDArray[np.float64] | None:
    """A channel of either run at the given reference steps, NaN where missing; None if logged nowhere."""
    for channels, offset in ((sides.theirs, sides.alignment.offset), (sides.ours, 0)):
        series = channels.series.get(name)
        if series is None:
            continue
        steps, at_pairs, at_series = np.intersect1d(pairs.steps, series.steps + offset, return_indices=True)
        values = np.full(len(pairs.steps), np.nan)
        values[at_pairs] = series.values[at_series]
        if len(steps):
            return values
    return None


def _inputs_differ(sides: _Sides) -> list[str]:
    """Notes on logged inputs of a step that already differ: learning rate and token count."""
    notes: list[str] = []
    for name in ("learning_rate", "num_tokens"):
        if name not in sides.ours.series or name not in sides.theirs.series:
            continue
        inputs = match_steps(sides.ours.series[name], sides.theirs.series[name], sides.alignment.offset)
        differ = np.abs(inputs.candidate - inputs.reference) > 1e-4 * np.abs(inputs.reference)
        if np.any(differ):
            at = int(np.argmax(differ))
            notes.append(
                f"{name} differs from step {inputs.steps[at]}: reference {inputs.reference[at]:.6g}, "
                f"candidate {inputs.candidate[at]:.6g}"
            )
    return notes


def _run_notes(role: str, run: Run) -> list[str]:
    notes: list[str] = []
    if run.restarts:
        notes.append(
            f"{role}: {len(run.restarts)} restarts, at steps {', '.join(map(str, run.restarts[:5]))}"
        )
    if run.num_repeated:
        notes.append(
            f"{role}: {run.num_repeated} values repeated with another number; the last one was taken"
        )
    if run.num_duplicates:
        notes.append(f"{role}: {run.num_duplicates} values printed more than once, equal")
    if run.num_skipped:
        notes.append(f"{role}: {run.num_skipped} unreadable records left out (cut short or damaged)")
    return notes


def _one_sided(sides: _Sides, options: Options) -> list[str]:
    """Notes on channels that would be judged but are in one log only."""
    notes: list[str] = []
    for role, channels, others in (
        ("reference", sides.ours, sides.theirs),
        ("candidate", sides.theirs, sides.ours),
    ):
        for name in channels.series:
            is_judged = not options.channels and name in options.tolerances
            if is_judged and name not in others.series:
                notes.append(f"{name}: only in the {role}, not compared")
    return notes


def _coverage(results: tuple[ChannelResult, ...], sides: _Sides) -> list[str]:
    """Notes where a judged channel covers less than nine tenths of a log."""
    notes: list[str] = []
    for result in results:
        if result.tolerance is None:
            continue
        for role, channels in (("reference", sides.ours), ("candidate", sides.theirs)):
            total = len(channels.series[result.channel].steps)
            if len(result.pairs.steps) < 0.9 * total:
                notes.append(
                    f"{result.channel}: {len(result.pairs.steps)} of the {role}'s {total} steps are compared"
                )
    return notes
