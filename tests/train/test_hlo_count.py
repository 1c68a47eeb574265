"""The counter of FLOPs and collectives against programs whose costs are known by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import eqx_loss
from model._uneven import run_uneven
from train._aot_compile import needed_bytes
from train._aot_flops import tpu_kernel_flops
from train._hlo_count import count_program, instruction_flops, replica_groups
from train._hlo_parse import Instruction, Shape, parse_program, run_counts

from .step_cases import mesh_of

NUM_LAYERS, WIDTH, ROWS = 5, 64, 32
MESH = {"data": 2, "fsdp": 4}


def compiled(function, *arguments):
    return parse_program(jax.jit(function).lower(*arguments).compile().as_text())


def scanned(x, weights):
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0])


def unrolled(x, weights):
    for i in range(NUM_LAYERS):
        x = jnp.tanh(x @ weights[i])
    return jnp.sum(x)


@pytest.fixture(scope="module")
def arguments():
    return jnp.ones((ROWS, WIDTH)), jnp.ones((NUM_LAYERS, WIDTH, WIDTH))


@pytest.mark.parametrize("function", [scanned, unrolled])
def test_a_loop_costs_what_its_unrolled_form_costs(function, arguments):
    forward = 2 * ROWS * WIDTH * WIDTH * NUM_LAYERS
    program = compiled(jax.grad(function, argnums=(0, 1)), *arguments)
    assert count_program(program, {"data": 1}).flops == 3 * forward


def test_nested_loops_multiply(arguments):
    def nested(x, weights):
        return jax.lax.scan(lambda x, _: (x + scanned(x, weights), None), x, jnp.arange(3))[0]

    cost = count_program(compiled(nested, *arguments), {"data": 1})
    assert cost.flops == 3 * 2 * ROWS * WIDTH * WIDTH * NUM_LAYERS


def test_collectives_in_a_loop_count_every_trip_and_name_their_axis(arguments):
    mesh = mesh_of(data=2, fsdp=4)

    def body(x, weights):
        def loss(weights):
            def layer(x, w):
                return jnp.tanh(x @ jax.lax.all_gather(w, "fsdp", axis=0, tiled=True)), None

            return jnp.sum(jax.lax.scan(layer, x, weights)[0])

        return jax.lax.psum(jax.grad(loss)(weights), "data")

    spec = PartitionSpec(None, "fsdp")
    rows = PartitionSpec(("data", "fsdp"))
    step = jax.shard_map(body, mesh=mesh, in_specs=(rows, spec), out_specs=spec, check_vma=False)
    uses = count_program(compiled(step, *arguments), dict(mesh.shape)).collectives
    size = WIDTH * WIDTH * 4
    assert {(u.kind, u.axis, u.count, u.num_bytes) for u in uses} == {
        ("all-gather", "fsdp", NUM_LAYERS, NUM_LAYERS * size),
        ("reduce-scatter", "fsdp", NUM_LAYERS, NUM_LAYERS * size),
        ("all-reduce", "data", 1, NUM_LAYERS * size // 4),
    }
    wire = {u.kind: u.wire_bytes for u in uses}
    assert wire["all-gather"] == NUM_LAYERS * size * 3 // 4
    assert wire["all-reduce"] == NUM_LAYERS * size // 4


@pytest.fixture
def names_in_cache_key():
    """Otherwise the compilation cache may return a program with the names of an older one."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("names_in_cache_key")
def test_the_output_layers_loop_over_tiles_costs_three_products_of_a_whole_batch():
    """Its trips depend on the weights, so the program does not hold them; its scope does."""
    tokens, vocab, tile = 48, 96, 8

    def fused(hidden, unembed):
        tiling = eqx_loss.XentTiling(token_tile_size=tile, vocab_tile_size=32)
        return eqx_loss.linear_cross_entropy_heads(
            hidden,
            unembed,
            jnp.zeros(hidden.shape[:3], int),
            hidden[..., 0],
            execution=eqx_loss.XentExecution(tiling=tiling),
        )

    def objective(hidden, unembed, factors):
        heads = fused(hidden, unembed)
        return sum(f * head.objective for f, head in zip(factors, heads)), [head.xent for head in heads]

    # Factors as arguments, losses as results: no loop of the layer may be dropped by the compiler.
    arguments = jnp.ones((2, 1, tokens, WIDTH)), jnp.ones((WIDTH, vocab)), jnp.ones(2)
    step = jax.value_and_grad(objective, (0, 1), has_aux=True)
    cost = count_program(compiled(step, *arguments), {"data": 1})
    assert cost.flops == 3 * 2 * (2 * tokens) * WIDTH * vocab


def convolution(dims, labels, window):
    left, right, out = (Shape("f32", d) for d in dims)
    window = f"window={{{window}}}, " if window else ""
    return instruction_flops(
        Instruction("c", "convolution", (out,), ("a", "b"), f", {window}dim_labels={labels}", False),
        [left, right],
    )


