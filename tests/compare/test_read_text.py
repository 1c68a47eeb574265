"""Readers of trainer output: what is a step, what is noise around it."""

import gzip
import math

import numpy as np
import pytest

from eqx_loss.compare import LogError, LogFormat, read_run

from . import logs

LM = logs.curve(60)
MTP = logs.curve(60, seed=1, end=2.3)


def read(tmp_path, content, name="run.log", **kwargs):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_run(path, **kwargs)


def assert_series(run, name, steps, values, rtol):
    series = run.find(name)
    assert series is not None, run.names
    np.testing.assert_array_equal(series.steps, steps)
    np.testing.assert_allclose(series.values, values, rtol=rtol)


def test_megatron_lines_are_read_to_their_printed_digits(tmp_path):
    run = read(tmp_path, logs.megatron_text(LM, MTP))
    assert run.format is LogFormat.MEGATRON
    assert_series(run, "lm loss", np.arange(1, 61), LM, 5e-7)  # %.6E
    assert_series(run, "mtp_1 loss", np.arange(1, 61), MTP, 5e-7)
    assert run.find("learning rate").values[0] == 2.999998e-05
    assert run.find("elapsed time per iteration (ms)").values[0] == 1812.3


def test_the_published_sample_line_of_ling_is_read(tmp_path):
    line = (
        " [2025-09-10 11:22:33] iteration        1/    2000 | consumed samples:          128 | elapsed "
        "time per iteration (ms): 20143.9 | throughput per GPU (TFLOP/s/GPU): 41.5 | learning rate: "
        "2.999998E-05 | global batch size:   128 | lm loss: 2.605958E+00 | z_loss: 1.091659E+01 | mtp_1 "
        "loss: 2.828435E+00 | loss scale: 1.0 | grad norm: 0.258 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |\n"
    )
    run = read(tmp_path, line)
    values = {series.name: series.values[0] for series in run.series}
    assert values["lm loss"] == 2.605958
    assert values["z_loss"] == 10.91659
    assert values["mtp_1 loss"] == 2.828435


def test_maxtext_lines_are_read_to_their_printed_digits(tmp_path):
    run = read(tmp_path, logs.maxtext_text(LM, MTP))
    assert run.format is LogFormat.MAXTEXT
    assert_series(run, "lm_loss", np.arange(60), LM, 5e-7)
    assert_series(run, "raw_mtp_loss", np.arange(60), MTP, 5e-7)
    assert run.find("total_weights").values[0] == 8289372
    assert run.find("nan_iters") is not None


def test_upstream_maxtext_line_ending_in_loss_is_read(tmp_path):
    line = "completed step: 3, seconds: 0.120, TFLOP/s/device: 1.5, total_weights: 512, loss: 10.870\n"
    run = read(tmp_path, line)
    assert run.find("loss").values[0] == 10.870


def test_torchtitan_lines_are_read_through_colours_and_rank_prefixes(tmp_path):
    run = read(tmp_path, logs.torchtitan_text(LM))
    assert run.format is LogFormat.TORCHTITAN
    assert_series(run, "loss", np.arange(1, 61), LM, 5e-6)
    assert run.find("tps").values[0] == 12345


@pytest.mark.parametrize("writer", [logs.megatron_text, logs.maxtext_text, logs.torchtitan_text])
def test_validation_lines_are_no_training_steps(tmp_path, writer):
    run = read(tmp_path, writer(LM))
    for series in run.series:
        assert len(series.steps) <= 60
        assert 9.876 not in series.values
        assert 9.8765 not in series.values
        assert 9.876543 not in series.values


def test_nan_and_infinity_are_read_in_every_spelling(tmp_path):
    text = "".join(
        logs.megatron_line(i + 1, 1.0).replace("1.000000E+00", word) + "\n"
        for i, word in enumerate(["NAN", "nan", "INF", "-INF", "inf"])
    )
    values = read(tmp_path, text).find("lm loss").values
    assert [math.isnan(value) for value in values] == [True, True, False, False, False]
    assert list(values[2:]) == [math.inf, -math.inf, math.inf]


def test_a_skipped_iteration_without_losses_leaves_a_gap(tmp_path):
    text = "\n".join(
        [logs.megatron_line(1, 2.0), logs.megatron_line(2, None), logs.megatron_line(3, 1.5), ""]
    )
    run = read(tmp_path, text)
    np.testing.assert_array_equal(run.find("lm loss").steps, [1, 3])
    np.testing.assert_array_equal(run.find("grad norm").steps, [1, 2, 3])


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_megatron_line_cut_anywhere_gives_no_number_with_missing_digits(tmp_path, cut):
    whole = logs.megatron_line(2, 1.2345678, 2.345678)
    run = read(tmp_path, logs.megatron_line(1, 2.0, 3.0) + "\n" + whole[: len(whole) - 5 * cut])
    for name, value in (("lm loss", 1.234568), ("mtp_1 loss", 2.345678)):
        series = run.find(name)
        assert len(series.steps) == 1 or series.values[1] == value


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_maxtext_line_cut_anywhere_gives_no_number_with_missing_digits(tmp_path, cut):
    whole = logs.maxtext_line(1, 1.234567, 2.345678)
    run = read(tmp_path, logs.maxtext_line(0, 2.0, 3.0) + "\n" + whole[: len(whole) - 11 * cut])
    for name, value in (("lm_loss", 1.234567), ("raw_mtp_loss", 2.345678)):
        series = run.find(name)
        assert len(series.steps) == 1 or series.values[1] == value


