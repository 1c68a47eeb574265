"""Breaks the code on purpose, once for every kind of known bug, and records which test notices.

    python scripts/mutations.py            # applies every break, runs its tests, writes docs/mutations.md
    python scripts/mutations.py --only mtp # one kind; prints, writes nothing

Works on a copy of the tree in a temporary folder. Exit code 1 if a break goes unnoticed.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.mutation_list import MUTATIONS, Mutation  # noqa: E402

RECORD = ROOT / "docs" / "mutations.md"
COPIED = ("eqx_loss", "model", "train", "tests", "configs", "pyproject.toml")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", metavar="KIND", help="only the breaks of this kind")
    only = parser.parse_args().only
    chosen = [m for m in MUTATIONS if only in (None, m.kind)]
    if not chosen:
        kinds = ", ".join(sorted({m.kind for m in MUTATIONS}))
        print(f"error: no break of kind {only!r}; kinds: {kinds}", file=sys.stderr)
        return 2
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        for name in COPIED:
            source = ROOT / name
            ignore = shutil.ignore_patterns("__pycache__")
            (shutil.copytree if source.is_dir() else shutil.copy)(
                source, tree / name, **({"ignore": ignore} if source.is_dir() else {})
            )
        # A test that fails anyway would seem to notice every break.
        failing = _failure(tree, sorted({test for m in chosen for test in m.tests}), "the unbroken code")
        if failing:
            print(f"error: {failing} fails without any break; repair it first", file=sys.stderr)
            return 2
        for mutation in chosen:
            caught = _failure_with(tree, mutation)
            rows.append((mutation, caught))
            print(f"{mutation.kind:<22} {'caught by ' + caught if caught else 'NOT NOTICED'}", flush=True)
    if only is None and all(caught for _, caught in rows):
        RECORD.write_text(_record(rows))
    return 0 if all(caught for _, caught in rows) else 1


def _failure_with(tree: pathlib.Path, mutation: Mutation) -> str:
    """Id of the first test that fails with the break in place; empty if none does."""
    target = tree / mutation.file
    original = target.read_text()
    if original.count(mutation.old) != 1:
        raise SystemExit(f"error: {mutation.file} holds the text of break {mutation.bug!r} not exactly once")
    target.write_text(original.replace(mutation.old, mutation.new))
    try:
        return _failure(tree, mutation.tests, f"break {mutation.bug!r}")
    finally:
        target.write_text(original)


def _failure(tree: pathlib.Path, tests: Sequence[str], where: str) -> str:
    """Id of the first of `tests` that fails in `tree`; empty if none does."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", *tests],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1) or (run.returncode == 1 and not found):
        raise SystemExit(f"error: pytest broke off for {where}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return found[1] if found else ""


def _record(rows: list[tuple[Mutation, str]]) -> str:
    lines = [
        "# Deliberate breaks and the tests that caught them",
        "",
        "Written by `python scripts/mutations.py`: each row is one change of our code that brings back a known "
        "kind of bug, and the first test that failed with it. `tests/test_mutations.py` checks that every "
        "break still applies to the code as it is.",
        "",
        "| kind | bug | break | caught by |",
        "|---|---|---|---|",
    ]
    for mutation, caught in rows:
        change = f"`{mutation.file}`: `{_inline(mutation.old)}` -> `{_inline(mutation.new)}`"
        lines.append(f"| {mutation.kind} | {mutation.bug} | {change} | `{caught}` |")
    return "\n".join(lines) + "\n"


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
