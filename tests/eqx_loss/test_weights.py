"""Token weights against explicit loops, and the properties every normalization must have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_loss
from eqx_loss import Granularity
from tests.oracles import weights as oracle

ROWS, LENGTH = 4, 6
RTOL = 1e-12  # float64, at most 24 terms
GRANULARITIES = list(Granularity)


def _batch(seed: int):
    """Uneven rows, an all-padding row now and then, documents of length 1 to 4."""
    rng = np.random.default_rng(seed)
    mask = rng.random((ROWS, LENGTH)) < rng.choice([0.2, 0.6, 1.0], size=(ROWS, 1))
    if seed % 3 == 0:
        mask[rng.integers(ROWS)] = False
    segment_ids = np.cumsum(rng.random((ROWS, LENGTH)) < 0.4, axis=1) + 1
    if seed % 2:
        segment_ids[:, -1] = 0
    mask &= segment_ids != 0
    return rng, mask, segment_ids, rng.uniform(0.1, 9.0, (ROWS, LENGTH))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("count_empty", [True, False])
@pytest.mark.parametrize("scale_denominator", [None, "sum", "count"])
def test_weights_are_the_derivative_of_the_looped_objective(x64, granularity, count_empty, scale_denominator):
    for seed in range(6):
        rng, mask, segment_ids, _ = _batch(seed)
        scale = None
        if scale_denominator:
            scale = rng.choice([0.0, 0.25, 0.5, 1.0, 3.0], size=mask.shape)
        expected = oracle.weights(
            mask if scale is None else mask & (scale != 0),
            granularity.value,
            micro_batch_size=2,
            segment_ids=segment_ids,
            count_empty=count_empty,
            scale=scale,
            by=scale_denominator or "sum",
        )
        found = eqx_loss.token_weights(
            jnp.asarray(mask),
            granularity,
            micro_batch_size=2,
            segment_ids=jnp.asarray(segment_ids),
            count_empty=count_empty,
            token_scale=None if scale is None else jnp.asarray(scale),
            scale_denominator=scale_denominator or "sum",
        )
        np.testing.assert_allclose(found, expected, rtol=RTOL, atol=1e-15)


def test_per_sample_mean_by_hand_with_uneven_counts_and_an_all_padding_row(x64):
    xent = jnp.array([[1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 9.0, 9.0], [7.0, 7.0, 7.0, 7.0], [6.0, 9.0, 9.0, 9.0]])
    mask = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], bool)
    # (10/4 + 6/2 + 0 + 6) / 4: the empty row contributes 0 and counts.
    assert float(eqx_loss.granular_mean(xent, mask, Granularity.SAMPLE)) == pytest.approx(11.5 / 4, rel=1e-15)
    assert float(eqx_loss.granular_mean(xent, mask, Granularity.SAMPLE, count_empty=False)) == pytest.approx(
        11.5 / 3, rel=1e-15
    )
    assert float(eqx_loss.granular_mean(xent, mask, Granularity.TOKEN)) == pytest.approx(22 / 7, rel=1e-15)


def test_per_sample_is_below_per_token_when_long_rows_have_higher_loss(x64):
    mask = jnp.arange(8) < jnp.array([[8], [6], [3], [1]])
    xent = jnp.broadcast_to(jnp.array([[4.0], [3.0], [2.0], [1.0]]), mask.shape)
    assert eqx_loss.granular_mean(xent, mask, Granularity.SAMPLE) < eqx_loss.granular_mean(
        xent, mask, Granularity.TOKEN
    )


@pytest.mark.parametrize("seed", range(8))
def test_estimator_gap_is_minus_the_covariance_over_the_mean_count(x64, seed):
    _, mask, _, xent = _batch(seed)
    counts = mask.sum(1).astype(float)
    if counts.sum() == 0:
        mask[0, 0], counts[0] = True, 1.0
    means = np.where(counts > 0, (xent * mask).sum(1) / np.maximum(counts, 1), 0.0)
    covariance = np.mean(counts * means) - np.mean(counts) * np.mean(means)
    sample, token = (
        float(eqx_loss.granular_mean(jnp.asarray(xent), jnp.asarray(mask), g))
        for g in (Granularity.SAMPLE, Granularity.TOKEN)
    )
    np.testing.assert_allclose(sample - token, -covariance / counts.mean(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_per_token_mean_is_bit_equal_to_the_plain_formula(dtype):
    rng = np.random.default_rng(0)
    mask = jnp.asarray(rng.random((8, 512)) < 0.7)
    xent = jnp.asarray(rng.gamma(2.0, 2.0, (8, 512)), dtype)

    def plain(values):
        kept = jnp.where(mask, values, 0)
        return jnp.sum(kept) / jnp.maximum(jnp.sum(mask, dtype=values.dtype), 1)

    def ours(values):
        return eqx_loss.granular_mean(values, mask, Granularity.TOKEN)

    for f, g in ((plain, ours), (jax.grad(plain), jax.grad(ours))):
        assert jnp.array_equal(f(xent), g(xent))


def test_per_token_weights_are_bit_equal_to_one_over_the_count():
    mask = jnp.asarray(np.random.default_rng(1).random((8, 512)) < 0.7)
    count = jnp.sum(mask, dtype=jnp.float32)
    assert jnp.array_equal(eqx_loss.token_weights(mask, Granularity.TOKEN), jnp.where(mask, 1 / count, 0))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("count_empty", [True, False])
def test_nothing_scored_weighs_nothing(granularity, count_empty):
    weights = eqx_loss.token_weights(
        jnp.zeros((ROWS, LENGTH), bool),
        granularity,
        micro_batch_size=2,
        segment_ids=jnp.zeros((ROWS, LENGTH), int),
        count_empty=count_empty,
    )
    assert not weights.any()
    assert jnp.isfinite(weights).all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_values_at_masked_positions_reach_neither_value_nor_gradient(granularity):
    _, mask, segment_ids, xent = _batch(1)
    poisoned = jnp.where(jnp.asarray(mask), jnp.asarray(xent, jnp.float32), jnp.nan)

    def f(values):
        return eqx_loss.granular_mean(
            values, jnp.asarray(mask), granularity, micro_batch_size=2, segment_ids=jnp.asarray(segment_ids)
        )

    value, gradient = jax.value_and_grad(f)(poisoned)
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()
    assert (gradient != 0).sum() == mask.sum()


@given(seed=st.integers(0, 2**16), granularity=st.sampled_from(GRANULARITIES))
@settings(deadline=None, max_examples=40)
def test_appended_padding_changes_nothing(seed, granularity):
    _, mask, segment_ids, _ = _batch(seed)
    wide = np.pad(mask, ((0, 0), (0, 3))), np.pad(segment_ids, ((0, 0), (0, 3)))

    def weights(m, ids):
        return np.asarray(
            eqx_loss.token_weights(
                jnp.asarray(m), granularity, micro_batch_size=2, segment_ids=jnp.asarray(ids)
            )
        )

    found = weights(*wide)
    assert np.array_equal(found[:, :LENGTH], weights(mask, segment_ids))
    assert not found[:, LENGTH:].any()


@given(seed=st.integers(0, 2**16), granularity=st.sampled_from([Granularity.TOKEN, Granularity.SAMPLE]))
@settings(deadline=None, max_examples=30)
def test_permuted_rows_have_permuted_weights(seed, granularity):
    rng, mask, _, _ = _batch(seed)
    order = rng.permutation(ROWS)
    weights = np.asarray(eqx_loss.token_weights(jnp.asarray(mask), granularity))
    permuted = np.asarray(eqx_loss.token_weights(jnp.asarray(mask[order]), granularity))
    assert np.array_equal(permuted, weights[order])


def test_micro_batch_size_must_divide_the_rows():
    with pytest.raises(ValueError, match=r"divide the 4 rows .* got 3"):
        eqx_loss.token_weights(jnp.ones((4, 2), bool), Granularity.MICRO_BATCH, micro_batch_size=3)


def test_document_weights_need_segment_ids():
    with pytest.raises(ValueError, match="needs segment_ids, got None"):
        eqx_loss.token_weights(jnp.ones((4, 2), bool), Granularity.DOCUMENT)


def test_no_gradient_flows_through_token_scale():
    mask = jnp.ones((2, 3), bool)
    gradient = jax.grad(
        lambda scale: eqx_loss.token_weights(mask, Granularity.TOKEN, token_scale=scale)[0, 0]
    )(jnp.full((2, 3), 0.5))
    assert not gradient.any()