def test_torchtitan_last_number_without_line_end_is_left_out(tmp_path):
    run = read(tmp_path, "step: 1  loss: 7.5000  grad_norm: 1.0\nstep: 2  loss: 7.25")
    np.testing.assert_array_equal(run.find("loss").steps, [1])


def test_two_processes_on_one_physical_line_are_two_records(tmp_path):
    both = logs.megatron_line(1, 2.5) + logs.megatron_line(2, 2.25) + "\n"
    np.testing.assert_array_equal(read(tmp_path, both).find("lm loss").values, [2.5, 2.25])
    torn = "completed step: 4, loss: 2.5, lm_loss: 2.4completed step: 5, seconds: 1.0, lm_loss: 2.3, x: 1\n"
    run = read(tmp_path, torn)
    np.testing.assert_array_equal(run.find("lm_loss").steps, [5])
    np.testing.assert_array_equal(run.find("loss").values, [2.5])


def test_pods_printing_the_same_step_are_duplicates_not_restarts(tmp_path):
    lines = [
        f"pod-{pod} | " + logs.maxtext_line(step, LM[step], device_rate=240.0 + pod)
        for step in range(20)
        for pod in range(3)
    ]
    lines[5], lines[7] = lines[7], lines[5]  # a late print
    run = read(tmp_path, "\n".join(lines) + "\n")
    assert_series(run, "lm_loss", np.arange(20), LM[:20], 5e-7)
    assert run.restarts == ()
    assert run.num_duplicates > 0


def test_after_a_restart_the_last_value_of_a_step_wins_and_is_counted(tmp_path):
    second = LM[30:50] + 0.5
    text = (
        logs.megatron_text(LM[:40])
        + "Traceback (most recent call last):\n"
        + logs.megatron_text(second, first=31)
    )
    run = read(tmp_path, text)
    series = run.find("lm loss")
    np.testing.assert_array_equal(series.steps, np.arange(1, 51))
    np.testing.assert_allclose(series.values, np.concatenate([LM[:30], second]), rtol=5e-7)
    assert run.restarts == (31,)
    assert run.num_repeated == 10


def test_steps_wrapped_in_a_collectors_json_are_read(tmp_path):
    lines = [
        f'{{"textPayload": "completed step: {i}, seconds: 1.0, loss: {2.5 - i}", "insertId": "a{i}"}}'
        for i in range(2)
    ]
    run = read(tmp_path, "\n".join(lines) + "\n")
    np.testing.assert_array_equal(run.find("loss").values, [2.5, 1.5])


def test_binary_garbage_and_nul_bytes_around_steps_do_not_matter(tmp_path):
    rng = np.random.default_rng(0)
    garbage = bytes(rng.integers(0, 256, 4000, dtype=np.uint8).tolist())
    text = logs.megatron_text(LM).encode()
    run = read(tmp_path, garbage + b"\n" + text[:5000] + b"\n\0\0\0\xff\xfe\n" + text)
    assert_series(run, "lm loss", np.arange(1, 61), LM, 5e-7)


def test_windows_line_ends_and_utf16_are_read(tmp_path):
    text = logs.maxtext_text(LM).replace("\n", "\r\n")
    assert_series(read(tmp_path, text), "lm_loss", np.arange(60), LM, 5e-7)
    assert_series(read(tmp_path, text.encode("utf-16")), "lm_loss", np.arange(60), LM, 5e-7)


def test_gzip_is_read_even_when_cut_short(tmp_path):
    blob = gzip.compress(logs.megatron_text(LM).encode())
    assert_series(read(tmp_path, blob, "run.log.gz"), "lm loss", np.arange(1, 61), LM, 5e-7)
    cut = read(tmp_path, blob[: len(blob) // 2], "cut.log.gz").find("lm loss")
    assert 1 <= len(cut.steps) < 60
    np.testing.assert_allclose(cut.values, LM[: len(cut.steps)], rtol=5e-7)
    two = read(tmp_path, blob + gzip.compress(logs.megatron_text(LM[:5], first=61).encode()))
    assert two.find("lm loss").steps[-1] == 65


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"  \n\n", "empty"),
        (b"hello\nworld\n", "no training step recognized"),
        (b"\x1f\x8bnot gzip at all", "gzip"),
        (b'{"losses": [{"maxtext_step": 0, "lm_l', "not valid JSON"),
        (b"validation loss at iteration 5 on validation set | lm loss value: 1.0E+00 |", "no training step"),
    ],
)
def test_unusable_files_say_what_is_wrong(tmp_path, content, says):
    with pytest.raises(LogError, match=says):
        read(tmp_path, content)


def test_a_missing_path_and_a_wrong_format_are_errors(tmp_path):
    with pytest.raises(LogError, match="existing file"):
        read_run(tmp_path / "absent.log")
    with pytest.raises(LogError, match="no training step found when read as maxtext"):
        read(tmp_path, logs.megatron_text(LM), log_format=LogFormat.MAXTEXT)
