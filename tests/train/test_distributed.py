"""Several real processes on loopback train as one process does."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from train._distributed import Processes, find_processes

ROOT = pathlib.Path(__file__).parents[2]


def run(num_processes: int) -> dict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for index in range(num_processes):
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // num_processes}",
        }
        if num_processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(num_processes),
                "JAX_PROCESS_ID": str(index),
            }
        command = [sys.executable, "-m", "tests.train.distributed_child"]
        children.append(
            subprocess.Popen(
                command,
                env=environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        results = [child.communicate(timeout=600) for child in children]
    finally:
        # One that failed leaves the others waiting for it.
        for child in children:
            child.kill()
    assert all(child.returncode == 0 for child in children), results[0][1][-3000:]
    return json.loads(results[0][0].splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_steps_over_processes_equal_those_of_one(num_processes):
    one, several = run(1), run(num_processes)
    assert several["processes"] == num_processes
    # float32 sums over devices in another order; the second step sees the first one's update.
    np.testing.assert_allclose(several["numbers"], one["numbers"], rtol=1e-5)


def test_explicit_variables_name_the_processes():
    environment = {
        "JAX_COORDINATOR_ADDRESS": "host:1",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
        "SLURM_NTASKS": "8",
    }
    assert find_processes(environment) == Processes(coordinator="host:1", count=2, index=1)


@pytest.mark.parametrize(
    "environment",
    [{"SLURM_NTASKS": "2"}, {"OMPI_COMM_WORLD_SIZE": "4"}, {"TPU_WORKER_HOSTNAMES": "a,b"}],
)
def test_known_launchers_are_left_to_jax(environment):
    assert find_processes(environment) == Processes()


@pytest.mark.parametrize("environment", [{}, {"SLURM_NTASKS": "1"}, {"TPU_WORKER_HOSTNAMES": "localhost"}])
def test_a_process_alone_joins_nothing(environment):
    assert find_processes(environment) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "without JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID"),
        (
            {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "below JAX_NUM_PROCESSES",
        ),
    ],
)
def test_incomplete_or_impossible_variables_are_refused(environment, message):
    with pytest.raises(ValueError, match=message):
        find_processes(environment)
