"""From a name, or a run's configuration, to a `LossSemantics`."""

import dataclasses
import enum
import pathlib
from typing import Any, cast

from .._router import LoadBalanceScope
from .._semantics import LossSemantics

PROFILES = ("ours", "rfc-0032", "megatron", "maxtext", "hf-trainer", "torchtitan", "levanter")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "ours": ("calculate_per_token_loss",),
    "rfc-0032": ("calculate_per_token_loss",),
    "megatron": (
        "calculate_per_token_loss",
        "micro_batch_size",
        "context_parallel_size",
        "packed_sequences",
    ),
    "maxtext": (),
    "hf-trainer": ("num_items_in_batch", "average_tokens_across_devices"),
    "torchtitan": (),
    "levanter": (),
}
_DEFAULT_RELEASES = {"megatron": "main", "maxtext": "0.2.5"}


def parse_profile(text: str) -> LossSemantics:
    """`NAME[:RELEASE][,option=value...]`, or the path of a run's YAML configuration.

    Options are those of the profile's constructor and the fields of `LossSemantics`. Examples:
    `megatron:0.16,calculate_per_token_loss=false,micro_batch_size=2`, `ours,moe_z_loss_weight=1e-3`.

    Raises:
        ValueError: An unknown name, option or value; or a file that cannot be read.
    """
    if text.endswith((".yaml", ".yml")):
        return read_config(pathlib.Path(text))
    head, *assignments = text.split(",")
    name, _, release = head.partition(":")
    options: dict[str, str] = {}
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise ValueError(f"an option is KEY=VALUE, got {assignment!r} in {text!r}")
        options[key.strip().replace("-", "_")] = value.strip()
    return make_profile(name, release or None, options)


def make_profile(name: str, release: str | None, options: dict[str, str]) -> LossSemantics:
    """A profile by name with options as text.

    Raises:
        ValueError: An unknown name, release, option or value.
    """
    if name not in PROFILES:
        raise ValueError(f"a profile is one of {', '.join(PROFILES)}, got {name!r}")
    if release is not None and name not in _DEFAULT_RELEASES:
        raise ValueError(f"profile {name} has one release only, got release {release!r}; leave it out")
    release = release or _DEFAULT_RELEASES.get(name, "")
    own = {key: _flag_or_size(key, options.pop(key)) for key in list(options) if key in _OPTIONS[name]}
    semantics = _constructed(name, release, own)
    return dataclasses.replace(semantics, **{key: _field_value(key, value) for key, value in options.items()})


def _constructed(name: str, release: str, own: dict[str, bool | int]) -> LossSemantics:
    """Calls the constructor; `own` holds only options that it has."""
    flag = bool(own.get("calculate_per_token_loss", False))
    match name:
        case "megatron":
            return LossSemantics.megatron(
                release,
                calculate_per_token_loss=flag,
                micro_batch_size=int(own.get("micro_batch_size", 1)),
                context_parallel_size=int(own.get("context_parallel_size", 1)),
                packed_sequences=bool(own.get("packed_sequences", False)),
            )
        case "maxtext":
            return LossSemantics.maxtext(release)
        case "hf-trainer":
            return LossSemantics.hf_trainer(
                num_items_in_batch=bool(own.get("num_items_in_batch", True)),
                average_tokens_across_devices=bool(own.get("average_tokens_across_devices", True)),
            )
        case "torchtitan":
            return LossSemantics.torchtitan()
        case "levanter":
            return LossSemantics.levanter()
        case _:
            return LossSemantics(calculate_per_token_loss=flag)


def read_config(path: pathlib.Path) -> LossSemantics:
    """The `loss` section of a run's YAML configuration.

    Raises:
        ValueError: No such file, no YAML, no `loss` section, or a key or value that it cannot have.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the YAML file of a run")
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    section: Any = cast("dict[str, Any]", content).get("loss") if isinstance(content, dict) else None
    if not isinstance(section, dict):
        raise ValueError(f"{path} has no section `loss`; give the configuration of a training run")
    entries = cast("dict[str, Any]", section)
    values = {key: _field_value(key, value) for key, value in entries.items() if key != "rules"}
    if "calculate_per_token_loss" not in values:
        raise ValueError(f"{path}: loss.calculate_per_token_loss is missing; set it to true or false")
    return LossSemantics(**values)


def _flag_or_size(key: str, text: str) -> bool | int:
    if key in ("micro_batch_size", "context_parallel_size"):
        return _number(key, text, int)
    return _flag(key, text)


def _field_value(key: str, value: Any) -> Any:
    """`value` (text, or as YAML reads it) in the type of the field `key`."""
    fields = {field.name: field for field in dataclasses.fields(LossSemantics) if field.name != "rules"}
    if key not in fields:
        raise ValueError(f"unknown option {key!r}; LossSemantics has {', '.join(fields)}")
    default = fields[key].default
    if isinstance(default, bool) or key == "calculate_per_token_loss":
        return _flag(key, value)
    if isinstance(default, int):
        return _number(key, value, int)
    if isinstance(default, float):
        return _number(key, value, float)
    if isinstance(default, enum.Enum):
        scopes = [scope.value for scope in LoadBalanceScope]
        if value not in scopes:
            raise ValueError(f"{key} must be one of {', '.join(scopes)}, got {value!r}")
        return LoadBalanceScope(value)
    return value


def _flag(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ValueError(f"{key} must be true or false, got {value!r}")


def _number(key: str, value: Any, kind: type[int] | type[float]) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key} must be a number ({kind.__name__}), got {value!r}") from None
