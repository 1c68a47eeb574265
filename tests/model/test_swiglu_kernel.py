"""The feed-forward as TPU kernels, run by the interpreter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from model import Parallel, _ffn
from model._ffn import SwiGlu, fused_feed_forward
from model._swiglu_kernel import fused_swiglu

from . import samples

EPS = 1e-5
NUM_TOKENS, WIDTH, INNER = 768, 768, 1536  # three tiles of each in the kernel


def oracle(x, norm, gate, up, down, probe):
    """Output, and gradients of `sum(probe * output)` at all but the probe; float64, by hand."""
    scale = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS)
    normed = x * scale * norm
    a, b = normed @ gate, normed @ up
    sigmoid = 1 / (1 + np.exp(-a))
    hidden = a * sigmoid * b
    d_hidden = probe @ down.T
    d_a = d_hidden * b * sigmoid * (1 + a * (1 - sigmoid))
    d_b = d_hidden * a * sigmoid
    d_normed = d_a @ gate.T + d_b @ up.T
    along = np.sum(d_normed * norm * x, axis=1, keepdims=True)
    d_x = d_normed * norm * scale - x * scale**3 * along / x.shape[1]
    d_norm = np.sum(d_normed * x * scale, axis=0)
    return hidden @ down, d_x, d_norm, normed.T @ d_a, normed.T @ d_b, hidden.T @ probe


@pytest.mark.parametrize("num_cuts", [1, 2])
def test_the_kernels_equal_the_oracle(num_cuts, monkeypatch):
    """Tiles on all axes of the grid; the width whole, or cut over two devices of a tensor axis."""
    monkeypatch.setattr(_ffn, "fused_swiglu", functools.partial(fused_swiglu, interpret=True))
    rng = np.random.default_rng(0)
    shapes = ((NUM_TOKENS, WIDTH), (WIDTH,), *[(WIDTH, INNER)] * 2, (INNER, WIDTH), (NUM_TOKENS, WIDTH))
    operands = [rng.normal(size=shape) * std for shape, std in zip(shapes, (2, 1, 0.05, 0.05, 0.03, 1))]
    tensor = "tensor" if num_cuts > 1 else None
    parallel = Parallel(tensor_axis=tensor, sizes=(("tensor", num_cuts),), platform="tpu")

    def run(x, norm, gate, up, down):
        return fused_feed_forward(
            SwiGlu(gate=gate, up=up, down=down), x.reshape(2, -1, WIDTH), norm, EPS, parallel
        ).reshape(x.shape)

    def value_and_gradients(*operands):
        y, pull = jax.vjp(run, *operands[:-1])
        return y, *pull(operands[-1])

    # A second axis, as the step has: the compiler of CPUs takes no sum over the only one.
    mesh = jax.make_mesh(
        (2, num_cuts),
        ("data", "tensor"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: 2 * num_cuts],
    )
    whole = PartitionSpec()
    mapped = jax.shard_map(
        value_and_gradients, mesh=mesh, in_specs=whole, out_specs=whole, axis_names={"data"}, check_vma=False
    )
    got = jax.jit(mapped)(*(jnp.asarray(x, jnp.float32) for x in operands))
    for a, b in zip(got, oracle(*operands), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6 * np.abs(b).max())  # float32, sums of up to 1536 products


@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(128, 256, 256), (256, 384, 256), (256, 256, 192)])
def test_work_that_the_tiles_do_not_divide_is_refused_with_its_sizes(tokens, hidden, inner):
    x, norm, gate = jnp.ones((2, tokens // 2, hidden)), jnp.ones(hidden), jnp.ones((hidden, inner))
    with pytest.raises(
        ValueError, match=f"{tokens} tokens, ffn width {inner} and model width {hidden} .*false"
    ):
        fused_swiglu(x, x[..., :1], norm, gate, gate, gate.T, True)


@pytest.mark.parametrize("changes", [{"remat": "dots"}, {"remat": "block", "quantization": "int8"}])
def test_a_model_that_cannot_use_the_kernels_is_refused(changes):
    pytest.importorskip("qwix")
    with pytest.raises(ValueError, match="fused_swiglu=true .* use remat='block' and null, or false"):
        dataclasses.replace(samples.BASE, fused_swiglu=True, **changes)
