"""`python -m model.hf import|export|check`: checkpoints of Hugging Face, in and out.

    python -m model.hf check HF_FOLDER                 names, shapes and the model that config.json describes
    python -m model.hf import HF_FOLDER FOLDER         to our layout, one tensor in memory at a time
    python -m model.hf export FOLDER HF_FOLDER         back, in either spelling

Only safetensors files are read: nothing is unpickled. Exit code 2 when a checkpoint breaks a rule; every missing, extra
or mis-shaped tensor is then listed by name.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ._errors import CheckpointError
from ._load import open_hf
from ._native import import_hf, open_native
from ._save import write_hf


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; 0 when it is done, 2 when a checkpoint or an option is wrong."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except CheckpointError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        print(f"{len(error.problems)} problem{'s' * (len(error.problems) != 1)}", file=sys.stderr)
        return 2
    except OSError as error:  # no permission, no space, a file in the way
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m model.hf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="{check,import,export}")
    check = verbs.add_parser(
        "check", help="compare names, shapes and dtypes with config.json; reads no numbers"
    )
    check.add_argument("source", type=_folder, help="Hugging Face folder")
    check.set_defaults(run=_check)
    load = verbs.add_parser("import", help="Hugging Face folder to a folder in our layout")
    load.add_argument("source", type=_folder, help="Hugging Face folder (config.json, *.safetensors)")
    load.add_argument("target", type=_folder, help="folder to write; must not hold weights")
    load.add_argument(
        "--dtype",
        choices=("stored", "bfloat16", "float32"),
        default="stored",
        help="dtype of the arrays (default: as stored)",
    )
    load.set_defaults(run=_import)
    save = verbs.add_parser("export", help="folder in our layout to a Hugging Face folder")
    save.add_argument("source", type=_folder, help="folder that import wrote")
    save.add_argument("target", type=_folder, help="folder to write; must not hold weights")
    save.add_argument(
        "--dtype",
        choices=("stored", "bfloat16", "float32"),
        default="stored",
        help="dtype of the tensors (default: as stored); with bfloat16 router, convolution and decay stay float32",
    )
    save.add_argument(
        "--layout",
        choices=("hub", "save_pretrained"),
        default="hub",
        help="spelling of names and config.json (default: hub)",
    )
    save.add_argument(
        "--fuse-experts", action="store_true", help="write all experts of a layer as one tensor"
    )
    save.set_defaults(run=_export)
    for verb in (load, save):
        verb.add_argument(
            "--max-shard-gb", type=float, default=5.0, help="gigabytes of one file (default: 5)"
        )
        verb.add_argument("--quiet", action="store_true", help="no progress lines")
    return parser


def _folder(text: str) -> Path:
    if not text:  # `Path("")` is the working folder
        raise argparse.ArgumentTypeError("must name a folder, got an empty text; '.' is the working folder")
    return Path(text)


def _check(options: argparse.Namespace) -> None:
    opened = open_hf(options.source)
    num_parameters = sum(math.prod(rule.shape) for rule in opened.rules)
    print(
        f"{len(opened.rules)} tensors, {num_parameters:,} parameters, spelling of {opened.hf.layout}: complete"
    )
    print(opened.config)


def _import(options: argparse.Namespace) -> None:
    dtype = None if options.dtype == "stored" else options.dtype
    progress = _Progress(options.quiet)
    import_hf(
        options.source,
        options.target,
        dtype=dtype,
        max_shard_bytes=_shard_bytes(options.max_shard_gb),
        progress=progress,
    )
    print(f"wrote {options.target}")


def _export(options: argparse.Namespace) -> None:
    folder = open_native(options.source)
    write_hf(
        options.target,
        folder.config,
        {path: folder.array(path) for path in folder.reader.tensors},
        dtype=options.dtype,
        layout=options.layout,
        fuse_experts=options.fuse_experts,
        hf=folder.hf,
        max_shard_bytes=_shard_bytes(options.max_shard_gb),
        progress=_Progress(options.quiet),
    )
    print(f"wrote {options.target}")


def _shard_bytes(gigabytes: float) -> int:
    if not 1e-9 <= gigabytes < math.inf:
        raise CheckpointError([f"--max-shard-gb must be positive and finite, got {gigabytes}; 5 is usual"])
    return int(gigabytes * 1e9)


class _Progress:
    """At most one line a second on stderr."""

    def __init__(self, is_quiet: bool):
        self._is_quiet = is_quiet
        self._last = 0.0

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if not self._is_quiet and now - self._last >= 1.0:
            self._last = now
            print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
