"""The report of a step compiled ahead of time, and what the command says when there is none."""

import dataclasses
import functools
import importlib.util
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from model._grouped import grouped_matmul
from train import _aot_compile, _aot_executable, _aot_sweep
from train._aot_chip import chip_of
from train._aot_compile import (
    CompiledStep,
    compile_step,
    needed_bytes,
    topology_devices,
)
from train._aot_executable import save_executable
from train._aot_report import GIB, Counts, make_report
from train._aot_show import NOT_COUNTED, markdown, save_report
from train._aot_sweep import POLICIES, candidates, ranked
from train._compiler import compiler_options
from train._mesh import MeshConfig, make_mesh
from train.aot import main
from train.executable import ExecutableError, load_config, load_executable

from .tiny import QUICKSTART, tiny_config, tiny_overrides

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
    " Used 120.50G of 95.74G hbm. Exceeded hbm capacity by 24.76G.\n\nTotal hbm usage >= 121.00G:\n"
    "    reserved        530.00M \n    program         104.60G \n    arguments        15.90G \n\n"
    "  Largest program allocations in hbm:\n\n  1. Size: 1.46G\n"
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
    state = found["parameter_bytes"] + found["optimizer_bytes"]
    assert found["temporary_bytes"] == int(120.5 * GIB) - state - found["activation_bytes"]
    assert found["failure"] == OUT_OF_MEMORY
    counted = {field.name for field in dataclasses.fields(Counts)}
    assert {name for name in found if found[name] is None} == counted | {"expert_exchange"}
    text = markdown(report)
    assert "does not fit" in text
    assert "| estimated step (s) | not counted |" in text
    assert "    arguments        15.90G" in text
    assert "Size: 1.46G" not in text  # the allocations are in the JSON
    assert "reduce_gradients=micro_step" in text


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries"
         " (228.67G) exceeds available HBM (15.75G). HLO module: jit_train_step.", 228.67),
        ("Compilation failure: Aborting compilation early because it's unlikely to have enough device memory."
         " Requires 20.50G, has 15.75G available.", 20.5),
    ],
)  # fmt: skip
def test_every_way_to_say_that_memory_is_lacking_is_read(words, size):
    assert needed_bytes(words) == int(size * GIB)


@pytest.mark.slow
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


def refusal(capsys, *arguments):
    """What a command says that must end with exit code 2, print nothing else and not begin to compile."""
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "compiling" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v9:2x2", "v5e, v5p, v6e, tpu7x"),
        ("", "v5e, v5p, v6e, tpu7x"),
        ("V5P:2x2x1", "did you mean v5p, as in v5p:4x4x4"),
        ("v5p-8", "did you mean v5p"),  # an accelerator type
        ("v7x:4x4x4", "did you mean tpu7x"),
        ("v5p", "at most 3 sizes and 8960 chips, as in v5p:4x4x4"),
        ("v5p:8", "at most 3 sizes"),
        ("v5p:0x2x2", "at most 3 sizes"),  # libtpu divides by it
        ("v5p:64x64x64", "8960 chips"),  # libtpu describes it
        ("v6e:4x4x4", "at most 2 sizes and 256 chips, as in v6e:4x4"),  # likewise
        ("v6e:2x2;x", "at most 2 sizes"),
    ],
)
def test_a_topology_that_is_no_slice_is_refused_with_one_that_is(name, words, capsys):
    assert words in refusal(capsys, QUICKSTART, "--topology", name)


@pytest.mark.parametrize("name", ["v5p:2x2", "v5p:4x4x8_untwisted", "v5e:16x16", "v6e:1x1", "tpu7x:16x16x36"])
def test_the_shapes_of_slices_are_taken(name):
    assert chip_of(name).name == name.split(":")[0]


def test_files_that_cannot_be_written_are_named_before_the_compilation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_aot_compile, "topology_devices", None)  # not asked for
    (tmp_path / "file").touch()
    command = [QUICKSTART, *tiny_overrides(tmp_path), "--topology", "v5p:2x2x1"]
    inside = tmp_path / "file" / "report.json"
    assert f"{inside}: cannot be written: {tmp_path / 'file'} is no folder" in refusal(
        capsys, *command, "--json", inside
    )
    assert f"{tmp_path}: is no file" in refusal(capsys, *command, "--save", tmp_path)
    assert "would be written twice" in refusal(capsys, *command, "--json", tmp_path / "report.md")
    assert "is read by this command" in refusal(capsys, *command, "--save", QUICKSTART)
    (tmp_path / "new.sweep.json").mkdir()
    assert "new.sweep.json: is no file" in refusal(
        capsys, *command, "--sweep", "--json", tmp_path / "new.json"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"file", "new.sweep.json", "text"}


