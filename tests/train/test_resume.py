"""A run that was interrupted is, to the bit, the run that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.train.tiny import QUICKSTART, tiny_overrides, tiny_train
from train import _display, _loop
from train._checkpoint import CheckpointError
from train._config_load import ConfigError
from train._metrics import METRICS_FILE

ROOT = Path(__file__).parents[2]


def metrics(tmp_path: Path) -> str:
    return (tmp_path / "run" / METRICS_FILE).read_text()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> str:
    """Metrics of a run nobody disturbed: rows at 2, 4, 6, evaluations at 3 and 6, checkpoints at 3 and 6."""
    tmp_path = tmp_path_factory.mktemp("whole")
    result = tiny_train(tmp_path)
    assert (result.step, result.signal) == (6, None)
    return metrics(tmp_path)


def at_step(monkeypatch, wanted: int, action) -> None:
    """Calls `action` once, as soon as the output of step `wanted` has been read."""
    show_step = _display.Display.show_step

    def show(self, step):
        show_step(self, step)
        if step == wanted:
            monkeypatch.setattr(_display.Display, "show_step", show_step)
            action()

    monkeypatch.setattr(_display.Display, "show_step", show)


def test_rows_after_a_crash_equal_those_of_an_uninterrupted_run(tmp_path, monkeypatch, uninterrupted):
    # The crash comes after row 4, the checkpoint before it: row 4 is cut off and written again, and it
    # begins with step 3 of the interval that the checkpoint cut in two.
    def crash():
        raise KeyboardInterrupt

    at_step(monkeypatch, 5, crash)
    with pytest.raises(KeyboardInterrupt):
        tiny_train(tmp_path)
    before = metrics(tmp_path)
    assert '"step": 4' in before
    assert '"step": 6' not in before
    result = tiny_train(tmp_path, compiles=True)
    assert result.step == 6
    assert metrics(tmp_path) == uninterrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, monkeypatch, uninterrupted, number):
    at_step(monkeypatch, 4, lambda: signal.raise_signal(number))
    result = tiny_train(tmp_path)
    assert result.signal is number
    assert 4 <= result.step < 6
    assert result.step % 3 != 0  # no checkpoint was due
    assert (tmp_path / "run" / "checkpoints" / str(result.step)).is_dir()
    tiny_train(tmp_path)
    assert metrics(tmp_path) == uninterrupted


def test_a_finished_run_is_left_as_it_is_and_can_be_extended(tmp_path, uninterrupted):
    tiny_train(tmp_path, "run.num_steps=3")
    rows = metrics(tmp_path)
    assert tiny_train(tmp_path, "run.num_steps=3").step == 3
    assert metrics(tmp_path) == rows
    assert tiny_train(tmp_path, "run.num_steps=4").step == 4
    assert metrics(tmp_path).startswith(rows)


def test_another_configuration_is_refused_by_name_unless_forced(tmp_path):
    tiny_train(tmp_path, "run.num_steps=3")
    changed = ("run.num_steps=3", "loss.calculate_per_token_loss=true", "run.seed=1")
    with pytest.raises(ConfigError) as error:
        tiny_train(tmp_path, *changed)
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert "--force" in lines[0]
    assert lines[1:] == ["loss.calculate_per_token_loss: was False, is True", "run.seed: was 0, is 1"]
    assert tiny_train(tmp_path, *changed, is_forced=True).step == 3


def test_other_text_is_refused(tmp_path):
    tiny_train(tmp_path, "run.num_steps=3")
    (tmp_path / "text" / "f0.py").write_text("changed")
    with pytest.raises(ConfigError, match=r"data.fingerprint: was '\w+', is '\w+'"):
        tiny_train(tmp_path, "run.num_steps=3")


def test_another_model_under_force_is_refused_by_the_checkpoint(tmp_path):
    tiny_train(tmp_path, "run.num_steps=3")
    with pytest.raises(CheckpointError, match="does not fit the config"):
        tiny_train(tmp_path, "run.num_steps=3", "model.moe.moe_intermediate_size=8", is_forced=True)


def test_fresh_forgets_the_run(tmp_path, uninterrupted):
    tiny_train(tmp_path, "run.seed=1")
    assert metrics(tmp_path) != uninterrupted
    tiny_train(tmp_path, is_fresh=True)
    assert metrics(tmp_path) == uninterrupted


def test_a_step_without_finite_gradient_is_told_and_too_many_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(_loop, "MAX_SKIPPED_IN_A_ROW", 2)
    with pytest.raises(_loop.TrainingError, match="not finite for 2 steps in a row, to step 2; lower"):
        tiny_train(tmp_path, "model.initializer_range=1e30")


def test_the_mesh_may_change_when_a_run_goes_on(tmp_path, monkeypatch, uninterrupted):
    at_step(monkeypatch, 4, lambda: signal.raise_signal(signal.SIGINT))
    tiny_train(tmp_path)
    tiny_train(tmp_path, num_devices=2)
    rows = [json.loads(line) for line in metrics(tmp_path).splitlines()]
    expected = [json.loads(line) for line in uninterrupted.splitlines()]
    assert [row.keys() for row in rows] == [row.keys() for row in expected]
    for row, other in zip(rows, expected):
        for name in row.keys() & {"learning/lm_loss", "learning/objective", "eval/lm_loss"}:
            np.testing.assert_allclose(row[name], other[name], rtol=2e-5)  # float32, 6 Adam steps


@pytest.mark.slow
def test_rows_after_sigkill_equal_those_of_an_uninterrupted_run(tmp_path):
    steps = (
        "run.num_steps=150",
        "checkpoint.every_steps=20",
        "logging.every_steps=3",
        "evaluation.every_steps=35",
    )
    environment = os.environ | {"XLA_FLAGS": ""}

    def command(folder: Path) -> list[str]:
        folder.mkdir(exist_ok=True)
        return [sys.executable, "-m", "train", str(QUICKSTART), *tiny_overrides(folder, *steps)]

    def run_to_end(folder: Path) -> None:
        done = subprocess.run(
            command(folder), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr

    run_to_end(tmp_path / "whole")
    killed = subprocess.Popen(
        command(tmp_path / "killed"), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
    )
    checkpoints = tmp_path / "killed" / "run" / "checkpoints"
    deadline = time.monotonic() + 300
    while not any(p.name.isdigit() for p in checkpoints.glob("*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert metrics(tmp_path / "killed") != metrics(tmp_path / "whole")
    run_to_end(tmp_path / "killed")
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
