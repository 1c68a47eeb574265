"""Groups with different numbers of alike layers: values and gradients are those of the layers one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model._layer_plan import LayerPlan, plan_stack
from model._stack import in_layer_order, run_layers
from model._uneven import _forward_saving

RTOL = 1e-12  # float64; the same operations in another program
KINDS = {"k": LayerPlan(mixer="linear", ffn="moe"), "m": LayerPlan(mixer="full", ffn="moe"),
         "K": LayerPlan(mixer="linear", ffn="dense")}  # fmt: skip
POLICIES = {
    "none": lambda layer: layer,
    "dots": lambda layer: jax.checkpoint(
        layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "block": jax.checkpoint,
}
SHIFT = jnp.arange(4)


def _layer(x, shift, own):
    """Differs from layer to layer by a weight, a bias and an integer; says a float and an integer."""
    x = jnp.tanh(x @ own["weight"] + own["bias"] * shift) + x * own["number"]
    return x, (jnp.sum(x**2, axis=1), jnp.sum(x > 0))


def _inputs(num_layers):
    keys = jax.random.split(jax.random.key(0), num_layers)
    return [
        {
            "weight": jax.random.normal(key, (4, 4)),
            "bias": jax.random.normal(key, 4),
            "number": jnp.asarray(i % 3),
        }
        for i, key in enumerate(keys)
    ]


def _stacked(plan, each):
    return [
        each[own.layers[0]]
        if len(own.layers) == 1
        else jax.tree.map(lambda *x: jnp.stack(x), *(each[i] for i in own.layers))
        for own in plan.alike
    ]


@pytest.mark.parametrize(
    ("layers", "policy"),
    [("Kkkmkkkm", "none"), ("Kkkmkkkm", "dots"), ("Kkkmkkkmkkkm", "block"), ("kmKmkkK", "block")],
)
def test_values_and_gradients_equal_those_of_the_layers_one_by_one(layers, policy, x64):
    plan = plan_stack([KINDS[letter] for letter in layers])
    each = _inputs(len(layers))
    x = jax.random.normal(jax.random.key(1), (3, 4))
    wrapped = POLICIES[policy](_layer)

    def split(each):
        numbers = [own["number"] for own in each]
        return [{k: v for k, v in own.items() if k != "number"} for own in each], numbers

    floats, numbers = split(each)

    def joined(floats):
        return [{**own, "number": number} for own, number in zip(floats, numbers)]

    def loss(x, sums):
        return jnp.sum(x**3) + jnp.sum(sums * jnp.arange(1.0, sums.size + 1).reshape(sums.shape))

    def one_by_one(x, floats):
        sums, counts = [], []
        for own in joined(floats):
            x, (total, count) = _layer(x, SHIFT, own)
            sums.append(total)
            counts.append(count)
        return loss(x, jnp.stack(sums)), jnp.stack(counts)

    def in_stacks(x, floats):
        x, outputs = run_layers(wrapped, x, SHIFT, _stacked(plan, joined(floats)), plan)
        sums, counts = (in_layer_order([output[i] for output in outputs], plan) for i in range(2))
        return loss(x, sums), counts

    for want, got in zip(
        jax.tree.leaves(jax.value_and_grad(one_by_one, (0, 1), has_aux=True)(x, floats)),
        jax.tree.leaves(jax.jit(jax.value_and_grad(in_stacks, (0, 1), has_aux=True))(x, floats)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=RTOL, atol=RTOL * np.abs(want).max())


def test_a_rematerialized_layer_keeps_its_input_and_no_weight():
    x = jnp.zeros((3, 4))
    own = jax.tree.map(lambda a: jnp.stack([a] * 3), _inputs(1)[0])
    _, (_, _, saved) = jax.eval_shape(
        lambda x, own: _forward_saving(jax.checkpoint(_layer), ((1,), (2,)), x, SHIFT, (own,)), x, own
    )
    assert [a.shape for a in jax.tree.leaves(saved)] == [(3, 3, 4)]


def test_floats_that_all_layers_share_are_refused():
    plan = plan_stack([KINDS[letter] for letter in "kmkkm"])
    with pytest.raises(ValueError, match="has no gradient"):
        run_layers(_layer, jnp.zeros((3, 4)), jnp.ones(4), _stacked(plan, _inputs(5)), plan)
