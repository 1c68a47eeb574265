"""Statistics against hand computation and a plain re-derivation."""

import math

import numpy as np

from eqx_loss.compare import Options, Pairs, compare_runs, read_run
from eqx_loss.compare._stats import drift, relative, statistics

from . import logs


def pairs(reference, candidate, steps=None):
    reference = np.asarray(reference, float)
    return Pairs(
        steps=np.arange(len(reference)) if steps is None else np.asarray(steps),
        reference=reference,
        candidate=np.asarray(candidate, float),
    )


def test_statistics_of_four_steps_by_hand():
    numbers = statistics(pairs([2.0, 4.0, 5.0, 10.0], [2.0, 4.4, 4.0, 10.5], [7, 9, 10, 20]), 0.06, 0.01)
    assert (numbers.num_steps, numbers.first_step, numbers.last_step) == (4, 7, 20)
    assert numbers.first_step_rel == 0
    np.testing.assert_allclose(
        [numbers.mean_rel, numbers.max_rel, numbers.final_rel, numbers.mean_signed_rel],
        [(0 + 0.1 + 0.2 + 0.05) / 4, 0.2, 0.05, (0 + 0.1 - 0.2 + 0.05) / 4],
        rtol=1e-14,
    )
    assert numbers.first_step_beyond == 9
    assert numbers.num_beyond == 2
    assert numbers.drift is None


def test_the_first_step_has_its_own_tolerance():
    values = [1.0] * 5
    assert statistics(pairs(values, [1.001, 1, 1, 1, 1]), 0.01, 0.0005).first_step_beyond == 0
    assert statistics(pairs(values, [1, 1.001, 1, 1, 1]), 0.01, 0.0005).first_step_beyond is None
    assert statistics(pairs(values, [1.005, 1, 1, 1, 1]), 0.001, 0.01).first_step_beyond == 0


def test_values_that_are_not_finite():
    nan, inf = math.nan, math.inf
    numbers = statistics(pairs([1.0, nan, 3.0, inf, 5.0], [1.0, nan, nan, 4.0, 5.5]), 0.2, 0.2)
    assert numbers.num_not_finite == 3
    assert numbers.first_step_beyond == 2  # NaN against NaN does not differ
    assert numbers.num_beyond == 2
    np.testing.assert_allclose(numbers.max_rel, 0.1, rtol=1e-14)
    nothing = statistics(pairs([nan], [nan]), 0.1, 0.1)
    assert nothing.first_step_beyond is None
    assert math.isnan(nothing.mean_rel)


def test_a_reference_of_exactly_zero():
    signed = relative(pairs([0.0, 0.0, -2.0], [0.0, 1e-9, -1.0]))
    assert list(signed) == [0.0, math.inf, 0.5]
    assert statistics(pairs([0.0, 0.0], [0.0, 1e-9]), 0.1, 0.1).first_step_beyond == 1


def test_drift_of_a_straight_line_is_its_slope_without_error():
    steps = np.arange(0, 2000, 10)
    found = drift(steps, 3e-7 * steps - 1e-4)
    np.testing.assert_allclose(found.per_1k_steps, 3e-4, rtol=1e-9)
    assert found.error < 1e-12
    assert found.significant


def test_drift_error_is_that_of_least_squares_for_white_noise():
    rng = np.random.default_rng(3)
    steps = np.arange(500)
    slopes = [drift(steps, 1e-4 * rng.standard_normal(500)) for _ in range(200)]
    spread = np.std([found.per_1k_steps for found in slopes])
    mean_error = np.mean([found.error for found in slopes])
    # 200 draws: the spread itself is known to 5 %; the widening adds up to 4 % for white noise.
    assert 0.85 < spread / mean_error < 1.1
    assert sum(found.significant for found in slopes) == 0


def test_drift_error_widens_for_noise_that_lasts():
    rng = np.random.default_rng(4)
    noise = np.convolve(rng.standard_normal(600), np.ones(10) / 10, "valid")
    white = drift(np.arange(len(noise)), rng.permutation(noise))
    lasting = drift(np.arange(len(noise)), noise)
    assert lasting.error > 2 * white.error


def test_drift_needs_eight_finite_steps():
    signed = np.array([1e-4] * 7 + [np.nan])
    assert drift(np.arange(8), signed) is None
    assert drift(np.arange(8), np.full(8, 1e-4)) is not None


def test_a_channel_without_tolerance_is_reported_and_not_judged(tmp_path):
    lm = logs.curve(30)
    for name, grad_norm in (("reference", 0.2), ("candidate", 0.4)):
        text = "\n".join(logs.megatron_line(i + 1, lm[i], grad_norm=grad_norm) for i in range(30)) + "\n"
        (tmp_path / name).write_text(text)
    runs = read_run(tmp_path / "reference"), read_run(tmp_path / "candidate")
    result = compare_runs(*runs)
    norm = next(channel for channel in result.channels if channel.channel == "raw_grad_norm")
    assert result.passed
    assert norm.verdict.value == "info"
    assert norm.statistics.mean_rel == 1.0
    assert not compare_runs(*runs, Options(tolerances={"raw_grad_norm": 0.5})).passed
