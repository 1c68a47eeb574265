"""Experts on several devices: copies that travel, with and without enough room, experts that visit, or are gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from model import Cut, ExchangeWork, ExpertExchange, Parallel, _moe
from model._moe import Experts, GatheredExperts, gathered_experts, run_experts
from tests.oracles.experts import copies_with_a_place, expert_gradients

NUM_DEVICES, NUM_EXPERTS, NUM_TOKENS, NUM_CHOSEN, WIDTH, EXPERT_WIDTH = 4, 8, 7, 3, 5, 4
NUM_COPIES = NUM_TOKENS * NUM_CHOSEN
RTOL = 2e-5  # float32, gradients of an expert's matrices add up to 28 products of three matrices
WAYS = {
    "tokens": (ExpertExchange(kind="tokens"), "cpu"),
    "tokens in half a buffer": (ExpertExchange(kind="tokens", buffer=0.5), "cpu"),
    "tokens, ragged": (ExpertExchange(kind="tokens"), "tpu"),
    "tokens in a buffer, ragged": (ExpertExchange(kind="tokens", buffer=1.25), "tpu"),
    "experts": (ExpertExchange(kind="weights"), "cpu"),
}
CAPACITIES = {1.25: 26, 0.5: 10, None: 4 * 7 * 3}  # of 7 * 3 copies, rounded


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
) -> jax.Array:
    """`jax.lax.ragged_all_to_all` by gathering everything: CPUs do not have it. NaN where the sizes disagree."""
    me = jax.lax.axis_index(axis_name)
    operands, begin, sizes, place = (
        jax.lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    at = jnp.arange(output.shape[0])
    for sender in range(NUM_DEVICES):
        index = at - place[sender, me]
        is_sent = (index >= 0) & (index < sizes[sender, me])
        row = operands[sender][jnp.clip(index + begin[sender, me], 0, operand.shape[0] - 1)]
        output = jnp.where(is_sent.reshape(-1, *[1] * (output.ndim - 1)), row, output)
    return jnp.where(jnp.all(recv_sizes == sizes[:, me]), output, jnp.nan)


def mesh() -> Mesh:
    return Mesh(np.asarray(jax.devices()[:NUM_DEVICES]), ("expert",), axis_types=(AxisType.Auto,))


def parallel_on(platform: str, exchange: ExpertExchange) -> Parallel:
    """4 CPU devices that the model takes for those of `platform`."""
    return Parallel(
        expert_axis="expert", sizes=(("expert", NUM_DEVICES),), platform=platform, exchange=exchange
    )


@functools.cache
def program(way: str):
    """`(experts, tokens, chosen, weights, probe) -> ((outputs, dropped), gradients)` on 4 devices."""
    exchange, platform = WAYS[way]
    parallel = parallel_on(platform, exchange)

    def body(experts, tokens, chosen, weights, probe):
        def run(experts, tokens, weights):
            return run_experts(experts, tokens, chosen, weights, parallel=parallel)

        out, back, dropped = jax.vjp(run, experts, tokens, weights, has_aux=True)
        return out, None if dropped is None else dropped[None], back(probe)

    cut = PartitionSpec("expert")
    return jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=cut, out_specs=cut, check_vma=False))


def draw(routing: str, width: int = WIDTH) -> tuple[np.ndarray, ...]:
    """gate, up, down, tokens, chosen, weights, probe of all devices."""
    rng = np.random.default_rng(5)
    num_tokens = NUM_DEVICES * NUM_TOKENS
    shapes = [(NUM_EXPERTS, width, EXPERT_WIDTH)] * 2 + [(NUM_EXPERTS, EXPERT_WIDTH, width)]
    experts = [rng.normal(size=shape) for shape in shapes]
    choice = rng.normal(size=(num_tokens, NUM_EXPERTS))
    match routing:
        case "to one device":
            choice[:, 4:6] += 9
        case "to all but one":
            choice[:, 2:4] -= 9
    chosen = np.argsort(-choice, axis=1)[:, :NUM_CHOSEN]
    tokens, probe = rng.normal(size=(2, num_tokens, width))
    return *experts, tokens, chosen, rng.uniform(0.1, 1, chosen.shape), probe


@pytest.mark.parametrize("routing", ["anywhere", "to one device", "to all but one"])
@pytest.mark.parametrize("way", WAYS)
def test_experts_on_several_devices_equal_the_oracle(way, routing, monkeypatch):
    """Outputs and gradients, and how many copies of each device were dropped."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    gate, up, down, tokens, chosen, weights, probe = draw(routing)
    buffer = WAYS[way][0].buffer
    has_place = copies_with_a_place(chosen, NUM_DEVICES, NUM_EXPERTS, CAPACITIES[buffer])
    assert has_place.all() == (buffer is None or (buffer > 1 and routing == "anywhere"))
    expected = expert_gradients(gate, up, down, tokens, chosen, weights, probe, has_place)
    single = [jnp.asarray(x, jnp.float32) for x in (gate, up, down, tokens, weights, probe)]
    out, dropped, grads = program(way)(
        Experts(*single[:3]), single[3], jnp.asarray(chosen, jnp.int32), single[4], single[5]
    )
    for got, want in zip((out, *jax.tree.leaves(grads)), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=RTOL, atol=RTOL * np.abs(want).max())
    if buffer is not None:
        np.testing.assert_array_equal(dropped, np.sum(~has_place.reshape(NUM_DEVICES, -1), axis=1))
    else:
        assert dropped is None


