"""A compiled step in a file, and back.

eqx-loss executable 1       the first line
{"versions": ..., ...}      what the code was made with, from and for; one line of JSON
code                        as jax writes it: a pickle, read only when all of the above is as it must be
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from ._aot_compile import CompiledStep, step_and_shapes
from ._config import Config
from ._examples import Batch
from ._manifest import course_of, manifest_changes
from ._mesh import make_mesh
from ._state import TrainState
from ._step import StepOutput

_MAGIC = b"eqx-loss executable 1\n"
_SECTIONS = ("model", "loss", "batch", "optimizer", "step", "mesh")
_AGAIN = "compile again with `python -m train.aot --save`"


class ExecutableError(ValueError):
    """A file holds no executable, or one that was made for something else; the text says what to do."""


@dataclass(frozen=True, kw_only=True)
class LoadedStep:
    """A training step that needs no compiler; `step(batch, state)` is one optimizer step.

    Attributes:
        batch: What it takes: `jax.ShapeDtypeStruct`s whose `sharding` says where each array lies.
        state: Likewise; `jax.device_put` and checkpoints put arrays there.
    """

    batch: Batch
    state: TrainState
    _compiled: Any

    def __call__(self, batch: Batch, state: TrainState) -> tuple[TrainState, StepOutput]:
        """The next state and what the step reports, before it is done. The arrays of `state` are given up."""
        return self._compiled(batch, state)


def save_executable(step: CompiledStep, config: Config, path: Path) -> int:
    """Writes the machine code of `step`, compiled from `config`; returns the bytes of the file.

    Raises:
        ExecutableError: The backend does not let its executables out.
    """
    try:
        code, _, _ = serialize(step.compiled)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise ExecutableError(f"the executable cannot be saved: {str(error).splitlines()[0]}") from error
    devices = list(step.mesh.devices.flat)
    facts = {
        "versions": _versions(devices[0].platform),
        "config": course_of(config, _SECTIONS),
        "kind": _kind(devices),
        "places": [_place(device) for device in devices],
        "num_bytes": len(code),
        "sha256": hashlib.sha256(code).hexdigest(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(_MAGIC + json.dumps(facts).encode() + b"\n" + code)


def load_executable(config: Config, devices: Sequence[jax.Device], path: Path) -> LoadedStep:
    """The step that `python -m train.aot --save` wrote, without compiling it.

    Args:
        config: The one it was compiled from, overrides included.
        devices: Those of the topology it was compiled for, in the order of `jax.devices()`.
        path: The file. It holds code that these devices and this process will run: load only what you wrote.

    Raises:
        ExecutableError: The file is missing, cut off, damaged or of another kind; or it was made by another jax or
            libtpu, from another config, for other devices, or by other code of this package.
    """
    facts, code = _read(path)
    _check_origin(path, facts, config, list(devices))
    mesh, step, (batch, state) = step_and_shapes(config, devices)
    # From the config, not from the file: a pickled tree of equinox modules does not come back whole.
    inputs = jax.tree.structure(((batch, state), {}))
    outputs = jax.tree.structure(jax.eval_shape(step, batch, state))
    try:
        compiled = deserialize_and_load(
            code,
            inputs,
            outputs,
            backend=devices[0].client,
            execution_devices=list(mesh.devices.flat),
        )
    except Exception as error:
        words = (str(error) or repr(error)).splitlines()[0]
        raise ExecutableError(
            f"{path}: these devices do not load it: {words}; use those of `jax.devices()`, or {_AGAIN}"
        ) from error
    made = [(x.shape, x.dtype) for x in jax.tree.leaves(compiled.args_info)]
    if made != [(x.shape, x.dtype) for x in jax.tree.leaves((batch, state))]:
        raise ExecutableError(f"{path}: takes other arrays than the step of this code; {_AGAIN}")
    return LoadedStep(batch=batch, state=state, _compiled=compiled)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ExecutableError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not content.startswith(_MAGIC):
        raise ExecutableError(f"{path}: is no executable of this version of the package; {_AGAIN}")
    head, _, code = content[len(_MAGIC) :].partition(b"\n")
    try:
        facts = json.loads(head)
    except ValueError as error:
        raise ExecutableError(f"{path}: is cut off or damaged; copy it again, or {_AGAIN}") from error
    if len(code) != facts["num_bytes"]:
        raise ExecutableError(
            f"{path}: is cut off: {len(code)} bytes of code, not {facts['num_bytes']}; copy it again, or {_AGAIN}"
        )
    if hashlib.sha256(code).hexdigest() != facts["sha256"]:
        raise ExecutableError(f"{path}: is damaged, its checksum is another one; copy it again, or {_AGAIN}")
    return facts, code


def _check_origin(path: Path, facts: dict[str, Any], config: Config, devices: list[jax.Device]) -> None:
    """Refuses another origin, all of it at once."""
    here = _versions(facts["kind"].split()[0])
    problems = [
        f"made with {name} {old}, here is {here[name]}"
        for name, old in facts["versions"].items()
        if old != here[name]
    ]
    now = course_of(config, _SECTIONS)
    problems += manifest_changes({"course": facts["config"]}, {"course": now})
    if facts["kind"] != _kind(devices):
        problems.append(f"made for {facts['kind']}, these devices are {_kind(devices)}")
    elif now["mesh"] == facts["config"]["mesh"]:
        places = [_place(device) for device in make_mesh(config.mesh, devices=devices).devices.flat]
        moved = [f"{new} was {old}" for old, new in zip(facts["places"], places, strict=True) if old != new]
        if moved:
            problems.append(f"made for another topology or order of devices: {', '.join(moved[:3])}")
    if problems:
        raise ExecutableError(
            "\n  ".join([f"{path}: does not belong here; mend this, or {_AGAIN}:", *problems])
        )


def _versions(platform: str) -> dict[str, str | None]:
    """Of what decides what machine code is and how it is stored; None is not installed."""
    names = ("jax", "jaxlib", "libtpu") if platform == "tpu" else ("jax", "jaxlib")
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _kind(devices: Sequence[jax.Device]) -> str:
    # libtpu's two spellings of one chip: `TPU v5` and `TPU v5p`, `TPU v6 lite` and `TPU v6e`.
    name = devices[0].device_kind.replace(" lite", "e").removesuffix("p")
    return f"{devices[0].platform} devices, {len(devices)} of kind {name}"


def _place(device: jax.Device) -> list[Any]:
    """Number and coordinates of a device; None where the platform has no coordinates."""
    coords = getattr(device, "coords", None)
    return [device.id, None if coords is None else list(coords)]
