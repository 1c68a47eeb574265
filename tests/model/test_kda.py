"""Kimi Delta Attention against golden numbers, a NumPy oracle and its own step-by-step form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import TypeCheckError

from model import DecayGate, kda_chunked, kda_gated_chunked, kda_recurrent, l2_normalize
from model._kda_chunk import invert_unit_lower
from tests.oracles import kda as oracle

SMALL = functools.partial(kda_chunked, chunk_size=16)  # compiles in a third of the time
RTOL32 = 3e-6  # float32, norms of at most 1e3 terms; measured below 1e-6
RTOL64 = 1e-12  # float64, the same
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def draw(seed, length, *, batch=2, heads=2, key_size=8, value_size=6, dtype=np.float64, gate="mixed"):
    """Normalized queries and keys, values, log-decays, write strengths, initial state."""
    rng = np.random.default_rng(seed)
    shape = (batch, length, heads, key_size)
    q, k = rng.normal(size=shape), rng.normal(size=shape)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -np.exp(rng.normal(size=shape) * 2 - 2)
    if gate == "hard":  # no decay at all next to decays that end everything
        g = rng.choice([0.0, -1e-3, -5.0, -60.0], size=shape, p=[0.5, 0.2, 0.1, 0.2])
    return {
        "q": q.astype(dtype),
        "k": k.astype(dtype),
        "v": rng.normal(size=(batch, length, heads, value_size)).astype(dtype),
        "g": g.astype(dtype),
        "beta": rng.uniform(size=shape[:3]).astype(dtype),
        "initial_state": rng.normal(size=(batch, heads, key_size, value_size)).astype(dtype),
    }


def packed_ids():
    """Two rows of 200: several documents in a chunk, one of one token, padding before, between and after them."""
    ids = np.zeros((2, 200), np.int32)
    for row, start, stop, name in [(0, 3, 10, 4), (0, 10, 11, 2), (0, 11, 100, 9), (0, 105, 190, 3)]:
        ids[row, start:stop] = name
    for start, stop, name in [(0, 64, 1), (64, 130, 5), (140, 200, 5)]:  # padding inside document 5
        ids[1, start:stop] = name
    return ids


def rel(a, b):
    """rms(a - b) / rms(b)."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.sqrt(np.mean((a - b) ** 2)) / np.sqrt(np.mean(b**2))


def probes(output_shape, state_shape):
    rng = np.random.default_rng(7)
    return rng.normal(size=output_shape), rng.normal(size=state_shape)


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(function, arrays, probe, segment_ids=None):
    """(output, state), gradients of a random projection of both."""

    def objective(arrays):
        o, state = function(**arrays, segment_ids=segment_ids)
        return jnp.sum(o * probe[0]) + jnp.sum(state * probe[1]), (o, state)

    grads, results = jax.grad(objective, has_aux=True)(arrays)
    return results, grads


@functools.partial(jax.jit, static_argnums=0)
def run(function, arrays, segment_ids=None):
    return function(**arrays, segment_ids=segment_ids)


@pytest.mark.parametrize("function", [kda_recurrent, kda_chunked])
@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 200, 1000])
def test_equals_the_oracle_at_every_length(x64, function, length):
    arrays = draw(length, length)
    o, state = run(function, arrays)
    expected_o, expected_state = oracle.kda(**arrays)
    assert rel(o, expected_o) < RTOL64
    assert rel(state, expected_state) < RTOL64


@pytest.mark.parametrize("length", [1, 65, 200])
def test_gradients_equal_those_of_the_recurrence(x64, length):
    arrays = draw(length, length)
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)
    _, ours = value_and_grads(kda_chunked, arrays, probe)
    _, plain = value_and_grads(kda_recurrent, arrays, probe)
    assert {name: rel(ours[name], plain[name]) < 1e-11 for name in NAMES} == dict.fromkeys(NAMES, True)


