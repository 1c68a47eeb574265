"""The command: exit codes, JSON, JUnit, picture, mapping, messages."""

import json
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from eqx_loss.compare import main

from . import logs

LM = logs.curve(50)
MTP = logs.curve(50, seed=1, end=2.3)
PER_CHANNEL = {
    "first_step_rel", "mean_rel", "max_rel", "drift_per_1k_steps", "first_step_beyond", "verdict", "cause",
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def writer(name, text):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return writer


def test_exit_code_0_within_tolerance(write, capsys):
    assert main([write("a", logs.megatron_text(LM, MTP)), write("b", logs.maxtext_text(LM, MTP))]) == 0
    out = capsys.readouterr().out
    assert out.rstrip().endswith("PASS")
    assert "reference = candidate +1 (expected)" in out


def test_exit_code_1_beyond_tolerance_with_the_cause(write, capsys):
    assert main([write("a", logs.megatron_text(LM)), write("b", logs.maxtext_text(8 * LM))]) == 1
    out = capsys.readouterr().out
    assert out.rstrip().endswith("FAIL")
    assert "constant factor 8" in out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["only_one"],
        ["absent", "absent"],
        ["{a}", "{empty}"],
        ["{a}", "{a}", "--tol", "lm=x"],
        ["{a}", "{a}", "--tol", "lm=-1"],
        ["{a}", "{a}", "--map", "lm"],
        ["{a}", "{a}", "--map", "lm=absent"],
        ["{a}", "{a}", "--channel", "absent"],
        ["{a}", "{a}", "--offset", "x"],
        ["{a}", "{a}", "--min-steps", "0"],
        ["{a}", "{a}", "--plot", "x.unknown"],
    ],
)
def test_exit_code_2_for_unusable_input_with_a_message(write, capsys, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {"a": write("a", logs.megatron_text(LM)), "empty": write("empty", "")}
    assert main([argument.format(**paths) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip()
    assert "Traceback" not in captured.err


def test_json_has_the_documented_fields(write, capsys):
    wrong = MTP.copy()
    wrong[30:] *= 1.01
    code = main(
        [write("a", logs.reference_json(LM, MTP)), write("b", logs.metrics_jsonl(LM, wrong)), "--json"]
    )
    document = json.loads(capsys.readouterr().out)
    assert code == 1
    assert document["verdict"] == "fail"
    assert set(document["channels"]) == {"lm", "mtp"}
    for channel in document["channels"].values():
        assert set(channel) >= PER_CHANNEL
    assert document["channels"]["lm"]["verdict"] == "pass"
    assert document["channels"]["lm"]["cause"] is None
    mtp = document["channels"]["mtp"]
    assert (mtp["verdict"], mtp["first_step_beyond"], mtp["cause_code"]) == ("fail", 30, "divergence")
    np.testing.assert_allclose(mtp["max_rel"], 0.01, rtol=1e-3)


def test_json_stays_valid_with_nan_in_the_logs(write, capsys):
    values = LM.copy()
    values[:] = np.nan
    assert main([write("a", logs.metrics_jsonl(LM)), write("b", logs.metrics_jsonl(values)), "--json"]) == 1
    text = capsys.readouterr().out
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert document["channels"]["lm"]["max_rel"] is None
    assert document["channels"]["lm"]["num_not_finite"] == 50


def test_junit_has_one_case_per_judged_channel(write, tmp_path, capsys):
    junit = tmp_path / "report.xml"
    arguments = [write("a", logs.megatron_text(LM, MTP)), write("b", logs.maxtext_text(LM, 1.02 * MTP))]
    assert main([*arguments, "--junit", str(junit)]) == 1
    suite = ElementTree.fromstring(junit.read_text())
    assert (suite.tag, suite.get("tests"), suite.get("failures")) == ("testsuite", "2", "1")
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert cases["lm"].find("failure") is None
    assert "constant factor 1.02" in cases["mtp"].find("failure").get("message")


def test_junit_reports_an_error_when_nothing_could_be_compared(write, tmp_path, capsys):
    junit = tmp_path / "report.xml"
    assert (
        main([write("a", logs.megatron_text(LM)), write("b", "\x01\x02 no log"), "--junit", str(junit)]) == 2
    )
    suite = ElementTree.fromstring(junit.read_text())
    assert suite.get("errors") == "1"
    assert suite.find("testcase/error") is not None


@pytest.mark.parametrize(("suffix", "head"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_picture_is_written(write, tmp_path, capsys, suffix, head):
    picture = tmp_path / f"parity.{suffix}"
    values = MTP.copy()
    values[5] = np.nan
    arguments = [write("a", logs.megatron_text(LM, MTP)), write("b", logs.maxtext_text(LM, values))]
    main([*arguments, "--plot", str(picture)])
    assert picture.read_bytes().startswith(head)


def test_without_matplotlib_the_message_says_what_to_install(write, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = write("a", logs.megatron_text(LM))
    assert main([path, path, "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert main([path, path]) == 0


@pytest.mark.parametrize("maps", [["lm=my/ref::my/cand"], ["lm=my/ref::", "lm=::my/cand"]])
def test_map_names_channels_of_either_log(write, capsys, maps):
    reference = write("a", logs.wandb_csv(LM).replace("learning/lm_loss", "my/ref"))
    candidate = write("b", logs.wandb_csv(LM).replace("learning/lm_loss", "my/cand"))
    assert main([reference, candidate]) == 2
    assert "--map" in capsys.readouterr().err
    assert main([reference, candidate, *(part for entry in maps for part in ("--map", entry))]) == 0


@pytest.mark.parametrize("entry", ["lm=my/loss", "my/loss=lm"])
def test_map_of_one_name_in_both_logs_in_either_order(write, capsys, entry):
    path = write("a", logs.wandb_csv(LM).replace("learning/lm_loss", "my/loss"))
    assert main([path, path]) == 2
    assert main([path, path, "--map", entry]) == 0
    capsys.readouterr()


def test_map_of_a_channel_of_the_users_own(write, capsys):
    text = logs.wandb_csv(LM).replace("learning/lm_loss", "eval/ppl")
    path = write("a", text)
    assert main([path, path, "--map", "ppl=eval/ppl"]) == 2  # no tolerance, nothing to judge
    assert main([path, path, "--map", "ppl=eval/ppl", "--tol", "ppl=1%"]) == 0


def test_tolerances_are_relative_or_percent(write, capsys):
    paths = [write("a", logs.metrics_jsonl(LM)), write("b", logs.metrics_jsonl(LM * 1.0005))]
    assert main(paths) == 1
    assert main([*paths, "--tol", "lm=0.001", "--first-step-tol", "0.001"]) == 0
    assert main([*paths, "--tol", "lm=0.1%", "--first-step-tol", "0.001"]) == 0
    assert main([*paths, "--tol", "lm=0.001"]) == 1  # the first step is stricter
    capsys.readouterr()


def test_default_tolerances_are_those_of_the_nightly_check(write, capsys):
    """lm 0.02 %, mtp 0.2 %, first step 0.01 %."""
    reference = write("a", logs.metrics_jsonl(LM, MTP))
    for lm_factor, mtp_factor, first, code in [
        (1.00019, 1.0019, 1.00009, 0),
        (1.00021, 1.0, 1.0, 1),
        (1.0, 1.0021, 1.0, 1),
        (1.0, 1.0, 1.00011, 1),
    ]:
        lm, mtp = LM * lm_factor, MTP * mtp_factor
        lm[0], mtp[0] = LM[0] * first, MTP[0] * first
        assert main([reference, write("b", logs.metrics_jsonl(lm, mtp))]) == code
    capsys.readouterr()


def test_formats_can_be_forced(write, capsys):
    path = write("a", logs.megatron_text(LM))
    assert main([path, path, "--reference-format", "megatron", "--candidate-format", "megatron"]) == 0
    assert main([path, path, "--reference-format", "csv"]) == 2
    assert main([path, path, "--reference-format", "nonsense"]) == 2
    assert main([path, path, "--candidate-format", "tensorboard"]) == 2
    capsys.readouterr()


def test_the_module_runs_as_a_command(write):
    root = pathlib.Path(__file__).parents[2]
    path = write("a", logs.megatron_text(LM))
    done = subprocess.run(
        [sys.executable, "-m", "eqx_loss", "compare", path, path, "--json"],
        capture_output=True, text=True, cwd=root, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["channels"]["lm"]["max_rel"] == 0
