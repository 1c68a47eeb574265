"""Synthetic perturbations: the cause must be named."""

import math

import numpy as np
import pytest

from eqx_loss.compare import Signature, Verdict

from . import logs
from .test_align import compare

NUM_STEPS = 200
LM = logs.curve(NUM_STEPS)
Z = 3.5 + 2 * np.exp(-np.arange(NUM_STEPS) / 60) + 0.05 * np.random.default_rng(9).standard_normal(NUM_STEPS)
ROUNDING = 1 + 2e-6 * np.random.default_rng(8).standard_normal(NUM_STEPS)


def lm_of(tmp_path, candidate, *, reference=LM, **series):
    texts = logs.metrics_jsonl(reference, **series), logs.metrics_jsonl(candidate, **series)
    result = compare(tmp_path, *texts)
    return next(channel for channel in result.channels if channel.channel == "lm")


def cause_of(tmp_path, candidate, **kwargs):
    channel = lm_of(tmp_path, candidate, **kwargs)
    assert channel.verdict is Verdict.FAIL
    return channel.cause


def test_equal_curves_have_no_cause(tmp_path):
    channel = lm_of(tmp_path, LM * ROUNDING)
    assert channel.verdict is Verdict.PASS
    assert channel.cause is None


@pytest.mark.parametrize(
    ("factor", "word"), [(8, "8 micro-steps"), (1 / 8, "8 micro-steps"), (1 / 3, "3 micro-steps")]
)
def test_steps_or_ranks_as_a_factor(tmp_path, factor, word):
    cause = cause_of(tmp_path, LM * factor * ROUNDING)
    assert cause.signature is Signature.CONSTANT_FACTOR
    assert "constant factor" in cause.text
    assert word in cause.text


@pytest.mark.parametrize("count", [100, 1024])
def test_a_label_count_as_a_factor(tmp_path, count):
    cause = cause_of(tmp_path, LM * (count - 1) / count * ROUNDING)
    assert cause.signature is Signature.CONSTANT_FACTOR
    assert "label count" in cause.text


def test_bits_instead_of_nats(tmp_path):
    assert "bits" in cause_of(tmp_path, LM / math.log(2)).text


def test_weighted_against_raw_mtp(tmp_path):
    mtp = logs.curve(NUM_STEPS, seed=2, end=2.3)
    reference = logs.reference_json(LM, mtp)
    rows = logs.metrics_jsonl(LM, mtp).replace("learning/raw_mtp_loss", "unrelated")
    result = compare(tmp_path, reference, rows)
    channel = next(channel for channel in result.channels if channel.channel == "mtp")
    assert channel.cause.signature is Signature.CONSTANT_FACTOR
    assert "mtp_loss_scaling_factor" in channel.cause.text
    assert any("learning/mtp_loss" in note for note in channel.notes)


@pytest.mark.parametrize("offset", [0.003, -0.004])
def test_a_constant_offset_of_the_size_of_the_covariance_gap(tmp_path, offset):
    cause = cause_of(tmp_path, LM + offset)
    assert cause.signature is Signature.COVARIANCE_GAP
    assert "per-sample against per-token" in cause.text


def test_a_real_covariance_gap_that_changes_from_batch_to_batch(tmp_path):
    rng = np.random.default_rng(5)
    sample, token = [], []
    for step in range(NUM_STEPS):
        lengths = rng.integers(200, 256, 16)
        row_means = LM[step] * (1 + 0.08 * (lengths - 228) / 28 + 0.02 * rng.standard_normal(16))
        sample.append(row_means.mean())
        token.append((lengths * row_means).sum() / lengths.sum())
    cause = cause_of(tmp_path, np.array(sample), reference=np.array(token))
    assert cause.signature is Signature.COVARIANCE_GAP
    gap = np.array(sample) - np.array(token)
    logged = cause_of(
        tmp_path, np.array(sample), reference=np.array(token), **{"learning/lm_estimator_gap": gap}
    )
    assert logged.signature is Signature.COVARIANCE_GAP
    assert "candidate is normalized per sample" in logged.text


def test_a_z_term_included_is_found_from_the_logged_z(tmp_path):
    cause = cause_of(tmp_path, LM + 1e-3 * Z, **{"learning/moe_z_loss": Z})
    assert cause.signature is Signature.TERM_INCLUDED
    assert "z-term" in cause.text
    assert "included in the candidate" in cause.text
    assert "+0.001 x router_z" in cause.text
    other = cause_of(tmp_path, LM, reference=LM + 1e-4 * 20 * Z, **{"learning/z_loss": 20 * Z})
    assert "included in the reference" in other.text
    assert "lm-head" in other.text


