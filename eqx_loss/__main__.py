"""Command line of eqx_loss: `python -m eqx_loss COMMAND ...`."""

import importlib
import sys

_COMMANDS = {
    "explain": ("eqx_loss.explain", "what a profile or a run's configuration divides by what"),
    "gap": ("eqx_loss.gap", "the estimator gap of a run, with its standard error"),
    "compare": ("eqx_loss.compare", "whether two training logs agree, and the likeliest cause if not"),
    "conformance": ("eqx_loss.conformance", "runs the conformance cases against any implementation"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code; 2 for a wrong command line."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        return 0 if given else 2
    command, *rest = given
    if command not in _COMMANDS:
        print(f"error: unknown command {command!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    return importlib.import_module(_COMMANDS[command][0]).main(rest)


def _usage() -> str:
    lines = [f"  {name:<12} {text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join(["usage: python -m eqx_loss COMMAND ...", "", *lines, "", "COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
