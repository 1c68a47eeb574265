"""The training step compiled for a TPU topology beside MaxText's: memory, bytes, FLOPs, collectives, compile time.

    python -m bench.aot_vs_maxtext --maxtext-python PYTHON --case llama3-8b --json OUT --csv OUT

Cases: `llama3-8b` (dense, 8192 positions, 1 row a device, v5p:2x2x1), the same with 4 rows (`llama3-8b-4-rows`) and
with 2 rows on v5p:2x4x4 (`llama3-8b-32-chips`), and `deepseek2-16b-mtp` (MoE, MLA, one MTP depth, 4096 positions,
4 rows a device, v5p:4x4x4). No chip is needed; the tpu extra is. Each side compiles in a process of its own, one after
the other; the deepseek case takes minutes of CPU a side.

Both programs are counted by the same code, `train._hlo_count`: loops by their trips, kernels by formula, everything for
one device and one step. Memory is the compiler's peak (arguments + results + temporaries where it says none), plus
code. MaxText runs with its default flags; add others with --set.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from ._maxtext_table import write_files
from ._maxtext_works import COMPILED, CONFIGS, add_python_argument, find_python, replace_settings

# Ours over MaxText's, at most.
REACH = {"memory_bytes": 0.8, "moved_bytes": 0.8, "compile_cpu_seconds": 0.5, "flops": 1.0}


def main() -> None:
    """Compiles and prints; writes `--json` and `--csv` after every side."""
    options = _parser().parse_args()
    if options.ours_into is not None:
        compile_ours(options.case[0], pathlib.Path(options.ours_into), options.ours)
        return
    python = find_python(options.maxtext_python)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    cases: list[dict[str, Any]] = []
    for name in options.case:
        case: dict[str, Any] = {"case": name, "topology": COMPILED[name].topology}
        cases.append(case)
        for side in options.sides:
            changes = options.ours if side == "ours" else options.set
            case[side] = compile_side(name, side, python, changes)
            if "ours" in case and "maxtext" in case:
                case["ratios"] = ratios(case["ours"], case["maxtext"])
            write(cases, options.json, options.csv)
        print(table(case), flush=True)


def compile_side(name: str, side: str, python: str, changes: Sequence[str]) -> dict[str, Any]:
    """What one side's program costs; `{"failure": words}` when it did not compile."""
    settings = COMPILED[name].settings
    with tempfile.TemporaryDirectory(prefix="aot_vs_maxtext_") as folder:
        if side == "ours":
            command = [sys.executable, "-m", "bench.aot_vs_maxtext", "--case", name, "--ours-into", folder]
            command += [f"--ours={change}" for change in changes]
        else:
            child = str(pathlib.Path(__file__).with_name("maxtext_aot.py"))
            command = [python, "-P", child, folder, COMPILED[name].their_topology]
            command += replace_settings(settings, changes)
        # A warm compilation cache would hide the compiler's work.
        environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        facts = pathlib.Path(folder) / "facts.json"
        if ended.returncode or not facts.exists():
            return {"failure": (ended.stdout + ended.stderr)[-3000:], "command": command}
        return cost_of(
            (pathlib.Path(folder) / "program.txt").read_text(encoding="utf-8"),
            json.loads(facts.read_text(encoding="utf-8")),
        )


def compile_ours(name: str, folder: pathlib.Path, changes: Sequence[str]) -> None:
    """Writes our program and what is known beside it, in the form of `maxtext_aot`."""
    import time

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from train._aot_compile import compile_step, topology_devices
    from train._aot_report import num_parameters
    from train._config_load import load_config

    case = COMPILED[name]
    config = load_config(CONFIGS / f"{case.config}.yaml", [*case.changes, *changes])
    step = compile_step(config, topology_devices(case.topology))
    if step.compiled is None:
        sys.exit(step.failure)
    memory = step.compiled.memory_analysis()
    facts = {
        "memory": {field: getattr(memory, field, 0) for field in _MEMORY},
        "mesh": dict(step.mesh.shape),
        "num_parameters": num_parameters(config),
        "lower_seconds": step.lower_seconds,
        "compile_seconds": step.compile_seconds,
        "compile_cpu_seconds": step.compile_cpu_seconds,
        "total_cpu_seconds": time.process_time(),
    }
    (folder / "program.txt").write_text(step.compiled.as_text(), encoding="utf-8")
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


_MEMORY = (
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "generated_code_size_in_bytes",
    "peak_memory_in_bytes",
)


