"""QK-clip brings the largest logit of every head to the threshold and changes nothing else."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import MtpConfig, clip_factors, qk_clip

from . import samples

# A query latent and none, stacked groups and single layers, MTP.
CONFIG = dataclasses.replace(
    samples.BASE,
    num_layers=3,
    moe=None,
    mla=dataclasses.replace(samples.MLA, q_lora_rank=7),
    mtp=MtpConfig(num_layers=1),
    record_max_logits=True,
)


def test_factors_reach_the_threshold_and_leave_small_and_negative_logits():
    factors = clip_factors(jnp.array([200.0, 100.0, 50.0, 0.0, -300.0, -jnp.inf]), 100.0)
    np.testing.assert_allclose(factors, [100 / 200, 1, 1, 1, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("q_lora_rank", [None, 7])
def test_clipped_layers_have_logits_at_most_the_threshold(q_lora_rank, x64):
    """One layer: its input does not depend on the clipped weights, so each head's logit scales by its factor."""
    mla = dataclasses.replace(samples.MLA, q_lora_rank=q_lora_rank)
    model = samples.make(dataclasses.replace(CONFIG, num_layers=1, mtp=None, mla=mla), dtype="float64")
    record = eqx.filter_jit(lambda m: m(samples.random_tokens((2, 9))).max_logits)
    before = record(model)
    threshold = float(jnp.sort(before[0]).mean())
    after = record(qk_clip(model, before, threshold))
    assert (before > threshold).any()
    assert (before < threshold).any()
    np.testing.assert_allclose(after, jnp.minimum(before, threshold), rtol=1e-5)  # the 1e-6 in the factor


def test_only_query_and_key_weights_of_clipped_heads_change():
    model = samples.make(CONFIG)
    max_logits = jnp.full((4, 2), 10.0).at[1, 0].set(400.0).at[3, 1].set(1600.0)
    clipped = qk_clip(model, max_logits, 100.0)
    changed = set()
    flat, _ = jax.tree_util.tree_flatten_with_path(model)
    for (path, old), new in zip(flat, jax.tree.leaves(clipped), strict=True):
        if not np.array_equal(old, new):
            changed.add(jax.tree_util.keystr(path))
    parts = ("query.nope", "query.rope", "k_up")
    assert changed == {f"{where}.mixer.{part}" for where in (".layers[0]", ".mtp[0].block") for part in parts}
    # Head 0 of layer 1 has factor 1/4.
    old, new = model.layers[0].mixer, clipped.layers[0].mixer
    np.testing.assert_allclose(new.query.rope[1, :, 0], old.query.rope[1, :, 0] / 4, rtol=1e-6)
    np.testing.assert_allclose(new.query.nope[1, :, 0], old.query.nope[1, :, 0] / 2, rtol=1e-6)
    np.testing.assert_allclose(new.k_up[1, :, 0], old.k_up[1, :, 0] / 2, rtol=1e-6)
    np.testing.assert_array_equal(new.query.rope[:, :, 1], old.query.rope[:, :, 1])
    np.testing.assert_array_equal(new.query.rope[0], old.query.rope[0])


def test_each_stacked_layer_is_clipped_by_its_own_row():
    """Two groups of (linear, 2 full): the full layers 1, 2, 4, 5 are rows 0 to 3."""
    types = ("linear", "full", "full") * 2
    config = dataclasses.replace(CONFIG, num_layers=6, layer_types=types, kda=samples.KDA, mtp=None)
    model = samples.make(config)
    clipped = qk_clip(model, jnp.array([[200.0, 1.0], [400.0, 1.0], [800.0, 1.0], [1600.0, 1.0]]), 100.0)
    old, new = (m.layers[1].mixer.query.rope for m in (model, clipped))
    factors = jnp.array([1 / 2, 1 / 4, 1 / 8, 1 / 16])
    # float32: a product by a factor that a quotient or a square root has rounded once or twice.
    np.testing.assert_allclose(new[:, :, 0], old[:, :, 0] * factors[:, None, None], rtol=1e-6)
    np.testing.assert_array_equal(new[:, :, 1], old[:, :, 1])


def test_models_without_mla_and_wrong_row_counts_are_refused():
    with pytest.raises(ValueError, match="needs MLA layers"):
        qk_clip(samples.make(samples.DENSE), jnp.zeros((2, 4)))
    with pytest.raises(ValueError, match="one row per MLA layer, 4 here, got 3"):
        qk_clip(samples.make(CONFIG), jnp.zeros((3, 2)))
