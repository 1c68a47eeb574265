"""What `train_vs_maxtext` makes of its turns: medians, ratios, tables."""

import csv
import json
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

# name: (reach, True where it is a least)
REACH = {
    "tokens_per_second": (1.5, True),
    "seconds_to_first_step": (0.5, False),
    "peak_bytes": (0.7, False),
}

_ROWS = (
    ("parameters", "num_parameters", 1.0, ",.0f"),
    ("to first step, s", "seconds_to_first_step", 1.0, ".1f"),
    ("to first step, CPU s", "cpu_seconds_to_first_step", 1.0, ".1f"),
    ("step, s", "step_seconds", 1.0, ".2f"),
    ("tokens/s", "tokens_per_second", 1.0, ".0f"),
    ("CPU s a step", "cpu_seconds_per_step", 1.0, ".2f"),
    ("peak memory, GiB", "peak_bytes", 2.0**-30, ".2f"),
    ("share of product rate", "product_rate_share", 1.0, ".3f"),
)


def summary(
    work: str,
    dtype: str,
    first: dict[str, dict[str, float]],
    steps: dict[str, list[dict[str, float]]],
    rates: Sequence[float],
    size: dict[str, float],
) -> dict[str, Any]:
    """The record of a case. Ratios of steps are medians of the ratios of every pair of turns."""
    sides: dict[str, dict[str, float]] = {}
    for name, turns in steps.items():
        seconds = statistics.median(t["seconds"] for t in turns)
        shares = [size["model_flops"] / t["seconds"] / rate for t, rate in zip(turns, rates, strict=True)]
        sides[name] = {
            "num_parameters": first[name]["num_parameters"],
            "seconds_to_first_step": first[name]["seconds_to_first_step"],
            "cpu_seconds_to_first_step": first[name]["cpu_seconds_to_first_step"],
            "step_seconds": seconds,
            "tokens_per_second": size["tokens"] / seconds,
            "cpu_seconds_per_step": statistics.median(t["cpu_seconds"] for t in turns),
            "peak_bytes": turns[-1]["peak_bytes"],
            "product_rate_share": statistics.median(shares),
            "first_loss": first[name]["loss"],
            "last_loss": turns[-1]["loss"],
        }
    ours, theirs = sides["ours"], sides["maxtext"]
    ratios = {name: ours[name] / theirs[name] for name in ("seconds_to_first_step", "peak_bytes")}
    ratios["cpu_seconds_to_first_step"] = (
        ours["cpu_seconds_to_first_step"] / theirs["cpu_seconds_to_first_step"]
    )
    pairs = list(zip(steps["ours"], steps["maxtext"], strict=True))
    ratios["tokens_per_second"] = statistics.median(b["seconds"] / a["seconds"] for a, b in pairs)
    ratios["cpu_seconds_per_step"] = statistics.median(a["cpu_seconds"] / b["cpu_seconds"] for a, b in pairs)
    return {
        "work": work,
        "dtype": dtype,
        "num_steps": len(rates),
        **size,
        "product_flops_per_second": statistics.median(rates),
        "ours": ours,
        "maxtext": theirs,
        "parameter_difference": ours["num_parameters"] - theirs["num_parameters"],
        "ratios": ratios,
        "reached": {name: reaches(name, ratios[name]) for name in REACH},
    }


def reaches(name: str, ratio: float) -> bool:
    """Whether a ratio (ours over MaxText's) is as good as `REACH` says."""
    bound, is_least = REACH[name]
    return ratio >= bound if is_least else ratio <= bound


def table(cases: Sequence[dict[str, Any]]) -> str:
    """All cases as Markdown."""
    lines = ["| work | | ours | MaxText | ours / MaxText | reach | |", "|---|---|---|---|---|---|---|"]
    for case in cases:
        label = f"{case['work']}, {case['dtype']}"
        for title, name, unit, form in _ROWS:
            values = [format(case[side][name] * unit, form) for side in ("ours", "maxtext")]
            ratio = f"{case['ratios'][name]:.2f}" if name in case["ratios"] else ""
            reach = mark = ""
            if name in REACH:
                bound, is_least = REACH[name]
                reach = f"{'>=' if is_least else '<='} {bound}"
                mark = "yes" if case["reached"][name] else "no"
            lines.append(f"| {label} | {title} | {values[0]} | {values[1]} | {ratio} | {reach} | {mark} |")
    return "\n".join(lines)


def write(cases: Sequence[dict[str, Any]], json_path: str | None, csv_path: str | None) -> None:
    """Writes what is there so far: a later case may fail."""
    lines = (
        (
            case["work"],
            case["dtype"],
            name,
            case["ours"][name],
            case["maxtext"][name],
            case["ratios"].get(name, ""),
        )
        for case in cases
        for _, name, _, _ in _ROWS
    )
    write_files(
        cases, (("work", "dtype", "measure", "ours", "maxtext", "ratio"), *lines), json_path, csv_path
    )


def write_files(
    cases: Sequence[dict[str, Any]],
    lines: Iterable[Sequence[Any]],
    json_path: str | None,
    csv_path: str | None,
) -> None:
    """`cases` as JSON and `lines` as CSV, each where a path is given."""
    if json_path:
        pathlib.Path(json_path).write_text(json.dumps({"cases": cases}, indent=1) + "\n", encoding="utf-8")
    if csv_path:
        with open(csv_path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)
