"""`eqx_loss.numpy.token_weights`: equal to the JAX weights and to a slow derivation; NumPy alone."""

import pathlib
import subprocess
import sys
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eqx_loss import Granularity
from eqx_loss import token_weights as jax_weights
from eqx_loss.numpy import GRANULARITIES, token_weights

ROWS, POSITIONS = 6, 7
SEGMENTS = np.array(
    [[1, 1, 2, 2, 2, 3, 0], [1] * 7, [0] * 7, [1, 2, 3, 4, 5, 6, 7], [4, 4, 1, 1, 0, 0, 0], [2] * 6 + [0]]
)


def slow(mask, name, micro_batch_size, count_empty, scale, by_sum):
    """Group by group in exact fractions."""
    groups = {}
    for b in range(ROWS):
        for s in range(POSITIONS):
            key = {
                "token": 0,
                "sample": b,
                "micro_batch": b // micro_batch_size,
                "document": (b, SEGMENTS[b, s]) if SEGMENTS[b, s] else None,
            }[name]
            if key is not None:
                groups.setdefault(key, []).append((b, s))
    weights = np.zeros((ROWS, POSITIONS))
    votes = {at: Fraction(float(scale[at])) * int(mask[at]) for members in groups.values() for at in members}
    filled = [key for key, members in groups.items() if any(votes[at] for at in members)]
    number = len(groups) if count_empty or name == "token" else len(filled)
    for key in filled:
        scored = [at for at in groups[key] if votes[at]]
        divisor = sum(votes[at] for at in scored) if by_sum else len(scored)
        for at in scored:
            weights[at] = float(votes[at] / divisor / number)
    return weights


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    density=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    name=st.sampled_from(GRANULARITIES),
    micro_batch_size=st.sampled_from([1, 2, 3, 6]),
    count_empty=st.booleans(),
    scaled=st.booleans(),
    by_sum=st.booleans(),
)
def test_weights_equal_a_slow_derivation_and_jax(
    seed, density, name, micro_batch_size, count_empty, scaled, by_sum
):
    rng = np.random.default_rng(seed)
    mask = rng.random((ROWS, POSITIONS)) < density
    if name == "document":
        mask &= SEGMENTS > 0
    scale = rng.integers(0, 5, mask.shape) / 4 if scaled else np.ones(mask.shape)
    options = {
        "micro_batch_size": micro_batch_size, "count_empty": count_empty,
        "scale_denominator": "sum" if by_sum else "count",
    }  # fmt: skip
    found = token_weights(mask, name, segment_ids=SEGMENTS, token_scale=scale if scaled else None, **options)
    assert found.dtype == np.float64
    np.testing.assert_allclose(
        found, slow(mask, name, micro_batch_size, count_empty, scale, by_sum), rtol=1e-14, atol=0
    )
    ours = jax_weights(
        jnp.asarray(mask),
        Granularity(name),
        segment_ids=jnp.asarray(SEGMENTS),
        token_scale=jnp.asarray(scale, jnp.float32) if scaled else None,
        **options,
    )
    np.testing.assert_allclose(ours, found, rtol=1e-6, atol=0)  # float32


def test_a_granularity_may_be_given_as_the_enum():
    mask = np.ones((2, 3), bool)
    np.testing.assert_array_equal(token_weights(mask, Granularity.SAMPLE), token_weights(mask, "sample"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"granularity": "rows"}, "granularity must be one of"),
        ({"granularity": "micro_batch", "micro_batch_size": 4}, "divide the 2 rows"),
        ({"granularity": "document"}, "needs segment_ids"),
        ({"granularity": "token", "mask": np.ones(3, bool)}, r"must be \[B, S\]"),
    ],
)
def test_errors_say_rule_value_and_remedy(arguments, says):
    with pytest.raises(ValueError, match=says):
        token_weights(**{"mask": np.ones((2, 3), bool), **arguments})


def test_the_file_runs_with_numpy_alone():
    path = pathlib.Path(__file__).parents[2] / "eqx_loss" / "numpy" / "_weights.py"
    program = (
        f"import runpy, sys\nnames = runpy.run_path({str(path)!r})\nimport numpy as "
        "np\nprint(names['token_weights'](np.array([[True, False]]), 'token').tolist())\nprint([name for "
        "name in ('jax', 'jaxtyping', 'equinox', 'eqx_loss') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/", timeout=120
    )
    assert done.stdout.splitlines() == ["[[1.0, 0.0]]", "[]"]