def test_the_total_compared_with_lm_shows_the_mtp_term(tmp_path):
    mtp = logs.curve(NUM_STEPS, seed=2, end=3.0)
    reference = logs.metrics_jsonl(LM, mtp)
    total = logs.wandb_csv(LM + 0.1 * mtp).replace("learning/lm_loss", "train/loss")
    result = compare(tmp_path, reference, total)
    channel = result.channels[0]
    assert channel.channel == "lm"
    assert channel.cause.signature is Signature.TERM_INCLUDED
    assert "MTP" in channel.cause.text
    assert any("may include further loss terms" in note for note in channel.notes)


def test_gathered_logits_summed_again_are_a_log_of_the_ranks(tmp_path):
    cause = cause_of(tmp_path, LM * ROUNDING + math.log(4))
    assert cause.signature is Signature.CONSTANT_OFFSET
    assert "4 replicas" in cause.text


def test_a_large_offset_is_no_covariance_gap(tmp_path):
    assert cause_of(tmp_path, LM + 0.5).signature is Signature.CONSTANT_OFFSET


@pytest.mark.parametrize("begin", [20, 77, 150])
def test_divergence_names_its_first_step(tmp_path, begin):
    rng = np.random.default_rng(begin)
    candidate = LM.copy() * ROUNDING
    candidate[begin:] *= 1 + 0.01 + 0.002 * rng.standard_normal(NUM_STEPS - begin)
    channel = lm_of(tmp_path, candidate)
    assert channel.cause.signature is Signature.DIVERGENCE
    assert f"from step {begin} on" in channel.cause.text
    assert channel.statistics.first_step_beyond == begin


def test_slow_divergence_is_dated_before_it_leaves_the_tolerance(tmp_path):
    candidate = LM * ROUNDING
    candidate[120:] *= 1 + 2e-5 * np.arange(NUM_STEPS - 120)
    channel = lm_of(tmp_path, candidate)
    assert channel.cause.signature is Signature.DIVERGENCE
    begin = int(channel.cause.text.split("from step ")[1].split()[0])
    assert 120 <= begin <= 123
    assert channel.statistics.first_step_beyond > 125


def test_divergence_at_a_restart_says_so(tmp_path):
    second = LM[100:] * 1.02
    text = logs.metrics_jsonl(LM[:110]) + logs.metrics_jsonl(second, first=100)
    result = compare(tmp_path, logs.metrics_jsonl(LM), text)
    channel = result.channels[0]
    assert channel.cause.signature is Signature.DIVERGENCE
    assert "restarts there" in channel.cause.text
    assert any("1 restarts, at steps 100" in note for note in result.notes)


def test_drift_from_the_first_step(tmp_path):
    candidate = LM * ROUNDING * (1 + 1e-5 * np.arange(NUM_STEPS))
    cause = cause_of(tmp_path, candidate)
    assert cause.signature is Signature.DRIFT
    assert "+1.0" in cause.text  # 1e-2 per 1000 steps


def test_other_data_after_the_same_first_batch(tmp_path):
    other = logs.curve(NUM_STEPS, seed=77)
    other[0] = LM[0]
    assert cause_of(tmp_path, other).signature is Signature.DIFFERENT_DATA


def test_other_initial_weights_that_are_forgotten(tmp_path):
    candidate = LM * (1 + 0.05 * np.exp(-np.arange(NUM_STEPS) / 10))
    assert cause_of(tmp_path, candidate).signature is Signature.DIFFERENT_START


def test_nan_from_a_step_on(tmp_path):
    candidate = LM.copy()
    candidate[60:] = np.nan
    channel = lm_of(tmp_path, candidate)
    assert channel.verdict is Verdict.FAIL
    assert channel.cause.signature is Signature.NOT_FINITE
    assert "candidate from step 60" in channel.cause.text
    assert "reference from step 60" in cause_of(tmp_path, LM, reference=candidate).text


def test_single_steps_beyond_tolerance(tmp_path):
    candidate = LM.copy()
    candidate[[50, 120]] *= 1.01
    cause = cause_of(tmp_path, candidate)
    assert cause.signature is Signature.ISOLATED_STEPS
    assert "first at 50" in cause.text


def test_a_learning_rate_that_differs_is_noted(tmp_path):
    lr = np.full(NUM_STEPS, 1e-3)
    other = lr.copy()
    other[40:] = 2e-3
    candidate = LM.copy()
    candidate[41:] *= 1.01
    texts = (
        logs.metrics_jsonl(LM, **{"learning/current_learning_rate": lr}),
        logs.metrics_jsonl(candidate, **{"learning/current_learning_rate": other}),
    )
    channel = compare(tmp_path, *texts).channels[0]
    assert "learning_rate differs from step 40: reference 0.001, candidate 0.002" in channel.notes


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_factor_is_seen_in_very_short_logs(tmp_path, num_steps):
    cause = cause_of(tmp_path, 4 * LM[:num_steps], reference=LM[:num_steps])
    assert cause.signature is Signature.CONSTANT_FACTOR
    assert "4 micro-steps" in cause.text
