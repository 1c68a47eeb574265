"""The command line of the trainer."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE_ERROR = 2

_EPILOG = """\
examples:
  python -m train configs/quickstart.yaml
  python -m train configs/quickstart.yaml run.num_steps=50 optimizer.schedule.peak=1e-3
  python -m train configs/quickstart.yaml --check loss.calculate_per_token_loss=true

With several processes (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; SLURM; Open MPI; a TPU pod)
run the same command in each; the first one writes and prints.
Running the same command again continues from the newest checkpoint of the run folder. Ctrl-C saves first.
exit codes: 0 done, 1 failed while running, 2 wrong command or configuration, 130 or 143 stopped by a signal.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m train`; returns its exit code. No traceback for anything a user can mend."""
    options = _parser().parse_intermixed_args(arguments)
    # After the arguments: --help need not wait for jax.
    from ._distributed import leave_soon

    try:
        code = _run(options)
    except BaseException:
        leave_soon(1)
        raise
    if code in (1, USAGE_ERROR):
        leave_soon(code)
    return code


def _run(options: argparse.Namespace) -> int:
    import jax
    from rich.console import Console

    from ._checkpoint import CheckpointError
    from ._config import config_warnings
    from ._config_load import ConfigError, dump_config, load_config
    from ._distributed import find_processes, is_first_process, join_processes
    from ._loop import TrainingError, train
    from ._run_folder import RunFolderError

    console = Console()
    # orbax prints a traceback for what reaches us as an exception and becomes one message below.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        config = load_config(options.config, options.overrides)
        for warning in config_warnings(config):
            print(f"warning: {warning}", file=sys.stderr)
        if options.check:
            print(dump_config(config), end="")
            return 0
        try:
            join_processes(find_processes(os.environ))
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot join the processes of this run: {error}") from error
        result = train(config, console=console, is_fresh=options.fresh, is_forced=options.force)
    except (ConfigError, RunFolderError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except (CheckpointError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        print(
            f"error: a step failed: {str(error).splitlines()[0]}\nMost likely another process of this run has ended:"
            " see what it said, then run the same command again in all of them to go on from the newest checkpoint",
            file=sys.stderr,
        )
        return 1
    except OSError as error:  # a full or lost disk: what was saved before is whole
        where = f" {error.filename!r}" if error.filename else ""
        print(
            f"error: cannot read or write{where}: {error.strerror or error}; mend it and run the same command again",
            file=sys.stderr,
        )
        return 1
    if result.signal is None:
        return 0
    if not is_first_process():
        return 128 + result.signal
    command = " ".join(["python -m train", str(options.config), *options.overrides])
    # Kept free of line breaks and colours: the last line is a command to copy.
    print(_stop_text(result.signal, result.step, config.run.num_steps, command))
    return 128 + result.signal


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train",
        description="Train a model as a YAML file says; everything is written to the run folder (run.folder).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, help="YAML file, for example configs/quickstart.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="change one value; the value is read as YAML"
    )
    parser.add_argument(
        "--check", action="store_true", help="check the configuration, print it in full, and stop"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="delete what the run folder holds and begin at step 0"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="continue although configuration or data are not those of the checkpoint",
    )
    return parser


def _stop_text(number: signal.Signals, step: int, num_steps: int, command: str) -> str:
    if step == 0:
        return f"Stopped by {number.name} before the first step; there is nothing to save."
    return (
        f"Stopped by {number.name} after step {step} of {num_steps}; the state is saved. "
        f"To continue, run the same command again:\n  {command}"
    )
