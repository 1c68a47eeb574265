"""Experts on several devices, from the configuration of a run to what its step counts and its program sends."""

import dataclasses

import jax
import numpy as np
import pytest

from model import ExchangeWork, ExpertExchange
from tests.oracles.experts import copies_with_a_place
from train._aot_chip import chip_of
from train._aot_compile import CompiledStep
from train._aot_report import make_report
from train._aot_show import markdown, to_json
from train._config import config_warnings
from train._exchange import dropped_words, exchange_words, exchange_work, expert_exchange, without_drops
from train._hlo_count import count_program
from train._hlo_parse import parse_program
from train._mesh import MeshConfig

from .step_cases import GradientCase, mesh_of, packed_batch, tiny_config, tiny_model
from .test_step_hlo import largest_gather
from .tiny import tiny_config as tiny_run

ONE_ROUTER = tiny_config(num_layers=2, mtp=None)
MOE = ONE_ROUTER.moe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_buffer": 0.5}, "at least 1, the even share, got 0.5; use null"),
        ({"expert_buffer": float("nan")}, "at least 1, the even share, got nan"),
        ({"expert_buffer": float("inf")}, "got inf; use null"),
        (
            {"expert_buffer": 2.0, "expert_exchange": "weights"},
            "set expert_buffer to null, or expert_exchange",
        ),
    ],
)
def test_a_buffer_that_bounds_nothing_is_refused_with_the_remedy(fields, message):
    with pytest.raises(ValueError, match=message):
        MeshConfig(**fields)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["mesh.expert=2", "mesh.expert_buffer=1.5"], ["up to 2 times", "moe_overflow_copies"]),
        (["mesh.fsdp=1", "mesh.expert=-1", "mesh.expert_buffer=1.5"], ["up to 2 times"]),
        (["mesh.expert=2", "mesh.expert_buffer=2"], []),
        (["mesh.expert_buffer=1.5"], ["has no effect"]),
        (["mesh.expert=2"], []),
    ],
)
def test_a_buffer_that_may_overflow_is_warned_of(tmp_path, overrides, words):
    """4 experts, 2 of them for a token."""
    warnings = config_warnings(tiny_run(tmp_path, *overrides))
    assert len(warnings) == bool(words)
    assert all(word in warnings[0] for word in words)


@pytest.mark.slow
def test_the_configuration_gives_the_sizes_that_the_model_meets(monkeypatch, tmp_path):
    jax.clear_caches()  # a layer that another test has traced would not ask again
    met = []
    monkeypatch.setattr(ExchangeWork, "choose", lambda work, _: met.append(work) or "tokens")
    config = dataclasses.replace(
        tiny_run(
            tmp_path, "batch.num_rows=16", "batch.num_positions=32", "batch.gradient_accumulation_steps=2"
        ),
        model=ONE_ROUTER,
    )
    case = GradientCase(mesh_of(data=2, expert=2, context=2), 2, model_config=ONE_ROUTER)
    jax.eval_shape(case.gradient, case.model, jax.eval_shape(case.steps, packed_batch()))
    assert set(met) == {exchange_work(config, case.mesh)}
    assert met[0].num_tokens == 16 * 32 // 2 // 8


def test_the_choice_and_its_reason_are_said(tmp_path):
    config = tiny_run(tmp_path, "mesh.expert=2", "mesh.expert_buffer=1.5")
    assert exchange_words(config, mesh_of(expert=2)).startswith("tokens travel to experts (")
    assert exchange_words(config, mesh_of(expert=2)).endswith("room for 1.5 x the even share")
    assert exchange_words(config, mesh_of(fsdp=2)) == ""
    many = tiny_run(tmp_path, "mesh.expert=2", "batch.num_rows=4096")
    assert exchange_words(many, mesh_of(expert=2)).startswith("experts travel (")


def test_dropped_copies_are_said_with_their_share_of_all(tmp_path):
    """2 layers and 1 MTP depth with experts, 2 for each of 8 x 16 tokens, 2 steps: 1536 copies."""
    assert dropped_words(tiny_run(tmp_path), 2, 337).startswith(
        "337 copies of tokens had no place and were dropped (21.94%); raise mesh.expert_buffer"
    )


