"""What a run log is once read: series of (step, value), and what the reader had to forgive."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MAX_STEP = 2**53  # beyond it a step is garbage that looked like a number


class LogFormat(enum.Enum):
    """Where a log comes from. The value is the name used by `--format` options."""

    MEGATRON = "megatron"
    MAXTEXT = "maxtext"
    TORCHTITAN = "torchtitan"
    JSONL = "jsonl"
    TENSORBOARD = "tensorboard"
    CSV = "csv"
    TRAINER_STATE = "trainer_state"
    REFERENCE = "reference"
    GOLDEN = "golden"


class LogError(ValueError):
    """A log cannot be read or compared; the message says rule, value and remedy."""


class Row(NamedTuple):
    """One printed or stored record of a step, in file order.

    Attributes:
        step: The step number as the log says it.
        values: Numbers by the name in the log; NaN and infinities are kept.
    """

    step: int
    values: Mapping[str, float]


class Parsed(NamedTuple):
    """All rows of one file, in file order, and the number of records that could not be used."""

    rows: list[Row]
    num_skipped: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity over steps.

    Attributes:
        name: The name in the log.
        steps: Step numbers, strictly increasing.
        values: The value at each step; may hold NaN or infinities.
    """

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One log, read.

    Attributes:
        path: Where it came from.
        format: How it was read.
        series: One per name, in order of first appearance.
        num_repeated: (step, name) pairs seen again with another value; the last one was kept.
        num_duplicates: Pairs seen again with the same value (several processes printing).
        restarts: Steps at which the step number went back.
        num_skipped: Records that looked like a step but could not be read (truncated, garbage).
    """

    path: str
    format: LogFormat
    series: tuple[Series, ...]
    num_repeated: int = 0
    num_duplicates: int = 0
    restarts: tuple[int, ...] = ()
    num_skipped: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the log."""
        return tuple(series.name for series in self.series)

    def find(self, name: str) -> Series | None:
        """The series of that name, or None."""
        return next((series for series in self.series if series.name == name), None)


def assemble(path: str, log_format: LogFormat, parsed: Parsed) -> Run:
    """The run of all rows: for each name and step the last value wins, and the others are counted.

    A restart is a row whose step is at least two below the one before it, or one below it with
    another loss (a late print of another process repeats the loss).

    Raises:
        LogError: There is no row at all.
    """
    rows = [row for row in parsed.rows if abs(row.step) <= _MAX_STEP]
    num_skipped = parsed.num_skipped + len(parsed.rows) - len(rows)
    if not rows:
        skipped = f" ({num_skipped} unreadable records)" if num_skipped else ""
        raise LogError(
            f"{path}: no training step found when read as {log_format.value}{skipped}; name the right "
            "format with --reference-format or --candidate-format"
        )
    tables: dict[str, dict[int, float]] = {}
    num_repeated = num_duplicates = 0
    restarts: list[int] = []
    previous_step: int | None = None
    for row in rows:
        changed = False
        for name, value in row.values.items():
            table = tables.setdefault(name, {})
            if row.step in table:
                if same_number(table[row.step], value):
                    num_duplicates += 1
                else:
                    num_repeated += 1
                    changed |= "loss" in name  # rates and times differ between processes anyway
            table[row.step] = value
        if (
            previous_step is not None
            and row.step < previous_step
            and (changed or row.step < previous_step - 1)
        ):
            restarts.append(row.step)
        previous_step = row.step
    return Run(
        path=path,
        format=log_format,
        series=tuple(series_of(name, table) for name, table in tables.items()),
        num_repeated=num_repeated,
        num_duplicates=num_duplicates,
        restarts=tuple(restarts),
        num_skipped=num_skipped,
    )


def series_of(name: str, table: Mapping[int, float]) -> Series:
    """The series of a step-to-value table, sorted by step."""
    steps = sorted(table)
    return Series(
        name=name,
        steps=np.asarray(steps, np.int64),
        values=np.asarray([table[step] for step in steps], np.float64),
    )


def same_number(a: float, b: float) -> bool:
    """True when equal, NaN counting as equal to NaN."""
    return a == b or (a != a and b != b)
