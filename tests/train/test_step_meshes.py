"""The gradient and the logs of a batch do not depend on the mesh, nor on the number of micro-steps."""

import jax
import numpy as np
import pytest

from train._state import init_state, make_optimizer
from train._step import StepConfig

from .step_cases import OPTIMIZER, GradientCase, mesh_of, relative_rms, tiny_config, tiny_model

# float32: sums of about 500 tokens and 32 products in another order; measured 2e-6.
RTOL = 2e-5

CASES = {
    "fsdp 2": ({"fsdp": 2}, 1, StepConfig()),
    "data 2, 2 micro-steps": ({"data": 2}, 2, StepConfig()),
    "data 4 x fsdp 2, 2 micro-steps": ({"data": 4, "fsdp": 2}, 2, StepConfig()),
    "data 2 x fsdp 4, reduced every micro-step": (
        {"data": 2, "fsdp": 4},
        2,
        StepConfig(reduce_gradients="micro_step"),
    ),
    "4 micro-steps": ({}, 4, StepConfig()),
}


@pytest.fixture(scope="module")
def reference():
    return GradientCase(mesh_of())


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request):
    sizes, num_micro_steps, config = CASES[request.param]
    return GradientCase(mesh_of(**sizes), num_micro_steps, config=config)


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
    sharded = state.model.groups[0].mixer.out
    assert sharded.addressable_shards[0].data.size * 4 == sharded.size
