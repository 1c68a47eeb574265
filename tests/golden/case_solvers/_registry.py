"""Registry of solvers and the reading of case inputs."""

import math
import re
from collections.abc import Callable

import numpy as np

Values = dict[str, object]
_SOLVERS: list[Callable[[str, dict], Values]] = []
TOKEN_VALUES = r"(.*_)?(per_token_(xent|loss|ce|nll|value|values)|token_loss(es)?|xent|nll)(_by_\w+)?"
MASKS = r"(loss_mask|mask|label_mask|valid_mask|target_mask)(_by_\w+)?"


class NotExpressible(Exception):
    """No solver knows inputs of this kind."""


def solver(function: Callable[[str, dict], Values]) -> Callable[[str, dict], Values]:
    _SOLVERS.append(function)
    return function


def solve(kind: str, inputs: dict, wanted: tuple[str, ...]) -> Values:
    """Named values of every solver that recognizes the inputs; later solvers are more specific."""
    found: Values = {}
    for function in _SOLVERS:
        found.update(function(kind, inputs))
    if not set(wanted) & set(found):
        raise NotExpressible(f"kind {kind!r} with inputs {sorted(inputs)}")
    found["all_finite"] = all(
        np.isfinite(np.asarray(value, float)).all()
        for name, value in found.items()
        if name in wanted and not isinstance(value, dict | bool)
    )
    return found


def number(value: object) -> float:
    """A float from JSON: null is NaN, the strings nan, inf and -inf are themselves."""
    return math.nan if value is None else float(value)  # type: ignore[arg-type]


def numbers(values: list) -> np.ndarray:
    return np.vectorize(number, otypes=[float])(np.array(values, dtype=object))


def config_of(inputs: dict) -> dict:
    return {**inputs, **inputs.get("config", {})}


def grid(values: list) -> tuple[np.ndarray, np.ndarray]:
    """A ragged list (of rows or of scalars) as `[rows, longest]` and the mask of what is there."""
    rows = values if values and isinstance(values[0], list) else [values]
    longest = max(len(row) for row in rows)
    padded, there = np.zeros((len(rows), longest)), np.zeros((len(rows), longest), bool)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = [number(v) for v in row]
        there[i, : len(row)] = True
    return padded, there


def first_name(inputs: dict, pattern: str) -> str | None:
    return next((name for name in inputs if re.fullmatch(pattern, name)), None)


def nested_like(array: object, values: list) -> object:
    """Undoes `grid`'s padding: the nesting of `values`."""
    out = np.asarray(array)
    if values and isinstance(values[0], list):
        return [out[i, : len(row)].tolist() for i, row in enumerate(values)]
    return out[0].tolist()
