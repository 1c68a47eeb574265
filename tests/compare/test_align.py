"""Which step is which: numbering rules, offsets found and given, gaps."""

import numpy as np
import pytest

from eqx_loss.compare import LogError, Options, Signature, Verdict, compare_runs, read_run

from . import logs

LM = logs.curve(120)
MTP = logs.curve(120, seed=1, end=2.3)


def compare(tmp_path, reference, candidate, **options):
    paths = []
    for name, text in (("reference", reference), ("candidate", candidate)):
        path = tmp_path / name
        path.write_text(text)
        paths.append(path)
    return compare_runs(read_run(paths[0]), read_run(paths[1]), Options(**options))


def test_megatron_iteration_one_is_maxtext_step_zero(tmp_path):
    result = compare(tmp_path, logs.megatron_text(LM, MTP), logs.maxtext_text(LM, MTP))
    assert result.alignment.offset == 1
    assert result.alignment.source == "expected"
    assert result.passed
    assert [channel.statistics.num_steps for channel in result.channels[:2]] == [120, 120]


def test_our_trainer_counts_steps_done(tmp_path):
    ours = logs.metrics_jsonl(LM, MTP, first=1, **{"learning/objective": LM + 0.3})
    megatron = compare(tmp_path, logs.megatron_text(LM, MTP), ours)
    assert (megatron.alignment.offset, megatron.alignment.source) == (0, "expected")
    reference = compare(tmp_path, logs.reference_json(LM, MTP), ours)
    assert (reference.alignment.offset, reference.alignment.source) == (-1, "expected")
    assert megatron.passed
    assert reference.passed
    assert reference.channels[0].statistics.num_steps == 120


def test_other_offset_between_trainers_is_found(tmp_path):
    # The fork's reference run: Megatron iteration = MaxText step + 2.
    result = compare(tmp_path, logs.megatron_text(LM, first=2), logs.maxtext_text(LM))
    assert (result.alignment.offset, result.alignment.source) == (2, "found")
    assert result.passed
    assert result.channels[0].statistics.num_steps == 120


def test_reference_json_matches_metrics_jsonl_without_offset(tmp_path):
    result = compare(tmp_path, logs.reference_json(LM, MTP), logs.metrics_jsonl(LM, MTP))
    assert (result.alignment.offset, result.alignment.source) == (0, "expected")
    assert [channel.channel for channel in result.channels[:2]] == ["lm", "mtp"]
    assert result.passed


def test_numbering_that_begins_elsewhere_is_aligned_by_value(tmp_path):
    result = compare(tmp_path, logs.metrics_jsonl(LM, first=1), logs.metrics_jsonl(LM))
    assert (result.alignment.offset, result.alignment.source) == (1, "found")
    assert result.passed
    assert result.channels[0].cause.signature is Signature.STEP_SHIFT  # said, though it passes


def test_logs_without_common_numbers_are_put_together_at_their_beginning(tmp_path):
    result = compare(tmp_path, logs.wandb_csv(LM, first=5000), logs.wandb_csv(LM))
    assert result.alignment.offset == 5000
    assert result.passed


@pytest.mark.parametrize("shift", [1, -1, 2])
def test_a_shifted_curve_under_the_same_numbers_fails_and_is_named(tmp_path, shift):
    shifted = LM[shift:] if shift > 0 else np.concatenate([LM[:1] + 0.3] * -shift + [LM[:shift]])
    result = compare(tmp_path, logs.metrics_jsonl(LM), logs.metrics_jsonl(shifted))
    assert result.alignment.offset == 0
    channel = result.channels[0]
    assert channel.verdict is Verdict.FAIL
    assert channel.cause.signature is Signature.STEP_SHIFT
    assert f"{shift:+d}" in channel.cause.text


def test_a_given_offset_is_used_as_it_is(tmp_path):
    reference, candidate = logs.metrics_jsonl(LM), logs.metrics_jsonl(LM[1:])
    assert compare(tmp_path, reference, candidate, offset=1).passed
    wrong = compare(tmp_path, reference, candidate, offset=3)
    assert (wrong.alignment.offset, wrong.alignment.source) == (3, "given")
    assert wrong.channels[0].cause.signature is Signature.STEP_SHIFT
    with pytest.raises(LogError, match="share steps"):
        compare(tmp_path, reference, candidate, offset=1000)


def test_offset_is_found_under_a_constant_factor_and_a_late_divergence(tmp_path):
    changed = 0.125 * LM
    changed[90:] *= 1.1
    result = compare(tmp_path, logs.megatron_text(LM, first=3), logs.maxtext_text(changed))
    assert result.alignment.offset == 3


def test_gaps_are_left_out_and_said(tmp_path):
    rows = logs.metrics_jsonl(LM).splitlines()
    gappy = "\n".join(row for i, row in enumerate(rows) if i % 3) + "\n"
    result = compare(tmp_path, logs.metrics_jsonl(LM), gappy)
    assert result.passed
    assert result.channels[0].statistics.num_steps == 80
    assert any("80 of the reference's 120 steps" in note for note in result.notes)


def test_too_few_common_steps_fail_when_a_minimum_is_set(tmp_path):
    result = compare(tmp_path, logs.metrics_jsonl(LM), logs.metrics_jsonl(LM[:20]), min_steps=100)
    assert not result.passed
    assert any("only 20 common steps" in note for note in result.channels[0].notes)


def test_first_and_last_step_bound_the_comparison(tmp_path):
    changed = LM.copy()
    changed[:10] += 1
    changed[100:] += 1
    texts = logs.metrics_jsonl(LM), logs.metrics_jsonl(changed)
    assert not compare(tmp_path, *texts).passed
    bounded = compare(tmp_path, *texts, first_step=10, last_step=99)
    assert bounded.passed
    assert (bounded.channels[0].statistics.first_step, bounded.channels[0].statistics.last_step) == (10, 99)
    with pytest.raises(LogError, match="no common step is left"):
        compare(tmp_path, *texts, first_step=500)


def test_interval_means_are_compared_with_the_mean_of_the_denser_log(tmp_path):
    means = [logs.megatron_line(10 * (i + 1), LM[10 * i : 10 * i + 10].mean()) for i in range(12)]
    texts = "\n".join(means) + "\n", logs.maxtext_text(LM)
    assert not compare(tmp_path, *texts, offset=1).passed
    result = compare(tmp_path, *texts, offset=1, average=True)
    assert result.passed
    assert result.channels[0].statistics.num_steps == 12
    holed = "".join(line for line in texts[1].splitlines(keepends=True) if "completed step: 25," not in line)
    without = compare(tmp_path, texts[0], holed, offset=1, average=True)
    assert without.passed  # an interval with a step missing has no mean
    assert without.channels[0].statistics.num_steps == 11
