"""A toy Ling-3 trained here and by PyTorch: same weights, same batches, 50 steps, the same losses.

The PyTorch logs are recorded in `tests/golden/train_pair`; with EQX_LOSS_REFERENCE_PYTHON set to a Python that has
torch and transformers, PyTorch trains again.
"""

import json
import os
import pathlib
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_loss.compare import main as compare

from . import pair_settings as settings
from .train_pair import train

ROOT = pathlib.Path(__file__).parents[2]
REFERENCE_PYTHON = os.environ.get("EQX_LOSS_REFERENCE_PYTHON")
# lm 0.02 %, mtp 0.2 %, 0.01 % at the first step: the defaults of `compare`, here written out.
TOLERANCES = ("--tol", "lm=0.02%", "--tol", "mtp=0.2%", "--first-step-tol", "0.0001")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """`metrics.jsonl` of our run with a flag, trained once."""
    folder = tmp_path_factory.mktemp("ours")

    def metrics(flag):
        if not (folder / flag).exists():
            train(settings.WEIGHTS, folder / flag, per_token=settings.FLAGS[flag])
        return folder / flag / "metrics.jsonl"

    return metrics


def judge(reference, candidate, capsys):
    """Exit code and JSON of `python -m eqx_loss compare`."""
    code = compare(
        [
            str(reference),
            str(candidate),
            "--json",
            "--offset",
            "0",
            "--min-steps",
            str(settings.NUM_STEPS),
            *TOLERANCES,
        ]
    )
    return code, json.loads(capsys.readouterr().out)["channels"]


@pytest.mark.slow
@pytest.mark.parametrize("flag", settings.FLAGS)
def test_our_run_stays_within_tolerance_of_the_recorded_pytorch_run(flag, ours, capsys):
    code, channels = judge(settings.FOLDER / f"torch.{flag}.log", ours(flag), capsys)
    assert {name: channels[name]["num_steps"] for name in ("lm", "mtp")} == {"lm": 50, "mtp": 50}
    assert code == 0, channels


@pytest.mark.slow
def test_the_other_normalization_is_told_apart(ours, capsys):
    """The check has power: the same run with the other value of calculate_per_token_loss fails it."""
    code, channels = judge(settings.FOLDER / "torch.mb.log", ours("pt"), capsys)
    assert code == 1
    assert channels["lm"]["verdict"] == "fail"


@pytest.mark.skipif(
    REFERENCE_PYTHON is None, reason="needs a Python with torch and transformers in EQX_LOSS_REFERENCE_PYTHON"
)
@pytest.mark.parametrize("flag", settings.FLAGS)
def test_pytorch_trains_the_recorded_run_again(flag, tmp_path, capsys):
    assert REFERENCE_PYTHON is not None
    subprocess.run(
        [REFERENCE_PYTHON, "-m", "tests.reference.torch_run", "--flag", flag, "--out", str(tmp_path)],
        cwd=ROOT,
        check=True,
    )
    code, channels = judge(settings.FOLDER / f"torch.{flag}.log", tmp_path / f"torch.{flag}.log", capsys)
    assert code == 0, channels


def test_rows_are_packed_and_uneven():
    """Else packing or the flag would not matter."""
    for rows in settings.batches():
        counts = rows.loss_mask.sum(1)
        assert counts.max() > 1.1 * counts.min()
        assert rows.segment_ids.max() > 1
        for row, segments in enumerate(rows.segment_ids):
            for document in settings.documents(segments):
                assert rows.tokens[row, document][-1] == settings.END_OF_DOCUMENT
                np.testing.assert_array_equal(
                    rows.positions[row, document], np.arange(document.stop - document.start)
                )


def test_learning_rate_of_both_sides_is_the_same():
    from train._schedule import learning_rate

    from .train_pair import OPTIMIZER

    for step in range(settings.NUM_STEPS):
        np.testing.assert_allclose(
            float(learning_rate(OPTIMIZER.schedule, jnp.int32(step))),
            settings.learning_rate(step + 1),
            rtol=1e-6,
        )
