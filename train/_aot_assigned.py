"""A step's program as the TPU compiler has it once buffers are assigned: a tenth of the time, and no machine code."""

import multiprocessing
import os
import re
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ._aot_compile import CompiledStep, lower_step, memory_wanted, topology_devices
from ._config import Config
from ._mesh import check_mesh, make_mesh
from ._mesh_work import mesh_work

_TEXT = "*.after_optimizations_after_buffer_assignment.txt"
_BUFFERS = "*.after_optimizations-buffer-assignment.txt"
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)
_ELEMENT = re.compile(r"%([\w.\-]+)#(\d+)")
_RESULT = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (?=\()")
_POLL_SECONDS = 0.2


class AssignError(RuntimeError):
    """The compiling process ended without a program and without the compiler's words."""


@dataclass(frozen=True)
class AssignedProgram:
    """What the compiler wrote down before it makes code.

    Attributes:
        text: The program, in the spelling of `compiled.as_text()`.
        hbm_bytes: Arguments, results and temporaries on one device, without code.
    """

    text: str
    hbm_bytes: int

    def as_text(self) -> str:
        """`text`, as an executable gives it."""
        return self.text


def assign_buffers(config: Config, topology: str, devices: Sequence[jax.Device]) -> CompiledStep:
    """Compiles the step of `config` in another process until its buffers are assigned, and ends that process.

    Args:
        config: A run whose mesh divides its work.
        topology: As for `topology_devices`.
        devices: Those of `topology`.

    Returns:
        A step whose `compiled` is an `AssignedProgram`; its seconds are those up to there.

    Raises:
        ValueError: The mesh does not divide the work, or the compiler fails for another reason than memory.
        AssignError: The process ended without a program and without words.
    """
    mesh = make_mesh(config.mesh, devices=devices)
    check_mesh(mesh, mesh_work(config))
    before = _children_seconds()
    with tempfile.TemporaryDirectory(prefix="train_aot_") as folder:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        # Not forked: jax has threads.
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_compile, args=(config, topology, folder, sender), daemon=True)
        process.start()
        sender.close()
        try:
            program, failure, lowered, seconds = _wait(process, receiver, Path(folder))
        finally:
            process.kill()
            process.join()
    return CompiledStep(
        mesh=mesh,
        compiled=program,
        lower_seconds=lowered.seconds,
        compile_seconds=seconds,
        compile_cpu_seconds=_children_seconds() - before - lowered.cpu_seconds,
        needed_bytes=memory_wanted(failure),
        failure=failure,
    )


class _Lowered(NamedTuple):
    """Seconds of the clock for tracing and lowering, and of the processor since the process began."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


def _wait(
    process: Any, receiver: Connection, folder: Path
) -> tuple[AssignedProgram | None, str, _Lowered, float]:
    """The program or the compiler's words; what lowering took; seconds of the compiler."""
    lowered, start = _Lowered(), time.monotonic()
    while True:
        program = read_program(folder)
        if program is not None:
            return program, "", lowered, time.monotonic() - start
        if not receiver.poll(_POLL_SECONDS):
            continue
        try:
            said = receiver.recv()
        except EOFError:
            process.join()
            raise AssignError(
                f"the compiling process ended with exit code {process.exitcode} and without a program;"
                " run again without --no-code to see why"
            ) from None
        if isinstance(said, str):
            return None, said, lowered, time.monotonic() - start
        lowered, start = said, time.monotonic()


def _compile(config: Config, topology: str, folder: str, sender: Connection) -> None:
    """The child: says when the step is lowered, then compiles it until it is killed."""
    # Read when the compiler is loaded, with the first topology.
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*train_step.*"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    jax.config.update("jax_enable_compilation_cache", False)  # a program found there is not written down
    start = time.monotonic()
    lowered = lower_step(config, topology_devices(topology, config.mesh.num_slices))[1]
    sender.send(_Lowered(time.monotonic() - start, time.process_time()))
    try:
        lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        sender.send(str(error))


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_program(folder: Path) -> AssignedProgram | None:
    """The program that the compiler wrote to `folder`; None until it is there in full."""
    texts, buffers = list(folder.glob(_TEXT)), list(folder.glob(_BUFFERS))
    if not texts or not buffers:
        return None
    text, found = texts[0].read_text(), _ALLOCATION.findall(buffers[0].read_text())
    if not found or not text.rstrip().endswith("}") or "\nENTRY " not in text:
        return None
    # Other colors are other memories; what lives inside one operation lies in fast memory.
    sizes = (int(size) for size, kind in found if "color" not in kind and "thread-local" not in kind)
    return AssignedProgram(name_elements(text), sum(sizes))


def name_elements(text: str) -> str:
    """`text` with `%tuple#3`, as the compiler dumps it, spelled as a `get-tuple-element` of its own."""
    types: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        result = _RESULT.match(line)
        if result:
            types[result.group(1)] = _tuple_types(line[result.end() :])
        for name, index in sorted(set(_ELEMENT.findall(line))):
            kind = types[name][int(index)]
            lines.append(f"  %{name}.element_{index} = {kind} get-tuple-element(%{name}), index={index}")
        lines.append(_ELEMENT.sub(r"%\1.element_\2", line))
    return "\n".join(lines) + "\n"


def _tuple_types(text: str) -> list[str]:
    """Types of the elements of the tuple type that `text` begins with."""
    parts, depth, start = [], 0, 1
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 or (letter == "," and depth == 1):
            parts.append(re.sub(r"/\*index=\d+\*/", "", text[start:place]).strip())
            start = place + 1
        if depth == 0:
            break
    return parts