@pytest.mark.parametrize(
    ("whole_experts", "is_kept"),
    [(False, True), (True, False)],
    ids=["parts of experts, gradients kept", "whole experts, gradients reduced"],
)
def test_gathered_experts_equal_the_oracle(whole_experts, is_kept):
    """Outputs and gradients where a device stores parts of all experts, or some experts. On TPUs gate and up travel
    together. Gradients that every device keeps whole are added up here. Two devices share the width of every expert."""
    *matrices, tokens, chosen, weights, probe = draw("anywhere", width=2 * NUM_DEVICES)
    names = ("expert", "tensor")
    parallel = Parallel(
        fsdp_axes=("expert",),
        tensor_axis="tensor",
        whole_experts=whole_experts,
        sizes=tuple(zip(names, (NUM_DEVICES, 2))),
        platform="tpu",
    )

    def body(stored, tokens, chosen, weights, probe):
        def run(trained, tokens, weights):
            leaves = map(Cut, jax.tree.leaves(stored), trained) if is_kept else trained
            gathered = gathered_experts(jax.tree.unflatten(jax.tree.structure(stored), leaves), parallel)
            assert isinstance(gathered, GatheredExperts)
            return run_experts(gathered, tokens, chosen, weights, parallel=parallel)[0]

        trained = [jnp.zeros(x.shape) for x in matrices] if is_kept else jax.tree.leaves(stored)
        out, back = jax.vjp(run, trained, tokens, weights)
        grads, *of_tokens = back(probe)
        return out, [x[None] for x in grads] if is_kept else grads, of_tokens

    rows = PartitionSpec("expert")
    cuts = [rows if whole_experts else PartitionSpec(*[None] * i, "expert") for i in (1, 1, 2)]
    single = [jnp.asarray(x, jnp.float32) for x in (*matrices, tokens, weights, probe)]
    experts = Experts(*single[:3])
    stored = jax.tree.unflatten(jax.tree.structure(experts), cuts)
    run = jax.shard_map(
        body,
        mesh=Mesh(np.asarray(jax.devices()[:8]).reshape(4, 2), names, axis_types=(AxisType.Auto,) * 2),
        in_specs=(stored, rows, rows, rows, rows),
        out_specs=(rows, rows if is_kept else cuts, rows),
        axis_names={"expert"},
        check_vma=False,
    )
    out, grads, of_tokens = jax.jit(run)(
        experts, single[3], jnp.asarray(chosen, jnp.int32), single[4], single[5]
    )
    of_experts = [np.sum(x, axis=0) if is_kept else x for x in grads]
    has_place = np.ones(chosen.shape, bool)
    expected = expert_gradients(*matrices, tokens, chosen, weights, probe, has_place)
    for got, want in zip((out, *of_experts, *of_tokens), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=RTOL, atol=RTOL * np.abs(want).max())


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_no_more_rows_are_multiplied_than_a_bounded_buffer_holds(platform, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    multiplied = []
    monkeypatch.setattr(_moe, "expert_products", lambda _, x, *__: multiplied.append(x.shape[0]) or x)
    *experts, tokens, chosen, weights, _ = draw("anywhere")

    def body(*arguments):
        parallel = parallel_on(platform, ExpertExchange(kind="tokens", buffer=1.25))
        return run_experts(Experts(*arguments[:3]), *arguments[3:], parallel=parallel)[0]

    cut = PartitionSpec("expert")
    run = jax.shard_map(body, mesh=mesh(), in_specs=cut, out_specs=cut, check_vma=False)
    jax.eval_shape(run, *experts, tokens, chosen, weights)
    assert multiplied == [CAPACITIES[1.25]]


def work(**changes: int) -> ExchangeWork:
    fields = {
        "num_tokens": 16384,
        "num_chosen": 8,
        "num_experts": 128,
        "num_devices": 4,
        "model_size": 1024,
        "expert_size": 512,
        "compute_bytes": 2,
        "gather_bytes": 2,
        "reduce_bytes": 4,
    }
    return ExchangeWork(**{**fields, **changes})


def test_bytes_of_both_ways_are_those_worked_out_by_hand():
    """131072 copies of 2 KiB, three quarters of them to other devices; 32 experts of three 1 MiB matrices a device."""
    mib = 2**20
    assert work().token_bytes(ExpertExchange(token_trips=4)) == 4 * 192 * mib
    assert work().token_bytes(ExpertExchange(token_trips=5)) == 5 * 192 * mib
    # Three devices further: forward in bfloat16, backward in bfloat16 with gradients in float32.
    assert work().weight_bytes(ExpertExchange()) == 3 * (96 + 96 + 192) * mib
    assert work().weight_bytes(ExpertExchange(expert_cuts=2)) == 3 * (96 + 96 + 192) * mib // 2


def test_what_sends_fewer_bytes_travels_unless_told_otherwise():
    assert work().choose(ExpertExchange()) == "tokens"  # 768 MiB against 1152 MiB
    assert work(num_tokens=32768).choose(ExpertExchange()) == "weights"
    assert work(num_tokens=24576).choose(ExpertExchange()) == "tokens"  # equal
    assert work(num_tokens=24576).choose(ExpertExchange(token_trips=5)) == "weights"
    assert work().choose(ExpertExchange(kind="weights")) == "weights"
    assert work(num_tokens=32768).choose(ExpertExchange(kind="tokens")) == "tokens"


def test_a_buffer_has_never_more_rows_than_may_come():
    assert work().buffer_rows(None) == 4 * 16384 * 8
    assert work().buffer_rows(1.25) == 163840
    assert work().buffer_rows(9.0) == 4 * 16384 * 8
    assert work(num_experts=16).buffer_rows(None) == 4 * 16384 * 4
