"""Turned pairs, by both ways of pairing and both ways of computing, against complex products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import RopeConfig, _rope

SHAPE = (2, 5, 3, 8)
RTOL = 1e-12  # float64, two products and a sum an entry


def turned(x: np.ndarray, angle: np.ndarray, interleaved: bool) -> np.ndarray:
    """The pairs of `x` as complex numbers, times `exp(1j * angle)`."""
    half = x.shape[-1] // 2
    first = slice(0, None, 2) if interleaved else slice(0, half)
    second = slice(1, None, 2) if interleaved else slice(half, None)
    pairs = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)
    result = np.empty_like(x)
    result[..., first], result[..., second] = pairs.real, pairs.imag
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("way", [_rope._turned_by_pairs, _rope._turned_by_shifts])
def test_pairs_turn_as_complex_numbers_do(way, interleaved, x64):
    draw = np.random.default_rng(0)
    x, angle = draw.normal(size=SHAPE), draw.normal(size=(2, 5, 1, 4))
    found = way(interleaved, jnp.asarray(x), jnp.cos(angle), jnp.sin(angle))
    np.testing.assert_allclose(found, turned(x, angle, interleaved), rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("interleaved", [False, True])
def test_slopes_turn_back(interleaved, x64):
    draw = np.random.default_rng(1)
    x, slope, angle = draw.normal(size=SHAPE), draw.normal(size=SHAPE), draw.normal(size=(2, 5, 1, 4))
    _, pull = jax.vjp(lambda x: _rope._turned(interleaved, x, jnp.cos(angle), jnp.sin(angle)), jnp.asarray(x))
    np.testing.assert_allclose(
        pull(jnp.asarray(slope))[0], turned(slope, -angle, interleaved), rtol=RTOL, atol=RTOL
    )


@pytest.mark.parametrize("way", [_rope._turned_by_pairs, _rope._turned_by_shifts])
def test_heads_that_lie_side_by_side_turn_as_they_do_apart(way, x64):
    draw = np.random.default_rng(2)
    x, angle = draw.normal(size=SHAPE), draw.normal(size=(2, 5, 1, 4))
    for first, end in ((0, 1), (1, 3), (0, 3)):
        found = way(False, jnp.asarray(x), jnp.cos(angle), jnp.sin(angle), heads=(first, end))
        np.testing.assert_allclose(found, turned(x[:, :, first:end], angle, False), rtol=RTOL, atol=RTOL)


def test_queries_and_keys_turn_and_values_stay_and_slopes_come_back_side_by_side(x64):
    sizes, positions = (3, 2, 2), np.arange(5)[None].repeat(2, axis=0)
    config = RopeConfig(theta=50.0)
    draw = np.random.default_rng(3)
    x = draw.normal(size=(2, 5, 7, 8))
    slopes = [draw.normal(size=(2, 5, size, 8)) for size in sizes]
    angle = positions[..., None, None] * 50.0 ** (-np.arange(4) / 4)
    found, pull = jax.vjp(
        lambda x: _rope.apply_rope_apart(x, jnp.asarray(positions), config, sizes), jnp.asarray(x)
    )
    q, k, v = np.split(x, np.cumsum(sizes)[:-1], axis=2)
    for got, want in zip(found, (turned(q, angle, False), turned(k, angle, False), v), strict=True):
        np.testing.assert_allclose(got, want, rtol=RTOL, atol=RTOL)
    back = [turned(slopes[0], -angle, False), turned(slopes[1], -angle, False), slopes[2]]
    np.testing.assert_allclose(
        pull(tuple(map(jnp.asarray, slopes)))[0], np.concatenate(back, axis=2), rtol=RTOL, atol=RTOL
    )
