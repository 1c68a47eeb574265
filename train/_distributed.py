"""Several processes as one run: who they are, from the environment of a launcher."""

import os
import re
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_PATIENCE_SECONDS = 3600
_NOTICE_SECONDS = 10
_LEAVE_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of a run.

    Attributes:
        coordinator: host:port of process 0; None where jax finds it by itself (TPU pods, SLURM, Open MPI).
        count: Number of processes; None likewise.
        index: Number of this process, from 0; None likewise.
        launcher: The variable that says that there are others; None where all is explicit.
    """

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    launcher: str | None = None


def find_processes(environment: Mapping[str, str]) -> Processes | None:
    """What the environment says of other processes; None for a process that is alone.

    Explicit variables win: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. Else SLURM
    (`SLURM_NTASKS` above 1), Open MPI (`OMPI_COMM_WORLD_SIZE` above 1) and TPU pods (several
    `TPU_WORKER_HOSTNAMES`) are left to `jax.distributed.initialize`, which knows them.

    Raises:
        ValueError: The explicit variables are incomplete or impossible.
    """
    given = [name for name in EXPLICIT if environment.get(name)]
    if given:
        return _explicit(environment, given)
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        if environment.get(name, "1").isdigit() and int(environment.get(name, "1")) > 1:
            return Processes(launcher=f"{name}={environment[name]}")
    if len([host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]) > 1:
        return Processes(launcher=f"TPU_WORKER_HOSTNAMES={environment['TPU_WORKER_HOSTNAMES']}")
    return None


def join_processes(processes: Processes | None) -> None:
    """Connects this process with the others; must precede every other use of jax. None does nothing.

    On CPUs collectives use gloo.

    Raises:
        ValueError: jax does not find the others by itself, or something else listens where process 0 should.
    """
    if processes is None:
        return
    if (jax.config.jax_platforms or "").split(",")[0] == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes.index == 0:
        _check_port(processes)
    notice = threading.Timer(_NOTICE_SECONDS, print, [_waiting_words(processes)], {"file": sys.stderr})
    notice.daemon = True
    notice.start()
    try:
        jax.distributed.initialize(
            coordinator_address=processes.coordinator,
            num_processes=processes.count,
            process_id=processes.index,
        )
    except ValueError as error:
        raise ValueError(
            f"{processes.launcher} speaks of several, but jax does not find them ({error}): start with the launcher"
            f" (srun, mpirun), or set {', '.join(EXPLICIT)}, or unset it to train in one process"
        ) from error
    finally:
        notice.cancel()


def leave_soon(code: int) -> None:
    """Ends this process with `code` in a few seconds even if others do not end: for one that has failed.

    jax waits at the end of a process until all others have come to theirs, up to five minutes. Those that wait for
    this one learn that it is gone when it is. A process alone ends by itself.
    """
    if jax.distributed.is_initialized():
        timer = threading.Timer(_LEAVE_SECONDS, os._exit, [code])
        timer.daemon = True  # if all have failed they need not wait for it
        timer.start()


def is_first_process() -> bool:
    """Whether this process writes logs and reports."""
    return jax.process_index() == 0


def meet(name: str) -> None:
    """Waits until every process has come here; nothing for a process alone.

    Through the coordinator, not by a collective: gloo gives up on a process that is 30 seconds late, as one is
    that compiles while the other finds the program in its cache.

    Args:
        name: The same in all processes, and not used before in this run.
    Raises:
        jax.errors.JaxRuntimeError: A process did not come within the hour.
    """
    if jax.process_count() > 1:
        everyone = set(range(jax.process_count()))
        multihost.sync_global_processes(name, timeout=_PATIENCE_SECONDS, processes=everyone)


def largest_of_processes(number: int) -> int:
    """The largest of the numbers that the processes pass, in all of them; every process must call it."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def _explicit(environment: Mapping[str, str], given: list[str]) -> Processes:
    missing = [name for name in EXPLICIT if name not in given]
    if missing:
        raise ValueError(f"{', '.join(given)} set without {', '.join(missing)}; set all three or none")
    address, count, index = (environment[name] for name in EXPLICIT)
    if not re.fullmatch(r"\S+:\d{1,5}", address):
        raise ValueError(
            f"JAX_COORDINATOR_ADDRESS must be host:port of process 0, such as 10.0.0.1:8476, got {address!r}"
        )
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
        raise ValueError(
            f"JAX_PROCESS_ID must be a number below JAX_NUM_PROCESSES, got {index!r} and {count!r}"
        )
    return Processes(coordinator=address, count=int(count), index=int(index))


def _check_port(processes: Processes) -> None:
    """Refuses a port that another process listens on: jax would share it, and wait for ever."""
    if processes.coordinator is None or "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return
    port = int(processes.coordinator.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"process 0 cannot listen on port {port} of JAX_COORDINATOR_ADDRESS ({error}): is another process started"
            " with JAX_PROCESS_ID=0, or another run on this port? Each process has a number, each run a port of its own"
        ) from error


def _waiting_words(processes: Processes) -> str:
    where = f" at {processes.coordinator}" if processes.coordinator else ""
    who = "" if processes.count is None else f", process {processes.index} of {processes.count}"
    return (
        f"waiting for the other processes{where}{who}: each must run this command with a number of its own and reach"
        " process 0; jax gives up after 5 minutes and ends this process"
    )
