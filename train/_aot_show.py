"""The record of a compiled step as JSON, Markdown and a picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from ._aot_report import GIB, AotReport, Counts

_KINDS = ("parameter", "optimizer", "activation", "temporary")
_BOUNDS = ("compute", "memory", "network")
NOT_COUNTED = "not counted"


def markdown(report: AotReport) -> str:
    """The record as tables."""
    lines = [
        f"# {report.topology}: {report.num_devices} devices, {mesh_words(report)}, remat {report.remat}",
        "",
        f"{_number(report.num_parameters / 1e9)} billion parameters, {report.num_rows} rows of"
        f" {report.num_positions}: {'fits' if report.fits else 'does not fit'}",
        "",
        "| memory per device | GiB |",
        "|---|---|",
        *(f"| {kind} | {_number(getattr(report, kind + '_bytes') / GIB)} |" for kind in _KINDS),
        f"| all, by the compiler | {_number(report.hbm_bytes_per_device / GIB)} |",
        f"| limit | {report.hbm_limit_bytes / GIB:.2f} |",
        "",
        *_counts_lines(report),
    ]
    if report.fits and not report.has_code:
        lines.append("No code was made: memory is without it, compilation up to the assignment of buffers.")
    if report.expert_exchange is not None:
        lines.append(f"Experts: {report.expert_exchange.words}.")
    if report.advice:
        lines += ["", "To make it fit:", *(f"- {way}" for way in report.advice)]
    return "\n".join(lines) + "\n"


def sweep_table(reports: Sequence[AotReport]) -> str:
    """One line for each."""
    lines = ["| mesh | remat | fits | GiB | step s | MFU |", "|---|---|---|---|---|---|"]
    for report in reports:
        counts = report.counts
        estimate = (
            f"{NOT_COUNTED} | {NOT_COUNTED}"
            if counts is None
            else f"{counts.estimated_step_seconds:.3g} | {counts.estimated_mfu:.1%}"
        )
        lines.append(
            f"| {mesh_words(report)} | {report.remat} | {'yes' if report.fits else 'no'} |"
            f" {report.hbm_bytes_per_device / GIB:.3g} | {estimate} |"
        )
    return "\n".join(lines)


def mesh_words(report: AotReport) -> str:
    """Its axes of more than one device."""
    return " x ".join(f"{name} {size}" for name, size in report.mesh.items() if size > 1) or "1 device"


def save_report(report: AotReport, path: Path) -> None:
    """Writes `path` (JSON), and beside it `.md` and `.png`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(report), indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(report))
    _picture(report, path.with_suffix(".png"))


def to_json(report: AotReport) -> dict[str, object]:
    """The record as JSON values, the counts among the others: null where nothing was counted.

    A collective's bytes are named `bytes`.
    """
    values: dict[str, object] = asdict(report)
    del values["counts"]
    counts = report.counts
    if counts is None:
        return values | dict.fromkeys(field.name for field in fields(Counts))
    collectives = [
        {
            "kind": use.kind,
            "axis": use.axis,
            "count": use.count,
            "bytes": use.num_bytes,
            "wire_bytes": use.wire_bytes,
        }
        for use in counts.collectives
    ]
    return values | asdict(counts) | {"collectives": collectives}


def _counts_lines(report: AotReport) -> list[str]:
    """Tables of what was counted, or why nothing was."""
    seconds = f"| lowering, compilation (s) | {report.lower_seconds:.0f}, {report.compile_seconds:.0f} |"
    head = ["| per device and step | |", "|---|---|"]
    counts = report.counts
    if counts is None:
        names = ("TFLOP", "HBM GB", "collectives", "estimated step (s)", "estimated MFU")
        words = (report.failure or "").partition("Largest program allocations")[0].strip().splitlines()
        return [
            *head,
            *(f"| {name} | {NOT_COUNTED} |" for name in names),
            seconds,
            "",
            "The compiler gave up for lack of memory, before there was a program to count. In its words:",
            "",
            *(f"    {line}".rstrip() for line in words),
        ]
    bounds = ", ".join(_number(getattr(counts, name + "_seconds")) for name in _BOUNDS)
    lines = [
        *head,
        f"| TFLOP | {_number(counts.flops_per_device / 1e12)} |",
        f"| model FLOPs / counted | {counts.model_flops_ratio:.3f} |",
        f"| HBM GB | {_number(counts.bytes_per_device / 1e9)} |",
        f"| {', '.join(_BOUNDS)} bound (s) | {bounds} |",
        f"| estimated step (s) | {_number(counts.estimated_step_seconds)} |",
        f"| estimated MFU | {counts.estimated_mfu:.1%} |",
        seconds,
        "",
        "| collective | axis | count | GB |",
        "|---|---|---|---|",
        *(f"| {c.kind} | {c.axis} | {c.count} | {_number(c.num_bytes / 1e9)} |" for c in counts.collectives),
        "",
        "Assumptions: " + "; ".join(report.assumptions) + ".",
    ]
    if counts.unknown_kernels:
        names = ", ".join(f"{name} x {count}" for name, count in counts.unknown_kernels.items())
        lines.append(f"Kernels without a formula, not in the FLOPs: {names}.")
    return lines


def _number(value: float) -> str:
    """Two decimals, and three digits below 1: a small run is not one of zeros."""
    return f"{value:.2f}" if value >= 1 or value == 0 else f"{value:.3g}"


def _picture(report: AotReport, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    bottom = 0.0
    for kind in _KINDS:
        size = getattr(report, kind + "_bytes") / GIB
        left.bar(["memory"], [size], bottom=bottom, label=kind)
        bottom += size
    left.axhline(report.hbm_limit_bytes / GIB, color="black", linestyle="--", label="limit")
    left.set_ylabel("GiB per device")
    left.legend(fontsize=7)
    right.set_ylabel("bound of the step, s")
    if report.counts is None:
        right.text(0.5, 0.5, NOT_COUNTED, ha="center", transform=right.transAxes)
        right.set(xticks=[], yticks=[])
        words = "does not fit"
    else:
        right.bar(_BOUNDS, [getattr(report.counts, name + "_seconds") for name in _BOUNDS])
        words = f"MFU {report.counts.estimated_mfu:.0%}"
    figure.suptitle(f"{report.topology}, {report.num_devices} devices, {words}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
