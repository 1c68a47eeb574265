"""The runner: judging, adapters as programs and callables, crashes, reports, exit codes."""

import json
import math
import subprocess
import sys

import pytest

from . import kit

RUN = kit.load_runner()
CASE = {
    "id": "core/toy",
    "task": "toy",
    "inputs": {"x": [1, "nan"]},
    "expected": {"loss": 2.0, "grad": [1.0, 0.0], "note": "nan"},
    "tolerance": {"float64": {"rtol": 1e-9, "atol": 1e-12}, "float32": {"rtol": 1e-5, "atol": 1e-6}},
    "known_bugs": [{"name": "doubled", "values": {"loss": 4.0}}, {"name": "nan", "values": {"loss": "nan"}}],
}
GOOD = {"loss": 2.0, "grad": [1.0, 0.0], "note": math.nan}


@pytest.mark.parametrize(
    ("reply", "status", "detail"),
    [
        ({"outputs": GOOD}, "pass", ""),
        ({"outputs": {**GOOD, "loss": 2.0 + 1e-10}}, "pass", ""),
        ({"outputs": {**GOOD, "loss": 2.0 + 1e-6}}, "fail", "loss: expected 2.0"),
        ({"outputs": {**GOOD, "loss": 2.0 + 1e-6}, "dtype": "float32"}, "pass", ""),
        ({"outputs": {"loss": 2}}, "partial", "without grad, note"),
        ({"outputs": {**GOOD, "loss": 4.0}}, "known bug", "doubled"),
        ({"outputs": {**GOOD, "loss": "NaN"}}, "known bug", "nan"),
        ({"outputs": {"grad": [2.0, 0.0]}}, "fail", "grad[0]"),
        ({"outputs": {**GOOD, "grad": [1.0]}}, "fail", "length must be 2, got 1"),
        ({"outputs": {**GOOD, "grad": 1.0}}, "fail", "no list"),
        ({"outputs": {**GOOD, "note": 0.0}}, "fail", "note"),
        ({"outputs": {**GOOD, "loss": None}}, "fail", "expected 2.0, got None"),
        ({"outputs": {}}, "error", "must hold some of"),
        ({"outputs": [1]}, "error", "must hold some of"),
        ({}, "error", "must hold some of"),
        ([], "error", "JSON object"),
        ({"outputs": GOOD, "dtype": "float8"}, "error", "float8"),
        ({"skip": "not here"}, "skip", "not here"),
        ({"error": "boom"}, "error", "boom"),
    ],
)
def test_judging_of_replies(reply, status, detail):
    result = RUN.judge(CASE, reply)
    assert (result.case, result.status) == ("core/toy", status)
    assert detail in result.detail


def test_an_adapter_never_sees_the_answer():
    case = RUN.load_cases()[0]
    seen = RUN.request(case)
    assert set(seen) == {"protocol", "id", "task", "inputs", "wants"}
    assert seen["wants"] == sorted(case["expected"])


def test_a_callable_may_return_outputs_or_a_reply_or_raise():
    def function(request):
        if request["id"] == "b":
            raise RuntimeError("broken")
        return GOOD if request["id"] == "a" else {"skip": "no"}

    results = RUN.run_callable(function, [{**CASE, "id": name} for name in "abc"])
    assert [result.status for result in results] == ["pass", "error", "skip"]
    assert results[1].detail == "RuntimeError: broken"


ADAPTER = """
import json, sys, time
for line in sys.stdin:
    case = json.loads(line)
    number = case["inputs"]["number"]
    print("noise on stdout")
    print(json.dumps({"id": "another", "outputs": {"loss": 0}}))
    if number == 1:
        sys.exit(3)
    if number == 3:
        time.sleep(60)
    print(json.dumps({"id": case["id"], "outputs": {"loss": float(number)}}), flush=True)
"""


def test_a_program_is_restarted_after_a_crash_and_after_a_timeout(tmp_path, capfd):
    path = tmp_path / "adapter.py"
    path.write_text(ADAPTER)
    cases = [
        {**CASE, "id": f"c{n}", "inputs": {"number": n}, "expected": {"loss": float(n)}} for n in range(5)
    ]
    results = RUN.run_command(f"{sys.executable} {path}", cases, timeout=5.0)
    assert [result.status for result in results] == ["pass", "error", "pass", "error", "pass"]
    assert "exit code 3" in results[1].detail
    assert "no reply within 5 s" in results[3].detail
    assert "noise on stdout" in capfd.readouterr().err


def test_a_program_that_cannot_start_is_a_usage_error(capsys):
    assert RUN.main(["--adapter", "/no/such/program"]) == 2
    assert "can be started" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["--tier", "none"], ["--callable", "x"], ["--callable", "no_such_module:f"], ["--case", "no such case"],
     ["--callable", "json:no_such_function"]],
)  # fmt: skip
def test_unusable_arguments_give_exit_code_2(arguments, capsys):
    full = (
        arguments if not arguments or arguments[0] != "--case" else [*arguments, "--callable", "json:loads"]
    )
    assert RUN.main(full) == 2
    assert capsys.readouterr().err


def test_exit_codes_follow_the_worst_result(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "import json\ndef right(request):\n    case = json.load(open(CASES + '/' + request['id'] + "
        "'.json'))\n    return case['expected']\ndef buggy(request):\n    case = json.load(open(CASES + "
        "'/' + request['id'] + '.json'))\n    return {**case['expected'], "
        "**case['known_bugs'][0]['values']}\ndef none(request):\n    return {'skip': 'nothing'}\nCASES = "
        f"{str(kit.KIT / 'cases')!r}\n"
    )
    assert RUN.main(["--callable", f"{path}:right"]) == 0
    assert "47 pass" in capsys.readouterr().out
    assert RUN.main(["--callable", f"{path}:buggy", "--tier", "core"]) == 1
    out = capsys.readouterr().out
    assert "known bug: mean_of_micro_batch_means" in out
    assert "19 known bug" in out
    assert RUN.main(["--callable", f"{path}:none"]) == 2
    assert "47 skipped: nothing" in capsys.readouterr().out


def test_json_output_and_list(tmp_path, capsys):
    adapter = str(kit.KIT / "adapters" / "numpy_adapter.py")
    assert RUN.main(["--callable", f"{adapter}:answer", "--tier", "core", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)[f"{adapter}:answer"]
    assert {"case": "core/token_mean", "status": "pass", "detail": ""} in results
    assert RUN.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 47


LONELY_ADAPTER = """
import sys
sys.path.insert(0, "kit")
import run

def answer(case):
    if case["task"] != "logged_ratio":
        return {"skip": "one task"}
    return {"logged": sum(case["inputs"]["sum_by_rank"]) / sum(case["inputs"]["count_by_rank"])}

run.serve(answer)
"""


def test_the_folder_works_alone_without_any_package(tmp_path):
    """A copy of runner and cases, an isolated interpreter, an adapter of the standard library."""
    import shutil

    shutil.copytree(
        kit.KIT, tmp_path / "kit", ignore=shutil.ignore_patterns("derivation", "adapters", "__pycache__")
    )
    (tmp_path / "adapter.py").write_text(LONELY_ADAPTER)
    command = [sys.executable, "-I", "-S", "kit/run.py", "--tier", "advanced"]
    done = subprocess.run(
        [*command, "--adapter", f"{sys.executable} -S adapter.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 pass, 14 skip" in done.stdout
