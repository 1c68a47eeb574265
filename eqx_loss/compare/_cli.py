"""`python -m eqx_loss compare REFERENCE CANDIDATE`."""

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence

from ._channels import KNOWN_NAMES
from ._compare import DEFAULT_FIRST_TOLERANCE, DEFAULT_TOLERANCES, Comparison, Options, compare_runs
from ._plot import save_plot
from ._read import read_run
from ._report import as_json, as_junit, as_text, junit_error
from ._types import LogError, LogFormat

PASSED, FAILED, UNUSABLE = 0, 1, 2
_BOTH_SIDES = "::"


def main(argv: Sequence[str] | None = None) -> int:
    """Compares two logs and prints the result.

    Returns:
        0 when every judged channel is within tolerance, 1 when one is not, 2 when the logs or
        the arguments cannot be used (the reason is on stderr).
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse: 0 after --help, 2 for bad arguments
        return stop.code if isinstance(stop.code, int) else UNUSABLE
    try:
        comparison = _compare(arguments)
        if arguments.plot is not None:
            save_plot(comparison, arguments.plot)
        if arguments.junit is not None:
            pathlib.Path(arguments.junit).write_text(as_junit(comparison), encoding="utf-8")
    except (ValueError, OSError) as error:  # LogError is a ValueError
        print(f"compare: {error}", file=sys.stderr)
        if arguments.junit is not None:
            _write_quietly(arguments.junit, junit_error(str(error)))
        return UNUSABLE
    print(as_json(comparison) if arguments.json else as_text(comparison))
    return PASSED if comparison.passed else FAILED


def _compare(arguments: argparse.Namespace) -> Comparison:
    reference_names, candidate_names = _mapped_names(arguments.map)
    asked = _tolerances(arguments.tol)
    options = Options(
        tolerances={**DEFAULT_TOLERANCES, **asked},
        first_tolerance=arguments.first_step_tol,
        offset=arguments.offset,
        reference_names=reference_names,
        candidate_names=candidate_names,
        channels=tuple(arguments.channel),
        first_step=arguments.first_step,
        last_step=arguments.last_step,
        min_steps=arguments.min_steps,
        average=arguments.average,
    )
    reference = read_run(arguments.reference, _format(arguments.reference_format))
    candidate = read_run(arguments.candidate, _format(arguments.candidate_format))
    comparison = compare_runs(reference, candidate, options)
    compared = {result.channel for result in comparison.channels}
    missing = [name for name in asked if name not in compared]
    if missing:
        # A misspelt or vanished channel would otherwise pass unjudged, night after night.
        raise LogError(
            f"--tol must name compared channels, got {', '.join(missing)}; compared: "
            f"{', '.join(sorted(compared))}"
        )
    return comparison


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eqx_loss compare",
        description="Compare the losses of two training logs, step by step. Exit code: 0 within "
        "tolerance, 1 beyond, 2 unusable input.",
        epilog=f"Channels: {', '.join(KNOWN_NAMES)}, mtp_1, mtp_2, ... Tolerances are relative: 0.0002 is "
        "0.02 %.",
    )
    parser.add_argument("reference", help="log of the run to match: a file or a directory")
    parser.add_argument("candidate", help="log of the run under test")
    formats = [log_format.value for log_format in LogFormat]
    parser.add_argument("--reference-format", choices=formats, help="default: recognized from the content")
    parser.add_argument("--candidate-format", choices=formats, help="default: recognized from the content")
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="CHANNEL=NAME",
        help="name of a channel in the logs; CHANNEL=REFERENCE_NAME::CANDIDATE_NAME when they differ (one "
        "of the two may be left empty)",
    )
    parser.add_argument(
        "--tol",
        action="append",
        default=[],
        metavar="CHANNEL=RELATIVE",
        help="tolerance at every step; default "
        + ", ".join(f"{k}={v:g}" for k, v in DEFAULT_TOLERANCES.items()),
    )
    parser.add_argument(
        "--first-step-tol", type=float, default=DEFAULT_FIRST_TOLERANCE, metavar="RELATIVE",
        help="tolerance at the first common step of every judged channel; default %(default)g",
    )  # fmt: skip
    parser.add_argument(
        "--offset", type=_offset, help="reference step minus candidate step, or `auto` (default)"
    )
    parser.add_argument(
        "--channel", action="append", default=[], help="compare this channel only; repeatable"
    )
    parser.add_argument("--first-step", type=int, help="leave out reference steps before this one")
    parser.add_argument("--last-step", type=int, help="leave out reference steps after this one")
    parser.add_argument(
        "--min-steps", type=int, default=1, help="fail with fewer common steps; default %(default)d"
    )
    parser.add_argument(
        "--average", action="store_true", help="average the denser log over the interval of the sparser one"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (.png, .svg, .pdf)")
    return parser


def _offset(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _format(name: str | None) -> LogFormat | None:
    return None if name is None else LogFormat(name)


def _mapped_names(maps: Sequence[str]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Channel to name, for the reference and for the candidate.

    `NAME=CHANNEL` is understood too when only the right side is a known channel.
    """
    reference_names: dict[str, str] = {}
    candidate_names: dict[str, str] = {}
    for entry in maps:
        channel, equals, name = entry.partition("=")
        if not equals or not channel or not name:
            raise LogError(
                f"--map must be CHANNEL=NAME or CHANNEL=REFERENCE_NAME::CANDIDATE_NAME, got {entry!r}"
            )
        if channel not in KNOWN_NAMES and name in KNOWN_NAMES:
            channel, name = name, channel
        left, _, right = name.partition(_BOTH_SIDES) if _BOTH_SIDES in name else (name, "", name)
        if left:
            reference_names[channel] = left
        if right:
            candidate_names[channel] = right
    return reference_names, candidate_names


def _tolerances(entries: Sequence[str]) -> Mapping[str, float]:
    tolerances: dict[str, float] = {}
    for entry in entries:
        channel, _, value = entry.partition("=")
        try:
            percent = value.endswith("%")
            tolerances[channel] = float(value.rstrip("% ")) / (100 if percent else 1)
        except ValueError:
            raise LogError(
                f"--tol must be CHANNEL=RELATIVE such as lm=0.0002 or lm=0.02%, got {entry!r}"
            ) from None
    return tolerances


def _write_quietly(path: str, text: str) -> None:
    """Writes a report about an error; failing to must not hide the error itself."""
    try:
        pathlib.Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"compare: {path}: cannot be written ({error})", file=sys.stderr)