def cost_of(text: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Counts of a program, per device and step, beside the facts of its compilation."""
    from train._aot_flops import tpu_kernel_flops
    from train._hlo_count import count_program
    from train._hlo_parse import parse_program

    cost = count_program(parse_program(text), facts["mesh"], tpu_kernel_flops)
    collectives: dict[str, dict[str, int]] = {}
    for use in cost.collectives:
        kind = collectives.setdefault(use.kind, {"count": 0, "bytes": 0, "wire_bytes": 0})
        kind["count"] += use.count
        kind["bytes"] += use.num_bytes
        kind["wire_bytes"] += use.wire_bytes
    return {
        **facts,
        "memory_bytes": memory_bytes(facts["memory"]),
        "flops": cost.flops,
        "kernel_flops": cost.kernel_flops,
        "unknown_kernels": dict(cost.unknown_kernels),
        "moved_bytes": cost.num_bytes,
        "collectives": collectives,
        "wire_bytes": sum(kind["wire_bytes"] for kind in collectives.values()),
    }


def memory_bytes(memory: dict[str, int]) -> int:
    """Bytes that a program needs on a device: the compiler's peak, else all its arrays together; and code."""
    together = (
        memory["argument_size_in_bytes"]
        + memory["output_size_in_bytes"]
        - memory["alias_size_in_bytes"]
        + memory["temp_size_in_bytes"]
    )
    # Arrays whose lives do not meet share memory: their sum says 40.5 GiB of MaxText's llama3-8b, the peak 36.8.
    return (memory["peak_memory_in_bytes"] or together) + memory["generated_code_size_in_bytes"]


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Ours over MaxText's; empty when a side failed."""
    if "failure" in ours or "failure" in theirs:
        return {}
    names = (*REACH, "wire_bytes", "compile_seconds", "lower_seconds", "total_cpu_seconds")
    return {name: ours[name] / theirs[name] for name in names if theirs[name]}


_ROWS = (
    ("parameters", "num_parameters", 1.0, ",.0f"),
    ("memory, GiB", "memory_bytes", 2.0**-30, ".1f"),
    ("moved in HBM, GB", "moved_bytes", 1e-9, ".0f"),
    ("TFLOP", "flops", 1e-12, ".1f"),
    ("sent, GB", "wire_bytes", 1e-9, ".1f"),
    ("tracing and lowering, s", "lower_seconds", 1.0, ".0f"),
    ("compilation, s", "compile_seconds", 1.0, ".0f"),
    ("compilation, CPU s", "compile_cpu_seconds", 1.0, ".0f"),
    ("whole process, CPU s", "total_cpu_seconds", 1.0, ".0f"),
)


def table(case: dict[str, Any]) -> str:
    """A case as Markdown."""
    lines = [f"{case['case']} on {case['topology']}, per device and step:", ""]
    sides = {name: case[name] for name in ("ours", "maxtext") if name in case}
    failed = {name: side["failure"] for name, side in sides.items() if "failure" in side}
    if failed:
        lines += [f"{name} did not compile: {text}" for name, text in failed.items()]
    sides = {name: side for name, side in sides.items() if name not in failed}
    lines += [f"| | {' | '.join(sides)} | ours / MaxText | reach | |", "|---" * (len(sides) + 4) + "|"]
    for title, name, unit, form in _ROWS:
        values = " | ".join(format(side[name] * unit, form) for side in sides.values())
        ratio = case.get("ratios", {}).get(name)
        reach = f"<= {REACH[name]}" if name in REACH else ""
        mark = "" if ratio is None or name not in REACH else "yes" if ratio <= REACH[name] else "no"
        lines.append(f"| {title} | {values} | {'' if ratio is None else f'{ratio:.2f}'} | {reach} | {mark} |")
    for name, side in sides.items():
        uses = "; ".join(
            f"{kind} {use['count']}, {use['bytes'] / 1e9:.1f} GB" for kind, use in side["collectives"].items()
        )
        lines.append(f"\n{name}: {uses}; kernels without a formula: {side['unknown_kernels'] or 'none'}")
    return "\n".join(lines)


def write(cases: Sequence[dict[str, Any]], json_path: str | None, csv_path: str | None) -> None:
    """Writes what is there so far: the next side takes minutes and may fail."""
    lines = (
        (
            case["case"],
            name,
            *(case.get(side, {}).get(name, "") for side in ("ours", "maxtext")),
            case.get("ratios", {}).get(name, ""),
        )
        for case in cases
        for _, name, _, _ in _ROWS
    )
    write_files(cases, (("case", "measure", "ours", "maxtext", "ratio"), *lines), json_path, csv_path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_python_argument(parser)
    parser.add_argument("--case", nargs="+", choices=sorted(COMPILED), default=sorted(COMPILED, reverse=True))
    parser.add_argument("--sides", nargs="+", choices=("ours", "maxtext"), default=("ours", "maxtext"))
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of MaxText"
    )
    parser.add_argument("--ours", action="append", default=[], metavar="KEY=VALUE", help="a setting of ours")
    parser.add_argument("--json", metavar="OUT", help="file for the numbers")
    parser.add_argument("--csv", metavar="OUT", help="file for the table")
    parser.add_argument("--ours-into", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
