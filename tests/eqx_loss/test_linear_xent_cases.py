"""Public cases on chunked, vocabulary-parallel and low-precision losses, through the fused output layer."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_loss
from eqx_loss import XentExecution, XentRules, XentSharding, XentTiling

FILES = pathlib.Path(__file__).parent.parent / "golden" / "case_files"
PLAIN = XentRules()


@functools.cache
def _case(number):
    case = json.loads(next(FILES.glob(f"{number}_*.json")).read_text())
    expected = case["expected"]
    return case["inputs"], expected["values"], expected["rtol"], expected["atol"]


def _floats(nested):
    return np.array(nested, np.float64)  # "nan" and "inf" are strings in JSON


def _one_row(values):
    return jnp.asarray(values)[None]


def _identity_head(logits):
    """Hidden states and an output matrix whose product is these logits."""
    logits = _floats(logits)
    return _one_row(logits), jnp.eye(logits.shape[1])


def _tiles(tokens, columns=2):
    return XentExecution(tiling=XentTiling(token_tile_size=tokens, vocab_tile_size=columns))


def _grad(hidden, unembed, targets, weights, mask=None, rules=PLAIN, execution=None):
    execution = _tiles(2) if execution is None else execution

    def f(hidden, unembed):
        loss = eqx_loss.linear_cross_entropy(
            hidden, unembed, targets, weights, mask=mask, rules=rules, execution=execution
        )
        return loss.objective + loss.z_objective, loss

    (_, loss), gradients = jax.value_and_grad(f, (0, 1), has_aux=True)(hidden, unembed)
    return loss, gradients


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_partition_of_a_linear_head(x64, tokens, backend):
    """Case 02: loss and gradients of the whole batch, for every tile of tokens, as each backend forms them."""
    inputs, values, rtol, atol = _case("02")
    mask = _floats(inputs["loss_mask"])
    found, (d_hidden, d_unembed) = _grad(
        _one_row(_floats(inputs["hidden"])),
        jnp.asarray(_floats(inputs["head"])),
        _one_row(inputs["targets"]),
        _one_row(mask / mask.sum()),
        execution=dataclasses.replace(_tiles(tokens, 3), backend=backend),
    )
    np.testing.assert_allclose(found.objective, values["loss"], rtol=rtol)
    np.testing.assert_allclose(d_unembed, values["grad_head"], rtol=rtol, atol=atol)
    np.testing.assert_allclose(d_hidden[0], values["grad_hidden"], rtol=rtol, atol=atol)


def test_non_finite_hidden_at_masked_positions(x64):
    """Case 10: the logits of the case are hidden states here, through an identity head."""
    inputs, values, rtol, atol = _case("10")
    mask = _floats(inputs["loss_mask"])
    hidden, unembed = _identity_head(inputs["logits"])
    found, (d_hidden, d_unembed) = _grad(
        hidden, unembed, _one_row(inputs["targets"]), _one_row(mask / mask.sum())
    )
    np.testing.assert_allclose(found.objective, values["loss"], rtol=rtol)
    np.testing.assert_allclose(d_hidden[0], values["grad_logits"], rtol=rtol, atol=atol)
    assert np.isfinite(d_unembed).all()


def test_head_z_loss_is_separate(x64):
    """Case 25."""
    inputs, values, rtol, atol = _case("25")
    mask = _floats(inputs["loss_mask"])
    hidden, unembed = _identity_head(inputs["logits"])
    arguments = (hidden, unembed, _one_row(inputs["targets"]), _one_row(mask / mask.sum()))
    on, (d_hidden, _) = _grad(*arguments, rules=XentRules(z_loss_multiplier=inputs["config"]["z_weight"]))
    np.testing.assert_allclose(on.objective, values["cross_entropy"], rtol=rtol)
    np.testing.assert_allclose(on.z_objective, values["z_loss"], rtol=rtol)
    np.testing.assert_allclose(d_hidden[0], values["grad_logits"], rtol=rtol, atol=atol)
    off, _ = _grad(*arguments)
    assert off.z_objective == 0
    np.testing.assert_allclose(off.objective, values["total_with_z_off"], rtol=rtol)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_vocabulary_shards_are_not_summed_again(x64, num_shards):
    """Case 27: one device with all columns, or the columns cut over two or three."""
    inputs, values, rtol, atol = _case("27")
    hidden, unembed = _identity_head(inputs["logits"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_shards]), ("tensor",))
    spec = jax.sharding.PartitionSpec(None, "tensor")
    sharding = XentSharding(mesh=mesh, vocab=("tensor",), unembed=spec)
    execution = XentExecution(sharding=sharding, tiling=_tiles(1).tiling)
    found, (d_hidden, _) = _grad(
        hidden, unembed, _one_row(inputs["targets"]), jnp.ones((1, 1)), execution=execution
    )
    np.testing.assert_allclose(found.objective, values["loss"], rtol=rtol)
    np.testing.assert_allclose(d_hidden[0], values["grad_logits"], rtol=rtol, atol=atol)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7])
def test_chunk_length_does_not_change_the_loss(x64, tokens):
    """Case 28."""
    inputs, values, rtol, atol = _case("28")
    targets = np.array(inputs["targets"])
    mask = targets != inputs["config"]["ignore_index"]
    hidden, unembed = _identity_head(inputs["logits"])
    weights = eqx_loss.token_weights(_one_row(mask), eqx_loss.Granularity.TOKEN)
    found, _ = _grad(
        hidden, unembed, _one_row(targets), weights.astype(jnp.float64), execution=_tiles(tokens)
    )
    np.testing.assert_allclose(found.xent[0], values["none"], rtol=rtol, atol=atol)
    np.testing.assert_allclose(jnp.sum(found.xent), values["sum"], rtol=rtol)
    np.testing.assert_allclose(jnp.sum(found.xent) / mask.sum(), values["mean"], rtol=rtol)
    # The weights are float32 quotients, here 1/5.
    np.testing.assert_allclose(found.objective, values["mean"], rtol=1e-7)


def test_upstream_gradients_per_token(x64):
    """Case 30: as weights, and as cotangents of the unreduced loss."""
    inputs, values, rtol, atol = _case("30")
    hidden, unembed = _one_row(_floats(inputs["hidden"])), jnp.asarray(_floats(inputs["head"]))
    targets = _one_row(inputs["targets"])
    upstream = _one_row(_floats(inputs["upstream_gradient_per_token"]))
    _, weighted = _grad(hidden, unembed, targets, upstream)

    def per_token(hidden, unembed):
        everywhere = jnp.ones(targets.shape, bool)
        return eqx_loss.linear_token_cross_entropy(
            hidden, unembed, targets, everywhere, execution=_tiles(2)
        ).xent

    _, pull = jax.vjp(per_token, hidden, unembed)
    for d_hidden, d_unembed in (weighted, pull(upstream)):
        np.testing.assert_allclose(d_unembed, values["grad_head"], rtol=rtol, atol=atol)
        np.testing.assert_allclose(d_hidden[0], values["grad_hidden"], rtol=rtol, atol=atol)


def test_bfloat16_arguments_give_float32_losses():
    """Case 32."""
    inputs, values, rtol, _ = _case("32")
    logits = np.array(inputs["logits"])
    hidden = jnp.asarray(logits[None], jnp.bfloat16)
    loss, (d_hidden, _) = _grad(
        hidden, jnp.eye(4, dtype=jnp.bfloat16), _one_row(inputs["targets"]), jnp.full((1, 2), 0.5)
    )
    assert loss.xent.dtype == jnp.float32
    assert d_hidden.dtype == jnp.bfloat16
    np.testing.assert_allclose(loss.xent[0], values["per_token_xent"], rtol=rtol)
    np.testing.assert_allclose(loss.objective, values["mean"], rtol=rtol)