def test_gradient_of_the_recurrence_is_a_finite_difference_of_the_oracle(x64):
    arrays = draw(3, 9, batch=1, heads=1, key_size=3, value_size=2)
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)
    _, grads = value_and_grads(kda_recurrent, arrays, probe)

    def objective(arrays):
        o, state = oracle.kda(**arrays)
        return np.sum(o * probe[0]) + np.sum(state * probe[1])

    rng = np.random.default_rng(0)
    for name in NAMES:
        direction = rng.normal(size=arrays[name].shape)
        up, down = ({**arrays, name: arrays[name] + s * 1e-6 * direction} for s in (1, -1))
        slope = (objective(up) - objective(down)) / 2e-6
        np.testing.assert_allclose(np.sum(grads[name] * direction), slope, rtol=1e-7)


@pytest.mark.parametrize("function", [kda_recurrent, kda_chunked])
def test_packed_rows_equal_the_oracle(x64, function):
    ids, arrays = packed_ids(), draw(5, 200)
    o, state = run(function, arrays, jnp.asarray(ids))
    expected_o, expected_state = oracle.kda(**arrays, segment_ids=ids)
    assert rel(o, expected_o) < RTOL64
    assert rel(state, expected_state) < RTOL64
    assert np.all(np.asarray(o)[ids == 0] == 0)


def test_packed_gradients_equal_those_of_the_recurrence(x64):
    ids, arrays = jnp.asarray(packed_ids()), draw(5, 200)
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)
    _, ours = value_and_grads(kda_chunked, arrays, probe, ids)
    _, plain = value_and_grads(kda_recurrent, arrays, probe, ids)
    assert {name: rel(ours[name], plain[name]) < 1e-11 for name in NAMES} == dict.fromkeys(NAMES, True)


@pytest.mark.slow
def test_a_packed_row_equals_its_documents_alone_with_gradients(x64):
    lengths, total = (40, 70, 40), 150
    arrays = draw(8, total, batch=1)
    del arrays["initial_state"]
    ids = np.zeros((1, total), np.int32)
    probe = probes(arrays["v"].shape, (1, 2, 8, 6))
    start = 0
    for name, length in enumerate(lengths, start=1):
        ids[0, start : start + length] = name
        start += length
    (o, state), grads = value_and_grads(SMALL, arrays, probe, jnp.asarray(ids))
    start = 0
    for name, length in enumerate(lengths, start=1):
        part = slice(start, start + length)
        alone = {key: x[:, part] for key, x in arrays.items()}
        is_last = name == len(lengths)
        (o_alone, state_alone), grads_alone = value_and_grads(
            SMALL, alone, (probe[0][:, part], probe[1] * is_last)
        )
        assert rel(o[:, part], o_alone) < RTOL64
        for key, grad in grads_alone.items():
            assert rel(grads[key][:, part], grad) < 1e-11, key
        start += length
    assert rel(state, state_alone) < RTOL64


@pytest.mark.slow
@pytest.mark.parametrize("function", [kda_recurrent, kda_chunked])
def test_padding_may_hold_anything_and_has_zero_gradient(function):
    ids = packed_ids()
    clean = draw(5, 200, dtype=np.float32)
    dirty = {name: x.copy() for name, x in clean.items()}
    for name in NAMES[:-1]:
        clean[name][ids == 0] = 0
        dirty[name][ids == 0] = np.inf if name == "v" else 7.0
    probe = probes(clean["v"].shape, clean["initial_state"].shape)
    (o, state), grads = value_and_grads(function, dirty, probe, jnp.asarray(ids))
    (o_clean, state_clean), grads_clean = value_and_grads(function, clean, probe, jnp.asarray(ids))
    np.testing.assert_array_equal(o, o_clean)
    np.testing.assert_array_equal(state, state_clean)
    for name in NAMES:
        np.testing.assert_array_equal(grads[name], grads_clean[name])
        if name != "initial_state":
            assert np.all(np.asarray(grads[name])[ids == 0] == 0)


