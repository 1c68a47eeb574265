"""Our Ling-3 equals the stock Hugging Face code on every case, and the judge notices when it does not."""

import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from .ling3.__main__ import judge, main
from .ling3._report import Judge, closing_line, relative_error, rounding_noise, summary_error

DATA = pathlib.Path(__file__).parent / "ling3" / "data"


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("g2_base", "float64"),
        ("g2_base", "float32"),
        ("g3_softplus_nonorm", "float64"),
        pytest.param("g3_softplus_nonorm", "float32", marks=pytest.mark.slow),
        pytest.param("g4_qlora_leftpad", "float64", marks=pytest.mark.slow),
        ("g4_qlora_leftpad", "float32"),
        pytest.param("g6_rightpad_nobias", "float64", marks=pytest.mark.slow),
        pytest.param("g6_rightpad_nobias", "float32", marks=pytest.mark.slow),
    ],
)
def test_model_equals_the_reference(case, precision):
    (lines,) = judge(DATA / case, (precision,))
    quantities = {line.quantity for line in lines}
    assert {"logits", "loss", "topk_idx", "norm+probe main/model.word_embeddings.weight"} <= quantities
    assert [str(line) for line in lines if not line.passed] == []


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_operator_equals_the_reference(precision):
    lines = [line for new in judge(DATA / "ops", (precision,)) for line in new]
    assert len(lines) == 30
    assert [str(line) for line in lines if not line.passed] == []


def test_wrong_number_in_a_file_is_a_failing_line_and_exit_code_1(tmp_path, capsys):
    tensors = load_file(DATA / "ops" / "kda_mixed.safetensors")
    tensors["dk"][0, 5, 1, 3] += 1e-3
    save_file(tensors, tmp_path / "wrong.safetensors")
    assert main([str(tmp_path), "--precision", "float64"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "14 passed, 2 failed"
    assert [line.split()[3] for line in out if line.startswith("FAIL")] == ["chunked.dk", "recurrent.dk"]


def test_right_files_give_exit_code_0_and_a_closing_line(tmp_path, capsys):
    shutil.copy(DATA / "ops" / "kda_saturated.safetensors", tmp_path / "a.safetensors")
    assert main([str(tmp_path), "--precision", "float32"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "14 passed, 0 failed"


def test_folder_without_cases_is_exit_code_2(tmp_path):
    assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path / "nowhere")]) == 2


def _without_tensor(file, *names):
    tensors = {name: x for name, x in load_file(file).items() if name not in names}
    save_file(tensors, file)


def _other_architecture(folder):
    (folder / "config.json").write_text('{"model_type": "llama"}')


def _half_a_file(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "quantity", "message"),
    [
        (
            lambda g: _without_tensor(g / "model.safetensors", "model.word_embeddings.weight"),
            "load",
            "model.word_embeddings.weight: missing, expected [61, 24]",
        ),
        (_other_architecture, "load", "model_type must be one of"),
        (lambda g: (g / "config.json").write_text("{"), "load", "config.json: is not JSON"),
        (lambda g: _half_a_file(g / "model.safetensors"), "load", "model.safetensors: damaged"),
        (lambda g: (g / "model.safetensors").unlink(), "read", "model.safetensors: missing"),
        (lambda g: (g / "config.json").unlink(), "read", "config.json: missing"),
        (lambda g: (g / "inputs.safetensors").unlink(), "read", "inputs.safetensors: missing"),
        (lambda g: (g / "expected.safetensors").unlink(), "read", "expected.safetensors: missing"),
        (lambda g: _half_a_file(g / "expected.safetensors"), "read", "expected.safetensors: damaged"),
        (lambda g: _half_a_file(g / "grads.safetensors"), "read", "grads.safetensors: damaged"),
        (lambda g: (g / "meta.json").write_text("nonsense"), "read", "meta.json: is not JSON"),
        (lambda g: (g / "meta.json").write_text("[]"), "read", "meta.json: must hold a JSON object"),
        (lambda g: _without_tensor(g / "inputs.safetensors", "labels"), "read", "holds no labels"),
        (lambda g: _without_tensor(g / "expected.safetensors", "logits"), "read", "holds no logits"),
        (
            lambda g: ((g / "grads.safetensors").unlink(), (g / "meta.json").unlink()),
            "read",
            "hold no gradient",
        ),
    ],
)
def test_unreadable_model_is_a_failing_line_not_a_crash(damage, quantity, message, tmp_path, capsys):
    shutil.copytree(DATA / "g2_base", tmp_path / "g2")
    damage(tmp_path / "g2")
    assert main([str(tmp_path), "--precision", "float32"]) == 1
    line, closing = capsys.readouterr().out.splitlines()
    assert line.split()[:4] == ["FAIL", "g2", "float32", quantity]
    assert message in line
    assert closing == "0 passed, 1 failed"


