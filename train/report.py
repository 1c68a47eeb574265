"""`python -m train.report RUN`: draw the report of a run folder again and print its table."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ._report import draw_report, summary_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 2 when the folder holds no run."""
    parser = argparse.ArgumentParser(
        prog="python -m train.report",
        description="Draw report.png of a run folder again and print its table.",
    )
    parser.add_argument("run", type=Path, help="run folder, for example runs/quickstart")
    folder = parser.parse_args(arguments).run
    try:
        table = summary_table(folder)
        path = draw_report(folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    console.print(table)
    console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
