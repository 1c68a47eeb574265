"""Further terms, per-domain logs, bits per byte, perplexity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_loss
from eqx_loss import Granularity


def _log_softmax(x):
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


def test_distillation_kl_equals_the_float64_formula_and_leaves_the_teacher_alone(x64):
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(0, 2, (2, 2, 3, 5))
    mask = np.array([[True, True, False], [True, False, False]])
    student[~mask] = np.nan
    log_p, log_q = _log_softmax(teacher / 2.0), _log_softmax(student / 2.0)
    expected = np.where(mask, 4.0 * (np.exp(log_p) * (log_p - log_q)).sum(-1), 0)

    def total(s, t):
        return jnp.sum(eqx_loss.distillation_kl(s, t, jnp.asarray(mask), temperature=2.0))

    found = eqx_loss.distillation_kl(
        jnp.asarray(student), jnp.asarray(teacher), jnp.asarray(mask), temperature=2.0
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    by_student, by_teacher = jax.grad(total, argnums=(0, 1))(jnp.asarray(student), jnp.asarray(teacher))
    exact = np.where(mask[..., None], 2.0 * (np.exp(log_q) - np.exp(log_p)), 0)
    np.testing.assert_allclose(by_student, exact, rtol=1e-10, atol=1e-14)
    assert not by_teacher.any()


def test_indexer_kl_sees_visible_keys_only_and_is_finite_for_a_query_without_keys(x64):
    attention = jnp.array([[[3.0, 1.0, 7.0], [1.0, 1.0, 1.0]]])
    scores = jnp.array([[[0.5, -1.0, jnp.nan], [jnp.inf, 0.0, 0.0]]])
    visible = jnp.array([[[True, True, False], [False, False, False]]])
    mask = jnp.ones((1, 2), bool)

    def total(s):
        return jnp.sum(eqx_loss.indexer_kl(attention, s, mask, visible))

    p, q = np.array([0.75, 0.25]), np.exp(_log_softmax(np.array([0.5, -1.0])))
    value, gradient = jax.value_and_grad(total)(scores)
    np.testing.assert_allclose(value, (p * np.log(p / q)).sum(), rtol=1e-13)
    np.testing.assert_allclose(gradient[0, 0, :2], q - p, rtol=1e-12)
    assert not gradient[0, 0, 2].any()
    assert not gradient[0, 1].any()


def test_extra_term_divides_by_its_own_global_count_in_every_cut(x64):
    values = jnp.array([[2.0, 4.0, jnp.nan], [jnp.nan, jnp.nan, jnp.nan], [9.0, 1.0, 3.0]])
    mask = jnp.array([[True, True, False], [False, False, False], [True, False, False]])
    weights = eqx_loss.token_weights(mask, Granularity.TOKEN)

    def term(rows):
        return eqx_loss.ExtraTerm(values[rows], mask[rows], weights[rows], 0.1, "extra")

    whole = term(slice(0, 3)).objective()
    parts = sum(term(slice(i, i + 1)).objective() for i in range(3))
    np.testing.assert_allclose(whole, 0.1 * 15 / 3, rtol=1e-14)
    np.testing.assert_allclose(parts, whole, rtol=1e-14)
    assert float(term(slice(0, 3)).log().value()) == 5.0


def test_extra_term_of_coefficient_zero_is_logged_and_not_trained():
    def objective(values):
        mask = jnp.ones((1, 2), bool)
        return eqx_loss.ExtraTerm(values, mask, jnp.full((1, 2), 0.5), 0.0, "probe").objective()

    value, gradient = jax.value_and_grad(objective)(jnp.array([[1.0, 2.0]]))
    assert value == 0
    assert not gradient.any()


def test_negative_coefficient_is_refused_by_name():
    with pytest.raises(ValueError, match="coefficient of term 'kl' must be finite and >= 0, got -1"):
        eqx_loss.ExtraTerm(jnp.ones((1, 1)), jnp.ones((1, 1), bool), jnp.ones((1, 1)), -1.0, "kl")


def test_domain_sums_and_counts_pool_to_the_token_mean(x64):
    xent = jnp.array([[2.0, 3.0, 1.0, 4.0], [2.5, 1.5, 5.0, jnp.nan]])
    mask = jnp.array([[True] * 4, [True, True, True, False]])
    domains = jnp.array([[0, 0, 0, 1], [1, 2, 2, 2]])
    found = eqx_loss.by_domain(xent, mask, domains, 4)
    assert found.count.tolist() == [3, 2, 2, 0]
    assert found.value().tolist() == [2.0, 3.25, 3.25, 0.0]
    pooled = eqx_loss.sum_count(xent, mask)
    assert float(found.sum.sum() / found.count.sum()) == float(pooled.value())
    by_row = eqx_loss.by_domain(xent, mask, jnp.array([1, 0]), 2)
    assert by_row.value().tolist() == [3.0, 2.5]


def test_importance_weights_divide_by_the_plain_count(x64):
    scale = eqx_loss.domain_scale(
        jnp.array([[0, 1, 2]]), jnp.array([0.4, 0.4, 0.2]), jnp.array([0.5, 0.3, 0.0])
    )
    np.testing.assert_allclose(scale, [[0.8, 4 / 3, 0.0]], rtol=1e-14)
    weights = eqx_loss.token_weights(
        jnp.ones((1, 3), bool), Granularity.TOKEN, token_scale=scale, scale_denominator="count"
    )
    np.testing.assert_allclose(weights, [[0.4, 2 / 3, 0.0]], rtol=1e-14)


def test_bits_per_byte_and_perplexity_come_from_cross_entropy_sums(x64):
    xent = eqx_loss.SumCount(jnp.array(8 * np.log(2.0)), jnp.array(4.0))
    np.testing.assert_allclose(eqx_loss.bits_per_byte(xent, jnp.array(16)), 0.5, rtol=1e-14)
    np.testing.assert_allclose(eqx_loss.perplexity(xent), 4.0, rtol=1e-14)
    empty = eqx_loss.zero_sum_count()
    assert float(eqx_loss.bits_per_byte(empty, jnp.array(0))) == 0
    assert float(eqx_loss.perplexity(empty)) == 1


def test_interval_logs_pool_sums_and_counts():
    steps = [eqx_loss.SumCount(jnp.array(3.0 * n), jnp.array(float(n))) for n in (16, 12, 0)]
    total = eqx_loss.zero_logs(steps[0])
    for step in steps:
        total = eqx_loss.add_logs(total, step)
    assert float(total.count) == 28
    assert float(total.value()) == 3.0
