"""Logs that try to pass unjudged, or to break the reader."""

import json

import numpy as np
import pytest

from eqx_loss.compare import main

from .logs import curve, maxtext_text, megatron_line, megatron_text, metrics_jsonl

LM, MTP = curve(40, noise=0.1), curve(40, seed=1, noise=0.1)
NOTHING = np.full(40, np.nan)


@pytest.fixture
def judge(tmp_path, capsys):
    """Exit code, parsed JSON (None without) and stderr of a comparison of two texts."""

    def run(reference, candidate, *options):
        paths = [tmp_path / "reference", tmp_path / "candidate"]
        for path, text in zip(paths, (reference, candidate), strict=True):
            path.write_text(text)
        code = main([*map(str, paths), "--json", *options])
        output = capsys.readouterr()
        return code, json.loads(output.out) if output.out else None, output.err

    return run


def test_a_channel_that_is_nan_in_both_logs_fails(judge):
    code, found, _ = judge(megatron_text(NOTHING, MTP), maxtext_text(NOTHING, MTP))
    assert code == 1
    assert found["channels"]["lm"]["verdict"] == "fail"
    assert "40 of 40 steps are finite in neither log and show nothing" in found["channels"]["lm"]["notes"]
    assert found["channels"]["mtp"]["verdict"] == "pass"


def test_single_steps_that_are_nan_in_both_logs_are_said(judge):
    lm = LM.copy()
    lm[7] = np.nan
    code, found, _ = judge(megatron_text(lm), maxtext_text(lm))
    assert code == 0
    assert "1 of 40 steps are finite in neither log and show nothing" in found["channels"]["lm"]["notes"]


def test_a_channel_that_vanished_from_one_log_is_said(judge):
    code, found, _ = judge(megatron_text(LM, MTP), metrics_jsonl(LM))
    assert code == 0
    assert "mtp: only in the reference, not compared" in found["notes"]


def test_an_asked_tolerance_for_a_channel_that_is_not_compared_is_an_error(judge):
    code, _, error = judge(megatron_text(LM, MTP), metrics_jsonl(LM), "--tol", "mtp=0.002")
    assert code == 2
    assert "--tol must name compared channels, got mtp; compared: lm" in error


def test_a_step_beyond_any_counter_is_an_unreadable_record(judge):
    text = megatron_text(LM).replace("iteration        5/", "iteration 99999999999999999999999/")
    code, found, _ = judge(text, maxtext_text(LM))
    assert code == 0
    assert "reference: 1 unreadable records left out (cut short or damaged)" in found["notes"]
    code, _, error = judge('{"step": 1e300, "loss": 1.0}\n' * 2, maxtext_text(LM))
    assert code == 2
    assert "no training step" in error


def test_json_lines_without_a_step_number_are_not_called_broken_json(judge):
    code, _, error = judge('{"step": "a", "loss": 1}\n{"step": "b", "loss": 2}\n', maxtext_text(LM))
    assert code == 2
    assert "no training step recognized" in error


def test_a_line_broken_by_another_process_gives_no_foreign_number(judge):
    broken = []
    for i, value in enumerate(LM):
        mine, other = megatron_line(i + 1, value), megatron_line(i + 1, value)
        cut = mine.index("lm loss:") + 10  # inside the number
        broken.append(mine[:cut] + other + "\n" + mine[cut:])
    code, found, _ = judge("\n".join(broken) + "\n", maxtext_text(LM))
    assert code == 0
    assert found["channels"]["lm"]["num_steps"] == 40


def test_ranks_with_prefixes_columns_nobody_knows_and_windows_line_ends(judge):
    lines = (
        megatron_text(LM).replace("| loss scale", "| foo bar: 12.0 | weird: abc | loss scale").splitlines()
    )
    text = "".join(f"[default{rank}]:{line}\r\n" for line in lines for rank in range(3))
    code, found, _ = judge(text, maxtext_text(LM).replace("\n", "\r\n"))
    assert code == 0
    assert found["channels"]["lm"]["num_steps"] == 40


def test_a_long_log_is_read_once(judge, monkeypatch):
    """Recognizing the format keeps what it read: a log of 100 000 lines is read by each parser once."""
    from eqx_loss.compare import _text

    calls = []
    bodies = _text._bodies
    monkeypatch.setattr(_text, "_bodies", lambda *given: calls.append(1) or bodies(*given))
    assert judge(megatron_text(LM), maxtext_text(LM))[0] == 0
    assert len(calls) == 6  # two logs, three text formats
