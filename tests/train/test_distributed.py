"""Several real processes on loopback train as one process does."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest

from tests.train.tiny import QUICKSTART, tiny_overrides, tiny_train
from train import _distributed, _loop
from train._cli import main
from train._distributed import Processes, find_processes, join_processes

ROOT = pathlib.Path(__file__).parents[2]


def start(num_processes: int, arguments: list[str], num_devices: int = 8) -> list[subprocess.Popen]:
    """Processes of one run that share `num_devices` fake devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for index in range(num_processes):
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices // num_processes}",
        }
        if num_processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(num_processes),
                "JAX_PROCESS_ID": str(index),
            }
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            cwd=ROOT,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        children.append(child)
    return children


def wait_for(condition: Callable[[], object], children: list[subprocess.Popen]) -> None:
    """Waits until `condition` holds; a child that ended first is an error."""
    while not condition():
        for child in children:
            assert child.poll() is None, child.communicate()
        time.sleep(0.1)


def run(num_processes: int, *model: str) -> dict:
    children = start(num_processes, ["-m", "tests.train.distributed_child", *model])
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
@pytest.mark.parametrize(("num_processes", "model"), [(2, ()), (4, ("small",))])
def test_steps_over_processes_equal_those_of_one(num_processes, model):
    """The smaller model where four processes compile at once."""
    one, several = run(1, *model), run(num_processes, *model)
    assert several["processes"] == num_processes
    # float32 sums over devices in another order; the second step sees the first one's update.
    np.testing.assert_allclose(several["numbers"], one["numbers"], rtol=1e-5)


TRAIN = ("-m", "train", str(QUICKSTART))
NUM_STEPS = re.compile(r"after step (\d+) of")


@pytest.mark.slow
def test_processes_stop_together_write_once_and_one_process_goes_on(tmp_path):
    """SIGTERM reaches the second process alone; both save the same step, which is that of a run alone."""
    overrides = [*tiny_overrides(tmp_path), "evaluation.every_steps=null"]
    children = start(2, [*TRAIN, *overrides, "run.num_steps=1000000"], num_devices=4)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text(), children)
    children[1].send_signal(signal.SIGTERM)
    texts = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [128 + signal.SIGTERM] * 2, texts
    assert "loss" not in texts[1][0]
    stop = NUM_STEPS.search(texts[0][0])
    assert stop is not None
    saved = int(stop[1])

    total = f"run.num_steps={saved + 2}"
    tiny_train(tmp_path, *overrides, total)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows[:-1]] == list(range(2, saved + 3, 2))
    alone = tmp_path / "alone"
    tiny_train(tmp_path, *overrides, total, f"run.folder={alone}")
    expected = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    for row, same in zip(rows[:5], expected, strict=False):
        # float32 sums over devices in another order, and updates that build on them.
        assert row == pytest.approx(same, rel=1e-4, abs=1e-5)


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
    ((name, value),) = environment.items()
    assert find_processes(environment) == Processes(launcher=f"{name}={value}")


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
        (
            {"JAX_COORDINATOR_ADDRESS": "h", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            "must be host:port",
        ),
    ],
)
def test_incomplete_or_impossible_variables_are_refused(environment, message):
    with pytest.raises(ValueError, match=message):
        find_processes(environment)


def test_a_launcher_that_is_not_there_is_named_with_the_ways_out(monkeypatch):
    """As in an interactive allocation, where the number of tasks is set and nothing was started by srun."""

    def initialize(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(
        ValueError, match="SLURM_NTASKS=2 speaks of several.*srun.*JAX_PROCESS_ID, or unset it"
    ):
        join_processes(find_processes({"SLURM_NTASKS": "2"}))


def test_a_second_process_0_is_refused():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the coordinator of jax does
        taken.bind(("", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match="cannot listen on port.*JAX_PROCESS_ID=0"):
            join_processes(Processes(coordinator=address, count=2, index=0))


@pytest.mark.parametrize("is_several", [True, False])
def test_a_process_that_failed_does_not_wait_for_the_others(is_several, monkeypatch, tmp_path, capsys):
    ended, codes = threading.Event(), []
    monkeypatch.setattr(_distributed, "_LEAVE_SECONDS", 0.01)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: is_several)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    assert main([str(tmp_path / "no.yaml")]) == 2
    assert ended.wait(5 if is_several else 0.1) == is_several
    assert codes == [2] * is_several


def test_a_step_that_fails_where_others_take_part_names_them(monkeypatch, tmp_path, capsys):
    def train(*_, **__):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer\nmore")

    monkeypatch.setattr(_loop, "train", train)
    with pytest.raises(jax.errors.JaxRuntimeError):
        main([str(QUICKSTART), *tiny_overrides(tmp_path)])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert main([str(QUICKSTART), *tiny_overrides(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "Connection reset by peer" in said
    assert "another process of this run has ended" in said
