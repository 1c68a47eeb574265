"""The model's random numbers are those of `jax.random`."""

import jax
import numpy as np
import pytest

from model._random import normal, uniform

ATOL = 1e-6  # roundings of float32 near 3: the compiler fuses the last product and sum differently


@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7)])
def test_numbers_equal_those_of_jax_random(shape):
    key = jax.random.key(7)
    np.testing.assert_array_equal(uniform(key, shape, 0.0, 1.0), jax.random.uniform(key, shape))
    expected = jax.random.uniform(key, shape, minval=-3.0, maxval=2.0)
    np.testing.assert_allclose(uniform(key, shape, -3.0, 2.0), expected, atol=ATOL)
    np.testing.assert_allclose(normal(key, shape), jax.random.normal(key, shape), atol=ATOL)


def test_batched_keys_give_each_its_own_numbers():
    keys = jax.random.split(jax.random.key(8), 3)
    batch = jax.vmap(lambda key: normal(key, (4,)))(keys)
    for key, row in zip(keys, batch, strict=True):
        np.testing.assert_allclose(row, jax.random.normal(key, (4,)), atol=ATOL)


def test_other_generators_are_left_to_jax():
    key = jax.random.key(7, impl="rbg")
    np.testing.assert_array_equal(uniform(key, (4,), 0.0, 1.0), jax.random.uniform(key, (4,)))
