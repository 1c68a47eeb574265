"""A compiled step in a file, and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from ._aot_compile import step_and_shapes
from ._config import Config


def save_executable(compiled: jax.stages.Compiled, path: Path) -> int:
    """Writes the machine code of `compiled`; returns its bytes.

    Raises:
        ValueError: The backend does not let its executables out.
    """
    try:
        payload, _, _ = serialize(compiled)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"the executable cannot be saved: {str(error).splitlines()[0]}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.write_bytes(payload)


def load_executable(config: Config, devices: Sequence[jax.Device], path: Path) -> Any:
    """The step `(batch, state) -> (state, output)` that `save_executable` wrote, without compiling it.

    Args:
        config: The one it was compiled from: it says how batch, state and output are built.
        devices: As many as it was compiled for, of the same topology, in the same order.
        path: The file. It holds code that these devices will run: load only what you wrote.
    """
    _, step, arguments = step_and_shapes(config, devices)
    # From the config, not from the file: a pickled tree of equinox modules does not come back whole.
    inputs = jax.tree.structure((arguments, {}))
    outputs = jax.tree.structure(jax.eval_shape(step, *arguments))
    return deserialize_and_load(
        path.read_bytes(), inputs, outputs, backend=devices[0].client, execution_devices=list(devices)
    )
