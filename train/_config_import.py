"""`python -m train.config import --from megatron|maxtext FILE`: another trainer's settings as ours.

Nothing is guessed in silence: a key that has no place in our configuration, or whose value ours
cannot express, is listed with the reason, on stderr and at the top of the YAML file.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ._config_import_maxtext import maxtext_tree, read_maxtext
from ._config_import_megatron import megatron_tree, read_megatron
from ._config_import_rules import Imported

COMPLETE, INCOMPLETE, UNUSABLE = 0, 1, 2
_SECTIONS = (
    "run",
    "model",
    "loss",
    "batch",
    "data",
    "optimizer",
    "step",
    "mesh",
    "checkpoint",
    "evaluation",
    "logging",
)


class ForeignFileError(ValueError):
    """A file of another trainer cannot be read; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes our YAML for another trainer's settings.

    Returns:
        0 when the result is a whole configuration, 1 when it was written but something it needs
        was not in the file, 2 when the file cannot be read.
    """
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else UNUSABLE
    try:
        imported = import_config(options.source, options.file.read_text(encoding="utf-8"), str(options.file))
    except (OSError, UnicodeDecodeError, ForeignFileError) as error:
        print(f"error: {options.file}: {error}", file=sys.stderr)
        return UNUSABLE
    text = to_yaml(imported, options.source, options.file.name)
    if options.output is None:
        print(text, end="")
    else:
        try:
            options.output.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"error: {options.output}: {error}", file=sys.stderr)
            return UNUSABLE
    for line in imported.dropped:
        print(f"not honoured: {line}", file=sys.stderr)
    for line in imported.remarks:
        print(f"note: {line}", file=sys.stderr)
    problems = check(imported.tree, options.file.name)
    if problems:
        print(f"{problems}\nthe file is incomplete; add what is named above", file=sys.stderr)
        return INCOMPLETE
    return COMPLETE


def import_config(source: str, text: str, name: str) -> Imported:
    """Our configuration tree for another trainer's file, with what could not be carried over.

    Args:
        source: "megatron" (a command line, a shell script or YAML) or "maxtext" (YAML or
            `key=value` arguments).
        text: The file's content.
        name: Named in errors.

    Raises:
        ForeignFileError: The file cannot be read or holds no setting.
    """
    try:
        keys = read_megatron(text) if source == "megatron" else read_maxtext(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a quotation that is never closed
        reason = " ".join(str(error).split())
        raise ForeignFileError(f"neither a command line nor YAML that can be read ({reason})") from error
    if not keys:
        wanted = "--flags or YAML keys" if source == "megatron" else "YAML keys or key=value arguments"
        raise ForeignFileError(
            f"a {source} file must hold {wanted}, {name} has none; check --from and the file"
        )
    return megatron_tree(keys) if source == "megatron" else maxtext_tree(keys)


def to_yaml(imported: Imported, source: str, name: str) -> str:
    """The YAML text, with everything that was not honoured in comments at the top."""
    header = [f"# Imported from {source} file {name}."]
    if imported.dropped:
        header.append("# Not honoured (no place here, or a value that cannot be expressed):")
        header += [f"#   {line}" for line in imported.dropped]
    header += [f"# Note: {line}" for line in imported.remarks]
    tree = {section: imported.tree[section] for section in _SECTIONS if section in imported.tree}
    return "\n".join(header) + "\n" + yaml.safe_dump(tree, sort_keys=False)


def check(tree: dict[str, Any], name: str) -> str:
    """The problems of the tree as a configuration; empty when it is one."""
    from ._config_load import ConfigError, config_from_tree

    try:
        config_from_tree(tree, name)
    except ConfigError as error:
        return str(error)
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train.config", description="Tools for configuration files."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("import", help="translate another trainer's settings")
    command.add_argument("--from", dest="source", choices=["megatron", "maxtext"], required=True)
    command.add_argument("file", type=Path, help="command line, shell script or YAML")
    command.add_argument("-o", "--output", type=Path, help="write here instead of stdout")
    return parser
