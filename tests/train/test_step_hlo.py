"""What travels between devices, read from compiled programs: weights, experts and gradients."""

import functools
import importlib.util
from collections import Counter

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bench._maxtext_works import COMPILED, CONFIGS
from model import gathered, sum_scattered
from train._aot_assigned import assign_buffers
from train._aot_compile import compile_step, topology_devices
from train._aot_flops import tpu_kernel_flops
from train._config_load import load_config
from train._hlo_count import count_program
from train._hlo_parse import Instruction, Program, parse_program, run_counts
from train._mesh import MeshConfig, make_mesh
from train._sharding import make_parallel
from train._step import StepConfig

from .step_cases import GradientCase, mesh_of, tiny_config
from .tiny import QUICKSTART
from .tiny import tiny_config as tiny_run

NUM_SCANNED = 4
CONFIG = tiny_config(num_layers=1 + NUM_SCANNED)
ONE_EXPERT_MATRIX = CONFIG.hidden_size * CONFIG.moe.moe_intermediate_size
ALL_EXPERTS = CONFIG.moe.num_experts * ONE_EXPERT_MATRIX
DENSE = QUICKSTART.with_name("dense-1b-toy.yaml")
SUMS = ("all-reduce", "reduce-scatter")


def gathers(program: Program) -> list[tuple[Instruction, int]]:
    """Every all-gather and how often it runs."""
    counts = run_counts(program)
    return [
        (instruction, counts[name])
        for name, body in program.computations.items()
        for instruction in body
        if instruction.opcode in ("all-gather", "all-gather-start") and counts[name]
    ]


def largest_gather(program: Program) -> int:
    """Entries of the largest gathered array."""
    return max(shape.num_elements for instruction, _ in gathers(program) for shape in instruction.shapes)


@pytest.fixture(scope="module")
def gathered_weights() -> Program:
    return parse_program(GradientCase(mesh_of(fsdp=8), model_config=CONFIG).hlo)


@pytest.fixture(scope="module")
def travelling_tokens() -> Program:
    return parse_program(GradientCase(mesh_of(fsdp=2, expert=4), model_config=CONFIG).hlo)


def test_no_program_on_an_expert_mesh_gathers_the_weights_of_all_experts(travelling_tokens, gathered_weights):
    assert largest_gather(travelling_tokens) < ALL_EXPERTS
    assert largest_gather(gathered_weights) == ALL_EXPERTS  # without experts cut, one layer's are gathered


def test_weights_are_gathered_layer_by_layer_inside_the_scan(gathered_weights):
    of_experts = [
        times
        for instruction, times in gathers(gathered_weights)
        if any(shape.num_elements == ALL_EXPERTS for shape in instruction.shapes)
    ]
    assert largest_gather(gathered_weights) == ALL_EXPERTS  # never those of several layers at once
    # Gate, up and down of every layer forward; gate, up and down again in the backward pass.
    in_scan = [times for times in of_experts if times > 1]
    assert in_scan == [NUM_SCANNED] * 6
    # The MTP depth has experts too, once and outside the scan: jax 0.10 compiles its two gathers to one.
    assert len(of_experts) - len(in_scan) in (3, 6)


@functools.cache
def sums_by_axis(num_micro_steps: int, reduce_gradients: str) -> Counter[str]:
    """Executions of sums over devices in one step, by the mesh axes of each."""
    case = GradientCase(
        mesh_of(data=2, fsdp=2), num_micro_steps, config=StepConfig(reduce_gradients=reduce_gradients)
    )
    cost = count_program(parse_program(case.hlo), dict(case.mesh.shape))
    counts: Counter[str] = Counter()
    for use in cost.collectives:
        counts[use.axis] += use.count * (use.kind in SUMS)
    return counts


def num_sums(num_micro_steps: int, reduce_gradients: str, axis: str) -> int:
    """Executions of sums over devices along `axis` in one step."""
    counts = sums_by_axis(num_micro_steps, reduce_gradients)
    return sum(count for name, count in counts.items() if axis in name)


def num_float_sums(program: Program) -> int:
    """Executions of sums of floats: TPUs gather the few counts of the experts' traffic by a sum of integers."""
    counts = run_counts(program)
    return sum(
        counts[name]
        for name, body in program.computations.items()
        for instruction in body
        if instruction.opcode.removesuffix("-start") in SUMS
        and any(shape.dtype in ("f32", "bf16") for shape in instruction.shapes)
    )


def test_gradients_are_reduced_once_a_step_and_not_once_a_micro_step():
    few, many = num_sums(2, "step", ""), num_sums(4, "step", "")
    assert few == many > 0


def test_gradients_reduced_every_micro_step_are_reduced_over_data_once():
    few, many = num_sums(2, "micro_step", "data"), num_sums(4, "micro_step", "data")
    assert few == many > 0
    assert num_sums(4, "micro_step", "fsdp") > num_sums(2, "micro_step", "fsdp")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the tpu extra")
