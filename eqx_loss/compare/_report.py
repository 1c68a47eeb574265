"""A comparison as a table, as JSON and as JUnit XML."""

import json
import math
import xml.etree.ElementTree as ElementTree

from ._compare import ChannelResult, Comparison, Verdict

_COLUMNS = (
    "channel",
    "steps",
    "first step",
    "mean",
    "max",
    "final",
    "drift / 1k steps",
    "beyond from",
    "verdict",
)


def as_text(comparison: Comparison) -> str:
    """The table a person reads: one line per channel, then causes and notes."""
    alignment = comparison.alignment
    lines = [
        f"reference  {comparison.reference.path} ({comparison.reference.format.value})",
        f"candidate  {comparison.candidate.path} ({comparison.candidate.format.value})",
        f"steps      reference = candidate {alignment.offset:+d} ({alignment.source})",
        "",
    ]
    table = [_COLUMNS, *(_cells(result) for result in comparison.channels)]
    widths = [max(len(row[i]) for row in table) for i in range(len(_COLUMNS))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    lines.append("")
    for result in comparison.channels:
        if result.cause is not None:
            lines.append(f"{result.channel}: {result.cause.text}")
        lines += [f"{result.channel}: note: {note}" for note in result.notes]
    lines += [f"note: {note}" for note in comparison.notes]
    lines.append("PASS" if comparison.passed else "FAIL")
    return "\n".join(lines)


def as_json(comparison: Comparison) -> str:
    """One JSON object; numbers that are not finite are null. The fields are in docs/compare.md."""
    alignment = comparison.alignment
    document = {
        "version": 1,
        "verdict": "pass" if comparison.passed else "fail",
        "reference": {"path": comparison.reference.path, "format": comparison.reference.format.value},
        "candidate": {"path": comparison.candidate.path, "format": comparison.candidate.format.value},
        "offset": alignment.offset,
        "offset_source": alignment.source,
        "channels": {result.channel: _channel_json(result) for result in comparison.channels},
        "notes": list(comparison.notes),
    }
    return json.dumps(document, indent=1, allow_nan=False)


def as_junit(comparison: Comparison, name: str = "loss parity") -> str:
    """JUnit XML with one test case per judged channel."""
    judged = [result for result in comparison.channels if result.verdict is not Verdict.INFO]
    failures = [result for result in judged if result.verdict is Verdict.FAIL]
    suite = ElementTree.Element(
        "testsuite", name=name, tests=str(len(judged)), failures=str(len(failures)), errors="0", skipped="0"
    )
    for result in judged:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=result.channel)
        if result.verdict is Verdict.FAIL:
            message = result.cause.text if result.cause is not None else "; ".join(result.notes)
            failure = ElementTree.SubElement(case, "failure", message=message)
            failure.text = "  ".join(_cells(result))
        output = ElementTree.SubElement(case, "system-out")
        output.text = "\n".join(["  ".join(_COLUMNS), "  ".join(_cells(result)), *result.notes])
    return error_free(ElementTree.tostring(suite, encoding="unicode"))


def junit_error(message: str, name: str = "loss parity") -> str:
    """JUnit XML of a comparison that could not be made."""
    suite = ElementTree.Element("testsuite", name=name, tests="1", failures="0", errors="1", skipped="0")
    case = ElementTree.SubElement(suite, "testcase", classname=name, name="comparison")
    ElementTree.SubElement(case, "error", message=message)
    return error_free(ElementTree.tostring(suite, encoding="unicode"))


def error_free(xml: str) -> str:
    """The XML with a declaration and without characters that XML forbids (from binary logs)."""
    legal = "".join(char for char in xml if char in "\t\n\r" or ord(char) >= 0x20)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + legal + "\n"


def _channel_json(result: ChannelResult) -> dict[str, object]:
    numbers = result.statistics
    drift = numbers.drift
    return {
        "reference_name": result.reference_name,
        "candidate_name": result.candidate_name,
        "tolerance": result.tolerance,
        "num_steps": numbers.num_steps,
        "first_step": numbers.first_step,
        "last_step": numbers.last_step,
        "first_step_rel": _finite(numbers.first_step_rel),
        "mean_rel": _finite(numbers.mean_rel),
        "max_rel": _finite(numbers.max_rel),
        "final_rel": _finite(numbers.final_rel),
        "mean_signed_rel": _finite(numbers.mean_signed_rel),
        "drift_per_1k_steps": None if drift is None else _finite(drift.per_1k_steps),
        "drift_error_per_1k_steps": None if drift is None else _finite(drift.error),
        "first_step_beyond": numbers.first_step_beyond,
        "num_steps_beyond": numbers.num_beyond,
        "num_not_finite": numbers.num_not_finite,
        "verdict": result.verdict.value,
        "cause": None if result.cause is None else result.cause.text,
        "cause_code": None if result.cause is None else result.cause.signature.value,
        "notes": list(result.notes),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cells(result: ChannelResult) -> tuple[str, ...]:
    numbers = result.statistics
    drift = numbers.drift
    limit = "" if result.tolerance is None else f" (<= {result.tolerance:.3%})"
    return (
        result.channel,
        str(numbers.num_steps),
        _percent(numbers.first_step_rel),
        _percent(numbers.mean_rel),
        _percent(numbers.max_rel) + limit,
        _percent(numbers.final_rel),
        "-" if drift is None else f"{_percent(drift.per_1k_steps)} +- {_percent(drift.error)}",
        "-" if numbers.first_step_beyond is None else str(numbers.first_step_beyond),
        result.verdict.value,
    )


def _percent(value: float) -> str:
    return f"{value:.4%}" if math.isfinite(value) else str(value)
