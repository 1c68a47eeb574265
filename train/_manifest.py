"""What decides the course of a run, kept in every checkpoint and compared when a run goes on."""

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from ._config import Config
from ._config_load import config_to_tree
from ._data import Dataset

_COURSE_SECTIONS = ("model", "loss", "batch", "data", "optimizer", "step")
_ABSENT = object()


def make_manifest(config: Config, dataset: Dataset) -> dict[str, Any]:
    """The parts of a run that must not change half-way, as JSON; `versions` beside them for the record.

    Length of the run, logging, evaluation, checkpoints and the mesh are left out: they may change freely.
    So may `total_steps` under a constant learning rate.
    """
    course = course_of(config, _COURSE_SECTIONS)
    course["run"] = {"seed": config.run.seed}
    course["data"] = course["data"] | {"fingerprint": dataset.fingerprint}
    packages = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain")
    versions = {name: metadata.version(name) for name in packages} | {"python": platform.python_version()}
    return {"course": course, "versions": versions}


def course_of(config: Config, sections: Sequence[str]) -> dict[str, Any]:
    """Sections of `config` as JSON, without what has no effect; `optimizer` must be among them."""
    tree = config_to_tree(config)
    course = {name: tree[name] for name in sections}
    schedule = course["optimizer"]["schedule"]
    if schedule["kind"] == "constant":
        del schedule["total_steps"]
    return course


def manifest_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for each value of the course that is not what it was."""
    lines: list[str] = []
    old, new = dict(_flat(saved["course"])), dict(_flat(current["course"]))
    for path in sorted(old.keys() | new.keys()):
        before, after = old.get(path, _ABSENT), new.get(path, _ABSENT)
        if before != after:
            lines.append(f"{path}: was {_show(before)}, is {_show(after)}")
    return lines


def version_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for each package whose version is another one; results may then differ in the last bits."""
    old, new = saved["versions"], current["versions"]
    return [f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]]


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, tree


def _show(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)
