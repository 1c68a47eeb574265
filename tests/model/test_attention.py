"""Blockwise and splash attention against an oracle that goes query by query."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from model import Parallel, _attention
from model._attention import causal_attention
from model._blockwise import blockwise_attention, max_attention_logits
from model._rows import make_rows
from model._splash import splash_attention
from tests.oracles.attention import attend

from . import samples

SCALE = 0.4
RTOL = 1e-12  # float64, at most 40 terms


def _inputs(length: int, *, heads: int = 4, kv_heads: int = 2, seed: int = 0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(2, length, heads, 5))
    k, v = rng.normal(size=(2, length, kv_heads, 5)), rng.normal(size=(2, length, kv_heads, 3))
    return q, jnp.asarray(k), jnp.asarray(v)


def _grouped(q, kv_heads=2):
    return jnp.asarray(q * SCALE).reshape(*q.shape[:2], kv_heads, -1, q.shape[-1])


def _segments(length: int):
    """A row of three documents and padding, and a row of one."""
    a, b = length // 3, length // 2
    first = [1] * a + [2] * (b - a) + [3] * (length - b - 1) + [0]
    return jnp.array([first[:length], [1] * length], dtype=jnp.int32)


@pytest.mark.parametrize("length", [1, 7, 20, 33])
def test_output_and_largest_logit_equal_the_oracle(length, x64):
    q, k, v = _inputs(length)
    segment_ids = _segments(length)
    out, top = blockwise_attention(_grouped(q), k, v, segment_ids, 8)
    expected, expected_top = attend(q, k, v, np.asarray(segment_ids), SCALE)
    np.testing.assert_allclose(out.reshape(expected.shape), expected, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(top.reshape(-1), expected_top, rtol=RTOL)
    np.testing.assert_allclose(max_attention_logits(_grouped(q), k, segment_ids, 8), top, rtol=RTOL)


def test_largest_logit_of_a_batch_of_padding_is_minus_infinity(x64):
    q, k, v = _inputs(5)
    out, top = blockwise_attention(_grouped(q), k, v, jnp.zeros((2, 5), jnp.int32), 8)
    assert (top == -jnp.inf).all()
    assert jnp.isfinite(out).all()


@pytest.mark.parametrize("length", [7, 20])
def test_gradient_equals_that_of_dense_attention(length, x64):
    q, k, v = _inputs(length, seed=1)
    segment_ids = _segments(length)
    probe = np.random.default_rng(2).normal(size=(2, length, 2, 2, 3))

    def dense(q, k, v):
        seen = np.tril(np.ones((length, length), bool)) & (segment_ids[:, :, None] == segment_ids[:, None])
        logits = jnp.einsum("bqjgk,bsjk->bjgqs", q, k)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -jnp.inf), axis=-1)
        return jnp.sum(probe * jnp.einsum("bjgqs,bsju->bqjgu", weights, v))

    def blocks(q, k, v):
        return jnp.sum(probe * blockwise_attention(q, k, v, segment_ids, 8)[0])

    arguments = (_grouped(q), k, v)
    for ours, theirs in zip(
        jax.grad(blocks, (0, 1, 2))(*arguments), jax.grad(dense, (0, 1, 2))(*arguments), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_largest_logit_has_no_gradient(x64):
    q, k, v = _inputs(7)
    grad = jax.grad(lambda q: jnp.sum(blockwise_attention(q, k, v, _segments(7), 8)[1]))(_grouped(q))
    assert not grad.any()


def test_softmax_of_bfloat16_is_summed_in_float32():
    """300 equal weights: a bfloat16 sum stops at 256."""
    q = jnp.zeros((1, 300, 1, 1, 4), jnp.bfloat16)
    v = jnp.ones((1, 300, 1, 2), jnp.bfloat16)
    out, top = blockwise_attention(q, q[:, :, :, 0], v, jnp.ones((1, 300), jnp.int32), 64)
    assert out.dtype == jnp.bfloat16
    assert top.dtype == jnp.float32
    np.testing.assert_allclose(out.astype(jnp.float32), 1, atol=2**-8)


def test_splash_kernel_of_each_device_s_heads_equals_blockwise(monkeypatch):
    """Values and gradients, with the head sizes of MLA, in the interpreter; rows and heads cut over devices."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(2, 256, h, 24)), jnp.float32) for h in (4, 2))
    v, probe = (jnp.asarray(rng.normal(size=(2, 256, h, 16)), jnp.float32) for h in (2, 4))
    segment_ids, positions = samples.packed([[100, 130], [256]], 256)
    monkeypatch.setattr(_attention, "splash_attention", functools.partial(splash_attention, interpret=True))
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    parallel = Parallel(tensor_axis="tensor", sizes=(("tensor", 2),), platform="tpu")

    def attend_own(q, k, v, segment_ids, positions):
        rows = make_rows(segment_ids, segment_ids, positions, None, None, parallel)
        return causal_attention(q, k, v, rows, scale=0.2, record_max_logits=True)

    def splash(q, k, v):
        row = PartitionSpec("data")
        mapped = jax.shard_map(
            lambda *arguments: jax.tree.map(lambda x: x[None], attend_own(*arguments)),
            mesh=mesh,
            in_specs=row,
            out_specs=row,
            axis_names={"data"},
            check_vma=False,
        )
        out, top = mapped(q, k, v, segment_ids, positions)
        return jnp.sum(probe * out[:, 0]), jnp.max(top, axis=0)

    def blocks(q, k, v):
        grouped = (q * 0.2).reshape(2, 256, 2, 2, 24)
        out, top = blockwise_attention(grouped, k, v, segment_ids, 64)
        return jnp.sum(probe * out.reshape(probe.shape)), top.reshape(-1)

    (value, top), grads = jax.jit(jax.value_and_grad(splash, (0, 1, 2), has_aux=True))(q, k, v)
    (expected, expected_top), expected_grads = jax.value_and_grad(blocks, (0, 1, 2), has_aux=True)(q, k, v)
    np.testing.assert_allclose(value, expected, rtol=1e-5)  # float32, 32768 terms
    np.testing.assert_allclose(top, expected_top, rtol=1e-6)  # float32, one product of 24 terms
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * float(jnp.abs(b).max()))
