"""Judge of numeric cases: `python -m tests.golden.cases PATH` (a file or a folder of them).

A line per case: pass, fail with the largest relative error, or the name of the known fault whose
number was hit. Closing line `N passed, N failed`; exit code 0 only if all pass.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys

import jax
import numpy as np

from tests.golden import case_solvers


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of one case; `problem` is empty when it passed."""

    name: str
    problem: str
    largest_error: float


def judge(path: pathlib.Path) -> Verdict:
    """Solves the case of a file by the public API and compares every expected value."""
    try:
        case = json.loads(path.read_text())
        kind, inputs, expected = case["kind"], case["inputs"], case["expected"]
        wanted = dict(expected["values"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Verdict(path.stem, f"no case file: {type(error).__name__}: {error}", math.inf)
    rtol, atol = expected.get("rtol", 1e-9), expected.get("atol", 1e-12)
    try:
        with jax.enable_x64(True):
            found = case_solvers.solve(kind, inputs, tuple(wanted))
    except case_solvers.NotExpressible as error:
        return Verdict(path.stem, f"the public API has no answer: {error}", math.inf)
    except AssertionError as error:
        first = next((line for line in str(error).splitlines() if line), "")
        return Verdict(path.stem, f"two cuts of the same batch differ: {first}", math.inf)
    problems, largest = [], 0.0
    for name, value in wanted.items():
        if name not in found:
            problems.append(f"no answer for {name!r}")
            continue
        error = _relative_error(found[name], value, atol)
        largest = max(largest, error)
        if not error <= rtol:
            fault = _known_fault(found[name], expected.get("must_not_equal", {}), rtol, atol)
            found_text = f" (known fault: {fault})" if fault else ""
            problems.append(f"{name}: relative error {error:.2e} > {rtol:.0e}{found_text}")
    return Verdict(path.stem, "; ".join(problems), largest)


def _relative_error(found: object, expected: object, atol: float) -> float:
    """Largest error over all numbers; structures must match; inf when they do not."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or set(found) != set(expected):
            return math.inf
        return max((_relative_error(found[k], v, atol) for k, v in expected.items()), default=0.0)
    if isinstance(expected, list):
        flat = list(found) if isinstance(found, list | tuple | np.ndarray | jax.Array) else None
        if flat is None or len(flat) != len(expected):
            return math.inf
        return max((_relative_error(f, e, atol) for f, e in zip(flat, expected)), default=0.0)
    if isinstance(expected, bool):
        return 0.0 if bool(found) == expected else math.inf
    a, b = case_solvers.number(found), case_solvers.number(expected)
    if math.isnan(b) or math.isinf(b):
        return 0.0 if str(a) == str(b) else math.inf
    if not math.isfinite(a):
        return math.inf
    return max(abs(a - b) - atol, 0.0) / abs(b) if b else (0.0 if abs(a) <= atol else math.inf)


def _known_fault(found: object, faults: dict, rtol: float, atol: float) -> str | None:
    for name, value in faults.items():
        if _relative_error(found, value, atol) <= rtol:
            return name
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.cases", description=__doc__)
    parser.add_argument("path", type=pathlib.Path, help="a case file, or a folder of *.json cases")
    path = parser.parse_args(arguments).path
    files = sorted(path.glob("**/*.json")) if path.is_dir() else [path]
    if not files or not path.exists():
        print(f"error: {path} holds no case files (*.json)", file=sys.stderr)
        return 2
    verdicts = [judge(file) for file in files]
    for verdict in verdicts:
        text = f"FAIL  {verdict.problem}" if verdict.problem else f"pass  {verdict.largest_error:.1e}"
        print(f"{verdict.name:<56} {text}")
    failed = sum(bool(v.problem) for v in verdicts)
    print(f"{len(verdicts) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
