"""Training steps in JSON Lines, JSON and CSV files."""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import cast

from ._types import LogError, Parsed, Row

# In order of preference. `maxtext_step` first: a reference JSON carries both numberings.
STEP_NAMES = (
    "maxtext_step",
    "step",
    "_step",
    "global_step",
    "iteration",
    "megatron_iteration",
    "trainer/global_step",
)
_NUMBER_WORDS = {
    "nan": math.nan,
    "inf": math.inf,
    "infinity": math.inf,
    "-inf": -math.inf,
    "-infinity": -math.inf,
}
_EXPORT_SUFFIX = re.compile(r"__(?:MIN|MAX)$")


def parse_jsonl(text: str) -> Parsed:
    """Rows of a JSON Lines file: every object with a step; nested names are joined by `/`.

    Objects without a step (headers, notes) are passed over; lines that are no JSON (a last line
    cut short) are counted as skipped. Validation rows keep their names and match no channel.
    """
    rows: list[Row] = []
    num_skipped = 0
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            record = cast(object, json.loads(line))
        except ValueError:
            num_skipped += 1
            continue
        row = _row(record)
        if row is not None:
            rows.append(row)
    return Parsed(rows, num_skipped)


def parse_trainer_state(document: object, path: str) -> Parsed:
    """Rows of `log_history` in a Hugging Face `trainer_state.json`.

    Evaluation entries and the closing summary (`train_runtime`, `train_loss`) are left out.
    """
    history = _mapping(document).get("log_history")
    if not isinstance(history, list):
        raise LogError(
            f"{path}: a trainer state needs a list `log_history`, got none; pass trainer_state.json"
        )
    rows: list[Row] = []
    num_skipped = 0
    for entry in cast("list[object]", history):
        row = _row(entry)
        if row is None:
            num_skipped += 1
        elif "train_runtime" not in row.values and not any(name.startswith("eval_") for name in row.values):
            rows.append(row)
    return Parsed(rows, num_skipped)


def parse_reference(document: object, path: str) -> Parsed:
    """Rows of a reference JSON: `losses[]` of `megatron_iteration`, `maxtext_step`, `lm_loss`, `mtp_loss`.

    A bare list of such objects is read too. The step is `maxtext_step` where there is one.
    """
    losses: object = _mapping(document).get("losses")
    if isinstance(document, list):
        losses = cast("list[object]", document)
    if not isinstance(losses, list):
        raise LogError(f"{path}: a reference JSON needs a list `losses`, got none; see docs/compare.md")
    rows: list[Row] = []
    num_skipped = 0
    for entry in cast("list[object]", losses):
        row = _row(entry)
        if row is None:
            num_skipped += 1
        else:
            rows.append(row)
    return Parsed(rows, num_skipped)


def parse_golden(document: object, path: str) -> Parsed:
    """Rows of Megatron-LM golden values: `{name: {"values": {"1": 10.8, ...}}}`.

    Source: NVIDIA/Megatron-LM `tests/functional_tests/**/golden_values_*.json`.
    """
    tables: dict[int, dict[str, float]] = {}
    num_skipped = 0
    for name, entry in _mapping(document).items():
        values = _mapping(_mapping(entry).get("values"))
        for step, value in values.items():
            number = _float(value)
            if number is None or not step.lstrip("-").isdigit():
                num_skipped += 1
            else:
                tables.setdefault(int(step), {})[name] = number
    if not tables:
        raise LogError(f"{path}: no channel has a table `values`; pass a golden-values JSON")
    return Parsed([Row(step, tables[step]) for step in sorted(tables)], num_skipped)


def looks_like_golden(document: object) -> bool:
    """True when some entry of the object holds a `values` object."""
    return any(isinstance(_mapping(entry).get("values"), dict) for entry in _mapping(document).values())


def parse_csv(text: str, path: str) -> Parsed:
    """Rows of a W&B or other CSV export: one step column, one column per quantity.

    The separator is found among comma, semicolon and tab. W&B panel exports name columns
    `run - metric`; their `__MIN` and `__MAX` companions are left out, and the run's name is cut
    off when the file holds a single run.
    """
    text = text.lstrip()
    reader = csv.reader(io.StringIO(text), delimiter=_delimiter(text))
    header = [name.strip() for name in next(reader, list[str]())]
    step_column = _step_column(header)
    if step_column is None:
        raise LogError(
            f"{path}: a CSV log needs a step column ({', '.join(('Step', *STEP_NAMES))}), got {header}; "
            "rename one"
        )
    names = _export_names(header, step_column)
    rows: list[Row] = []
    num_skipped = 0
    for cells in reader:
        step = _step_number(_float(cells[step_column])) if len(cells) > step_column else None
        if len(cells) != len(header) or step is None:
            num_skipped += bool(cells)
            continue
        numbers = {name: _float(cell) for name, cell in zip(names, cells) if name is not None}
        values = {name: number for name, number in numbers.items() if number is not None}
        if values:
            rows.append(Row(step, values))
    return Parsed(rows, num_skipped)


def has_step_column(header: str) -> bool:
    """True when the line is a CSV header with a step column and at least one more."""
    cells = [cell.strip().strip('"') for cell in header.split(_delimiter(header))]
    return len(cells) > 1 and _step_column(cells) is not None


def _delimiter(text: str) -> str:
    return max(",;\t", key=text.split("\n", 1)[0].count)


def _step_column(header: list[str]) -> int | None:
    lowered = [name.lower() for name in header]
    for wanted in STEP_NAMES:
        if wanted in lowered:
            return lowered.index(wanted)
    return None


def _export_names(header: list[str], step_column: int) -> list[str | None]:
    """Column names without W&B's run prefix; None for the step and for min/max companions."""
    names = [
        None if i == step_column or _EXPORT_SUFFIX.search(name) else name for i, name in enumerate(header)
    ]
    runs = {name.split(" - ", 1)[0] for name in names if name is not None and " - " in name}
    if len(runs) == 1:
        return [None if name is None else name.split(" - ", 1)[-1] for name in names]
    return names


def _row(record: object) -> Row | None:
    """The step and the numbers of one JSON object, or None when it has no step."""
    if not isinstance(record, dict):
        return None
    flat = dict(_flatten(cast("dict[str, object]", record), ""))
    for name in STEP_NAMES:
        step = _step_number(flat.get(name))
        if step is not None:
            values = {key: value for key, value in flat.items() if key not in STEP_NAMES}
            return Row(step, values) if values else None
    return None


def _flatten(record: Mapping[str, object], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _flatten(cast("dict[str, object]", value), f"{prefix}{name}/")
        else:
            number = _float(value)
            if number is not None:
                yield f"{prefix}{name}", number


def _float(value: object) -> float | None:
    """The number, or None for what is none. Booleans are no numbers; "NaN" and "Infinity" are."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _NUMBER_WORDS:
            return _NUMBER_WORDS[word]
        try:
            return float(word)
        except ValueError:
            return None
    return None


def _step_number(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) and value == int(value) else None


def _mapping(value: object) -> Mapping[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}
