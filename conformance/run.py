#!/usr/bin/env python3
"""Feeds the conformance cases to a program or a Python callable and prints what it gets right.

    python run.py --adapter "python adapters/numpy_adapter.py"
    python run.py --callable adapters/numpy_adapter.py:answer --tier core

Plain Python (3.9 or later), standard library only: copy this folder into any project. The
protocol is in README.md. Exit code 0: nothing failed; 1: something failed; 2: unusable arguments
or no case ran.
"""

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import math
import pathlib
import queue
import shlex
import subprocess
import sys
import threading

PROTOCOL = 1
HERE = pathlib.Path(__file__).resolve().parent
GOOD, BAD = ("pass", "partial", "skip"), ("fail", "known bug", "error")


@dataclasses.dataclass(frozen=True)
class Result:
    """One case of one adapter.

    `status` is pass, partial (right, but some answers are missing), known bug (`detail` names
    it), fail, error (no usable answer) or skip (`detail` is the adapter's reason).
    """

    case: str
    status: str
    detail: str = ""


# --- cases --------------------------------------------------------------------------------------


def load_cases(folder=HERE, tiers=(), names=()):
    """The cases in the kit's order, limited to tiers and to ids that contain one of `names`."""
    index = json.loads((pathlib.Path(folder) / "kit.json").read_text(encoding="utf-8"))
    if index["protocol"] != PROTOCOL:
        raise ValueError(
            f"this runner speaks protocol {PROTOCOL}, the kit needs {index['protocol']}; update run.py"
        )
    cases = []
    for name in index["cases"]:
        tier = name.split("/")[0]
        if (not tiers or tier in tiers) and (not names or any(part in name for part in names)):
            cases.append(
                json.loads((pathlib.Path(folder) / "cases" / f"{name}.json").read_text(encoding="utf-8"))
            )
    return cases


def request(case):
    """What an adapter sees of a case: no expected value."""
    return {
        "protocol": PROTOCOL,
        "id": case["id"],
        "task": case["task"],
        "inputs": case["inputs"],
        "wants": sorted(case["expected"]),
    }


# --- judging --------------------------------------------------------------------------------------


def judge(case, reply, dtype="float64"):
    """The result of one reply object."""
    name = case["id"]
    if not isinstance(reply, dict):
        return Result(name, "error", f"a reply must be a JSON object, got {type(reply).__name__}")
    if "skip" in reply:
        return Result(name, "skip", str(reply["skip"]))
    if "error" in reply:
        return Result(name, "error", str(reply["error"]))
    outputs = reply.get("outputs")
    wanted = case["expected"]
    given = [key for key in wanted if isinstance(outputs, dict) and key in outputs]
    if not given:
        return Result(name, "error", f"`outputs` must hold some of {sorted(wanted)}")
    dtype = reply.get("dtype", dtype)
    if dtype not in case["tolerance"]:
        return Result(name, "error", f"dtype must be one of {sorted(case['tolerance'])}, got {dtype!r}")
    tolerance = case["tolerance"][dtype]
    wrong = [text for key in given if (text := difference(wanted[key], outputs[key], tolerance, key))]
    if not wrong:
        missing = sorted(set(wanted) - set(given))
        return Result(name, "partial", "without " + ", ".join(missing)) if missing else Result(name, "pass")
    for bug in case["known_bugs"]:
        shared = [key for key in bug["values"] if key in outputs]
        if shared and not any(difference(bug["values"][key], outputs[key], tolerance, key) for key in shared):
            return Result(name, "known bug", bug["name"])
    return Result(name, "fail", wrong[0])


def difference(right, found, tolerance, path):
    """The first place at which two nested values differ, in words, or None."""
    if isinstance(right, list):
        if not isinstance(found, list) or len(found) != len(right):
            size = len(found) if isinstance(found, list) else "no list"
            return f"{path}: length must be {len(right)}, got {size}"
        for i, (a, b) in enumerate(zip(right, found)):
            text = difference(a, b, tolerance, f"{path}[{i}]")
            if text:
                return text
        return None
    a, b = number(right), number(found)
    if a is None or b is None:
        return None if right == found else f"{path}: expected {right!r}, got {found!r}"
    if math.isnan(a) or math.isnan(b) or math.isinf(a) or math.isinf(b):
        same = a == b or (math.isnan(a) and math.isnan(b))
    else:
        same = abs(a - b) <= tolerance["atol"] + tolerance["rtol"] * abs(a)
    return None if same else f"{path}: expected {right!r}, got {found!r}"


