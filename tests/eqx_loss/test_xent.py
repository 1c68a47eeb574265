"""Plain cross-entropy: values, gradients, masked rows, options, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import eqx_loss
from tests.oracles import weights as oracle

ROWS, LENGTH, VOCAB = 2, 5, 7
BF16_RTOL = 2e-6  # bfloat16 logits are exact inputs; the arithmetic is float32


def _case(seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (ROWS, LENGTH, VOCAB)).astype(dtype)
    targets = rng.integers(0, VOCAB, (ROWS, LENGTH))
    mask = rng.random((ROWS, LENGTH)) < 0.7
    mask[0, 0], mask[1, 1] = True, False
    return logits, targets, mask


def test_values_equal_the_float64_oracle(x64):
    logits, targets, mask = _case()
    expected = oracle.softmax_xent(logits, targets, mask)
    found = eqx_loss.cross_entropy(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(mask))
    np.testing.assert_allclose(found.xent, expected[0], rtol=1e-12)
    np.testing.assert_allclose(found.z_term, expected[1], rtol=1e-12)


def test_bfloat16_logits_give_float32_losses():
    logits, targets, mask = _case()
    rounded = jnp.asarray(logits, jnp.bfloat16)
    found = eqx_loss.cross_entropy(rounded, jnp.asarray(targets), jnp.asarray(mask))
    assert found.xent.dtype == jnp.float32
    expected, _ = oracle.softmax_xent(np.asarray(rounded.astype(jnp.float32)), targets, mask)
    np.testing.assert_allclose(found.xent, expected, rtol=BF16_RTOL)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logit_soft_cap": 3.0},
        {"label_smoothing": 0.1},
        {"vocab_size": 5},
        {"vocab_size": 5, "logit_soft_cap": 2.0, "label_smoothing": 0.2},
    ],
)
def test_gradients_equal_finite_differences(x64, options):
    logits, targets, mask = _case()
    targets = targets % 5

    def f(x):
        losses = eqx_loss.cross_entropy(jnp.asarray(x), jnp.asarray(targets), jnp.asarray(mask), **options)
        return jnp.sum(jnp.sin(losses.xent)) + 0.1 * jnp.sum(losses.z_term)

    check_grads(f, (jnp.asarray(logits),), order=1, modes=["rev"], rtol=1e-6)


def test_nan_and_inf_at_masked_rows_reach_neither_value_nor_gradient():
    logits, targets, mask = _case(dtype=np.float32)
    poisoned = logits.copy()
    poisoned[~mask] = np.resize([np.nan, np.inf, -np.inf], poisoned[~mask].shape)
    targets = np.where(mask, targets, -100)

    def f(x):
        losses = eqx_loss.cross_entropy(x, jnp.asarray(targets), jnp.asarray(mask))
        return jnp.sum(losses.xent) + jnp.sum(losses.z_term)

    value, gradient = jax.value_and_grad(f)(jnp.asarray(poisoned))
    expected_value, expected_gradient = jax.value_and_grad(f)(jnp.asarray(logits))
    assert value == expected_value
    assert jnp.array_equal(gradient, jnp.where(mask[..., None], expected_gradient, 0))


def test_scored_target_out_of_range_gives_nan():
    logits, _, _ = _case()
    for target in (-1, VOCAB, -100):
        found = eqx_loss.cross_entropy(
            jnp.asarray(logits, jnp.float32),
            jnp.full((ROWS, LENGTH), target),
            jnp.ones((ROWS, LENGTH), bool),
        )
        assert jnp.isnan(found.xent).all()


def test_padded_vocabulary_takes_no_part(x64):
    logits, targets, mask = _case()
    targets = targets % 5
    padded = logits.copy()
    padded[..., 5:] = 50.0

    def f(x, size):
        losses = eqx_loss.cross_entropy(
            x, jnp.asarray(targets), jnp.asarray(mask), vocab_size=size, label_smoothing=0.1
        )
        return jnp.sum(losses.xent)

    value, gradient = jax.value_and_grad(f)(jnp.asarray(padded), 5)
    expected, expected_gradient = jax.value_and_grad(f)(jnp.asarray(logits[..., :5]), None)
    np.testing.assert_allclose(value, expected, rtol=1e-13)
    np.testing.assert_allclose(gradient[..., :5], expected_gradient, rtol=1e-12)
    assert not gradient[..., 5:].any()


def test_label_smoothing_mixes_the_uniform_distribution(x64):
    logits, targets, mask = _case()
    smoothing = 0.3
    found = eqx_loss.cross_entropy(
        jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(mask), label_smoothing=smoothing
    )
    every = [oracle.softmax_xent(logits, np.full_like(targets, v), mask)[0] for v in range(VOCAB)]
    expected = (1 - smoothing) * oracle.softmax_xent(logits, targets, mask)[0] + smoothing * np.mean(
        every, axis=0
    )
    np.testing.assert_allclose(found.xent, expected, rtol=1e-12)


def test_z_multiplier_zero_gives_no_value_and_no_gradient():
    logits, targets, mask = _case(dtype=np.float32)

    def z_objective(x, multiplier):
        losses = eqx_loss.cross_entropy(x, jnp.asarray(targets), jnp.asarray(mask))
        weights = eqx_loss.token_weights(jnp.asarray(mask), eqx_loss.Granularity.TOKEN)
        return eqx_loss.head_loss(losses, weights, z_loss_multiplier=multiplier).z_objective

    value, gradient = jax.value_and_grad(z_objective)(jnp.asarray(logits), 0.0)
    assert value == 0
    assert not gradient.any()
    assert z_objective(jnp.asarray(logits), 0.1) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 8}, r"vocab_size must be in \[1, 7\]"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap must be positive"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\)"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    logits, targets, mask = _case(dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        eqx_loss.cross_entropy(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(mask), **options)
