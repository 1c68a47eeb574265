"""Learning rates against formulas written out by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from train._schedule import ScheduleConfig, learning_rate

RTOL = 1e-6  # float32


def rates(schedule, num_steps):
    return np.asarray([learning_rate(schedule, jnp.asarray(step)) for step in range(num_steps)])


def test_warm_up_never_takes_a_step_at_zero_and_ends_at_the_peak():
    got = rates(ScheduleConfig(peak=2.12e-4, warmup_steps=250), 260)
    # The line of a public Ling log: 2.544001e-05 at step 29 (from 0).
    np.testing.assert_allclose(got[29], 2.544e-05, rtol=RTOL)
    np.testing.assert_allclose(got[:250], 2.12e-4 * np.arange(1, 251) / 250, rtol=RTOL)
    np.testing.assert_allclose(got[249:], 2.12e-4, rtol=RTOL)


def test_cosine_falls_from_peak_to_final():
    got = rates(ScheduleConfig(peak=1.0, kind="cosine", warmup_steps=2, total_steps=12, final=0.1), 15)
    want = [0.5, 1.0] + [0.1 + 0.45 * (1 + math.cos(math.pi * k / 10)) for k in range(1, 11)] + [0.1] * 3
    np.testing.assert_allclose(got, want, rtol=RTOL)


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_wsd_is_flat_then_falls_over_its_last_steps(shape):
    schedule = ScheduleConfig(
        peak=1.0, kind="wsd", warmup_steps=2, total_steps=10, decay_steps=4, final=0.2, decay_shape=shape
    )
    fall = [k / 4 if shape == "linear" else math.sqrt(k / 4) for k in range(1, 5)]
    want = [0.5] + [1.0] * 5 + [1 - 0.8 * x for x in fall] + [0.2]
    np.testing.assert_allclose(rates(schedule, 11), want, rtol=RTOL)


@pytest.mark.parametrize(
    "fields",
    [
        {"peak": 0.0},
        {"peak": float("nan")},
        {"peak": 1.0, "final": 2.0},
        {"peak": 1.0, "warmup_steps": -1},
        {"peak": 1.0, "kind": "cosine", "warmup_steps": 5, "total_steps": 5},
        {"peak": 1.0, "kind": "wsd", "total_steps": 5},
        {"peak": 1.0, "kind": "wsd", "total_steps": 5, "decay_steps": 4, "warmup_steps": 2},
    ],
)
def test_impossible_schedules_are_refused(fields):
    with pytest.raises(ValueError, match="schedule"):
        ScheduleConfig(**fields)
