"""What a run trains on and what it says."""

import io
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from rich.console import Console

from eqx_loss import Granularity, loss_weights
from tests.train.tiny import tiny_config, tiny_train
from train import report
from train._config_load import load_config
from train._display import Display
from train._metrics import METRICS_FILE, PERF_FILE, read_rows
from train._run_folder import RunFolder, RunFolderError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
RTOL = 2e-5  # float32: six Adam steps over sums taken in another order
ULPS = 4e-6  # eight float32 roundings of a loss near 5 nats: what a difference of two losses may be off
MAXTEXT_NAMES = {
    "loss", "lm_loss", "mtp_loss", "raw_mtp_loss", "moe_z_loss", "moe_lb_loss", "z_loss", "grad_norm", "raw_grad_norm",
    "total_weights", "current_learning_rate",
}  # fmt: skip
OUR_NAMES = {
    "objective",
    "perplexity",
    "objective_lm",
    "lm_estimator_gap",
    "moe_z_estimator_gap",
    "num_skipped_steps",
}


def rows_of(tmp_path: Path) -> list[dict]:
    return read_rows(tmp_path / "run" / METRICS_FILE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Learning rows of one run per (calculate_per_token_loss, accumulation)."""
    rows = {}
    for flag, steps in ((False, 1), (False, 4), (True, 4)):
        folder = tmp_path_factory.mktemp(f"{flag}{steps}")
        overrides = (
            f"loss.calculate_per_token_loss={str(flag).lower()}",
            f"batch.gradient_accumulation_steps={steps}",
            "loss.load_balance_loss_weight=0.01",
            "loss.z_loss_multiplier=0.001",
            "logging.every_steps=1",  # over several steps, a mean of means is no pooled mean
        )
        tiny_train(folder, *overrides)
        rows[flag, steps] = [row for row in rows_of(folder) if "learning/loss" in row]
    return rows


def test_logs_do_not_depend_on_the_number_of_micro_steps(runs):
    one, four = runs[False, 1], runs[False, 4]
    assert [row["step"] for row in one] == [1, 2, 3, 4, 5, 6]
    for row, other in zip(one, four, strict=True):
        for name in row.keys() - {"learning/loss"}:  # its definition differs, see reported_loss
            np.testing.assert_allclose(row[name], other[name], rtol=RTOL, atol=ULPS, err_msg=name)


@pytest.mark.parametrize("steps", [1, 4])
def test_lm_objective_is_the_sample_mean_or_the_token_mean_by_the_flag(runs, steps):
    for row in runs[True, 4]:
        assert row["learning/objective_lm"] == pytest.approx(row["learning/lm_loss"], abs=ULPS)
    gaps = [row["learning/lm_estimator_gap"] for row in runs[False, steps]]
    assert max(abs(gap) for gap in gaps) > 100 * ULPS  # rows do have different counts
    for row, gap in zip(runs[False, steps], gaps):
        assert row["learning/objective_lm"] == pytest.approx(row["learning/lm_loss"] + gap, abs=ULPS)


def test_rows_carry_the_names_that_parity_scripts_read(runs):
    assert set(runs[False, 1][0]) == {"step"} | {f"learning/{name}" for name in MAXTEXT_NAMES | OUR_NAMES}


PER_SAMPLE = [path for path in CONFIGS if not load_config(path).loss.calculate_per_token_loss]


@pytest.mark.parametrize("path", PER_SAMPLE, ids=lambda p: p.stem)
def test_every_config_without_per_token_loss_takes_the_per_sample_path(path):
    config = load_config(path)
    size = config.loss.micro_batch_size
    mask = np.zeros((4 * size, 8), bool)
    for row in range(len(mask)):
        mask[row, : (3 * row) % 8] = True  # row 0 is empty and counts
    weights = np.asarray(loss_weights(jnp.asarray(mask), config.loss).lm_objective)
    groups = mask.reshape(4, -1)
    expected = groups / np.maximum(groups.sum(1, keepdims=True), 1) / 4
    np.testing.assert_allclose(weights.reshape(4, -1), expected, rtol=1e-6)
    assert config.loss.granularity is not Granularity.TOKEN


def test_the_run_folder_holds_config_metrics_picture_and_checkpoints(tmp_path):
    config = tiny_config(tmp_path)
    tiny_train(tmp_path)
    run = tmp_path / "run"
    assert yaml.safe_load((run / "config.yaml").read_text())["run"]["num_steps"] == 6
    assert load_config(run / "config.yaml") == config
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["3", "6"]
    picture = (run / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert [row["step"] for row in read_rows(run / PERF_FILE)] == [2, 4, 6]
    assert all(row["perf/tokens_per_second"] > 0 for row in read_rows(run / PERF_FILE))
    assert not any(name.startswith("perf/") for row in rows_of(tmp_path) for name in row)
    evaluations = [row for row in rows_of(tmp_path) if "eval/lm_loss" in row]
    assert [row["step"] for row in evaluations] == [3, 6]
    (run / "report.png").unlink()
    assert report.main([str(run)]) == 0
    assert (run / "report.png").read_bytes() == picture


def test_report_of_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert report.main([str(tmp_path)]) == 2
    assert "must be a run folder" in capsys.readouterr().err


def test_a_foreign_folder_and_a_busy_folder_are_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(RunFolderError, match="'thesis.txt' and no config.yaml"):
        RunFolder(tmp_path, is_fresh=True)
    assert (tmp_path / "thesis.txt").exists()
    with (
        RunFolder(tmp_path / "run", is_fresh=False),
        pytest.raises(RunFolderError, match="another process is training"),
    ):
        RunFolder(tmp_path / "run", is_fresh=False)
    RunFolder(tmp_path / "run", is_fresh=False).__exit__()


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(tmp_path):
    row = {"learning/loss": 2.5, "learning/lm_loss": 2.25, "learning/raw_mtp_loss": 2.75}
    texts = []
    for is_terminal in (True, False):
        out = io.StringIO()
        with Display(
            Console(file=out, force_terminal=is_terminal, width=120), num_steps=9, start_step=0
        ) as display:
            display.show_step(3)
            display.show_row(3, row, 1234.0, 65.0)
        texts.append(out.getvalue())
    assert "step 3/9  loss 2.5000  lm 2.2500  mtp 2.7500  1,234 tok/s  ETA 1:05" in texts[1]
    for part in ("loss 2.5000", "lm 2.2500", "mtp 2.7500", "1,234 tok/s", "ETA"):
        assert part in texts[0]
