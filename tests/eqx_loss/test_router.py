"""Router terms: z-loss, load balance, expert-bias rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_loss
from tests.oracles import channels


def test_z_term_of_bfloat16_logits_is_the_float32_square_of_the_log_partition():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 4, (2, 3, 8)), jnp.bfloat16)
    found = eqx_loss.router_z_term(logits)
    exact = np.asarray(logits.astype(jnp.float32), np.float64)
    top = exact.max(-1, keepdims=True)
    expected = (top[..., 0] + np.log(np.exp(exact - top).sum(-1))) ** 2
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=2e-6)  # float32, 8 terms


def test_load_balance_equals_the_looped_oracle_and_its_counts_carry_no_gradient(x64):
    rng = np.random.default_rng(1)
    raw = rng.random((1, 7, 4))
    scores = raw / raw.sum(-1, keepdims=True)
    selected = np.argsort(-raw, axis=-1)[..., :2]
    positions = np.array([[True] * 5 + [False] * 2])
    counts = eqx_loss.expert_counts(jnp.asarray(selected), jnp.asarray(positions), 4)

    def value(s, c):
        sums = jnp.sum(s * jnp.asarray(positions)[..., None], axis=1)
        return eqx_loss.load_balance(sums, c, jnp.array([5.0]))[0]

    found, (by_scores, by_counts) = jax.value_and_grad(value, argnums=(0, 1))(
        jnp.asarray(scores), counts.astype(float)
    )
    np.testing.assert_allclose(found, channels.load_balance_value(scores, selected, positions), rtol=1e-13)
    assert not by_counts.any()
    assert not by_scores[0, 5:].any()
    assert by_scores[0, :5].any()


def test_even_load_has_balance_one():
    sums, counts = jnp.full((1, 4), 2.0), jnp.full((1, 4), 4)
    assert eqx_loss.load_balance(sums, counts, jnp.array([8.0])).tolist() == [1.0]


def test_unit_without_positions_is_zero_with_zero_gradient():
    value, gradient = jax.value_and_grad(
        lambda s: eqx_loss.load_balance(s, jnp.zeros((1, 4)), jnp.zeros(1))[0]
    )(jnp.zeros((1, 4)))
    assert value == 0
    assert not gradient.any()


def test_bias_rises_for_idle_experts_by_the_rate_and_stays_for_average_ones():
    bias = eqx_loss.updated_router_bias(jnp.zeros((1, 3)), jnp.array([[10, 4, 7]]), rate=0.001)
    np.testing.assert_allclose(bias, [[-0.001, 0.001, 0.0]], rtol=1e-7)


def test_bias_sign_is_taken_of_the_summed_counts():
    first, second = jnp.array([[9, 0, 0]]), jnp.array([[0, 2, 1]])
    whole = eqx_loss.updated_router_bias(jnp.zeros((1, 3)), first + second, rate=1.0)
    assert whole.tolist() == [[-1.0, 1.0, 1.0]]
    step_by_step = eqx_loss.updated_router_bias(
        eqx_loss.updated_router_bias(jnp.zeros((1, 3)), first, rate=1.0), second, rate=1.0
    )
    assert step_by_step.tolist() != whole.tolist()


def test_zero_mean_bias_is_centred_over_experts_of_each_layer():
    bias = eqx_loss.updated_router_bias(
        jnp.array([[0.5, 0.1, 0.0], [0.0, 0.0, 0.0]]),
        jnp.array([[1, 2, 9], [9, 9, 0]]),
        rate=0.01,
        zero_mean=True,
    )
    np.testing.assert_allclose(bias.mean(axis=1), [0, 0], atol=1e-7)  # float32 sum of values up to 0.5
    np.testing.assert_allclose(bias[0] - bias[0, 0], [0.0, -0.4, -0.52], atol=1e-6)


def test_negative_rate_is_refused():
    with pytest.raises(ValueError, match="rate must be >= 0, got -0.1"):
        eqx_loss.updated_router_bias(jnp.zeros((1, 3)), jnp.ones((1, 3)), rate=-0.1)


def test_counts_leave_out_masked_positions():
    selected = jnp.array([[[0, 1], [1, 2], [2, 3]]])
    counts = eqx_loss.expert_counts(selected, jnp.array([[True, True, False]]), 5)
    assert counts.tolist() == [[1, 2, 1, 0, 0]]
