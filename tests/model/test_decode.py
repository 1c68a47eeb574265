"""Decoding token by token gives what the whole sequence gives."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

from model import decode, init_cache

from . import samples

ATOL = 1e-9  # float64; attention in the latent space and the recurrences sum in another order

CONFIGS = {
    "ling3": dataclasses.replace(samples.LING3, num_layers=5, mtp=None, record_max_logits=False),
    "ling2": samples.LING2,
    "dense": samples.DENSE,
}


@pytest.fixture(params=list(CONFIGS))
def model(request, x64):
    return samples.make(CONFIGS[request.param], dtype="float64")


def test_prompts_of_different_length_then_single_tokens_equal_whole_sequences(model):
    tokens = samples.random_tokens((2, 9))
    whole = eqx.filter_jit(lambda m: m(tokens).hidden @ m.unembed)(model)
    read = eqx.filter_jit(lambda m, t, c, n: decode(m, t, c, num_tokens=n))
    cache = init_cache(model.config, 2, 9)
    # Row 1 has one token less; what stands in its last place must not matter.
    logits, cache = read(model, tokens[:, :6].at[1, 5].set(0), cache, jnp.array([6, 5], jnp.int32))
    np.testing.assert_allclose(logits, jnp.stack([whole[0, 5], whole[1, 4]]), atol=ATOL)
    for i in range(3):
        step = jnp.stack([tokens[0, 6 + i], tokens[1, 5 + i]])[:, None]
        logits, cache = read(model, step, cache, jnp.ones(2, jnp.int32))
        np.testing.assert_allclose(logits, jnp.stack([whole[0, 6 + i], whole[1, 5 + i]]), atol=ATOL)
    assert cache.length.tolist() == [9, 8]


def test_cache_of_another_model_is_refused():
    model = samples.make(samples.DENSE)
    with pytest.raises(ValueError, match=r"MlaCache is no memory of Gqa; use init_cache"):
        decode(
            model,
            samples.random_tokens((1, 1)),
            init_cache(dataclasses.replace(samples.BASE, num_layers=2), 1, 4),
        )
