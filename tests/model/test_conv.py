"""The causal convolution against a NumPy oracle, across documents, and continued."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from model._conv import causal_conv1d, causal_conv1d_after, last_inputs, silu_conv1d
from tests.oracles import kda as oracle


def draw(seed, length, width, channels=3):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(2, length, channels))), jnp.asarray(
        rng.normal(size=(channels, width))
    )


def packed_ids():
    ids = np.zeros((2, 20), np.int32)
    for row, start, stop, name in [(0, 2, 3, 7), (0, 3, 9, 1), (0, 11, 20, 2), (1, 0, 5, 3), (1, 8, 15, 3)]:
        ids[row, start:stop] = name
    return ids


@pytest.mark.parametrize(
    ("width", "length"),
    [(w, n) for w in (1, 2, 7) for n in (1, 5, 20)] + [(4, n) for n in (1, 7, 63, 64, 65, 200, 1000)],
)
def test_equals_the_oracle_for_any_width_and_length(x64, width, length):
    x, weight = draw(width, length, width)
    np.testing.assert_allclose(causal_conv1d(x, weight), oracle.conv(x, weight), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("width", [1, 4])
def test_taps_stop_at_documents_and_padding(x64, width):
    x, weight = draw(3, 20, width)
    ids = packed_ids()
    y = np.asarray(causal_conv1d(x, weight, jnp.asarray(ids)))
    np.testing.assert_allclose(y, oracle.conv(x, weight, ids), rtol=1e-13, atol=1e-14)
    assert np.all(y[ids == 0] == 0)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_finite_differences(x64, packed):
    x, weight = draw(4, 20, 4)
    ids = jnp.asarray(packed_ids()) if packed else None
    check_grads(
        lambda x, w: causal_conv1d(jnp.asarray(x), jnp.asarray(w), ids),
        (x, weight),
        order=1,
        modes=["rev"],
        rtol=1e-7,
        atol=1e-7,
    )


def test_no_gradient_reaches_later_positions_other_documents_or_padding():
    x, weight = (a.astype(jnp.float32) for a in draw(5, 20, 4))
    ids = packed_ids()
    grad = np.asarray(jax.grad(lambda x: jnp.sum(causal_conv1d(x, weight, jnp.asarray(ids))[:, 4]))(x))
    assert np.all(grad[:, 5:] == 0)
    assert np.all(grad[0, :3] == 0)  # position 4 is in the document that starts at 3
    assert np.all(grad[0, 3:5] != 0)
    full = np.asarray(jax.grad(lambda x: jnp.sum(causal_conv1d(x, weight, jnp.asarray(ids))))(x))
    assert np.all(full[ids == 0] == 0)


def test_padding_may_hold_nan():
    x, weight = (np.asarray(a, np.float32) for a in draw(6, 20, 4))
    ids = packed_ids()
    dirty = np.where(ids[..., None] == 0, np.nan, x)

    def both(x):
        return jax.value_and_grad(lambda x, w: jnp.sum(causal_conv1d(x, w, jnp.asarray(ids)) ** 2), (0, 1))(
            jnp.asarray(x), jnp.asarray(weight)
        )

    for ours, clean in zip(jax.tree.leaves(both(dirty)), jax.tree.leaves(both(x)), strict=True):
        np.testing.assert_array_equal(ours, clean)


def test_bfloat16_rows_are_summed_in_float32():
    x, weight = draw(7, 20, 4)
    narrow = x.astype(jnp.bfloat16)
    y = causal_conv1d(narrow, weight.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    expected = oracle.conv(np.asarray(narrow, np.float64), weight)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=1e-6)  # one rounding


@pytest.mark.parametrize("cut", [1, 2, 9])
def test_rows_can_be_cut_and_continued(x64, cut):
    x, weight = draw(8, 20, 4)
    past = jnp.zeros((2, 3, 3))
    left = causal_conv1d_after(x[:, :cut], weight, past)
    past = last_inputs(x[:, :cut], past)
    right = causal_conv1d_after(x[:, cut:], weight, past)
    np.testing.assert_allclose(jnp.concatenate([left, right], axis=1), causal_conv1d(x, weight), rtol=1e-14)


def test_last_inputs_skip_padding_on_the_right_and_stop_at_the_document(x64):
    x, _ = draw(9, 6, 4)
    past = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 3)))
    ids = jnp.asarray([[1, 1, 2, 2, 0, 0], [4, 0, 0, 0, 0, 0]])
    tail = np.asarray(last_inputs(x, past, ids))
    np.testing.assert_array_equal(tail[0], np.stack([np.zeros(3), x[0, 2], x[0, 3]]))
    np.testing.assert_array_equal(tail[1], np.stack([past[1, 1], past[1, 2], x[1, 0]]))
    np.testing.assert_array_equal(last_inputs(x, past, jnp.zeros((2, 6), int)), past)


def test_past_of_the_wrong_length_is_refused():
    x, weight = (a.astype(jnp.float32) for a in draw(10, 4, 4))
    with pytest.raises(ValueError, match="past must hold W-1=3 positions, got 2"):
        causal_conv1d_after(x, weight, jnp.zeros((2, 2, 3)))


def test_ids_without_the_ids_of_the_past_are_refused():
    x, weight = (a.astype(jnp.float32) for a in draw(10, 4, 4))
    with pytest.raises(ValueError, match="segment_ids and past_ids must be given together"):
        causal_conv1d_after(x, weight, jnp.zeros((2, 3, 3)), jnp.ones((2, 4), int))


def test_convolution_and_silu_equal_the_oracle_and_have_its_gradient(x64):
    x, weight = draw(4, 20, 4)
    ids = jnp.asarray(packed_ids())
    plain = oracle.conv(x, weight)
    # float64: four products and a sigmoid, a few roundings of 2e-16; near zero the absolute term.
    np.testing.assert_allclose(silu_conv1d(x, weight), plain / (1 + np.exp(-plain)), rtol=1e-13, atol=1e-14)

    def run(x, weight):
        return silu_conv1d(jnp.asarray(x), jnp.asarray(weight), ids)

    check_grads(run, (x, weight), order=1, modes=("rev",))
