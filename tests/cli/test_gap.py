"""The gap command: statistics against NumPy, verdicts, and runs it cannot read."""

import json

import numpy as np
import pytest

from eqx_loss import __main__ as cli
from eqx_loss import gap


def _run(tmp_path, gaps, logs, *, tail=""):
    rows = [
        json.dumps({"step": i, "learning/lm_estimator_gap": g, "learning/lm_loss": x})
        for i, (g, x) in enumerate(zip(gaps, logs))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n" + tail)
    return tmp_path


def test_mean_error_and_noise_of_a_known_series():
    rng = np.random.default_rng(0)
    gaps, logs = rng.normal(-0.02, 0.01, 400), 3.0 + rng.normal(0, 0.05, 400)
    found = gap.summarize("lm", gaps, logs)
    assert found.mean == pytest.approx(gaps.mean(), rel=1e-12)
    assert found.standard_error == pytest.approx(0.01 / 20, rel=0.5)  # 20 batch means: +-32 % at two sigma
    assert found.noise == pytest.approx(0.05, rel=0.1)  # 400 differences: +-7 % at two sigma
    assert found.relative == pytest.approx(gaps.mean() / logs.mean(), rel=1e-12)


def test_correlated_steps_do_not_shrink_the_standard_error():
    rng = np.random.default_rng(1)
    slow = np.repeat(rng.normal(0, 1, 10), 40)
    naive = slow.std() / np.sqrt(slow.size)
    assert gap.summarize("lm", slow, np.ones(400)).standard_error > 3 * naive


@pytest.mark.parametrize(
    ("mean", "noise", "verdict"),
    [
        (0.0, 0.01, "not distinguishable from 0"),
        (0.05, 0.01, "exceeds the log's noise"),
        (0.05, 0.5, "different from 0, below the log's noise"),
    ],
)
def test_verdict(tmp_path, capsys, mean, noise, verdict):
    rng = np.random.default_rng(2)
    wiggle = np.resize([0.01, -0.01], 64)
    run = _run(tmp_path, mean + wiggle, 3.0 + rng.normal(0, noise, 64))
    assert cli.main(["gap", str(run)]) == 0
    assert verdict in capsys.readouterr().out


def test_json_has_every_field_and_from_step_leaves_out_the_beginning(tmp_path, capsys):
    run = _run(tmp_path, [9.0, 9.0, 1.0, 1.0, 1.0], [3.0] * 5)
    assert cli.main(["gap", str(run), "--json", "--from-step", "2"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["num_steps"] == 3
    assert found["mean"] == 1.0
    assert found["exceeds_noise"] is True


def test_half_a_last_line_is_left_out_and_a_damaged_one_is_refused(tmp_path, capsys):
    run = _run(tmp_path, [1.0, 1.0], [3.0, 3.0], tail='{"step": 2, "lear')
    assert cli.main(["gap", str(run)]) == 0
    (run / "metrics.jsonl").write_text('{"step": 0, \n{"step": 1}\n')
    assert cli.main(["gap", str(run)]) == 2
    assert "line 1: no JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ('{"step": 1, "loss": 2.0}\n', "has none of learning/lm_estimator_gap"),
        ('{"step": 1, "learning/lm_estimator_gap": 0.1, "learning/lm_loss": 3}\n', "at least 2 are needed"),
    ],
)
def test_unreadable_runs_exit_2_with_the_remedy(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert cli.main(["gap", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_unknown_command_exits_2_and_lists_the_commands(capsys):
    assert cli.main(["gpa"]) == 2
    printed = capsys.readouterr().err
    assert "unknown command 'gpa'" in printed
    assert "explain" in printed


def test_help_exits_0(capsys):
    assert cli.main(["--help"]) == 0
    assert "usage: python -m eqx_loss" in capsys.readouterr().out
