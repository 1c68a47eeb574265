"""The report of a step compiled ahead of time, and what the command says when there is none."""

import json

import jax
import pytest

from train import _aot_compile
from train._aot_chip import chip_of
from train._aot_compile import CompiledStep, compile_step, needed_bytes
from train._aot_report import GIB, make_report, markdown, save_report
from train._mesh import make_mesh
from train.aot import main

from .tiny import QUICKSTART, tiny_config

KEYS = {
    "fits",
    "hbm_bytes_per_device",
    "hbm_limit_bytes",
    "flops_per_device",
    "model_flops_ratio",
    "collectives",
    "compile_seconds",
    "estimated_step_seconds",
    "estimated_mfu",
}
OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm."
    " Used 120.50G of 95.74G hbm. Exceeded hbm capacity by 24.76G."
)
V5P = chip_of("v5p:2x2x1")


def saved(report, tmp_path):
    save_report(report, tmp_path / "report.json")
    return json.loads((tmp_path / "report.json").read_text())


def test_a_step_that_does_not_fit_says_how_much_is_missing_and_what_to_change(tmp_path):
    config = tiny_config(tmp_path, "batch.gradient_accumulation_steps=2")
    mesh = make_mesh(config.mesh, devices=jax.devices()[:4])
    step = CompiledStep(mesh, None, 1.0, 2.0, 3.0, needed_bytes(OUT_OF_MEMORY), OUT_OF_MEMORY)
    report = make_report(config, "v5p:2x2x1", V5P, step)
    found = saved(report, tmp_path)
    assert found.keys() >= KEYS
    assert found["fits"] is False
    assert found["hbm_bytes_per_device"] == int(120.5 * GIB)
    assert found["estimated_mfu"] == 0
    text = markdown(report)
    assert "does not fit" in text
    assert "reduce_gradients=micro_step" in text


def test_the_report_of_a_compiled_step_has_every_field(tmp_path):
    config = tiny_config(tmp_path, "mesh.fsdp=4")
    report = make_report(config, "v5p:2x2x1", V5P, compile_step(config, jax.devices()[:4]))
    found = saved(report, tmp_path)
    assert found.keys() >= KEYS
    assert found["fits"] is True
    assert 0 < found["model_flops_ratio"] < 1.5
    assert 0 < found["estimated_mfu"] < 1
    for use in found["collectives"]:
        assert use.keys() >= {"kind", "count", "bytes", "axis"}
        assert use["axis"] in ("fsdp", "none")  # sums over an axis of one device stay in the program
    assert any(use["axis"] == "fsdp" and use["bytes"] > 0 for use in found["collectives"])
    assert (tmp_path / "report.md").exists()
    assert (tmp_path / "report.png").exists()


def test_a_missing_compiler_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(_aot_compile, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert main([str(QUICKSTART), "--topology", "v5p:2x2x1"]) == 2
    assert "install the tpu extra" in capsys.readouterr().err


def test_an_unknown_chip_is_refused_with_the_known_ones(capsys):
    assert main([str(QUICKSTART), "--topology", "v9:2x2"]) == 2
    assert "v5e, v5p, v6e, tpu7x" in capsys.readouterr().err


@pytest.mark.parametrize("message", ["INTERNAL: Mosaic failed", "RESOURCE_EXHAUSTED: memory space vmem"])
def test_another_failure_of_the_compiler_is_no_lack_of_memory(tmp_path, monkeypatch, message):
    def fail(self, *_, **__):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(ValueError, match="not for lack of memory"):
        compile_step(tiny_config(tmp_path), jax.devices()[:1])
