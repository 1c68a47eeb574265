"""From a YAML file and `key.path=value` overrides to a checked `Config`, and back.

Nothing is coerced: `"false"` is no boolean and 2.7 no integer. The one widening is an integer where a
float is wanted. All errors of a file are reported together, one line each.
"""

import dataclasses
import difflib
import enum
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from ._config import Config, config_problems


class ConfigError(ValueError):
    """A configuration was refused; the text names every problem, one line each."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file `path`, changed by `key.path=value` overrides.

    Two values are derived when absent: `run.folder` from the name of the file, and
    `optimizer.schedule.total_steps` from `run.num_steps`.

    Raises:
        ConfigError: The file is missing or no YAML mapping, or any value breaks a rule.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file {str(path)!r}: {_reason(error)}") from None
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the file must be a mapping of sections, got {_kind(tree)}")
    for override in overrides:
        apply_override(tree, override)
    _derive(tree, path.stem)
    return config_from_tree(tree, str(path))


def config_from_tree(tree: Mapping[str, Any], source: str) -> Config:
    """The configuration in nested mappings, checked.

    Args:
        tree: As YAML or JSON gives it.
        source: Named in the error.
    Raises:
        ConfigError: Any value breaks a rule.
    """
    try:
        # JSON, not Python input: pydantic's strict mode takes no mapping for a dataclass otherwise.
        config = _ADAPTER.validate_json(json.dumps(tree))
    except ValidationError as error:
        problems = [_line(problem, tree) for problem in error.errors()]
    else:
        problems = config_problems(config)
        if not problems:
            return config
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    raise ConfigError("\n".join([f"{source}: {count} in the configuration", *(f"  {p}" for p in problems)]))


def parse_yaml(text: str, source: str) -> Any:
    """A YAML document with the scalars of YAML 1.2 (`3e-4` is a number, `no` a string, no dates).

    Raises:
        ConfigError: Broken syntax or a duplicate key, with its line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {_yaml_reason(error)}") from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one value of `tree` in place from `key.path=value`; the value is read as YAML.

    Raises:
        ConfigError: There is no `=`, an empty name, or the path leads through something that is no section.
    """
    path, equals, text = override.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"override {override!r}: must look like section.key=value, for example run.seed=1")
    value = parse_yaml(text, f"override {override!r}")
    node = tree
    for depth, name in enumerate(names[:-1], start=1):
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict):
            raise ConfigError(
                f"override {override!r}: {'.'.join(names[:depth])} is {_kind(node)}, not a section"
            )
    node[names[-1]] = value


def config_to_tree(config: Any) -> Any:
    """A config object as nested mappings, lists and scalars, ready for YAML or JSON."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: config_to_tree(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, enum.Enum):
        return config.value
    if isinstance(config, Mapping):
        return {key: config_to_tree(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [config_to_tree(value) for value in config]
    return config


def dump_config(config: Config) -> str:
    """The YAML text that `load_config` reads back to an equal config."""
    return yaml.safe_dump(config_to_tree(config), sort_keys=False)


def _derive(tree: dict[str, Any], name: str) -> None:
    run = tree.get("run")
    if not isinstance(run, dict):
        return
    if run.get("folder") is None:
        run["folder"] = f"runs/{name}"
    optimizer = tree.get("optimizer")
    schedule = optimizer.get("schedule") if isinstance(optimizer, dict) else None
    if isinstance(schedule, dict) and "num_steps" in run:
        schedule.setdefault("total_steps", run["num_steps"])


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars that refuses duplicate keys."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # of the class, as in PyYAML

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"a key must be a name, got {getattr(key_node, 'value', None)!r}",
                    key_node.start_mark,
                )
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"key {key_node.value!r} is given twice, in lines {seen[key_node.value]} and {line}; keep one",
                    key_node.start_mark,
                )
            seen[key_node.value] = line
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    # SafeLoader would read 010 as octal.
    return int(loader.construct_scalar(node).replace("_", ""))


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


def _line(problem: Any, tree: Mapping[str, Any]) -> str:
    """One pydantic error as `path: rule, value, remedy`."""
    names = [part for part in problem["loc"] if isinstance(part, int) or not _is_type_name(part)]
    path = ".".join(str(part) for part in names)
    value = problem["input"]
    match problem["type"]:
        case "unexpected_keyword_argument":
            return f"{path}: unknown key (value {_show(value)}){_nearest(names)}"
        case "missing" | "missing_argument" | "missing_keyword_only_argument":
            return f"{path}: is required and missing"
        case "value_error":
            return f"{path}: {problem['ctx']['error']}" if path else str(problem["ctx"]["error"])
        case "dataclass_type" | "dataclass_exact_type" | "model_type":
            return f"{path}: must be a section of keys, got {_show(value)}"
        case "enum" | "literal_error":
            choices = problem["ctx"]["expected"]
            nearest = _closest(value, re.findall("'(.*?)'", choices))
            return f"{path}: must be {choices}, got {_show(value)}{nearest}"
        case _:
            rule = problem["msg"].removeprefix("Input should be ")
            return f"{path}: must be {rule}, got {_show(value)}"


def _nearest(names: Sequence[Any]) -> str:
    """The suggestion for an unknown key: its twin in another section, or the closest name of its own."""
    *section, name = [part for part in names if isinstance(part, str)]
    homes = [".".join([*path, name]) for path, fields in _sections(Config, ()) if name in fields]
    if homes:
        return f"; did you mean {' or '.join(homes)}?"
    for path, fields in _sections(Config, ()):
        if list(path) == section:
            return _closest(name, fields) or f"; valid keys are {', '.join(fields)}"
    return ""


def _closest(value: Any, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _sections(kind: type, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Path and key names of every section below a config class."""
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    yield path, names
    for name in names:
        for member in _members(hints[name]):
            if dataclasses.is_dataclass(member):
                yield from _sections(typing.cast(type, member), (*path, name))


def _members(hint: Any) -> tuple[Any, ...]:
    """The classes a value may have: members of a union, elements of a tuple, or the hint itself."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union or typing.get_origin(hint) is tuple else (hint,)


def _is_type_name(part: str) -> bool:
    # pydantic puts the class of a union's member into the path; keys of ours are lower case.
    return part[:1].isupper() or "[" in part


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _yaml_reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}{problem}"


_ADAPTER: TypeAdapter[Config] = TypeAdapter(Config)