@pytest.mark.parametrize(
    ("exchange", "kind", "micro_steps"),
    [("tokens", "ragged-all-to-all", (2, 4)), ("weights", "collective-permute", (2,))],
)
def test_a_tpu_program_gathers_no_experts_and_sums_gradients_once(tmp_path, exchange, kind, micro_steps):
    devices = topology_devices("v5p:2x2x1")
    sums = []
    for num_micro_steps in micro_steps:
        config = tiny_run(
            tmp_path,
            "mesh.fsdp=2",
            "mesh.expert=2",
            f"mesh.expert_exchange={exchange}",
            "optimizer.name=adamw",
            "batch.num_rows=16",
            f"batch.gradient_accumulation_steps={num_micro_steps}",
        )
        step = compile_step(config, devices)
        program = parse_program(step.compiled.as_text())
        cost = count_program(program, dict(step.mesh.shape))
        assert {use.kind for use in cost.collectives} >= {kind}
        moe = config.model.moe
        whole = moe.num_experts * moe.moe_intermediate_size * config.model.hidden_size
        expert_gathers = [
            s.dims
            for instruction, _ in gathers(program)
            for s in instruction.shapes
            if s.num_elements >= whole and moe.num_experts in s.dims and moe.moe_intermediate_size in s.dims
        ]
        assert not expert_gathers
        sums.append(num_float_sums(program))
    assert len(set(sums)) == 1
    assert sums[0] > 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the tpu extra")
@pytest.mark.parametrize("shape", [{"fsdp": 2}, {"context": 2}], ids=str)
def test_a_tpu_program_attends_with_each_device_s_heads_and_gathers_none_over_tensor(shape):
    """Over tensor nothing is gathered but three numbers a token of the output layer; the rest are sums."""
    (name, size), num_heads, num_kv_heads, num_rows, num_positions = *shape.items(), 4, 2, 8, 256
    overrides = [f"mesh.{name}={size}", *(["mesh.fsdp=1"] if name != "fsdp" else []), "mesh.tensor=2"]
    sizes = [f"batch.num_rows={num_rows}", f"batch.num_positions={num_positions}", "model.dtype=bfloat16"]
    steps = ["batch.gradient_accumulation_steps=2", "model.remat=block", "model.num_layers=2"]
    step = compile_step(load_config(DENSE, [*overrides, *sizes, *steps]), topology_devices("v5p:2x2x1"))
    program = parse_program(step.compiled.as_text())
    counts, shape_of_mesh = run_counts(program), dict(step.mesh.shape)
    kernels = []
    for body_name, body in program.computations.items():
        shapes = {instruction.name: instruction.shapes for instruction in body}
        for instruction in body:
            operands = [s for o in instruction.operands for s in shapes.get(o, ())]
            if counts[body_name] and instruction.name.startswith("splash_mha"):
                kernels.append([s.dims[-3] for s in operands if s.dtype == "bf16"][:3])
    cuts = 2 if name == "fsdp" else 4  # with context each device has whole rows of half its heads
    assert kernels
    assert {tuple(heads) for heads in kernels} == {(num_heads // cuts, *[max(num_kv_heads // cuts, 1)] * 2)}
    num_tokens = num_rows * num_positions // 2  # of a device in one step
    uses = [u for u in count_program(program, shape_of_mesh).collectives if "tensor" in u.axis]
    assert {use.kind for use in uses} == {"all-reduce", "all-gather"}
    (gathered_use,) = (use for use in uses if use.kind == "all-gather")
    assert gathered_use.num_bytes == 2 * 3 * num_tokens * 4  # from both devices, in float32


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the tpu extra")
@pytest.mark.parametrize("topology", ["v5p:4x4x4", "v6e:8x8"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((1536, 512), "float32"), ((1536, 157184), "float32"), ((1536, 157184), "bfloat16")]
)
def test_a_tpu_program_over_64_devices_gathers_and_scatters_without_whole_sums(topology, shape, dtype):
    """Sums are in float32: of bfloat16 its parts travel, and nothing is summed on the way."""
    mesh = make_mesh(MeshConfig(fsdp=64), devices=topology_devices(topology))
    parallel = make_parallel(mesh, moe=None, gather_dtype="float32", reduce_dtype="float32")

    def there_and_back(x):
        whole = 2 * gathered(x, 0, ("fsdp",), parallel)
        return sum_scattered(whole, 0, ("fsdp",), "float32", parallel)

    cut = PartitionSpec("fsdp")
    function = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
    weight = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, cut))
    program = parse_program(function.lower(weight).compile().as_text())
    kinds = {use.kind for use in count_program(program, dict(mesh.shape)).collectives}
    sums = {"float32": "reduce-scatter", "bfloat16": "all-to-all"}
    assert kinds - {"collective-permute"} == {"all-gather", sums[dtype]}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the tpu extra")
def test_a_dense_tpu_program_multiplies_by_joined_weights_and_in_kernels_of_known_cost():
    topology = "v5p:2x2x1"
    config = load_config(CONFIGS / "llama3-8b.yaml", [*COMPILED["llama3-8b"].changes, "model.num_layers=3"])
    step = assign_buffers(config, topology, topology_devices(topology))
    program = parse_program(step.compiled.as_text())
    counts = run_counts(program)
    kernels = Counter()
    for name, body in program.computations.items():
        for instruction in body:
            if instruction.opcode == "custom-call":
                kernels[instruction.name.split(".")[0]] += counts[name]
    assert kernels["swiglu_hidden_kernel"] == kernels["swiglu_slopes_kernel"] == config.model.num_layers
    assert not count_program(program, dict(step.mesh.shape), tpu_kernel_flops).unknown_kernels
    gqa = config.model.gqa
    heads = {
        shape.dims[1] for i, _ in gathers(program) for shape in i.shapes if shape.dims[2:] == (gqa.head_dim,)
    }
    assert heads == {gqa.num_heads + 2 * gqa.num_kv_heads}
