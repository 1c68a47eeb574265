"""Rows split over eight devices equal whole rows, with gradients, in values, states and convolutions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from model._conv import causal_conv1d
from model._kda import kda_chunked
from model._kda_context import causal_conv1d_over_context, over_context
from model._lightning import lightning_chunked
from tests.model.test_kda import draw, probes, rel

ROWS = P(None, "context")
RTOL64 = 1e-11  # float64


def mesh():
    return jax.make_mesh((8,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))


def packed_ids():
    """160 positions, 20 a device: documents over several devices, several in one, and whole devices of padding."""
    ids = np.zeros((2, 160), np.int32)
    for row, start, stop, name in [
        (0, 0, 45, 3),
        (0, 45, 50, 1),
        (0, 50, 57, 2),
        (0, 60, 160, 9),
        (1, 3, 19, 5),
    ]:
        ids[row, start:stop] = name
    ids[1, 61:100] = 5  # goes on after two devices of padding
    ids[1, 100:120] = 6
    return ids


@functools.partial(jax.jit, static_argnums=(0,))
def value_and_grads(function, arrays, probe, ids):
    def objective(arrays):
        o, state = function(arrays, ids)
        return jnp.sum(o * probe[0]) + jnp.sum(state * probe[1]), (o, state)

    grads, results = jax.grad(objective, has_aux=True)(arrays)
    return results, grads


def plain_kda(arrays, ids):
    return kda_chunked(**arrays, segment_ids=ids, chunk_size=16)


def split_kda(arrays, ids):
    def local(q, k, v, g, beta, initial_state, ids):
        def recurrence(v, state):
            return kda_chunked(q, k, v, g, beta, segment_ids=ids, initial_state=state, chunk_size=16)

        return over_context(
            recurrence, v, key_size=8, axis_name="context", segment_ids=ids, initial_state=initial_state
        )

    specs = (ROWS,) * 5 + (P(), ROWS)
    run = jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=(ROWS, P()))
    return run(*(arrays[n] for n in ("q", "k", "v", "g", "beta", "initial_state")), ids)


def plain_lightning(arrays, ids):
    q, k, v, slope, state = (arrays[n] for n in ("q", "k", "v", "slope", "initial_state"))
    return lightning_chunked(q, k, v, slope, segment_ids=ids, initial_state=state, chunk_size=16)


def split_lightning(arrays, ids):
    def local(q, k, v, slope, state, ids):
        def recurrence(v, state):
            return lightning_chunked(q, k, v, slope, segment_ids=ids, initial_state=state, chunk_size=16)

        return over_context(
            recurrence, v, key_size=8, axis_name="context", segment_ids=ids, initial_state=state
        )

    specs = (ROWS, ROWS, ROWS, P(), P(), ROWS)
    run = jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=(ROWS, P()))
    return run(*(arrays[n] for n in ("q", "k", "v", "slope", "initial_state")), ids)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_kda_over_split_rows_equals_whole_rows_with_gradients(x64, packed):
    arrays = draw(21, 160)
    ids = jnp.asarray(packed_ids()) if packed else jnp.ones((2, 160), jnp.int32)
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)
    (o, state), grads = value_and_grads(split_kda, arrays, probe, ids)
    (o_plain, state_plain), grads_plain = value_and_grads(plain_kda, arrays, probe, ids)
    assert rel(o, o_plain) < RTOL64
    assert rel(state, state_plain) < RTOL64
    assert {n: rel(grads[n], grads_plain[n]) < RTOL64 for n in grads} == dict.fromkeys(grads, True)


def test_kda_over_split_rows_needs_no_ids_and_no_initial_state(x64):
    arrays = draw(22, 160)
    del arrays["initial_state"]

    def local(q, k, v, g, beta):
        def recurrence(v, state):
            return kda_chunked(q, k, v, g, beta, initial_state=state, chunk_size=16)

        return over_context(recurrence, v, key_size=8, axis_name="context")

    run = jax.jit(jax.shard_map(local, mesh=mesh(), in_specs=(ROWS,) * 5, out_specs=(ROWS, P())))
    o, state = run(*(arrays[n] for n in ("q", "k", "v", "g", "beta")))
    o_plain, state_plain = jax.jit(plain_kda)(arrays, None)
    assert rel(o, o_plain) < RTOL64
    assert rel(state, state_plain) < RTOL64


@pytest.mark.slow
def test_lightning_over_split_rows_equals_whole_rows_with_gradients(x64):
    arrays = draw(23, 160)
    arrays = {n: arrays[n] for n in ("q", "k", "v", "initial_state")} | {"slope": np.array([0.4, 0.02])}
    ids = jnp.asarray(packed_ids())
    probe = probes(arrays["v"].shape, arrays["initial_state"].shape)
    (o, state), grads = value_and_grads(split_lightning, arrays, probe, ids)
    (o_plain, state_plain), grads_plain = value_and_grads(plain_lightning, arrays, probe, ids)
    assert rel(o, o_plain) < RTOL64
    assert rel(state, state_plain) < RTOL64
    assert {n: rel(grads[n], grads_plain[n]) < RTOL64 for n in grads} == dict.fromkeys(grads, True)


@pytest.mark.parametrize("packed", [True, False])
def test_convolution_over_split_rows_equals_whole_rows_with_gradients(x64, packed):
    rng = np.random.default_rng(24)
    x, weight, probe = rng.normal(size=(2, 160, 3)), rng.normal(size=(3, 4)), rng.normal(size=(2, 160, 3))
    ids = jnp.asarray(packed_ids())

    def split(x, weight):
        def local(x, weight, ids):
            return causal_conv1d_over_context(
                x, weight, axis_name="context", segment_ids=ids if packed else None
            )

        return jax.shard_map(local, mesh=mesh(), in_specs=(ROWS, P(), ROWS), out_specs=ROWS)(x, weight, ids)

    def whole(x, weight):
        return causal_conv1d(x, weight, ids if packed else None)

    for ours, plain in zip(
        *(
            jax.tree.leaves(
                jax.jit(jax.value_and_grad(lambda x, w, f=f: jnp.sum(f(x, w) * probe), (0, 1)))(x, weight)
            )
            for f in (split, whole)
        ),
        strict=True,
    ):
        assert rel(ours, plain) < RTOL64


def test_shards_shorter_than_the_convolution_are_refused():
    def local(x):
        return causal_conv1d_over_context(x, jnp.ones((3, 4)), axis_name="context")

    with pytest.raises(ValueError, match="a shard must have at least W-1=3 positions, got 2"):
        jax.shard_map(local, mesh=mesh(), in_specs=ROWS, out_specs=ROWS)(jnp.ones((1, 16, 3)))
