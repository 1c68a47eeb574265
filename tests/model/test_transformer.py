"""What is around the layers: remat, MTP shift, output head, dtypes, rope."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import LayerPlan, RopeConfig, YarnConfig
from model._mtp import tokens_ahead
from model._rope import apply_rope, rope_frequencies

from . import samples


@pytest.mark.parametrize("remat", ["dots", "block"])
def test_rematerialization_does_not_change_values_or_gradients(remat, x64):
    tokens = samples.random_tokens((2, 9))

    @eqx.filter_jit
    def run(model):
        return jax.value_and_grad(lambda m: jnp.sum(jnp.sin(m(tokens).hidden)))(model)

    plain = run(samples.make(samples.DENSE, dtype="float64"))
    other = run(samples.make(dataclasses.replace(samples.DENSE, remat=remat), dtype="float64"))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12)


def test_tied_head_is_the_transposed_embedding():
    model = samples.make(samples.DENSE)
    assert model.head is None
    np.testing.assert_array_equal(model.unembed, model.embed.T)


def test_bfloat16_model_returns_bfloat16_and_keeps_float32_facts():
    config = dataclasses.replace(samples.LING_MINI, dtype="bfloat16", record_max_logits=True)
    model = dataclasses.replace(samples.make(samples.LING_MINI), config=config)
    out = eqx.filter_jit(lambda m: m(samples.random_tokens((2, 9))))(model)
    assert out.hidden.dtype == jnp.bfloat16
    assert out.router.logsumexp.dtype == out.router.score_sums.dtype == jnp.float32
    assert jnp.isfinite(out.hidden).all()


def test_tokens_ahead_stop_at_the_end_of_a_document():
    tokens = jnp.arange(1, 9)[None]
    segment_ids = jnp.array([[1, 1, 1, 2, 3, 3, 0, 0]])
    assert tokens_ahead(tokens, segment_ids, 1).tolist() == [[2, 3, 0, 0, 6, 0, 0, 0]]
    assert tokens_ahead(tokens, segment_ids, 2).tolist() == [[3, 0, 0, 0, 0, 0, 0, 0]]
    assert tokens_ahead(tokens, segment_ids, 9).tolist() == [[0] * 8]


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_pairs_by_position_times_frequency(interleaved, x64):
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(2, 3, 2, 6)), np.array([[0, 5, 9], [3, 0, 100]])
    ours = np.asarray(
        apply_rope(jnp.asarray(x), jnp.asarray(positions), RopeConfig(theta=50.0), interleaved=interleaved)
    )
    pairs = [(0, 1), (2, 3), (4, 5)] if interleaved else [(0, 3), (1, 4), (2, 5)]
    for j, (a, b) in enumerate(pairs):
        turn = np.exp(1j * positions * 50.0 ** (-2 * j / 6))[..., None]
        expected = (x[..., a] + 1j * x[..., b]) * turn
        np.testing.assert_allclose(ours[..., a] + 1j * ours[..., b], expected, rtol=1e-12)


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones():
    plain = rope_frequencies(64, RopeConfig(theta=10000.0))
    yarn = rope_frequencies(
        64, RopeConfig(theta=10000.0, yarn=YarnConfig(factor=32.0, original_max_positions=4096))
    )
    ratio = plain / yarn
    rotations = 4096 * plain / (2 * np.pi)
    assert np.allclose(ratio[rotations > 64], 1)
    assert np.allclose(ratio[rotations < 0.5], 32)
    assert (np.diff(ratio) >= -1e-12).all()


def test_layer_plan_of_the_sample_covers_groups_of_different_lengths():
    """Guards the family tests: their Ling-3 has a kind that only the first group has, and two with uneven counts."""
    stack = samples.LING3.stack
    assert str(stack) == "linear+dense, full+moe, linear+moe, full+moe, linear+moe, 2 full+moe"
    assert stack.lengths == ((1, 1, 1), (0, 1, 1), (0, 2, 0))
    assert samples.LING3.layer_plan[-1] == LayerPlan(mixer="full", ffn="moe")