@pytest.mark.parametrize(
    ("overrides", "kind", "rows"),
    [
        (["mesh.expert_buffer=1.5"], "tokens", 96),  # 1.5 x 2 rows x 16 positions x 2 experts
        (["mesh.expert_exchange=weights"], "weights", None),
        (["mesh.expert=1"], None, None),
    ],
)
def test_the_report_ahead_of_time_says_what_travels(tmp_path, overrides, kind, rows):
    config = tiny_run(
        tmp_path, "mesh.fsdp=2", "mesh.expert=2", "batch.gradient_accumulation_steps=1", *overrides
    )
    mesh = mesh_of(fsdp=2, expert=config.mesh.expert)
    report = make_report(
        config, "v5p:2x2x1", chip_of("v5p:2x2x1"), CompiledStep(mesh, None, 1.0, 2.0, 3.0, 4)
    )
    facts = to_json(report)["expert_exchange"]
    if kind is None:
        assert facts is None
        return
    assert (facts["kind"], facts["buffer_rows"]) == (kind, rows)
    # 64 copies of 16 float32s, half of them, 4 trips; 2 experts of 3 matrices of 16 x 16, one hop, 3 times.
    assert facts["token_bytes"] == 4 * 64 * 16 // 2 * 4
    assert facts["weight_bytes"] == 2 * 3 * 16 * 16 * 3 * 4
    assert f"Experts: {facts['words']}." in markdown(report)


def test_rematerialized_layers_send_copies_once_more_and_evaluation_drops_none():
    mesh, config = mesh_of(expert=2, tensor=2), MeshConfig(fsdp=1, expert_buffer=1.5)
    found = expert_exchange(config, tiny_config(remat="block"), mesh)
    assert found == ExpertExchange(buffer=1.5, token_trips=5, expert_cuts=2)
    assert expert_exchange(config, tiny_config(), mesh).token_trips == 4
    assert without_drops(found) == dataclasses.replace(found, kind="weights", buffer=None)
    assert without_drops(ExpertExchange()) == ExpertExchange()


@pytest.mark.slow
def test_dropped_copies_of_all_devices_and_micro_steps_are_counted():
    batch, num_micro_steps = packed_batch(), 2
    routed = tiny_model(ONE_ROUTER)(
        batch.tokens, segment_ids=batch.segment_ids, positions=batch.positions, return_router_logits=True
    )
    chosen = np.asarray(routed.router.experts[0])
    # Rows lie over micro-steps, then fsdp, then expert.
    shared = chosen.reshape(num_micro_steps * 2, -1, MOE.num_experts_per_tok)
    capacity = chosen.size // (num_micro_steps * 8)
    dropped = sum(np.sum(~copies_with_a_place(group, 4, MOE.num_experts, capacity)) for group in shared)
    assert dropped > 0
    exchange = ExpertExchange(kind="tokens", buffer=1.0)
    case = GradientCase(mesh_of(fsdp=2, expert=4), num_micro_steps, ONE_ROUTER, exchange=exchange)
    np.testing.assert_array_equal(case(False)[1].overflow, [dropped])


@pytest.mark.slow
def test_travelling_experts_send_what_the_formula_says_and_are_never_gathered():
    exchange = ExpertExchange(kind="weights")
    case = GradientCase(mesh_of(fsdp=2, expert=4), 1, ONE_ROUTER, exchange=exchange)
    program = parse_program(case.hlo)
    cost = count_program(program, dict(case.mesh.shape))
    sent = {use.kind: use for use in cost.collectives if use.axis == "expert"}
    work = ExchangeWork(
        num_tokens=64,
        num_chosen=2,
        num_experts=MOE.num_experts,
        num_devices=4,
        model_size=32,
        expert_size=16,
        compute_bytes=4,
        gather_bytes=4,
        reduce_bytes=4,
    )
    assert sent["collective-permute"].num_bytes == work.weight_bytes(exchange)
    assert "all-to-all" not in sent
    assert largest_gather(program) < 12 * 32 * 16  # a matrix of every expert
