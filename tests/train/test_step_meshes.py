"""The gradient and the logs of a batch do not depend on the mesh, nor on the number of micro-steps."""

import jax
import numpy as np
import pytest

from model import ExpertExchange, KdaConfig, MtpConfig
from train._state import init_state, make_optimizer
from train._step import StepConfig

from .step_cases import OPTIMIZER, SEMANTICS, GradientCase, mesh_of, relative_rms, tiny_config, tiny_model

# float32: sums of about 500 tokens and 32 products in another order; measured 2e-6.
RTOL = 2e-5
WEIGHTS = ExpertExchange(kind="weights")

CASES = {
    "data 4 x fsdp 2, 2 micro-steps": ({"data": 4, "fsdp": 2}, 2, StepConfig()),
    "data 2 x fsdp 4, reduced every micro-step": (
        {"data": 2, "fsdp": 4},
        2,
        StepConfig(reduce_gradients="micro_step"),
    ),
    "4 micro-steps": ({}, 4, StepConfig()),
    "fsdp 2 x expert 4": ({"fsdp": 2, "expert": 4}, 1, StepConfig()),
    "data 2 x expert 2 x context 2, 2 micro-steps": (
        {"data": 2, "expert": 2, "context": 2},
        2,
        StepConfig(),
    ),
}
SLOW_CASES = {
    "fsdp 2 x expert 4, experts travel": ({"fsdp": 2, "expert": 4}, 1, StepConfig(), WEIGHTS),
    "data 2 x expert 2 x context 2, 2 micro-steps, experts travel": (
        {"data": 2, "expert": 2, "context": 2},
        2,
        StepConfig(),
        WEIGHTS,
    ),
    "fsdp 8, 2 micro-steps": ({"fsdp": 8}, 2, StepConfig()),
    "fsdp 2 x expert 4, 2 micro-steps": ({"fsdp": 2, "expert": 4}, 2, StepConfig()),
    "fsdp 2 x tensor 2 x context 2": ({"fsdp": 2, "tensor": 2, "context": 2}, 1, StepConfig()),
    "fsdp 2 x tensor 2 x context 2, 2 micro-steps": (
        {"fsdp": 2, "tensor": 2, "context": 2},
        2,
        StepConfig(),
    ),
    "data 2 x expert 2 x context 2": ({"data": 2, "expert": 2, "context": 2}, 1, StepConfig()),
}


@pytest.fixture(scope="module")
def reference():
    return GradientCase(mesh_of())


@pytest.fixture(
    scope="module",
    params=[*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES)],
    ids=str,
)
def case(request):
    sizes, num_micro_steps, config, *exchange = {**CASES, **SLOW_CASES}[request.param]
    return GradientCase(mesh_of(**sizes), num_micro_steps, None, SEMANTICS, config, *exchange)


@pytest.mark.parametrize("per_token", [False, True], ids=["per sample", "per token"])
def test_gradient_and_logs_do_not_depend_on_mesh_or_micro_steps(reference, case, per_token):
    want_grads, want = reference(per_token)
    grads, got = case(per_token)
    assert relative_rms(grads, want_grads) < RTOL
    assert relative_rms(got.output, want.output) < RTOL
    np.testing.assert_array_equal(got.counts, want.counts)


def test_initial_parameters_do_not_depend_on_the_mesh():
    config, mesh = tiny_config(), mesh_of(data=2, fsdp=4)
    state = init_state(config, make_optimizer(OPTIMIZER, config), mesh, key=jax.random.key(1))
    assert relative_rms(state.model, tiny_model(config)) < 1e-6  # a rounding of the normal quantile
    sharded = state.model.layers[1].mixer.out
    assert sharded.addressable_shards[0].data.size * 4 == sharded.size


@pytest.mark.slow
def test_linear_attention_and_two_mtp_depths_do_not_see_the_borders_of_context_shards():
    config = tiny_config(
        num_layers=2,
        layer_group_size=2,
        kda=KdaConfig(num_heads=4, head_dim=8),
        mtp=MtpConfig(num_layers=2),
        record_max_logits=True,
    )
    want_grads, want = GradientCase(mesh_of(), model_config=config)(False)
    grads, got = GradientCase(mesh_of(context=4), 2, model_config=config)(False)
    # A recurrence of 32 steps in another order of sums; measured 8e-6.
    assert relative_rms(grads, want_grads) < 5e-5
    assert relative_rms(got.output, want.output) < RTOL
    np.testing.assert_allclose(got.max_logits, want.max_logits, rtol=1e-5)
    np.testing.assert_array_equal(got.counts, want.counts)
