"""Cases distilled from public bug reports, and the judge that reads them."""

import json
import pathlib

import pytest

from tests.golden import cases

FILES = sorted((pathlib.Path(__file__).parent / "case_files").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_case_has_the_right_values(path):
    assert cases.judge(path).problem == ""


def _changed(tmp_path, name, change):
    case = json.loads((FILES[0].parent / f"{name}.json").read_text())
    change(case)
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case))
    return path


def test_judge_refuses_a_wrong_number(tmp_path, capsys):
    def change(case):
        case["expected"]["values"]["loss"] *= 1 + 1e-6

    path = _changed(tmp_path, "04_dp_unequal_token_counts", change)
    assert cases.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "loss: relative error 1.00e-06" in printed
    assert printed.endswith("0 passed, 1 failed\n")
    assert path.exists()


def test_judge_names_the_known_fault_whose_number_was_hit(tmp_path):
    def change(case):
        faults = case["expected"]["must_not_equal"]
        # The right answer, listed as a fault: what the judge sees when our code has that fault.
        faults["some_known_bug"] = case["expected"]["values"]["loss"]
        case["expected"]["values"]["loss"] = 99.0

    problem = cases.judge(_changed(tmp_path, "31_mask_applies_to_numerator_and_denominator", change)).problem
    assert "known fault: some_known_bug" in problem


def test_judge_refuses_inputs_that_no_public_function_takes(tmp_path):
    def change(case):
        case["inputs"] = {"phlogiston": [1.0]}

    assert "no answer" in cases.judge(_changed(tmp_path, "08_all_tokens_masked", change)).problem


def test_judge_of_a_missing_folder_exits_2(tmp_path, capsys):
    assert cases.main([str(tmp_path / "none")]) == 2
    assert "holds no case files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"kind": ', "no case file: JSONDecodeError"),
        ("[1]", "no case file: TypeError"),
        ('{"kind": "mtp", "inputs": {}}', "no case file: KeyError: 'expected'"),
        (
            '{"kind": "unheard_of", "inputs": {"z": 1}, "expected": {"values": {"loss": 1}}}',
            "the public API has no answer: loss of kind 'unheard_of'",
        ),
        (
            '{"kind": "mtp", "inputs": {"per_token_xent": ["a"]}, "expected": {"values": {"loss": 1}}}',
            "token_values: ValueError",
        ),
    ],
)
def test_judge_says_why_a_case_cannot_be_judged_and_goes_on(tmp_path, capsys, text, reason):
    (tmp_path / "0_bad.json").write_text(text)
    (tmp_path / "1_good.json").write_text(FILES[0].read_text())
    assert cases.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert reason in printed
    assert printed.endswith("1 passed, 1 failed\n")