def number(value):
    """The float of a JSON number or of the strings nan, inf, -inf; None for anything else."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str) and value.lower() in ("nan", "inf", "-inf"):
        return float(value)
    return None


# --- adapters ---------------------------------------------------------------------------------------


def run_callable(function, cases, dtype="float64"):
    """Results of a Python function: request object -> reply object, or -> the outputs themselves."""
    results = []
    for case in cases:
        try:
            reply = function(request(case))
        except Exception as error:  # an adapter's failure is a result
            reply = {"error": f"{type(error).__name__}: {error}"}
        if isinstance(reply, dict) and not {"outputs", "skip", "error"} & set(reply):
            reply = {"outputs": reply}
        results.append(judge(case, reply, dtype))
    return results


def run_command(command, cases, dtype="float64", timeout=120.0):
    """Results of a program that reads one request a line and writes one reply a line.

    The program is started once; after a crash or a timeout it is started again for the next
    case. Lines that are no JSON object with the case's id are not replies and are passed to
    stderr.
    """
    results = []
    program = None
    try:
        for case in cases:
            program = program or Program(command)
            reply = program.ask(request(case), timeout)
            if program.broken:
                program.close()
                program = None
            results.append(judge(case, reply, dtype))
    finally:
        if program is not None:
            program.close()
    return results


class Program:
    """A running adapter. `broken` is True after a crash or a timeout."""

    def __init__(self, command):
        self.broken = False
        try:
            self._process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise ValueError(
                f"--adapter must be a program that can be started: {command!r} ({error})"
            ) from error
        self._lines = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, question, timeout):
        """The reply to one request; an error object when none comes."""
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:
            self.broken = True
            return {"error": f"the adapter ended (exit code {self._process.wait()}) before this case"}
        while True:
            try:
                line = self._lines.get(timeout=timeout)
            except queue.Empty:
                self.broken = True
                return {"error": f"no reply within {timeout:g} s"}
            if line is None:
                self.broken = True
                return {"error": f"the adapter ended without a reply (exit code {self._process.wait()})"}
            try:
                reply = json.loads(line)
            except ValueError:
                reply = None
            if isinstance(reply, dict) and reply.get("id") == question["id"]:
                return reply
            print(f"adapter: {line.rstrip()}", file=sys.stderr)

    def close(self):
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # a broken pipe holds unsent bytes
            self._process.stdin.close()
        self._reader.join()
        self._process.stdout.close()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)


def load_callable(spec):
    """The function named by `FILE.py:NAME` or `MODULE:NAME`."""
    source, colon, name = spec.rpartition(":")
    if not colon:
        raise ValueError(f"--callable must be FILE.py:FUNCTION or MODULE:FUNCTION, got {spec!r}")
    try:
        if source.endswith(".py"):
            module_spec = importlib.util.spec_from_file_location("conformance_adapter", source)
            module = importlib.util.module_from_spec(module_spec)
            module_spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        return getattr(module, name)
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(f"--callable {spec!r} cannot be loaded: {error}") from error


def serve(function):
    """The loop of an adapter program: replies to every request on stdin with `function(request)`."""
    for line in sys.stdin:
        case = json.loads(line)
        try:
            reply = function(case)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        if not {"outputs", "skip", "error"} & set(reply):
            reply = {"outputs": reply}
        print(json.dumps({"id": case["id"], **reply}), flush=True)


# --- report -------------------------------------------------------------------------------------------


def matrix(columns):
    """The table of all cases (rows) and adapters (columns), then the counts."""
    labels = list(columns)
    short = _short(labels)
    rows = [["case", *short]]
    for i, first in enumerate(columns[labels[0]]):
        cells = [columns[label][i] for label in labels]
        rows.append(
            [first.case, *(f"{c.status}: {c.detail}" if c.status == "known bug" else c.status for c in cells)]
        )
    counts = [
        ", ".join(f"{n} {status}" for status, n in count(columns[label]).items() if n) for label in labels
    ]
    rows.append(["", *counts])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for name, label in zip(short, labels):
        reasons = {}
        for result in columns[label]:
            if result.status == "skip":
                reasons[result.detail] = reasons.get(result.detail, 0) + 1
            elif result.detail and result.status != "known bug":
                lines.append(f"{name}: {result.case}: {result.status}: {result.detail}")
        lines += [f"{name}: {number} skipped: {reason}" for reason, number in reasons.items()]
    return "\n".join(lines)


def _short(labels):
    """Column heads: the adapter's file name, or its whole command where that is not unique."""
    names = [
        pathlib.PurePath(label.split()[-1].split(":")[0]).stem if label.split() else label for label in labels
    ]
    return [name if names.count(name) == 1 else label for name, label in zip(names, labels)]


def count(results):
    """Number of results by status."""
    return {status: sum(r.status == status for r in results) for status in (*GOOD, *BAD)}


def exit_code(columns):
    """0 when something ran and nothing failed, 1 when something failed, 2 when nothing ran."""
    statuses = [result.status for results in columns.values() for result in results]
    if any(status in BAD for status in statuses):
        return 1
    return 0 if any(status != "skip" for status in statuses) else 2


def main(argv=None, default=None, folder=HERE):
    """Runs the kit. `default` is the (label, callable) used when no adapter is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="CMD", help="program to ask; repeatable"
    )
    parser.add_argument(
        "--callable", action="append", default=[], metavar="FILE.py:NAME", help="function to ask"
    )
    parser.add_argument("--tier", action="append", default=[], choices=["core", "auxiliary", "advanced"])
    parser.add_argument(
        "--case", action="append", default=[], metavar="TEXT", help="only ids that contain TEXT"
    )
    parser.add_argument(
        "--dtype", default="float64", help="float64 (default) or float32: tolerance of the adapters"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for one reply")
    parser.add_argument("--json", action="store_true", help="print results as JSON")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    try:
        cases = load_cases(folder, arguments.tier, arguments.case)
        if arguments.list:
            print("\n".join(f"{case['id']}: {case['title']}" for case in cases))
            return 0
        columns = _ask_all(arguments, cases, default)
    except (OSError, ValueError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(
            json.dumps(
                {k: [dataclasses.asdict(r) for r in results] for k, results in columns.items()}, indent=1
            )
        )
    else:
        print(matrix(columns))
    return exit_code(columns)


def _ask_all(arguments, cases, default):
    if not cases:
        raise ValueError("no case is left; widen --tier and --case (--list shows all)")
    columns = {}
    for command in arguments.adapter:
        columns[command] = run_command(command, cases, arguments.dtype, arguments.timeout)
    for spec in arguments.callable:
        columns[spec] = run_callable(load_callable(spec), cases, arguments.dtype)
    if not columns:
        if default is None:
            raise ValueError("name an implementation with --adapter CMD or --callable FILE.py:NAME")
        columns[default[0]] = run_callable(default[1], cases, arguments.dtype)
    return columns


if __name__ == "__main__":
    sys.exit(main())
