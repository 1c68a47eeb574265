"""AdamW, labels, decay rules, clipping and skipped steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import ParamSpec
from train._optimizer import (
    DecayRule,
    Optimizer,
    OptimizerConfig,
    clip_scale,
    global_norm,
    matrix_layout,
)
from train._schedule import ScheduleConfig
from train._state import abstract_model, make_optimizer

from .step_cases import tiny_config

SCHEDULE = ScheduleConfig(peak=1e-2)
SPECS = {
    "w": ParamSpec(axes="D F", role="matrix", rows="D", columns="F"),
    "norm": ParamSpec(axes="D", role="norm"),
    "router_bias": ParamSpec(axes="E", role="router_bias"),
}
RTOL = 1e-5  # float32


def params():
    rng = np.random.default_rng(0)
    return {
        "norm": jnp.asarray(rng.normal(size=4), jnp.float32),
        "router_bias": jnp.asarray(rng.normal(size=3), jnp.float32),
        "w": jnp.asarray(rng.normal(size=(4, 5)), jnp.float32),
    }


def optimizer(**fields):
    return Optimizer(OptimizerConfig(schedule=SCHEDULE, **fields), SPECS)


def test_adamw_equals_its_formula_over_three_steps():
    opt = optimizer(max_grad_norm=None)
    tree = params()
    state = opt.init(tree)
    w = np.asarray(tree["w"], np.float64)
    mean = square = np.zeros_like(w)
    for count in range(1, 4):
        grads = jax.tree.map(lambda p, n=count: jnp.cos(n * p), tree)
        g = np.asarray(grads["w"], np.float64)
        mean, square = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g * g
        step = mean / (1 - 0.9**count) / (np.sqrt(square / (1 - 0.95**count)) + 1e-8)
        w = w - 1e-2 * (step + 0.1 * w)
        result = opt.step(grads, state, tree, jnp.asarray(1e-2))
        tree, state = result.params, result.state
        np.testing.assert_allclose(tree["w"], w, rtol=RTOL)


def test_router_bias_is_out_of_the_norm_and_never_moves():
    opt = optimizer(max_grad_norm=None)
    tree = params()
    grads = {**jax.tree.map(jnp.zeros_like, tree), "router_bias": jnp.full(3, 7.0)}
    result = opt.step(grads, opt.init(tree), tree, jnp.asarray(1.0))
    assert result.raw_grad_norm == 0
    np.testing.assert_array_equal(result.params["router_bias"], tree["router_bias"])


def test_clipping_scales_to_the_limit_and_reports_both_norms():
    opt = optimizer(max_grad_norm=1.0)
    tree = params()
    grads = {**jax.tree.map(jnp.zeros_like, tree), "w": jnp.full((4, 5), 2.0)}
    result = opt.step(grads, opt.init(tree), tree, jnp.asarray(0.0))
    np.testing.assert_allclose(result.raw_grad_norm, 2 * np.sqrt(20), rtol=1e-6)
    np.testing.assert_allclose(result.grad_norm, 1.0, rtol=1e-6)
    np.testing.assert_allclose(result.state.adamw.mu["w"], 0.1 * 2 / (2 * np.sqrt(20)), rtol=1e-5)


def test_norm_of_bfloat16_gradients_is_summed_in_float32():
    grads = [jnp.full(10001, 0.41, jnp.bfloat16)]
    want = np.sqrt(10001) * float(jnp.bfloat16(0.41))
    np.testing.assert_allclose(global_norm(grads), want, rtol=1e-5)


def test_no_gradient_has_norm_zero_and_is_not_clipped():
    assert global_norm([]) == 0
    assert clip_scale(jnp.zeros(()), 1.0) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_gradient_changes_nothing_and_is_flagged(bad):
    opt = optimizer(name="muon")
    tree = params()
    state = opt.init(tree)
    grads = {**jax.tree.map(jnp.ones_like, tree), "w": jnp.full((4, 5), bad)}
    result = opt.step(grads, state, tree, jnp.asarray(1e-2))
    assert result.is_skipped
    for new, old in zip(jax.tree.leaves((result.params, result.state)), jax.tree.leaves((tree, state))):
        np.testing.assert_array_equal(new, old)


def test_first_matching_decay_rule_decides_before_the_role():
    opt = optimizer(decay_rules=(DecayRule("n*", 0.5), DecayRule("*", 0.0)))
    assert opt.decay("norm") == 0.05
    assert opt.decay("w") == 0.0
    assert opt.decay("router_bias") == 0.0


def test_norms_decay_only_when_asked():
    assert optimizer().decay("norm") == 0.0
    assert optimizer(decay_norms=True).decay("norm") == 0.1


def test_muon_takes_declared_matrices_and_nothing_else():
    config = tiny_config()
    opt = make_optimizer(OptimizerConfig(schedule=SCHEDULE, name="muon"), config)
    labels = {path: label for path, label, *_ in opt.table(abstract_model(config))}
    adamw = {path for path, label in labels.items() if label == "adamw"}
    frozen = {path for path, label in labels.items() if label == "frozen"}
    assert {"embed", "head", "final_norm"} <= adamw
    assert all(path.split(".")[-1].endswith("norm") for path in adamw - {"embed", "head"})
    assert frozen == {path for path in labels if path.endswith("router_bias")}
    assert labels["layers.1.ffn.experts.gate"] == "muon"
    assert labels["layers.1.mixer.out"] == "muon"


def test_layouts_follow_the_declared_rows_and_columns():
    spec = ParamSpec(axes="L H U D", role="matrix", rows="H U", columns="D")
    layout = matrix_layout(spec)
    assert (layout.batch, layout.fan_in, layout.fan_out) == ((0,), (1, 2), (3,))
    with pytest.raises(ValueError, match="no matrices"):
        matrix_layout(SPECS["norm"])


def test_parameters_without_metadata_are_refused():
    with pytest.raises(ValueError, match=r"without metadata \['extra'\]"):
        optimizer().init({**params(), "extra": jnp.zeros(2)})


@pytest.mark.parametrize(
    "fields",
    [
        {"b1": 1.0},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"max_grad_norm": 0.0},
        {"router_bias_update_rate": -1.0},
        {"qk_clip_threshold": 0.0},
    ],
)
def test_impossible_options_are_refused(fields):
    with pytest.raises(ValueError, match="must"):
        OptimizerConfig(schedule=SCHEDULE, **fields)