def test_no_gradient_reaches_later_positions_or_other_documents():
    ids, arrays = packed_ids(), draw(5, 200, dtype=np.float32)
    probe_o = np.zeros(arrays["v"].shape)
    probe_o[:, 150] = 1  # row 0: document 3 from 105; row 1: document 5 from 64
    _, grads = value_and_grads(kda_chunked, arrays, (probe_o, np.zeros((2, 2, 8, 6))), jnp.asarray(ids))
    for name in NAMES[:-1]:
        grad = np.asarray(grads[name])
        assert np.all(grad[:, 151:] == 0)
        assert np.all(grad[0, :105] == 0)
        assert np.all(grad[1, :64] == 0)
        assert np.any(grad[0, 105:151] != 0)
        assert np.any(grad[1, 64:151] != 0)
    assert np.all(np.asarray(grads["initial_state"]) == 0)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["hard", "bound", "none"])
def test_float32_is_exact_to_rounding_for_any_gate(gate):
    arrays = draw(11, 200, dtype=np.float32, gate="hard", key_size=16)
    if gate == "bound":
        arrays["g"] = np.full_like(arrays["g"], -5.0)  # a chunk sums to -320
    if gate == "none":
        arrays["g"] = np.zeros_like(arrays["g"])
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)
    (o, state), grads = value_and_grads(kda_chunked, arrays, probe)
    expected_o, expected_state = oracle.kda(**arrays)
    assert rel(o, expected_o) < RTOL32
    assert rel(state, expected_state) < RTOL32
    with jax.enable_x64(True):
        wide = {name: x.astype(np.float64) for name, x in arrays.items()}
        _, expected = value_and_grads(kda_recurrent, wide, probe)
    assert {name: rel(grads[name], expected[name]) < RTOL32 for name in NAMES} == dict.fromkeys(NAMES, True)


def test_a_weak_gate_after_a_strong_one_keeps_its_digits():
    """One position at -3000 in the chunk, then decays of 1e-4: a difference of cumulative sums would be off by 2e-4."""
    arrays = draw(12, 64, dtype=np.float32)
    arrays["g"] = np.full_like(arrays["g"], -1e-4)
    arrays["g"][:, 3] = -3000.0
    o, _ = run(kda_chunked, arrays)
    assert rel(o, oracle.kda(**arrays)[0]) < RTOL32


def test_equal_keys_do_not_amplify_rounding():
    arrays = draw(13, 64, dtype=np.float32)
    arrays["k"][:] = arrays["k"][:, :1]
    arrays["beta"][:] = 1
    arrays["g"][:] = 0
    o, state = run(kda_chunked, arrays)
    expected_o, expected_state = oracle.kda(**arrays)
    assert rel(o, expected_o) < RTOL32
    assert rel(state, expected_state) < RTOL32


@pytest.mark.parametrize("size", [1, 2, 8, 16, 64])
def test_inverse_of_a_unit_lower_triangular_matrix(x64, size):
    a = np.tril(np.random.default_rng(size).normal(size=(2, 3, size, size)), -1) / 2
    expected = np.linalg.inv(np.eye(size) + a)
    assert (
        rel(jax.jit(invert_unit_lower)(a), expected) < 1e-10
    )  # random triangular matrices are ill-conditioned


@pytest.mark.parametrize("function", [kda_recurrent, kda_chunked])
def test_a_row_can_be_cut_anywhere_and_continued(x64, function):
    arrays = draw(14, 100)
    whole, end = run(function, arrays)
    left = {name: x if name == "initial_state" else x[:, :37] for name, x in arrays.items()}
    o_left, state = run(function, left)
    right = {name: state if name == "initial_state" else x[:, 37:] for name, x in arrays.items()}
    o_right, state = run(function, right)
    assert rel(np.concatenate([o_left, o_right], axis=1), whole) < RTOL64
    assert rel(state, end) < RTOL64


@pytest.mark.parametrize("chunk_size", [1, 16, 256])
def test_result_does_not_depend_on_the_chunk_size(x64, chunk_size):
    arrays, ids = draw(5, 200), jnp.asarray(packed_ids())
    function = functools.partial(kda_chunked, chunk_size=chunk_size)
    o, state = jax.jit(lambda a: function(**a, segment_ids=ids))(arrays)
    expected_o, expected_state = run(kda_chunked, arrays, ids)
    assert rel(o, expected_o) < RTOL64
    assert rel(state, expected_state) < RTOL64


