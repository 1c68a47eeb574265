"""The picture and the table at the end of a run, both drawn from its metric files alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ._metrics import METRICS_FILE, PERF_FILE, read_rows

REPORT_FILE = "report.png"
# (metric, title, label of the axis, format in the table)
_PANELS = (
    ("learning/objective", "objective", "nats", ".4f"),
    ("learning/lm_loss", "lm loss", "nats per token", ".4f"),
    ("learning/raw_mtp_loss", "MTP loss", "nats per token", ".4f"),
    ("learning/lm_estimator_gap", "estimator gap of lm: sample mean - token mean", "nats per token", ".1e"),
)
_VALIDATION = {"learning/lm_loss": "eval/lm_loss", "learning/raw_mtp_loss": "eval/raw_mtp_loss"}


def draw_report(folder: Path) -> Path:
    """Writes `report.png` into a run folder: objective, lm, MTP and estimator gap over steps.

    Returns:
        Where the picture is.
    Raises:
        ValueError: The folder holds no metrics.
    """
    rows = read_rows(folder / METRICS_FILE)
    if not rows:
        raise ValueError(
            f"{str(folder)!r} must be a run folder with rows in {METRICS_FILE}, got none; train first"
        )
    # Slow to import, and wants no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(folder.name)
    for axes, (name, title, unit, _) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        steps, values = _series(rows, name)
        axes.plot(steps, values, linewidth=1.2, label="train")
        if name in _VALIDATION:
            axes.plot(*_series(rows, _VALIDATION[name]), "o", markersize=4, label="validation")
            axes.legend(frameon=False)
        if name == "learning/lm_estimator_gap":
            axes.axhline(0.0, color="0.6", linewidth=0.8)
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.grid(alpha=0.25)
    path = folder / REPORT_FILE
    figure.savefig(path, dpi=110)
    return path


def summary_table(folder: Path) -> Table:
    """First and last training row, last evaluation, and speed, as a table for the terminal.

    Raises:
        ValueError: The folder holds no metrics.
    """
    rows = read_rows(folder / METRICS_FILE)
    learning = [row for row in rows if "learning/lm_loss" in row]
    if not learning:
        raise ValueError(
            f"{str(folder)!r} must be a run folder with rows in {METRICS_FILE}, got none; train first"
        )
    evaluations = [row for row in rows if "eval/lm_loss" in row]
    first, last = learning[0], learning[-1]
    table = Table(title=f"{folder}", title_justify="left")
    table.add_column("metric")
    table.add_column(f"step {first['step']}", justify="right")
    table.add_column(f"step {last['step']}", justify="right")
    for name, title, _, style in _PANELS:
        table.add_row(title, format(first[name], style), format(last[name], style))
    for name, title, style in (
        ("eval/lm_loss", "validation lm loss", ".4f"),
        ("eval/bits_per_byte", "validation bits per byte", ".4f"),
        ("eval/mtp_acceptance_rate_percent", "validation MTP acceptance, %", ".2f"),
    ):
        if evaluations and name in evaluations[-1]:
            early = format(evaluations[0][name], style) if evaluations[0]["step"] == first["step"] else ""
            table.add_row(title, early, format(evaluations[-1][name], style))
    speed = _steady_speed(read_rows(folder / PERF_FILE))
    if speed:
        table.add_row("tokens/s", "", f"{speed:.0f}")
    return table


def _series(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    kept = [row for row in rows if name in row]
    return [row["step"] for row in kept], [row[name] for row in kept]


def _steady_speed(rows: Sequence[dict[str, Any]]) -> float | None:
    """Median tokens/s over intervals: pauses and the first steps do not count."""
    speeds = sorted(row["perf/tokens_per_second"] for row in rows if "perf/tokens_per_second" in row)
    return speeds[len(speeds) // 2] if speeds else None
