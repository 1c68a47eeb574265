"""Registry of solvers and the reading of case inputs."""

import math
import re
from collections.abc import Callable

import numpy as np

Values = dict[str, object]
_SOLVERS: list[Callable[[str, dict], Values]] = []
TOKEN_VALUES = r"(.*_)?(per_token_(xent|loss|ce|nll|value|values)|token_loss(es)?|xent|nll)(_by_\w+)?"
MASKS = r"(loss_mask|mask|label_mask|valid_mask|target_mask|completion_mask|response_mask)(_by_\w+)?"
_COUNTED = r"(valid_|scored_|loss_)?(tokens?|targets?|labels)"
SPELLINGS = (
    (rf"(n|num|number_of|total|global)_{_COUNTED}|{_COUNTED}_count|count|denominator", "n_tokens"),
    (r"(lm|train|mean|global|total|step|eval|batch|reported|logged)_loss|loss_mean|xent|value", "loss"),
    (r"logged(_\w+)?", "logged"),
    (r"(per_token|token)_(loss(es)?|xent|ce|nll|values?)", "per_token_xent"),
    (r"(grad(ient)?|d)_(of_|wrt_)?logits", "grad_logits"),
    (r"(grad(ient)?|d)_(of_|wrt_)?(head|weight|unembed|lm_head)", "grad_head"),
    (r"(grad(ient)?|d)_(of_|wrt_)?hidden", "grad_hidden"),
    (r"(grad(ient)?_(weight_)?per_token|token_weights|weight_per_(token|position))", "grad_per_token"),
    (r"(router_)?(aux|load_balanc(e|ing))(_loss)?", "aux"),
    (r"(router_)?z(_loss|_term)?", "z_loss"),
    (r"lm|main(_loss)?", "main"),
    (r"mtp(_loss)?", "mtp"),
    (r"grad(ient)?_norm", "grad_norm"),
    (r"clipped_grad(ient)?", "clipped"),
    (r"ppl", "perplexity"),
    (r"bpb", "bits_per_byte"),
    (r"sum|loss_sum|xent_sum|token_sum", "sum"),
)


class NotExpressible(Exception):
    """No solver knows inputs of this kind."""


def solver(function: Callable[[str, dict], Values]) -> Callable[[str, dict], Values]:
    _SOLVERS.append(function)
    return function


def solve(kind: str, inputs: dict, wanted: tuple[str, ...]) -> Values:
    """Values of the wanted names, from every solver that recognizes the inputs; later ones are more specific.

    Raises:
        NotExpressible: No wanted name has an answer, or one is missing and a solver could not read its inputs.
        AssertionError: Two cuts of the same batch gave different values.
    """
    found: Values = {}
    unread: list[str] = []
    for function in _SOLVERS:
        try:
            found.update(function(kind, inputs))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            # Another solver may be the one that these inputs are for.
            unread.append(f"{function.__name__}: {type(error).__name__}: {error}")
    answers = {name: found[key] for name in wanted if (key := answering(name, found)) is not None}
    missing = [name for name in wanted if name not in answers and name != "all_finite"]
    if not answers or (missing and unread):
        reasons = f"; {'; '.join(unread)}" if unread else ""
        raise NotExpressible(f"{', '.join(missing)} of kind {kind!r} with inputs {sorted(inputs)}{reasons}")
    answers["all_finite"] = all(
        np.isfinite(np.asarray(value, float)).all()
        for value in answers.values()
        if not isinstance(value, dict | bool)
    )
    return answers


def answering(name: str, found: Values) -> str | None:
    """Key of `found` that means `name`: itself, or another spelling of it."""
    spellings = [name, *(key for pattern, key in SPELLINGS if re.fullmatch(pattern, name))]
    for affix in ("_loss", "_value", "loss_", "global_", "_mean_loss"):
        spellings += [name.removesuffix(affix), name.removeprefix(affix), f"{name}{affix}"]
    return next((key for key in spellings if key in found), None)


def number(value: object) -> float:
    """A float from JSON: null is NaN, the strings nan, inf and -inf are themselves."""
    return math.nan if value is None else float(value)  # type: ignore[arg-type]


def numbers(values: list) -> np.ndarray:
    return np.vectorize(number, otypes=[float])(np.array(values, dtype=object))


def config_of(inputs: dict) -> dict:
    return {**inputs, **inputs.get("config", {})}


def grid(values: list) -> tuple[np.ndarray, np.ndarray]:
    """A ragged list of any nesting as `[rows, longest]`, innermost lists being rows, and what is there."""
    rows = _rows(values)
    longest = max(len(row) for row in rows)
    padded, there = np.zeros((len(rows), longest)), np.zeros((len(rows), longest), bool)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = [number(v) for v in row]
        there[i, : len(row)] = True
    return padded, there


def _rows(values: list) -> list[list]:
    if values and any(isinstance(value, list) for value in values):
        return [row for value in values for row in _rows(value)]
    return [values]


def first_name(inputs: dict, pattern: str) -> str | None:
    return next((name for name in inputs if re.fullmatch(pattern, name)), None)


def nested_like(array: object, values: list) -> object:
    """Undoes `grid`: the nesting of `values`."""
    rows = iter(np.asarray(array))

    def rebuilt(part: list) -> list:
        if part and any(isinstance(value, list) for value in part):
            return [rebuilt(value) for value in part]
        return next(rows)[: len(part)].tolist()

    return rebuilt(values)
