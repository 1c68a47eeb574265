"""The command line: help, refusals in one readable message, exit codes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.tiny import QUICKSTART, shared_program, tiny_overrides
from train import _cli, _display, _loop

ROOT = Path(__file__).parents[2]
GQA_OF_THREE = (
    "model={vocab_size: 264, hidden_size: 16, num_layers: 1, intermediate_size: 16,"
    " gqa: {num_heads: 4, num_kv_heads: 3, head_dim: 4, rope_head_dim: 4}}"
)
WRONG = {
    "unknown key": ("model.num_layer=3", "model.num_layer: unknown key (value 3); did you mean num_layers?"),
    "wrong type": ("batch.num_rows=2.7", "batch.num_rows: must be a valid integer, got 2.7"),
    "impossible sizes": ("model.moe.num_experts_per_tok=99", "num_experts_per_tok must be in [1, "),
    "indivisible batch": ("loss.micro_batch_size=3", "loss.micro_batch_size: must divide the 4 rows of a micro-step"),
    "batch over mesh": ("mesh.fsdp=8", "8 rows do not divide into 2 micro-steps on 8 row shards"),
    "missing folder": ("data.folder=nowhere/at/all", "data.folder must be an existing folder, got 'nowhere/at/all'"),
    "negative coefficient": ("loss.moe_z_loss_weight=-1e-4", "moe_z_loss_weight must be finite and >= 0, got -0.0001"),
    "heads not divisible": (GQA_OF_THREE, "num_kv_heads must divide num_heads=4, got 3"),
    "unknown dtype": ("model.dtype=float16", "model.dtype: must be 'bfloat16', 'float32' or 'float64', got"),
    "accumulation": ("batch.gradient_accumulation_steps=3", "gradient_accumulation_steps=3 must divide num_rows=8"),
    "bad override": ("run.seed", "override 'run.seed': must look like section.key=value"),
    "mesh too big": ("mesh.tensor=3", "which does not divide 8 devices"),
    "padded vocabulary": ("model.vocab_size=100", "model.vocab_size: must be at least the 259 ids"),
}  # fmt: skip


@pytest.mark.parametrize("override", WRONG, ids=lambda k: k.replace(" ", "-"))
def test_a_wrong_config_ends_in_one_message_and_code_2(tmp_path, capsys, override):
    change, message = WRONG[override]
    code = _cli.main([str(QUICKSTART), *tiny_overrides(tmp_path, change)])
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(("name", "message"), [("absent.yaml", "No such file"), ("", "Is a directory")])
def test_a_missing_config_file_is_named(tmp_path, capsys, name, message):
    assert _cli.main([str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot read config file '{tmp_path / name}'")
    assert message in error


def test_a_file_that_is_no_mapping_is_refused(tmp_path, capsys):
    path = tmp_path / "x.yaml"
    path.write_text("- 1\n")
    assert _cli.main([str(path)]) == 2
    assert "must be a mapping of sections, got a list" in capsys.readouterr().err


def test_the_program_itself_ends_without_a_traceback(tmp_path):
    command = [
        sys.executable,
        "-m",
        "train",
        str(QUICKSTART),
        "model.num_layer=3",
        f"run.folder={tmp_path / 'run'}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {QUICKSTART}: 1 problem in the configuration",
        "  model.num_layer: unknown key (value 3); did you mean num_layers?",
    ]
    assert not (tmp_path / "run").exists()


def test_help_names_every_option_without_importing_jax():
    code = (
        "import sys; from train._cli import main\ntry: main(['--help'])\nfinally: print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    for word in ("key.path=value", "--check", "--fresh", "--force", "Ctrl-C", "exit codes"):
        assert word in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_check_prints_the_resolved_config_and_writes_nothing(tmp_path, capsys):
    assert _cli.main([str(QUICKSTART), "--check", *tiny_overrides(tmp_path, "run.seed=5")]) == 0
    assert "seed: 5" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_the_pair_that_no_megatron_run_has_is_warned_of(tmp_path, capsys):
    assert _cli.main([str(QUICKSTART), "--check", "loss.mtp_per_layer_loss_norm=false"]) == 0
    assert "warning: loss: calculate_per_token_loss=false" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_ends_with_its_table_and_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    show_step = _display.Display.show_step

    def interrupt(self, step):
        show_step(self, step)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(_loop, "make_program", shared_program)
    arguments = [str(QUICKSTART), *tiny_overrides(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(_display.Display, "show_step", interrupt)
        assert _cli.main(arguments) == 130
    said = capsys.readouterr().out
    assert "Stopped by SIGINT after step" in said
    assert "python -m train" in said.splitlines()[-1]
    assert _cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "continuing from step" in said
    for word in (
        "objective",
        "lm loss",
        "MTP loss",
        "estimator gap",
        "bits per byte",
        "tokens/s",
        "report.png",
        "peak memory",
    ):
        assert word in said
    assert _cli.main(arguments) == 0
    assert "nothing left to do" in capsys.readouterr().out
