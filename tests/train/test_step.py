"""The whole step: one update on a mesh is that of one device; bias, skips and counters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train._muon import MuonConfig
from train._optimizer import OptimizerConfig
from train._router_bias import router_biases
from train._schedule import ScheduleConfig
from train._state import TrainState, make_optimizer, state_shardings
from train._step import StepConfig, check_rows, make_train_step

from .step_cases import (
    COMPILER_OPTIONS,
    SEMANTICS,
    mesh_of,
    packed_batch,
    relative_rms,
    tiny_config,
    tiny_model,
)

CONFIG = OptimizerConfig(
    schedule=ScheduleConfig(peak=1e-2, warmup_steps=4),
    name="muon",
    muon=MuonConfig(),
    shard_state_over_data=True,
    router_bias_zero_mean=True,
)
# float32: measured 1.7e-5 with jax 0.10 and 0.12 (five quintic iterations on a gradient good to 2e-6).
UPDATE_RTOL = 5e-5


class StepCase:
    """A compiled step on a mesh, and the state before it."""

    def __init__(self, mesh, num_micro_steps):
        config = tiny_config()
        optimizer = make_optimizer(CONFIG, config)
        shardings = state_shardings(config, optimizer, mesh)
        model = tiny_model(config)
        zero = jnp.zeros((), jnp.int32)
        state = TrainState(model=model, optimizer=optimizer.init(model), step=zero, num_skipped=zero)
        self.state = jax.device_put(state, shardings)
        self.shardings = shardings
        step = make_train_step(
            config, SEMANTICS, optimizer, mesh, gradient_accumulation_steps=num_micro_steps
        )
        program = jax.jit(step).lower(packed_batch(), self.state)
        self.step = program.compile(compiler_options=COMPILER_OPTIONS)


@pytest.fixture(scope="module")
def one():
    return StepCase(mesh_of(), 1)


@pytest.fixture(scope="module")
def advanced(one):
    return one.step(packed_batch(), one.state)


@pytest.mark.slow
def test_one_update_on_a_mesh_is_that_of_one_device(one, advanced):
    state, output = advanced
    case = StepCase(mesh_of(data=2, fsdp=4), 2)
    new, got = case.step(packed_batch(), case.state)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), new.model, case.state.model)
    want = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.model, one.state.model)
    assert relative_rms(moved, want) < UPDATE_RTOL
    np.testing.assert_allclose(got.raw_grad_norm, output.raw_grad_norm, rtol=1e-5)
    for leaf, sharding in zip(jax.tree.leaves(new), jax.tree.leaves(case.shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_counters_and_rate_follow_the_steps_done(advanced):
    state, output = advanced
    assert (int(state.step), int(state.num_skipped), int(output.step)) == (1, 0, 1)
    np.testing.assert_allclose(output.learning_rate, 1e-2 / 4, rtol=1e-6)


def test_router_biases_of_all_layers_and_depths_move_by_the_sign_of_the_load(one, advanced):
    state, output = advanced
    counts = np.asarray(output.router_counts, np.float64)
    want = 1e-3 * np.sign(counts.mean(axis=1, keepdims=True) - counts)
    want -= want.mean(axis=1, keepdims=True)
    grouped, mtp = (np.asarray(x) for x in router_biases(state.model))
    np.testing.assert_allclose(np.concatenate([grouped, mtp[None]]), want, atol=1e-9)
    assert counts.sum(axis=1).tolist() == [16 * 32 * 2] * 3


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_counters(one):
    bad = dataclasses.replace(
        one.state, model=dataclasses.replace(one.state.model, final_norm=jnp.full(32, jnp.nan))
    )
    state, output = one.step(packed_batch(), bad)
    assert output.is_skipped
    assert (int(state.step), int(state.num_skipped)) == (1, 1)
    old, new = (jax.tree.leaves((s.model, s.optimizer)) for s in (bad, state))
    for a, b in zip(old, new, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_batch_without_a_scored_token_is_finite_and_trains_nothing_but_the_router(one):
    batch = packed_batch()
    empty = dataclasses.replace(batch, loss_mask=jnp.zeros_like(batch.loss_mask))
    _, output = one.step(empty, one.state)
    assert not output.is_skipped
    assert float(output.objective.lm) == 0
    assert float(output.objective.mtp) == 0
    assert float(output.logs.lm.value()) == 0


def test_objective_terms_add_up(advanced):
    objective = advanced[1].objective
    parts = sum(float(x) for name, x in objective._asdict().items() if name != "total")
    np.testing.assert_allclose(objective.total, parts, rtol=1e-6)


def test_rows_that_do_not_divide_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="12 rows do not divide into gradient_accumulation_steps=2"):
        check_rows(12, SEMANTICS, mesh_of(data=4), 2)


def test_a_micro_batch_over_two_devices_is_refused_for_the_load_balance():
    semantics = dataclasses.replace(SEMANTICS, micro_batch_size=2)
    with pytest.raises(ValueError, match="micro_batch_size=2 rows"):
        check_rows(8, semantics, mesh_of(data=8), 1)


def test_qk_clip_without_recorded_logits_is_refused():
    optimizer = make_optimizer(dataclasses.replace(CONFIG, qk_clip_threshold=100.0), tiny_config())
    with pytest.raises(ValueError, match="record_max_logits"):
        make_train_step(tiny_config(), SEMANTICS, optimizer, mesh_of(), config=StepConfig())
