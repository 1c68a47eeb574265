"""Judges golden files: `python -m tests.golden.megatron PATH`.

A line per case: `pass` or `fail`, the largest relative error and where, and what our default
semantics gives where it differs from the release. Exit code 0 only if every case passes.
"""

import os
import pathlib
import sys
import zipfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from ._case import find_cases, read_case
from ._check import RTOL, Verdict, check_case


def main(arguments: list[str]) -> int:
    """Checks every `.npz` file below the paths; 2 on wrong usage."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    files = [file for argument in arguments for file in find_cases(pathlib.Path(argument))]
    if not files:
        print(f"no .npz file below {' '.join(arguments)}: nothing was checked", file=sys.stderr)
        return 2
    failed = 0
    for file in files:
        try:
            case = read_case(file)
            verdict = check_case(case)
        except (OSError, zipfile.BadZipFile, KeyError, ValueError, TypeError, IndexError) as error:
            failed += 1
            print(f"fail  {file}: cannot be run: {type(error).__name__}: {error}", flush=True)
            continue
        failed += not verdict.passed
        print(line(case.name, verdict), flush=True)
    print(f"{len(files) - failed} passed, {failed} failed")
    return 1 if failed else 0


def line(name: str, verdict: Verdict) -> str:
    """One case in words."""
    where, error = verdict.worst
    result = f"pass  {name:32} {error:8.1e}" if verdict.passed else f"fail  {name:32} {error:8.1e} in {where}"
    differing = [
        f"{channel} {ours:.6g} (release {theirs:.6g})"
        for channel, (ours, theirs) in verdict.default.items()
        if not abs(ours - theirs) <= RTOL * max(abs(theirs), 1.0)
    ]
    return f"{result}  our default: {'; '.join(differing) if differing else 'the same'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