@pytest.mark.slow
def test_bfloat16_rows_have_a_float32_state_and_bfloat16_output():
    arrays = draw(15, 65, dtype=np.float32)
    narrow = {n: jnp.asarray(x, jnp.bfloat16) if n in ("q", "k", "v") else x for n, x in arrays.items()}
    o, state = run(kda_chunked, narrow)
    assert o.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32
    expected_o, expected_state = oracle.kda(**{n: np.asarray(x, np.float32) for n, x in narrow.items()})
    assert rel(state, expected_state) < RTOL32
    assert rel(o, expected_o) < 2**-8  # the output alone is rounded
    probe = probes(o.shape, state.shape)
    _, grads = value_and_grads(SMALL, narrow, probe)
    assert {n: grads[n].dtype for n in NAMES} == {n: jnp.asarray(narrow[n]).dtype for n in NAMES}


@pytest.mark.parametrize("length", [0, 70])
def test_rows_without_tokens_keep_the_initial_state(length):
    arrays = draw(16, length, dtype=np.float32)
    o, state = run(SMALL, arrays, jnp.zeros((2, length), jnp.int32))
    assert o.shape == arrays["v"].shape
    assert np.all(np.asarray(o) == 0)
    np.testing.assert_array_equal(state, arrays["initial_state"])


def test_the_backward_pass_keeps_the_state_before_every_step_only():
    # Ten chunks, of which a step takes two: four do not divide them.
    arrays = jax.tree.map(jnp.asarray, draw(17, 640, dtype=np.float32, key_size=32, value_size=32))
    pull = jax.eval_shape(lambda a: jax.vjp(lambda b: kda_chunked(**b), a)[1], arrays)
    kept = [x.shape for x in jax.tree.leaves(pull)]
    inputs = [x.shape for name, x in arrays.items() if name != "initial_state"]
    assert [shape for shape in kept if shape not in inputs and len(shape) > 1] == [(5, 2, 2, 32, 32)]


@pytest.mark.slow
def test_works_under_vmap_remat_and_scan(x64):
    arrays = {name: np.stack([x, x[::-1]]) for name, x in draw(18, 65).items()}
    probe = probes(arrays["v"].shape[1:], arrays["initial_state"].shape[1:])

    def objective(arrays):
        o, state = SMALL(**arrays)
        return jnp.sum(o * probe[0]) + jnp.sum(state * probe[1])

    mapped = jax.jit(jax.vmap(jax.grad(objective)))(arrays)
    rematted = jax.jit(lambda a: jax.lax.map(jax.grad(jax.checkpoint(objective)), a))(arrays)
    scanned = jax.jit(jax.grad(lambda a: jax.lax.scan(lambda c, x: (c + objective(x), None), 0.0, a)[0]))(
        arrays
    )
    for grads in (mapped, rematted, scanned):
        for name in NAMES:
            assert rel(grads[name], mapped[name]) < RTOL64
    one = jax.jit(jax.grad(objective))({name: x[1] for name, x in arrays.items()})
    assert {name: rel(mapped[name][1], one[name]) < RTOL64 for name in NAMES} == dict.fromkeys(NAMES, True)


@pytest.mark.slow
def test_rows_and_heads_can_be_sharded():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arrays = draw(19, 200, heads=4, dtype=np.float32)
    ids = packed_ids()
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)

    def place(name, x):
        spec = ("data", "tensor") if name == "initial_state" else ("data", None, "tensor")
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    placed = {name: place(name, x) for name, x in arrays.items()}
    compiled = value_and_grads.lower(SMALL, placed, probe, jnp.asarray(ids)).compile()
    (o, state), grads = compiled(placed, probe, jnp.asarray(ids))
    (o_plain, state_plain), grads_plain = value_and_grads(SMALL, arrays, probe, jnp.asarray(ids))
    assert rel(o, o_plain) < RTOL32
    assert rel(state, state_plain) < RTOL32
    assert {name: rel(grads[name], grads_plain[name]) < RTOL32 for name in NAMES} == dict.fromkeys(
        NAMES, True
    )


