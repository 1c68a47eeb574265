"""`python -m tests.golden.ling3 PATH`: judge a folder of cases; exit code 0 only if all is within tolerance."""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from ._folder import BrokenCase, ModelCase, OperatorCase, find_cases
from ._models import judge_model
from ._operators import judge_operator
from ._report import Judge, Line, Precision, closing_line


def judge(root: Path, precisions: tuple[Precision, ...]) -> Iterator[list[Line]]:
    """The lines of one case in one precision after another, for every case below `root`."""
    for precision, case in itertools.product(precisions, find_cases(root)):
        with jax.enable_x64(precision == "float64"):
            match case:
                case ModelCase():
                    yield judge_model(case, precision)
                case OperatorCase():
                    yield judge_operator(case, precision)
                case BrokenCase():
                    broken = Judge(case.name, precision)
                    broken.failure("read", case.reason)
                    yield broken.lines


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 when everything passed, 1 when something failed, 2 when there is nothing to judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.ling3", description=__doc__)
    parser.add_argument("path", type=Path, help="a case, a folder of cases, or an operator file")
    parser.add_argument(
        "--precision",
        choices=("both", "float64", "float32"),
        default="both",
        help="what to compute in (default: both)",
    )
    parser.add_argument("--failures-only", action="store_true", help="show only lines that fail")
    options = parser.parse_args(arguments)
    precisions: tuple[Precision, ...] = (
        ("float64", "float32") if options.precision == "both" else (options.precision,)
    )
    if not options.path.exists():
        print(f"{options.path}: no such file or folder", file=sys.stderr)
        return 2

    lines: list[Line] = []
    for new in judge(options.path, precisions):
        jax.clear_caches()  # every case has shapes of its own
        for line in new:
            if not (options.failures_only and line.passed):
                print(line, flush=True)
        lines += new
    if not lines:
        print(
            f"{options.path}: no case here (a folder with config.json, inputs.safetensors and expected.safetensors)",
            file=sys.stderr,
        )
        return 2
    print(closing_line(lines))
    return 0 if all(line.passed for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
