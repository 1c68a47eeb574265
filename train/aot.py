"""`python -m train.aot CONFIG --topology v5p:4x4x4`: compiles the real step for a TPU topology, on any machine."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

USAGE_ERROR = 2
DOES_NOT_FIT = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 fits, 1 does not fit, 2 wrong command or configuration."""
    options = _parser().parse_intermixed_args(arguments)
    # The compiler is libtpu; this process computes nothing, and chips of this machine may be busy.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from ._aot_assigned import AssignError, assign_buffers
    from ._aot_chip import chip_of
    from ._aot_compile import compile_step, topology_devices
    from ._aot_report import make_report
    from ._aot_show import markdown
    from ._config_load import load_config

    try:
        _check_options(options)
        config = load_config(options.config, options.overrides)
        chip = chip_of(options.topology)
        _check_outputs(options)
        devices = topology_devices(options.topology, config.mesh.num_slices)
        if options.sweep:
            return _sweep(options, config, chip, devices)
        print(f"compiling for {len(devices)} devices", file=sys.stderr)
        step = (
            assign_buffers(config, options.topology, devices)
            if options.no_code
            else compile_step(config, devices)
        )
    except (ValueError, AssignError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    report = make_report(config, options.topology, chip, step)
    print(markdown(report))
    try:
        _write(options, config, step, report)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0 if report.fits else DOES_NOT_FIT


def _check_options(options: argparse.Namespace) -> None:
    if options.sweep and options.save:
        raise ValueError("--save keeps one program, --sweep compiles many; leave one out")
    if options.no_code and options.save:
        raise ValueError("--save needs the code that --no-code leaves out; leave one out")
    if options.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {options.limit}")


def _check_outputs(options: argparse.Namespace) -> None:
    from ._aot_outputs import check_outputs, report_files

    reports = report_files(options.json, options.sweep) if options.json else []
    check_outputs([*reports, *([options.save] if options.save else [])], [options.config])


def _write(options: argparse.Namespace, config: Any, step: Any, report: Any) -> None:
    from ._aot_executable import save_executable
    from ._aot_show import save_report

    if options.json:
        save_report(report, options.json)
    if options.save and step.compiled is None:
        print(f"{options.save} is not written: there is no executable", file=sys.stderr)
    elif options.save:
        size = save_executable(step, config, options.save)
        print(f"executable: {options.save} ({size / 2**20:.1f} MiB), for train.executable.load_executable")


def _sweep(options: argparse.Namespace, config: Any, chip: Any, devices: Any) -> int:
    from ._aot_outputs import report_files
    from ._aot_report import GIB, AotReport
    from ._aot_show import mesh_words, save_report, sweep_table, to_json
    from ._aot_sweep import ranked, sweep

    reports: list[AotReport] = []
    num_refused = 0
    for result in sweep(config, options.topology, chip, devices, options.limit, not options.no_code):
        if isinstance(result, AotReport):
            reports.append(result)
            size, seconds = result.hbm_bytes_per_device / GIB, result.compile_seconds
            print(
                f"{mesh_words(result)}, {result.remat}: {size:.3g} GiB, {seconds:.0f} s to compile",
                file=sys.stderr,
            )
        else:
            num_refused += 1
            print(f"refused: {result}", file=sys.stderr)
    if not reports and not num_refused:
        raise ValueError(
            f"no mesh shape divides this work over {len(devices)} devices; change batch.num_rows or the topology"
        )
    if not reports:
        raise ValueError("the compiler refused every mesh that was tried; the lines above say why")
    best = ranked(reports)
    print(sweep_table(best))
    if options.json:
        save_report(best[0], options.json)
        every = json.dumps([to_json(report) for report in best], indent=1)
        report_files(options.json, is_sweep=True)[-1].write_text(every + "\n")
    return 0 if any(report.fits for report in reports) else DOES_NOT_FIT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m train.aot", description=__doc__)
    parser.add_argument("config", type=Path, help="YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes to the config")
    parser.add_argument("--topology", required=True, help="such as v5p:4x4x4, v6e:4x4, tpu7x:4x4x4")
    parser.add_argument(
        "--json",
        type=Path,
        help="write the report here, with .md and .png beside it; of a sweep, the best one's",
    )
    parser.add_argument("--save", type=Path, help="write the compiled executable here; not with --sweep")
    parser.add_argument(
        "--sweep", action="store_true", help="try mesh shapes and remat policies, rank those that fit"
    )
    parser.add_argument(
        "--no-code",
        action="store_true",
        help="stop before machine code is made: the same counts in a tenth of the time; memory without the code",
    )
    parser.add_argument("--limit", type=int, default=8, help="compilations of a sweep at most")
    return parser


if __name__ == "__main__":
    sys.exit(main())
