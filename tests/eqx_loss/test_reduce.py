"""Sums with counts: pooling, the empty case, values outside the mask."""

import jax
import jax.numpy as jnp
import pytest

import eqx_loss


def test_adding_pools_sums_and_counts_and_divides_once():
    parts = [eqx_loss.SumCount(jnp.array(s), jnp.array(n)) for s, n in [(9.0, 3.0), (1.0, 1.0), (20.0, 4.0)]]
    assert float((parts[0] + parts[1] + parts[2]).value()) == 3.75
    assert float((parts[2] + (parts[1] + parts[0])).value()) == 3.75


def test_empty_is_zero_with_zero_gradient():
    value, gradient = jax.value_and_grad(lambda s: eqx_loss.SumCount(s, jnp.zeros(())).value())(
        jnp.array(3.0)
    )
    assert value == 0
    assert gradient == 0


def test_zero_sum_count_is_neutral():
    pair = eqx_loss.SumCount(jnp.array([2.0, 0.0]), jnp.array([4.0, 0.0]))
    total = eqx_loss.zero_sum_count((2,)) + pair
    assert total.value().tolist() == [0.5, 0.0]


def test_ratio_of_a_fractional_count_is_exact():
    assert float(eqx_loss.guarded_ratio(jnp.array(0.5), jnp.array(0.25))) == 2.0


def test_sum_count_ignores_what_stands_outside_the_mask():
    pair = eqx_loss.sum_count(jnp.array([1.0, jnp.nan, jnp.inf]), jnp.array([True, False, False]))
    assert (float(pair.sum), float(pair.count)) == (1.0, 1.0)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_count_of_many_tokens_of_a_narrow_type_is_exact_in_float32(dtype):
    values = jnp.ones((4096,), dtype)
    pair = eqx_loss.sum_count(values.astype(jnp.float32), jnp.ones((4096,), bool))
    assert float(pair.count) == 4096