@pytest.mark.slow
@pytest.mark.parametrize(("lower_bound", "packed"), [(-5.0, True), (None, False)])
def test_gated_form_equals_normalization_and_gate_outside(x64, lower_bound, packed):
    arrays = draw(20, 200)
    rng = np.random.default_rng(20)
    arrays |= {"q": rng.normal(size=arrays["q"].shape), "k": rng.normal(size=arrays["k"].shape)}
    arrays |= {
        "f": rng.normal(size=arrays["g"].shape),
        "gate": DecayGate(jnp.asarray(rng.normal(size=2)), jnp.asarray(rng.normal(size=(2, 8))), lower_bound),
    }
    del arrays["g"]
    ids = jnp.asarray(packed_ids()) if packed else None
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)

    def outside(q, k, v, f, beta, gate, segment_ids, initial_state):
        q, k = l2_normalize(q) / np.sqrt(8), l2_normalize(k)
        return kda_recurrent(q, k, v, gate(f), beta, segment_ids=segment_ids, initial_state=initial_state)

    (o, state), grads = value_and_grads(
        functools.partial(kda_gated_chunked, chunk_size=16), arrays, probe, ids
    )
    (o_plain, state_plain), grads_plain = value_and_grads(outside, arrays, probe, ids)
    assert rel(o, o_plain) < RTOL64
    assert rel(state, state_plain) < RTOL64
    for ours, plain in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_plain), strict=True):
        assert rel(ours, plain) < 1e-11


def test_decay_gate_follows_the_reference_formulas(x64):
    a_log, bias, f = (
        np.array([0.3, -1.0]),
        np.arange(6.0).reshape(2, 3) - 2,
        np.linspace(-4, 4, 6).reshape(1, 1, 2, 3),
    )
    rate = np.exp(a_log)[:, None]
    safe = DecayGate(jnp.asarray(a_log), jnp.asarray(bias), -5.0)(jnp.asarray(f))
    np.testing.assert_allclose(safe, -5.0 / (1 + np.exp(-rate * (f + bias))), rtol=1e-14)
    soft = DecayGate(jnp.asarray(a_log), jnp.asarray(bias), None)(jnp.asarray(f))
    np.testing.assert_allclose(soft, -rate * np.log1p(np.exp(f + bias)), rtol=1e-13)


def test_l2_normalize_adds_epsilon_to_the_sum(x64):
    x = np.array([[3e-4, 4e-4], [0.0, 0.0]])
    np.testing.assert_allclose(l2_normalize(jnp.asarray(x)), x / np.sqrt(2.5e-7 + 1e-6), rtol=1e-14)
    assert np.all(np.isfinite(jax.jacobian(l2_normalize)(jnp.asarray(x))))


@pytest.mark.parametrize("function", [kda_recurrent, kda_chunked])
def test_no_rows_give_no_output(function):
    arrays = jax.tree.map(jnp.asarray, draw(1, 130, batch=0, dtype=np.float32))
    o, state = function(**arrays, segment_ids=jnp.zeros((0, 130), jnp.int32))
    assert (o.shape, state.shape) == ((0, 130, 2, 6), (0, 2, 8, 6))


def test_chunk_size_must_be_a_power_of_two():
    with pytest.raises(ValueError, match="chunk_size must be a power of two, got 48"):
        kda_chunked(**jax.tree.map(jnp.asarray, draw(1, 5, dtype=np.float32)), chunk_size=48)


def test_mismatched_head_dims_are_refused():
    arrays = jax.tree.map(jnp.asarray, draw(1, 5, dtype=np.float32))
    with pytest.raises(TypeCheckError, match="parameter 'k'"):
        kda_chunked(**{**arrays, "k": arrays["k"][..., :4]})
