"""Initial values: their laws, and what the parameter specs say about them."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import Axes, ParamSpec, init_model, param_specs
from model._delta import init_kda
from model._linear import init_normal

from . import samples


@pytest.fixture(scope="module")
def kda():
    config = dataclasses.replace(samples.KDA, num_heads=64, head_dim=64)
    return eqx.filter_jit(init_kda)(config, 32, 0.02, 1e-6, key=jax.random.key(0))


def test_weights_are_normal_with_the_given_deviation():
    x = init_normal((400, 500), 0.02, key=jax.random.key(1))
    assert x.dtype == jnp.float32
    assert float(x.mean()) == pytest.approx(0, abs=5 * 0.02 / np.sqrt(x.size))
    assert float(x.std()) == pytest.approx(0.02, rel=5 / np.sqrt(2 * x.size))
    assert float(jnp.mean(x**4)) == pytest.approx(3 * 0.02**4, rel=0.05)


def test_decay_rates_are_uniform_between_1_and_16(kda):
    rates = np.exp(np.asarray(kda.A_log))
    assert rates.min() >= 1
    assert rates.max() <= 16
    assert rates.mean() == pytest.approx(8.5, abs=5 * 15 / np.sqrt(12 * rates.size))


def test_decay_steps_are_log_uniform_between_a_thousandth_and_a_tenth(kda):
    step = np.log1p(np.exp(np.asarray(kda.dt_bias, np.float64)))  # softplus
    assert step.min() >= 1e-3 * (1 - 1e-4)
    assert step.max() <= 1e-1 * (1 + 1e-4)
    log = np.log(step)
    assert log.mean() == pytest.approx((np.log(1e-3) + np.log(1e-1)) / 2, abs=0.12)
    assert log.std() == pytest.approx(np.log(100) / np.sqrt(12), rel=0.05)


def test_convolution_taps_have_variance_one_over_width(kda):
    assert float(kda.q_conv.std()) == pytest.approx(0.5, rel=0.05)


@pytest.fixture(scope="module")
def shapes():
    """Dense, two groups of (full, 2 linear), 2 full."""
    types = ("linear", *2 * ("full", "linear", "linear"), "full", "full")
    config = dataclasses.replace(samples.LING3, num_layers=9, layer_types=types)
    return eqx.filter_eval_shape(lambda key: init_model(config, key=key), jax.random.key(0))


def _by_path(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, ParamSpec))
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def test_every_array_has_a_spec_of_its_rank_and_float32(shapes):
    specs, arrays = _by_path(param_specs(shapes)), _by_path(shapes)
    assert specs.keys() == arrays.keys()
    for path, spec in specs.items():
        assert len(spec.axes.split()) == arrays[path].ndim, path
        assert arrays[path].dtype == jnp.float32, path


def test_rows_and_columns_of_a_matrix_are_among_its_axes(shapes):
    for path, spec in _by_path(param_specs(shapes)).items():
        sides = [*spec.rows.split(), *spec.columns.split()]
        assert (spec.role == "matrix") == bool(sides), path
        assert set(sides) <= set(spec.axes.split()), path


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        (".embed", ParamSpec(axes="V D", role="embedding")),
        (".head", ParamSpec(axes="D V", role="head")),
        (".layers[1].mixer.query.nope", ParamSpec(axes="L D H K", role="matrix", rows="D", columns="H K")),
        (".layers[2].ffn.experts.down", ParamSpec(axes="L E F D", role="matrix", rows="F", columns="D")),
        (".layers[2].mixer.q", ParamSpec(axes="L D H K", role="matrix", rows="D", columns="K")),
        (".mtp[0].block.ffn.router.router_bias", ParamSpec(axes="E", role="router_bias")),
        (".layers[0].mixer.A_log", ParamSpec(axes="H", role="decay")),
    ],
)
def test_specs_of_some_parameters(shapes, path, spec):
    assert _by_path(param_specs(shapes))[path] == spec


def test_undeclared_parameters_are_refused():
    class Undeclared(eqx.Module):
        weight: jax.Array

    with pytest.raises(ValueError, match="declares no role"):
        param_specs(Undeclared(jnp.zeros(3)))


def test_axes_map_letters_to_mesh_axes():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    axes = Axes(mesh=mesh, rules=(("B", ("fsdp",)), ("H", "tensor")))
    assert axes.spec("B S H K") == jax.sharding.PartitionSpec(("fsdp",), None, "tensor", None)
    assert axes.platform == "cpu"
