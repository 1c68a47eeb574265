"""8-bit products against NumPy, and which parts of a model have them."""

import dataclasses
import functools
import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import _config
from model._grouped import quantized_grouped_matmul
from model._linear import project
from model._quantized import quantized_einsum, with_quantization

from . import samples

# float32 scales, products and, in the gradient of a weight, sums of ten terms; sums of 8-bit products are exact. A step
# of rounding the other way would be 4e-3.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}
needs_qwix = pytest.mark.skipif(importlib.util.find_spec("qwix") is None, reason="needs the extra `quantize`")


def rounded(x, axes):
    """Whole steps of the largest absolute value along `axes` over 127, in float64."""
    scale = np.abs(x.astype(np.float64)).max(axis=axes, keepdims=True) / 127
    return np.round(x / scale) * scale


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@needs_qwix
def test_products_and_gradients_equal_those_of_rounded_numbers():
    x, weight, slope = random(2, 5, 4, 3), random(4, 3, 6, seed=1), random(2, 5, 6, seed=2)
    run = with_quantization(functools.partial(project, "bshk,hkd->bsd"), "int8")
    y, pull = jax.vjp(run, jnp.asarray(x), jnp.asarray(weight))
    d_x, d_weight = pull(jnp.asarray(slope))
    want = np.einsum("bshk,hkd->bsd", rounded(x, (2, 3)), rounded(weight, (0, 1)))
    want_x = np.einsum("bsd,hkd->bshk", rounded(slope, 2), rounded(weight, 2))
    np.testing.assert_allclose(y, want, **ROUNDING)
    np.testing.assert_allclose(d_x, want_x, **ROUNDING)
    np.testing.assert_allclose(d_weight, np.einsum("bshk,bsd->hkd", x, slope), **ROUNDING)
    assert np.abs(y - np.einsum("bshk,hkd->bsd", x, weight)).max() > 1e-3


@needs_qwix
def test_products_of_experts_equal_those_of_rounded_numbers():
    sizes = np.array([3, 0, 5])
    x, slope = random(8, 6), random(8, 4, seed=2)
    weight = random(3, 6, 4, seed=1) * np.array([1, 10, 100], np.float32)[:, None, None]

    def run(x, weight):
        return quantized_grouped_matmul("int8", x, weight, jnp.asarray(sizes, jnp.int32))

    y, pull = jax.vjp(run, jnp.asarray(x), jnp.asarray(weight))
    d_x, d_weight = pull(jnp.asarray(slope))
    group = np.repeat(np.arange(3), sizes)
    want_y = np.einsum("td,tdf->tf", rounded(x, 1), rounded(weight, 1)[group])
    want_x = np.einsum("tf,tdf->td", rounded(slope, 1), rounded(weight, 2)[group])
    want_weight = np.stack([x[group == e].T @ slope[group == e] for e in range(3)])
    for got, want in ((y, want_y), (d_x, want_x), (d_weight, want_weight)):
        # Experts differ in size by 100: relative to the largest.
        scale = np.abs(want).max()
        np.testing.assert_allclose(got / scale, want / scale, **ROUNDING)


@needs_qwix
@pytest.mark.parametrize(("quantization", "largest_error"), [("int8", 0.05), ("fp8", 0.2)])
def test_a_model_is_quantized_although_it_was_traced_without_before(quantization, largest_error):
    plain = samples.make(dataclasses.replace(samples.DENSE, remat="block"))
    quantized = dataclasses.replace(
        plain, config=dataclasses.replace(plain.config, quantization=quantization)
    )
    tokens = samples.random_tokens((2, 9))
    before, after = (eqx.filter_jit(lambda m: m(tokens).hidden)(model) for model in (plain, quantized))
    # Measured 0.025 and 0.107: roundings of every product of two layers with large weights.
    assert largest_error / 10 < np.linalg.norm(after - before) / np.linalg.norm(before) < largest_error


@needs_qwix
@pytest.mark.parametrize(("quantization", "bits"), [("int8", "i8"), ("fp8", "f8_e4m3fn")])
def test_experts_and_linear_attention_are_quantized_and_gates_are_not(quantization, bits):
    model = samples.make(dataclasses.replace(samples.LING3, quantization=quantization))
    tokens = samples.random_tokens((2, 9))
    text = str(jax.make_jaxpr(lambda m: m(tokens).hidden)(model))
    moe = model.config.moe
    assert f"{bits}[{moe.num_experts},{model.config.hidden_size},{moe.moe_intermediate_size}]" in text
    kda = model.config.kda
    assert f"{bits}[{model.config.hidden_size},{kda.num_heads},{kda.head_dim}]" in text
    assert f"{bits}[{model.config.hidden_size},{kda.num_heads}]" not in text
    assert f"{bits}[{model.config.hidden_size},{moe.num_experts}]" not in text


@needs_qwix
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_what_is_not_finite_stays_so_in_its_row_and_zeros_stay_zero(quantization):
    x = random(4, 6)
    x[0, 1], x[1, 2], x[2] = np.nan, np.inf, 0
    y = np.asarray(quantized_einsum("td,df->tf", jnp.asarray(x), jnp.asarray(random(6, 5)), quantization))
    assert not np.isfinite(y[:2]).any()
    assert (y[2] == 0).all()
    assert np.isfinite(y[3]).all()


@needs_qwix
def test_rows_do_not_see_each_other():
    model = samples.make(samples.DENSE)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, quantization="int8"))
    tokens = samples.random_tokens((2, 9))
    run = eqx.filter_jit(lambda m, t: m(t).hidden)
    # Another shape is another program, whose float32 sums may go in another order.
    np.testing.assert_allclose(run(model, tokens[:1]), run(model, tokens)[:1], **ROUNDING)


def test_without_qwix_the_setting_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(_config, "has_qwix", lambda: False)
    with pytest.raises(ValueError, match=r"quantization=int8 needs qwix.*eqx-loss\[quantize\].*null"):
        dataclasses.replace(samples.DENSE, quantization="int8")