def test_unreadable_operator_file_is_a_failing_line_not_a_crash(tmp_path, capsys):
    source = DATA / "ops" / "kda_saturated.safetensors"
    for name in ("half", "no_beta", "no_result"):
        shutil.copy(source, tmp_path / f"{name}.safetensors")
    _half_a_file(tmp_path / "half.safetensors")
    _without_tensor(tmp_path / "no_beta.safetensors", "beta")
    _without_tensor(tmp_path / "no_result.safetensors", "o")
    assert main([str(tmp_path), "--precision", "float32"]) == 1
    out = capsys.readouterr().out
    assert "half.safetensors: damaged or not safetensors" in out
    assert "no_beta.safetensors: no operator file, holds no beta" in out
    assert "no_result.safetensors: no operator file, holds no o" in out
    assert main([str(tmp_path / "half.safetensors"), "--precision", "float32"]) == 1


def test_nan_another_shape_and_a_different_expert_fail():
    judge = Judge("case", "float64")
    judge.close("nan", "value", np.array([np.nan]), np.zeros(1))
    judge.close("shape", "value", np.zeros(2), np.zeros(3))
    judge.gradient("nan gradient", np.array([np.nan]), np.ones(1))
    judge.equal("expert", np.array([1, 2]), np.array([1, 3]))
    judge.failure("nothing", "why")
    assert closing_line(judge.lines) == "0 passed, 5 failed"


def test_comparison_is_restricted_to_real_positions():
    judge = Judge("case", "float64")
    judge.close("inside", "value", np.array([[1.0, 5.0]]), np.array([[1.0, 0.0]]), np.array([[True, False]]))
    assert judge.lines[0].passed


def test_gradient_that_must_be_zero_is_compared_absolutely():
    assert relative_error(np.full(3, 1e-3), np.zeros(3)) == pytest.approx(1e-3 * 3**0.5)
    assert summary_error(np.full(3, 1e-3), (0.0, 0.0)) >= 1e-3 * 3**0.5
    assert relative_error(np.zeros(0), np.zeros(0)) == 0


def test_gradient_that_is_zero_with_rounding_is_compared_absolutely():
    theirs = np.array([2e-18, -3e-18, 1e-18])
    noise = rounding_noise([0.9, 1e-3])
    assert relative_error(np.zeros(3), theirs) == pytest.approx(1)
    assert relative_error(np.zeros(3), theirs, noise) < 1e-17
    assert relative_error(np.full(3, 1e-3), theirs, noise) >= 1e-3
    assert summary_error(np.zeros(3), (4e-18, 1e-18), noise) < 1e-17
    assert relative_error(np.zeros(3), theirs * 1e6, noise) == pytest.approx(1)  # small, but no noise


def test_probe_notices_a_permutation_that_keeps_the_norm():
    gradient = np.array([1.0, 2.0, 3.0])
    probe = float(gradient @ np.sin([1.0, 2.0, 3.0]))
    norm = float(np.linalg.norm(gradient))
    assert summary_error(gradient, (norm, probe)) < 1e-15
    assert summary_error(gradient[::-1], (norm, probe)) > 0.1
