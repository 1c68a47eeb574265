"""`python -m eqx_loss gap RUN`: how far two estimators of the same loss are apart in a run.

The gap is the mean over groups minus the mean over tokens, a free by-product of every step:
`learning/lm_estimator_gap` for the lm loss and `learning/moe_z_estimator_gap` for the router
z-loss (RFC-0032's "phase 2" measurement).
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys

import numpy as np
from jaxtyping import Float

# Gap channel, the log it is a difference of, and what to call it.
CHANNELS = (
    ("learning/lm_estimator_gap", "learning/lm_loss", "lm (sample minus token)"),
    ("learning/moe_z_estimator_gap", "learning/moe_z_loss", "router z (per group minus global)"),
)
# A mean that is this many standard errors from 0 is called different from 0.
SIGNIFICANCE = 2.0


class GapError(Exception):
    """The run cannot be read; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GapSummary:
    """One channel's gap over the steps of a run.

    Attributes:
        name: Which estimators are compared.
        num_steps: Logged steps that have the channel.
        mean: Mean gap, in the unit of the loss.
        standard_error: Of `mean`, from batch means, so that correlated steps do not shrink it.
        relative: `mean` over the mean of the log; 0 when the log is 0.
        noise: Standard deviation of one step's log around its trend (from differences of
            neighbouring steps), in the unit of the loss.
        is_significant: `|mean|` exceeds two standard errors.
        exceeds_noise: Significant, and `|mean|` is above `noise`.
    """

    name: str
    num_steps: int
    mean: float
    standard_error: float
    relative: float
    noise: float
    is_significant: bool
    exceeds_noise: bool


def summarize(name: str, gap: Float[np.ndarray, " steps"], log: Float[np.ndarray, " steps"]) -> GapSummary:
    """The gap's mean with its standard error, beside the noise of the log it belongs to.

    Args:
        name: For the report.
        gap: Gap of each logged step, in order; NaN steps are left out.
        log: The token-mean log of the same steps.

    Raises:
        GapError: Fewer than two finite steps.
    """
    finite = np.isfinite(gap) & np.isfinite(log)
    gap, log = gap[finite], log[finite]
    if gap.size < 2:
        raise GapError(f"{name}: {gap.size} finite steps, at least 2 are needed; log more steps")
    mean = float(gap.mean())
    error = _standard_error(gap)
    noise = float(np.std(np.diff(log)) / math.sqrt(2))
    scale = float(np.abs(log.mean()))
    significant = abs(mean) > SIGNIFICANCE * error
    return GapSummary(
        name=name,
        num_steps=int(gap.size),
        mean=mean,
        standard_error=error,
        relative=mean / scale if scale > 0 else 0.0,
        noise=noise,
        is_significant=significant,
        exceeds_noise=significant and abs(mean) > noise,
    )


def main(arguments: list[str]) -> int:
    """Prints the summary of a run folder or a metrics.jsonl; exit code 2 when it cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m eqx_loss gap", description=__doc__)
    parser.add_argument("run", type=pathlib.Path, help="run folder, or a metrics.jsonl file")
    parser.add_argument("--from-step", type=int, default=0, help="leave out earlier steps (warm-up)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        summaries = read_run(options.run, from_step=options.from_step)
    except GapError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([dataclasses.asdict(summary) for summary in summaries], indent=2))
    else:
        print("\n".join(_line(summary) for summary in summaries))
    return 0


def read_run(path: pathlib.Path, *, from_step: int = 0) -> list[GapSummary]:
    """Summaries of every gap channel that the run logs.

    Raises:
        GapError: No such file, a damaged line, or no gap channel in it.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise GapError(f"{file} does not exist; give a run folder or a metrics.jsonl file")
    rows: list[dict[str, object]] = []
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break  # A run that is still being written ends in half a line.
            raise GapError(
                f"{file}, line {number}: no JSON ({error.msg}); repair or remove the line"
            ) from None
    rows = [row for row in rows if float(str(row.get("step", 0))) >= from_step]
    summaries: list[GapSummary] = []
    for gap_name, log_name, title in CHANNELS:
        pairs = [(row[gap_name], row[log_name]) for row in rows if gap_name in row and log_name in row]
        if pairs:
            values = np.asarray([[_number(gap), _number(log)] for gap, log in pairs])
            summaries.append(summarize(title, values[:, 0], values[:, 1]))
    if not summaries:
        names = ", ".join(gap for gap, _, _ in CHANNELS)
        raise GapError(f"{file} has none of {names} from step {from_step} on; it is no run of this project")
    return summaries


def _number(value: object) -> float:
    return math.nan if value is None else float(str(value))


def _standard_error(values: Float[np.ndarray, " steps"]) -> float:
    """Standard error of the mean from `floor(sqrt(n))` batch means (at least 2 batches)."""
    num_batches = max(2, math.isqrt(values.size))
    means = np.asarray([batch.mean() for batch in np.array_split(values, num_batches)])
    return float(means.std(ddof=1) / math.sqrt(num_batches))


def _line(summary: GapSummary) -> str:
    if not summary.is_significant:
        verdict = "not distinguishable from 0"
    elif summary.exceeds_noise:
        verdict = "exceeds the log's noise"
    else:
        verdict = "different from 0, below the log's noise"
    return (
        f"{summary.name}: {summary.mean:+.3e} +- {summary.standard_error:.1e} over {summary.num_steps} steps "
        f"({100 * summary.relative:+.4f} % of the log); one step's noise {summary.noise:.1e}: {verdict}"
    )