@pytest.mark.usefixtures("names_in_cache_key")
def test_loops_over_layers_of_uneven_groups_count_the_layers_of_all_groups(arguments):
    """2 and 3 layers of one kind, each time followed by one of another: 7 products forward, 14 backward."""

    def loss(x, weights, others):
        x, _ = run_uneven(
            lambda x, _, w: (jnp.tanh(x @ w), None), ((2, 1), (3, 1)), x, None, (weights, others)
        )
        return jnp.sum(x)

    x, weights = arguments
    cost = count_program(compiled(jax.grad(loss, argnums=(0, 1, 2)), x, weights, weights[:2]), {"data": 1})
    assert cost.flops == 3 * 7 * 2 * ROWS * WIDTH * WIDTH


def test_a_matrix_product_written_as_a_convolution_has_its_own_flops():
    assert convolution([(32, 64), (64, 16), (32, 16)], "bf_io->bf", "") == 2 * 32 * 64 * 16


def test_batched_product_written_as_a_dilated_window_does_not_count_holes():
    # TPUs put the batch of an einsum into a window of which one entry in `batch` is real.
    batch = 8
    flops = convolution(
        [(batch, 32, 64), (batch, 64, 16), (batch, 32, 16)],
        "0bf_0io->0bf",
        f"size={batch} stride={batch - 1} lhs_dilate={batch}",
    )
    assert flops == 2 * batch * 32 * 64 * 16


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['data'=2,'fsdp'=2] {'data'}", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
    ],
)
def test_every_spelling_of_groups_is_read(text, want):
    assert sorted(replica_groups(text)) == want


def test_strings_that_go_over_lines_do_not_end_a_computation():
    text = (
        "ENTRY %main (p: f32[2]) -> f32[2] {\n"
        '  %a = f32[2]{0} custom-call(%p), custom_call_target="x", backend_config="{\n'
        '} more"\n'
        "  ROOT %b = f32[2]{0} add(%a, %a)\n"
        "}\n"
    )
    program = parse_program(text)
    assert [i.name for i in program.computations["main"]] == ["a", "b"]
    assert run_counts(program) == {"main": 1}


def test_a_computation_of_another_thread_ends():
    text = (
        "%moved (p: f32[2]) -> f32[2] {\n"
        "  ROOT %a = f32[2]{0} copy(%p)\n"
        '}, execution_thread="sparsecore"\n\n'
        "ENTRY %main (p: f32[2]) -> f32[2] {\n"
        "  ROOT %b = f32[2]{0} add(%p, %p)\n"
        "}\n"
    )
    assert set(parse_program(text).computations) == {"moved", "main"}


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_program("HloModule empty\n")


def test_memory_that_the_compiler_asked_for_in_vain_is_read():
    assert needed_bytes("Ran out: Used 120.50G of 95.74G hbm. Exceeded") == int(120.5 * 2**30)
    early = "CompileTimeHbmOom: the total memory required for HLO temporaries (710.25G) exceeds available HBM (95.73G)."
    assert needed_bytes(early) == int(710.25 * 2**30)
    assert needed_bytes("other") is None


@pytest.mark.parametrize("view", ["bitcast(%b)", "copy(%b)", "fusion(%b), kind=kLoop, calls=%other_layout"])
def test_bytes_count_the_slice_that_a_nested_fusion_reads_and_nothing_in_fast_memory(view):
    program = parse_program(
        """HloModule m

%other_layout (c: f32[64,8]) -> f32[64,8] {
  %c = f32[64,8]{1,0:T(8,128)} parameter(0)
  ROOT %copied = f32[64,8]{1,0} copy(%c)
}

%inner (a: f32[64,8], i: s32[]) -> f32[1,8] {
  %a = f32[64,8]{1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  %z = s32[] constant(0)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%a, %i, %z), dynamic_slice_sizes={1,8}
}

%outer (b: f32[64,8], j: s32[], near: f32[1,8]) -> f32[1,8] {
  %b = f32[64,8]{1,0:T(8,128)} parameter(0)
  %j = s32[]{:T(128)S(6)} parameter(1)
  %near = f32[1,8]{1,0:T(8,128)S(1)} parameter(2)
  %view = f32[64,8]{1,0} VIEW
  %one = f32[1,8]{1,0} fusion(%view, %j), kind=kLoop, calls=%inner
  ROOT %sum = f32[1,8]{1,0} add(%one, %near)
}

ENTRY %main (x: f32[64,8], k: s32[], near: f32[1,8]) -> f32[1,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %y = f32[1,8]{1,0:S(1)} parameter(2)
  ROOT %out = f32[1,8]{1,0} fusion(%x, %k, %y), kind=kLoop, calls=%outer
}
""".replace("VIEW", view)
    )
    row = 8 * 4
    assert count_program(program, {"data": 1}).num_bytes == row + row  # the slice is read, the result written