def test_chips_of_this_machine_are_left_alone(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    refusal(capsys, QUICKSTART, "--topology", "v5p")
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_a_sweep_of_no_compilations_is_refused(limit, capsys):
    command = [QUICKSTART, "--topology", "v5p:2x2x1", "--sweep", f"--limit={limit}"]
    assert f"--limit must be at least 1, got {limit}" in refusal(capsys, *command)


@pytest.mark.parametrize("message", ["INTERNAL: Mosaic failed", "RESOURCE_EXHAUSTED: memory space vmem"])
def test_another_failure_of_the_compiler_is_no_lack_of_memory(tmp_path, monkeypatch, message):
    def fail(self, *_, **__):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(ValueError, match="not for lack of memory"):
        compile_step(tiny_config(tmp_path), jax.devices()[:1])


@pytest.fixture
def no_cache():
    """Programs are compiled here: on CPUs, one that came from the persistent cache cannot be saved whole."""
    is_enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", is_enabled)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_a_saved_executable_runs_without_being_compiled_again(tmp_path, no_cache):
    config = load_config(QUICKSTART, tiny_overrides(tmp_path, "mesh.fsdp=4"))
    devices = jax.devices()[:4]
    step = compile_step(config, devices)
    compiled = step.compiled
    assert save_executable(step, config, tmp_path / "step") == (tmp_path / "step").stat().st_size
    loaded = load_executable(config, devices, tmp_path / "step")

    def ones():
        shapes = (loaded.batch, loaded.state)
        return jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding), shapes)

    want, got = compiled(*ones()), loaded(*ones())
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A file as `--save` writes it for four devices, but for the code; and its config."""
    config = tiny_config(tmp_path)
    mesh = make_mesh(config.mesh, devices=jax.devices()[:4])
    monkeypatch.setattr(_aot_executable, "serialize", lambda compiled: (b"code" * 9, None, None))
    save_executable(CompiledStep(mesh, "compiled", 1.0, 2.0, 3.0), config, tmp_path / "step")
    return tmp_path / "step", config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: b"PK" + content, "is no executable"),
        (lambda content: b"", "is no executable"),
        (lambda content: content[:60], "is cut off or damaged"),
        (lambda content: content[:-1], "35 bytes of code, not 36"),
        (lambda content: content[:-1] + b"x", "checksum"),
        (lambda content: content, "do not load it"),  # "codecode..." is no code
    ],
)
def test_a_file_that_is_no_whole_executable_is_refused(written, change, words):
    path, config = written
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ExecutableError, match=words) as caught:
        load_executable(config, jax.devices()[:4], path)
    assert "compile again with" in str(caught.value)


def test_an_executable_for_something_else_is_refused_with_what_differs(written, monkeypatch, tmp_path):
    path, config = written
    devices = jax.devices()

    def refusal(config, devices):
        with pytest.raises(ExecutableError) as caught:
            load_executable(config, devices, path)
        return str(caught.value)

    assert "optimizer.max_grad_norm: was 1.0, is 2.0" in refusal(
        tiny_config(tmp_path, "optimizer.max_grad_norm=2.0"), devices[:4]
    )
    assert "made for cpu devices, 4 of kind cpu, these devices are cpu devices, 8" in refusal(config, devices)
    assert "another topology or order of devices: [4, None] was [0, None]" in refusal(config, devices[4:])
    monkeypatch.setattr(_aot_executable, "_version", lambda name: "0.1")
    said = refusal(tiny_config(tmp_path, "mesh.fsdp=2", "mesh.data=2"), devices[:4])
    assert f"made with jax {jax.__version__}, here is 0.1" in said
    assert "mesh.data: was 1, is 2" in said
    path.unlink()
    assert "cannot be read: No such file" in refusal(config, devices)


def fitting(limit_bytes):
    """Stands for the compiler: a policy that keeps more needs more, an expert axis needs less."""
    kept = {"none": 300, "dots": 200, "block": 100}

    def compile_step(config, devices):
        needed = kept[config.model.remat] * GIB // config.mesh.expert
        if needed > limit_bytes and config.mesh.context > 1:
            raise ValueError("the compiler failed, and not for lack of memory: INTERNAL")
        return CompiledStep(make_mesh(config.mesh, devices=devices), None, 1.0, 2.0, 3.0, needed, "")

    return compile_step


def test_candidates_of_a_sweep_divide_the_work_and_start_with_the_fewest_extra_axes(tmp_path):
    config = tiny_config(tmp_path, "mesh.fsdp=4", "batch.num_rows=8")
    found = [(c.mesh.expert, c.mesh.context) for c in candidates(config, jax.devices()[:4])]
    assert found[: len(POLICIES)] == [(1, 1)] * len(POLICIES)
    assert found == sorted(found, key=lambda axes: axes[0] * axes[1])
    assert {(2, 1), (1, 2)} <= set(found[len(POLICIES) : 3 * len(POLICIES)])
    for changed in candidates(config, jax.devices()[:4]):
        assert config.batch.num_rows % (4 // changed.mesh.context) == 0
    other = tiny_config(
        tmp_path, "mesh.num_slices=2", "mesh.slice_axis=fsdp", "mesh.expert_exchange=weights", "mesh.tensor=2"
    )
    meshes = [changed.mesh for changed in candidates(other, jax.devices()[:4])]
    assert meshes
    for mesh in meshes:
        assert (mesh.num_slices, mesh.slice_axis, mesh.expert_exchange) == (2, "fsdp", "weights")
        assert (mesh.data, mesh.tensor) == (1, 1)


def test_a_sweep_says_what_it_tried_and_ranks_those_that_fit_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_aot_sweep, "compile_step", fitting(0))
    monkeypatch.setattr(_aot_compile, "topology_devices", lambda *_: jax.devices()[:4])
    out = tmp_path / "sweep.json"
    command = [str(QUICKSTART), *tiny_overrides(tmp_path, "batch.num_rows=8"), "--topology", "v5p:2x2x1"]
    assert main([*command, "--sweep", "--limit", "9", "--json", str(out)]) == 1  # nothing was compiled
    said = capsys.readouterr()
    rows = [line for line in said.out.splitlines() if line.startswith("| ")][1:]
    assert len(rows) + said.err.count("refused") == 9
    assert said.err.count("GiB") == len(rows)  # one line as each is done
    assert all(row.count(NOT_COUNTED) == 2 for row in rows)
    sizes = [float(row.split("|")[4]) for row in rows]
    assert sizes == sorted(sizes)
    assert json.loads(out.read_text())["hbm_bytes_per_device"] == min(sizes) * GIB
    every = json.loads(out.with_suffix(".sweep.json").read_text())
    assert [report["hbm_bytes_per_device"] for report in every] == [size * GIB for size in sizes]


def test_a_sweep_of_which_the_compiler_refuses_all_says_so(tmp_path, monkeypatch, capsys):
    def refuse(config, devices):
        raise NotImplementedError("no such operation")

    monkeypatch.setattr(_aot_sweep, "compile_step", refuse)
    monkeypatch.setattr(_aot_compile, "topology_devices", lambda *_: jax.devices()[:4])
    command = [QUICKSTART, *tiny_overrides(tmp_path, "batch.num_rows=8"), "--topology", "v5p:2x2x1"]
    said = refusal(capsys, *command, "--sweep", "--limit", "2", "--json", tmp_path / "report.json")
    assert said.count("no such operation") == 2
    assert "the compiler refused every mesh that was tried" in said
    assert not (tmp_path / "report.json").exists()


def test_a_sweep_without_a_mesh_that_divides_the_work_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_aot_compile, "topology_devices", lambda *_: jax.devices()[:3])
    command = [str(QUICKSTART), *tiny_overrides(tmp_path, "batch.num_rows=8"), "--topology", "v5p:2x2x1"]
    assert main([*command, "--sweep"]) == 2
    assert "no mesh shape divides" in capsys.readouterr().err


def test_ranking_puts_the_fastest_that_fits_first(tmp_path):
    config = tiny_config(tmp_path)
    mesh = make_mesh(config.mesh, devices=jax.devices()[:1])
    report = make_report(config, "v5p:2x2x1", V5P, CompiledStep(mesh, None, 1.0, 2.0, 3.0, 7 * GIB, ""))
    make = functools.partial(dataclasses.replace, report)
    counts = Counts(
        flops_per_device=1,
        model_flops_ratio=1.0,
        bytes_per_device=1,
        collectives=(),
        unknown_kernels={},
        compute_seconds=2.0,
        memory_seconds=1.0,
        network_seconds=1.0,
        estimated_step_seconds=2.0,
        estimated_mfu=0.5,
    )
    slow = make(fits=True, counts=counts)
    fast = make(fits=True, counts=dataclasses.replace(counts, estimated_step_seconds=1.0))
    large, small = make(hbm_bytes_per_device=9 * GIB), make(hbm_bytes_per_device=8 * GIB)
    assert ranked([large, slow, small, fast]) == [fast, slow, small, large]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the tpu extra")
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_a_row_is_multiplied_with_the_matrix_of_its_expert_only(topology):
    mesh = make_mesh(MeshConfig(), devices=topology_devices(topology))
    place = NamedSharding(mesh, PartitionSpec())
    num_rows, width, inner, num_experts = 1024, 256, 128, 8
    shapes = (
        jax.ShapeDtypeStruct((num_rows, width), jnp.bfloat16, sharding=place),
        jax.ShapeDtypeStruct((num_experts, width, inner), jnp.bfloat16, sharding=place),
        jax.ShapeDtypeStruct((num_experts,), jnp.int32, sharding=place),
    )
    program = jax.jit(grouped_matmul, compiler_options=compiler_options(mesh)).lower(*shapes).compile()
    assert program.cost_analysis()["flops"] < 1.5 * 2 * num_rows * width * inner
