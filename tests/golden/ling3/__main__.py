"""`python -m tests.golden.ling3 PATH`: judge a folder of cases; exit code 0 only if all is within tolerance."""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from ._folder import find_cases
from ._models import judge_model
from ._operators import judge_operator
from ._report import Line, Precision, closing_line


def judge(root: Path, precisions: tuple[Precision, ...], show=print) -> list[Line]:
    """Judge every case below `root` in every precision; each line is shown as soon as it is known."""
    models, operators = find_cases(root)
    lines: list[Line] = []
    for case in [*models, *operators]:
        for precision in precisions:
            with jax.enable_x64(precision == "float64"):
                new = judge_model(case, precision) if case in models else judge_operator(case, precision)
            for line in new:
                show(line)
            lines += new
    return lines


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

    def show(line: Line) -> None:
        if not (options.failures_only and line.passed):
            print(line, flush=True)

    lines = judge(options.path, precisions, show)
    if not lines:
        print(
            f"{options.path}: no case here (a folder with config.json and inputs.safetensors)",
            file=sys.stderr,
        )
        return 2
    print(closing_line(lines))
    return 0 if all(line.passed for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
