"""`python -m train.aot CONFIG --topology v5p:4x4x4`: compiles the real step for a TPU topology, on any machine."""

import argparse
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

USAGE_ERROR = 2
DOES_NOT_FIT = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0 fits, 1 does not fit, 2 wrong command or configuration."""
    options = _parser().parse_intermixed_args(arguments)
    # The compiler is libtpu; this process computes nothing.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from ._aot_chip import chip_of
    from ._aot_compile import compile_step, topology_devices
    from ._aot_report import make_report, markdown, save_report
    from ._config_load import ConfigError, load_config

    try:
        config = load_config(options.config, options.overrides)
        chip = chip_of(options.topology)
        devices = topology_devices(options.topology, config.mesh.num_slices)
        if options.sweep:
            return _sweep(options, config, chip, devices)
        step = compile_step(config, devices)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    report = make_report(config, options.topology, chip, step)
    print(markdown(report))
    if options.json:
        save_report(report, options.json)
    if options.save and step.compiled is not None:
        print(_save_executable(step.compiled, options.save))
    return 0 if report.fits else DOES_NOT_FIT


def _sweep(options: argparse.Namespace, config: Any, chip: Any, devices: Any) -> int:
    from ._aot_report import GIB, AotReport, save_report
    from ._aot_sweep import ranked, sweep

    reports = []
    for result in sweep(config, options.topology, chip, devices, options.limit):
        if isinstance(result, AotReport):
            reports.append(result)
        else:
            print(f"refused: {result}", file=sys.stderr)
    print("| mesh | remat | fits | GiB | step s | MFU |")
    print("|---|---|---|---|---|---|")
    for report in ranked(reports):
        mesh = " x ".join(f"{name} {size}" for name, size in report.mesh.items() if size > 1)
        print(
            f"| {mesh} | {report.remat} | {'yes' if report.fits else 'no'} |"
            f" {report.hbm_bytes_per_device / GIB:.1f} | {report.estimated_step_seconds:.3f} |"
            f" {report.estimated_mfu:.1%} |"
        )
    if reports and options.json:
        save_report(ranked(reports)[0], options.json)
    return 0 if any(report.fits for report in reports) else DOES_NOT_FIT


def _save_executable(compiled: Any, path: Path) -> str:
    """What became of saving: not every backend lets an executable out."""
    from jax.experimental.serialize_executable import serialize

    try:
        payload = serialize(compiled)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return f"the executable cannot be saved: {str(error).splitlines()[0]}"
    path.write_bytes(pickle.dumps(payload))
    return (
        f"executable: {path} ({path.stat().st_size / 2**20:.1f} MiB); load it on devices of the same topology"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m train.aot", description=__doc__)
    parser.add_argument("config", type=Path, help="YAML file of a run")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes to the config")
    parser.add_argument("--topology", required=True, help="such as v5p:4x4x4, v6e:4x4, tpu7x:4x4x4")
    parser.add_argument("--json", type=Path, help="write the report here, with .md and .png beside it")
    parser.add_argument("--save", type=Path, help="write the compiled executable here")
    parser.add_argument(
        "--sweep", action="store_true", help="try mesh shapes and remat policies, rank those that fit"
    )
    parser.add_argument("--limit", type=int, default=8, help="compilations of a sweep at most")
    return parser


if __name__ == "__main__":
    sys.exit(main())
