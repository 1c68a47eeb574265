"""A model split over a mesh by the compiler equals the model on one device."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from model import Axes, MtpConfig, ParamSpec, param_specs

from . import samples

CONFIG = dataclasses.replace(
    samples.BASE,
    num_layers=2,
    layer_group_size=2,
    kda=samples.KDA,
    moe=samples.MOE,
    mtp=MtpConfig(num_layers=1),
)
RULES = (("B", "data"), ("E", "expert"), ("H", "tensor"), ("F", "tensor"))


@pytest.mark.slow
def test_values_and_gradients_do_not_depend_on_the_mesh(x64):
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    activations = Axes(mesh=mesh, rules=RULES)
    parameters = Axes(mesh=mesh, rules=(*RULES[1:], ("D", "data")))
    model = samples.make(CONFIG, dtype="float64")
    tokens = samples.random_tokens((4, 10))
    segment_ids, positions = samples.packed([[4, 6], [10], [3, 3], [1, 8]], 10)

    def run(model, rows, axes):
        def objective(model):
            tokens, segment_ids, positions = rows
            out = model(tokens, segment_ids=segment_ids, positions=positions, axes=axes)
            return jnp.sum(jnp.sin(out.hidden)) + jnp.sum(jnp.sin(out.mtp_hidden)), out.router.counts

        return eqx.filter_jit(jax.value_and_grad(objective, has_aux=True))(model)

    rows = (tokens, segment_ids, positions)
    (value, counts), grad = run(model, rows, None)
    specs = param_specs(model)
    split = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, parameters.spec(spec.axes))),
        model,
        specs,
        is_leaf=lambda x: isinstance(x, ParamSpec),
    )
    split_rows = jax.device_put(rows, NamedSharding(mesh, activations.spec("B")))
    (split_value, split_counts), split_grad = run(split, split_rows, activations)
    np.testing.assert_allclose(split_value, value, rtol=1e-12)
    np.testing.assert_array_equal(split_counts, counts)
    for a, b in zip(jax.tree.leaves(split_grad), jax.tree.leaves(grad), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)