def test_bytes_of_a_slice_that_is_cast_as_it_is_written_are_those_of_the_target():
    program = parse_program(
        """HloModule m

%written (all: bf16[64,8], i: s32[], new: bf16[1,8]) -> bf16[64,8] {
  %all = bf16[64,8]{1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  %new = bf16[1,8]{1,0} parameter(2)
  %wide = f32[1,8]{1,0} convert(%new)
  %z = s32[] constant(0)
  ROOT %placed = bf16[64,8]{1,0} dynamic-update-slice(%all, %wide, %i, %z)
}

ENTRY %main (x: bf16[64,8], k: s32[], y: bf16[1,8]) -> bf16[64,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  %k = s32[]{:S(6)} parameter(1)
  %y = bf16[1,8]{1,0} parameter(2)
  ROOT %out = bf16[64,8]{1,0} fusion(%x, %k, %y), kind=kLoop, calls=%written
}
"""
    )
    row = 8 * 2
    assert count_program(program, {"data": 1}).num_bytes == row + row  # the new row is read and written


ROW_OF_A_TABLE = """
%row_of (a: f32[64,8], i: s32[]) -> f32[1,8] {
  %a = f32[64,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%a, %i, %z), dynamic_slice_sizes={1,8}
}, execution_thread="sparsecore"
"""


def test_bytes_of_a_call_on_another_core_are_those_of_what_it_calls():
    program = parse_program(
        "HloModule m\n"
        + ROW_OF_A_TABLE
        + """
ENTRY %main (x: f32[64,8], k: s32[]) -> f32[1,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %k = s32[] parameter(1)
  ROOT %out = f32[1,8]{1,0} custom-call(%x, %k), custom_call_target="other", called_computations={%row_of}
}
"""
    )
    row = 8 * 4
    assert count_program(program, {"data": 1}).num_bytes == row + row


def test_bytes_of_a_call_that_runs_beside_the_program_are_counted_once_where_it_works():
    """As libtpu 0.0.52 writes a gather on a sparse core in a finished program."""
    program = parse_program(
        "HloModule m\n"
        + ROW_OF_A_TABLE
        + """
%there (b: f32[64,8], j: s32[]) -> f32[1,8] {
  %b = f32[64,8]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %begun = ((f32[64,8]{1,0}, s32[]), f32[1,8]{1,0}, u32[]{:S(8)}) call-start(%b, %j), to_apply=%row_of
  ROOT %ended = f32[1,8]{1,0} call-done(%begun)
}, execution_thread="sparsecore"

ENTRY %main (x: f32[64,8], k: s32[]) -> f32[1,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %start = ((), (), (s32[32]{0})) custom-call-start(), custom_call_target="t", called_computations={%there}
  %update = ((f32[64,8]{1,0}, s32[]), f32[1,8]{1,0}, (s32[32]{0})) custom-call-update(%start, %x, %k)
  ROOT %out = f32[1,8]{1,0} custom-call-done(%update)
}
"""
    )
    row = 8 * 4
    assert count_program(program, {"data": 1}).num_bytes == row + row


@pytest.mark.parametrize(
    "shifts",
    [
        """%here = bf16[16,8]{1,0} pad(%a, %zero), padding=-8_-40x0_0
  %left = bf16[16,8]{1,0} pad(%a, %zero), padding=-8_-40x-4_4""",
        """%here = bf16[16,8]{1,0} slice(%a), slice={[8:24], [0:8]}
  %wide = bf16[64,12]{1,0} pad(%a, %zero), padding=0_0x0_4
  %left = bf16[16,8]{1,0} slice(%wide), slice={[8:24], [4:12]}""",
    ],
    ids=["pads that cut", "slices of pads"],
)
def test_shifts_of_a_part_read_the_part_once(shifts):
    program = parse_program(
        """HloModule m

%shifted (a: bf16[64,8]) -> bf16[16,8] {
  %a = bf16[64,8]{1,0} parameter(0)
  %zero = bf16[] constant(0)
  SHIFTS
  ROOT %sum = bf16[16,8]{1,0} add(%here, %left)
}

ENTRY %main (x: bf16[64,8]) -> bf16[16,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  ROOT %out = bf16[16,8]{1,0} fusion(%x), kind=kLoop, calls=%shifted
}
""".replace("SHIFTS", shifts)
    )
    part = 16 * 8 * 2
    assert count_program(program, {"data": 1}).num_bytes == part + part  # read once, written


def test_memory_that_is_not_written_yet_costs_no_bytes():
    program = parse_program(
        """HloModule m

ENTRY %main (x: bf16[64,8]) -> bf16[64,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  %later = bf16[1024,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %out = bf16[64,8]{1,0} add(%x, %x)
}
"""
    )
    assert count_program(program, {"data": 1}).num_bytes == 3 * 64 * 8 * 2


def test_swiglu_kernels_count_their_products():
    shapes = [Shape("bf16", dims) for dims in ((512, 256), (512, 1), (1, 256))]
    for name, products in (("swiglu_hidden_kernel.3", 2), ("swiglu_slopes_kernel", 3)):
        call = Instruction(name, "custom-call", (Shape("bf16", (512, 768)),), (), "", False)
        assert tpu_kernel_flops(call, shapes) == 2 * products * 512 * 256 * 768
