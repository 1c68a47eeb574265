"""Lightning attention against a NumPy oracle and its own step-by-step form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import lightning_chunked, lightning_recurrent, lightning_slopes
from tests.model.test_kda import draw as draw_kda
from tests.model.test_kda import packed_ids, probes, rel, run, value_and_grads
from tests.oracles import kda as oracle

RTOL64 = 1e-12  # float64, sums of at most 1e3 terms
NAMES = ("q", "k", "v", "slope", "initial_state")


def draw(seed, length, dtype=np.float64):
    arrays = draw_kda(seed, length, dtype=dtype)
    return {**{n: arrays[n] for n in ("q", "k", "v", "initial_state")}, "slope": np.array([0.5, 0.01], dtype)}


@pytest.mark.parametrize("function", [lightning_recurrent, lightning_chunked])
@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 200, 1000])
def test_equals_the_oracle_at_every_length(x64, function, length):
    arrays = draw(length, length)
    o, state = run(function, arrays)
    expected_o, expected_state = oracle.lightning(**arrays)
    assert rel(o, expected_o) < RTOL64
    assert rel(state, expected_state) < RTOL64


@pytest.mark.parametrize("function", [lightning_recurrent, lightning_chunked])
def test_packed_rows_equal_the_oracle(x64, function):
    ids, arrays = packed_ids(), draw(5, 200)
    o, state = run(function, arrays, jnp.asarray(ids))
    expected_o, expected_state = oracle.lightning(**arrays, segment_ids=ids)
    assert rel(o, expected_o) < RTOL64
    assert rel(state, expected_state) < RTOL64
    assert np.all(np.asarray(o)[ids == 0] == 0)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_equal_those_of_the_recurrence(x64, packed):
    ids, arrays = jnp.asarray(packed_ids()) if packed else None, draw(5, 200)
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)
    _, ours = value_and_grads(lightning_chunked, arrays, probe, ids)
    _, plain = value_and_grads(lightning_recurrent, arrays, probe, ids)
    assert {name: rel(ours[name], plain[name]) < 1e-11 for name in NAMES} == dict.fromkeys(NAMES, True)


def test_gradient_of_the_recurrence_is_a_finite_difference_of_the_oracle(x64):
    arrays = draw(3, 9)
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)
    _, grads = value_and_grads(lightning_recurrent, arrays, probe)

    def objective(arrays):
        o, state = oracle.lightning(**arrays)
        return np.sum(o * probe[0]) + np.sum(state * probe[1])

    rng = np.random.default_rng(0)
    for name in NAMES:
        direction = rng.normal(size=arrays[name].shape)
        up, down = ({**arrays, name: arrays[name] + s * 1e-6 * direction} for s in (1, -1))
        slope = (objective(up) - objective(down)) / 2e-6
        np.testing.assert_allclose(np.sum(grads[name] * direction), slope, rtol=1e-6)


def test_strong_decay_neither_overflows_nor_loses_digits():
    arrays = draw(6, 200, np.float32)
    arrays["slope"] = np.array([90.0, 1e-4], np.float32)
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)
    (o, state), grads = value_and_grads(lightning_chunked, arrays, probe)
    expected_o, expected_state = oracle.lightning(**arrays)
    assert rel(o, expected_o) < 3e-6  # float32
    assert rel(state, expected_state) < 3e-6
    assert all(np.all(np.isfinite(x)) for x in grads.values())


def test_no_gradient_reaches_later_positions_or_other_documents():
    ids, arrays = packed_ids(), draw(5, 200, np.float32)
    probe_o = np.zeros(arrays["v"].shape)
    probe_o[:, 150] = 1  # row 0: document 3 from 105; row 1: document 5 from 64
    probe = (probe_o, np.zeros(arrays["initial_state"].shape))
    _, grads = value_and_grads(lightning_chunked, arrays, probe, jnp.asarray(ids))
    for name in ("q", "k", "v"):
        grad = np.asarray(grads[name])
        assert np.all(grad[:, 151:] == 0)
        assert np.all(grad[0, :105] == 0)
        assert np.all(grad[1, :64] == 0)
        assert np.any(grad[0, 105:151] != 0)


def test_padding_has_zero_gradient():
    ids, arrays = packed_ids(), draw(5, 200, np.float32)
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)
    _, grads = value_and_grads(lightning_chunked, arrays, probe, jnp.asarray(ids))
    assert all(np.all(np.asarray(grads[name])[ids == 0] == 0) for name in ("q", "k", "v"))


def test_a_row_can_be_cut_anywhere_and_continued(x64):
    arrays = draw(14, 100)
    whole, end = run(lightning_chunked, arrays)
    rows = ("q", "k", "v")
    o_left, state = run(lightning_chunked, {n: x[:, :37] if n in rows else x for n, x in arrays.items()})
    right = {n: x[:, 37:] if n in rows else x for n, x in arrays.items()}
    o_right, state = run(lightning_recurrent, {**right, "initial_state": state})
    assert rel(np.concatenate([o_left, o_right], axis=1), whole) < RTOL64
    assert rel(state, end) < RTOL64


def test_slopes_are_alibi_slopes_scaled_by_layer():
    np.testing.assert_allclose(
        lightning_slopes(8, layer=1, num_layers=20), 2.0 ** -np.arange(1, 9) * (1 + 1e-5), rtol=1e-6
    )
    # the first layer is number 0 and forgets more than one ALiBi slope
    np.testing.assert_allclose(
        lightning_slopes(2, layer=0, num_layers=20), [2**-4 * 20 / 19, 2**-8 * 20 / 19], rtol=2e-5
    )
    six = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    np.testing.assert_allclose(lightning_slopes(6, layer=20, num_layers=20), np.array(six) * 1e-5, rtol=1e-6)


def test_chunk_size_must_be_a_power_of_two():
    arrays = jax.tree.map(jnp.asarray, draw(1, 5, np.float32))
    with pytest.raises(ValueError, match="chunk_size must be a power of two, got 3"):
        functools.partial(lightning_chunked, chunk_size=3)(**arrays)
