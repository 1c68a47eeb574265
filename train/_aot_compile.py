"""The real training step, compiled for a mesh of devices that need not exist."""

import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from ._compiler import compiler_options
from ._config import Config
from ._examples import Batch
from ._exchange import expert_exchange
from ._mesh import check_mesh, make_mesh
from ._mesh_work import mesh_work
from ._sharding import BATCH_SPEC
from ._state import TrainState, abstract_state, make_optimizer, state_shardings
from ._step import TrainStep, make_train_step


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step, or why there is none.

    Attributes:
        mesh: Its devices.
        compiled: The executable, or an `AssignedProgram` where no code was asked for; None when it does not fit.
        lower_seconds: Wall seconds of tracing and lowering.
        compile_seconds: Wall seconds of XLA.
        compile_cpu_seconds: Processor seconds of XLA.
        needed_bytes: Memory that the compiler asked for in vain; None when it fits.
        failure: The compiler's words when it does not fit, else empty.
    """

    mesh: Mesh
    compiled: Any
    lower_seconds: float
    compile_seconds: float
    compile_cpu_seconds: float
    needed_bytes: int | None = None
    failure: str = ""


def topology_devices(topology: str, num_slices: int = 1) -> Sequence[jax.Device]:
    """Devices of a TPU topology such as `v5p:4x4x4`, described by libtpu; no chip is opened.

    Raises:
        ValueError: libtpu is missing, or does not know the topology.
    """
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    if find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise ValueError(
            "compiling for a TPU needs libtpu, which is not installed; install the tpu extra:"
            " pip install 'eqx-loss[tpu]'"
        )
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **({"num_slices": num_slices} if num_slices > 1 else {})
        )
    except Exception as error:
        raise ValueError(
            f"libtpu describes no topology {topology!r}: {str(error).splitlines()[0]}; use another shape"
        ) from error
    return described.devices


def compile_step(config: Config, devices: Sequence[jax.Device]) -> CompiledStep:
    """The step of `config` for `devices`, compiled from shapes alone.

    Raises:
        ValueError: The mesh does not divide the work, or the compiler fails for another reason than memory.
    """
    start = time.monotonic()
    mesh, lowered = lower_step(config, devices)
    middle, processor = time.monotonic(), time.process_time()
    compiled, failure = None, ""
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        failure = str(error)
    return CompiledStep(
        mesh=mesh,
        compiled=compiled,
        lower_seconds=middle - start,
        compile_seconds=time.monotonic() - middle,
        compile_cpu_seconds=time.process_time() - processor,
        needed_bytes=memory_wanted(failure),
        failure=failure,
    )


def lower_step(config: Config, devices: Sequence[jax.Device]) -> tuple[Mesh, jax.stages.Lowered]:
    """The mesh, and the step of `config` on it ready to be compiled.

    Raises:
        ValueError: The mesh does not divide the work.
    """
    mesh, step, (batch, state) = step_and_shapes(config, devices)
    # jax.jit, not eqx.filter_jit: the latter takes shapes for static values. The model holds arrays alone.
    program = jax.jit(step, donate_argnums=1, compiler_options=compiler_options(mesh))
    return mesh, program.lower(batch, state)


def memory_wanted(failure: str) -> int | None:
    """`needed_bytes` of a compiler's failure; None without one.

    Raises:
        ValueError: The compiler failed, and not for lack of memory.
    """
    needed = needed_bytes(failure)
    if failure and needed is None:
        raise ValueError(f"the compiler failed, and not for lack of memory: {failure.splitlines()[0]}")
    return needed


def step_and_shapes(
    config: Config, devices: Sequence[jax.Device]
) -> tuple[Mesh, TrainStep, tuple[Batch, TrainState]]:
    """The mesh, the step of `config` on it, and the shapes and places of the step's arguments.

    Raises:
        ValueError: The mesh does not divide the work.
    """
    mesh = make_mesh(config.mesh, devices=devices)
    check_mesh(mesh, mesh_work(config))
    optimizer = make_optimizer(config.optimizer, config.model)
    step = make_train_step(
        config.model,
        config.loss,
        optimizer,
        mesh,
        gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        config=config.step,
        exchange=expert_exchange(config.mesh, config.model, mesh),
    )
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        abstract_state(config.model, optimizer),
        state_shardings(config.model, optimizer, mesh),
    )
    return mesh, step, (_abstract_batch(config, mesh), state)


def needed_bytes(failure: str) -> int | None:
    """Bytes in the compiler's words, arguments and results included; None when it does not speak of memory.

    "Used 120.5G of 95.74G hbm"; "required for HLO temporaries (710.2G) exceeds"; "Requires 20.1G, has 15.75G".
    """
    match = re.search(
        r"(?:Used |for HLO temporaries \(|Requires )([\d.]+)([KMGT]?)"
        r"(?: of [\d.]+[KMGT]? hbm|\) exceeds|, has [\d.]+[KMGT]? available)",
        failure,
    )
    if match is None:
        return None
    return int(float(match.group(1)) * 1024 ** " KMGT".index(match.group(2) or " "))


def state_bytes(config: Config, mesh: Mesh) -> tuple[int, int]:
    """Bytes of parameters and of optimizer state on one device, without padding to tiles."""
    optimizer = make_optimizer(config.optimizer, config.model)
    state = abstract_state(config.model, optimizer)
    shardings = state_shardings(config.model, optimizer, mesh)

    def total(tree: Any, places: Any) -> int:
        return sum(
            int(jnp.dtype(x.dtype).itemsize) * math.prod(s.shard_shape(x.shape))
            for x, s in zip(jax.tree.leaves(tree), jax.tree.leaves(places), strict=True)
        )

    return total(state.model, shardings.model), total(state.optimizer, shardings.optimizer)


def _abstract_batch(config: Config, mesh: Mesh) -> Batch:
    shape = (config.batch.num_rows, config.batch.num_positions)
    sharding = NamedSharding(mesh, BATCH_SPEC)

    def make() -> Batch:
        numbers, flags = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.bool_)
        return Batch(tokens=numbers, targets=numbers, loss_mask=flags, segment_ids=numbers, positions=numbers)

    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), jax.eval_shape(make)
    )
