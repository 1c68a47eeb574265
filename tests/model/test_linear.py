"""Products with weights: slopes equal those of the plain einsum, on both forms of the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import _linear

# What the layers use: flat, into heads, out of heads.
SHAPES = {
    "bsd,df->bsf": ((2, 5, 3), (3, 4)),
    "bsd,dhk->bshk": ((2, 5, 3), (3, 2, 4)),
    "bshk,hkd->bsd": ((2, 5, 2, 4), (2, 4, 3)),
}


@pytest.mark.parametrize("equation", SHAPES)
@pytest.mark.parametrize("form", [_linear._slopes_on_cpu, _linear._slopes])
def test_slopes_equal_loops(x64, equation, form):
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=shape) for shape in SHAPES[equation])
    slope = rng.normal(size=np.einsum(equation, x, weight).shape)
    operands, result = equation.split("->")
    left, right = operands.split(",")
    expected = (
        np.einsum(f"{result},{right}->{left}", slope, weight),
        np.einsum(f"{left},{result}->{right}", x, slope),
    )
    # float64, sums of at most 10 terms: a few roundings of 1.1e-16, with room.
    for got, want in zip(form(equation, *map(jnp.asarray, (x, weight, slope))), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-14)


def test_gradients_of_weights_are_plain_products_on_a_cpu():
    """With plain einsums XLA contracts the rows of one operand with the columns of the other, on its slow path."""

    def products(project):
        def loss(weights, x):
            up, down = weights
            hidden = jax.nn.silu(project("bsd,df->bsf", x, up))
            return jnp.sum(jnp.sin(project("bsf,fd->bsd", hidden, down)))

        shapes = ((64, 128), (128, 64)), (2, 128, 64)
        weights, x = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            shapes,
            is_leaf=lambda node: isinstance(node[0], int),
        )
        text = jax.jit(jax.grad(loss, (0, 1))).lower(weights, x).compile().as_text()
        return text.count(" dot("), text.count("lhs_contracting_dims={0}, rhs_contracting_dims={1}")

    assert products(jnp.einsum) == (6, 2)
    assert products(_linear.project) == (6, 0)


def test_products_are_kept_under_remat_dots(x64):
    """The policy sees the product through its custom derivative: two products and their slopes, none formed again."""

    def loss(weights, x):
        def layer(x, weights):
            first, second = weights
            hidden = jnp.tanh(_linear.project("bsd,df->bsf", x, first))
            return _linear.project("bsf,fd->bsd", hidden, second)

        saved = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        return jnp.sum(jnp.sin(saved(x, weights)))

    x, weights = jnp.ones((2, 3, 4)), (jnp.ones((4, 5)), jnp.ones((5, 4)))
    text = jax.jit(jax.grad(loss, (0, 1))).lower(weights, x).as_text()
    assert text.count("stablehlo.dot_general") == 6
