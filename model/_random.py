"""Random arrays that compile fast: the numbers of `jax.random`, without its loops.

On CPUs `jax.random` runs the rounds of Threefry in loops, which take XLA about four times as long to compile as the
rounds written out (0.42 s against 0.11 s of one core for a normal array, ten times under `vmap`; jax 0.12). A model
draws many arrays.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


# Traced once a shape: a model draws hundreds of arrays of a few shapes.
@functools.partial(jax.jit, static_argnames="shape", inline=True)
def normal(key: PRNGKeyArray, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Independent float32 values of the standard normal distribution; the values of `jax.random.normal`."""
    low = float(np.nextafter(np.float32(-1), np.float32(0)))
    return jnp.float32(math.sqrt(2)) * jax.lax.erf_inv(uniform(key, shape, low, 1.0))


@functools.partial(jax.jit, static_argnames=("shape", "low", "high"), inline=True)
def uniform(key: PRNGKeyArray, shape: tuple[int, ...], low: float, high: float) -> Float[Array, "..."]:
    """Independent float32 values, uniform in [low, high); the values of `jax.random.uniform`."""
    if math.prod(shape) >= 2**32 or jax.random.key_data(key).shape != (2,):
        # Counters of two words, or another generator than Threefry.
        return jax.random.uniform(key, shape, minval=low, maxval=high, dtype=jnp.float32)
    start, width = jnp.float32(low), jnp.float32(high) - jnp.float32(low)
    mantissa = (_bits(key, shape) >> 9) | jnp.uint32(0x3F800000)  # a float32 in [1, 2)
    unit = jax.lax.bitcast_convert_type(mantissa, jnp.float32) - 1
    return jnp.maximum(start, unit * width + start)


def _bits(key: PRNGKeyArray, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """32 random bits per element; element i (row-major) depends on the key and i alone, so the array can be split."""
    counter, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        counter += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    high, low = jax.random.key_data(key)
    first, second = _threefry(high, low, jnp.zeros(shape, jnp.uint32), counter)
    return first ^ second


def _threefry(
    high: UInt32[Array, ""], low: UInt32[Array, ""], x: UInt32[Array, "..."], y: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Threefry-2x32 with 20 rounds; Salmon et al., SC 2011, section 4.2."""
    keys = (high, low, high ^ low ^ jnp.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y
