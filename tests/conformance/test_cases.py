"""The data of the kit: reproducible, derived twice, discriminating, documented."""

import ast
import json

import pytest

from . import kit

CASES = kit.stored_cases()
RUN = kit.load_runner()
TIERS = ("core", "auxiliary", "advanced")


def test_the_index_names_every_case_and_nothing_else():
    index = json.loads((kit.KIT / "kit.json").read_text())
    assert sorted(index["cases"]) == sorted(case["id"] for case in CASES)
    assert [index["kit_version"], index["protocol"]] == [1, RUN.PROTOCOL]
    assert {case["tier"] for case in CASES} == set(TIERS)


def test_the_generator_reproduces_the_files_byte_for_byte(monkeypatch):
    documents = kit.load_derivation("generate", monkeypatch).documents()
    stored = {
        str(path.relative_to(kit.KIT)): path.read_text() for path in (kit.KIT / "cases").rglob("*.json")
    }
    assert {name for name in documents if name != "kit.json"} == set(stored)
    for name, text in stored.items():
        # The last digit of exp and log may differ between NumPy builds; everything else may not.
        assert_close(json.loads(documents[name]), json.loads(text), name)


def assert_close(a, b, path):
    if isinstance(b, dict):
        assert a.keys() == b.keys(), path
        for name in b:
            assert_close(a[name], b[name], f"{path}.{name}")
    elif isinstance(b, list):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_close(x, y, f"{path}[{i}]")
    elif isinstance(b, float):
        assert a == pytest.approx(b, rel=1e-13, abs=1e-15), path
    else:
        assert a == b, path


def test_a_second_derivation_agrees_with_every_answer_and_every_bug(monkeypatch):
    found = kit.load_derivation("rederive", monkeypatch).check(CASES)
    assert {title: differences for title, differences in found.items() if differences} == {}
    assert len(found) == len(CASES) + sum(len(case["known_bugs"]) for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_every_bug_is_told_from_the_right_answer_even_in_float32(case):
    assert case["known_bugs"], "a case without a known bug tests nothing in particular"
    for bug in case["known_bugs"]:
        assert set(bug["values"]) <= set(case["expected"])
        for dtype in case["tolerance"]:
            result = RUN.judge(case, {"outputs": bug["values"], "dtype": dtype})
            assert result.status == "known bug", (bug["name"], dtype, result)
        names = [
            other["name"]
            for other in case["known_bugs"]
            if RUN.judge({**case, "known_bugs": [other]}, {"outputs": bug["values"]}).status == "known bug"
        ]
        assert bug["name"] in names


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_every_case_is_documented_and_is_plain_json(case):
    for field in ("title", "question", "explanation"):
        assert case[field].strip().endswith((".", case[field].strip()[-1]))
        assert len(case[field]) > 10
    assert case["provenance"]["source"].startswith(("https://", "RFC-0032"))
    assert json.loads(json.dumps(case, allow_nan=False)) == case
    assert case["id"].split("/")[0] == case["tier"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_right_answer_passes_in_both_dtypes(case):
    for dtype in case["tolerance"]:
        assert RUN.judge(case, {"outputs": case["expected"], "dtype": dtype}).status == "pass"


@pytest.mark.parametrize("name", ["run.py", *(f"derivation/{stem}.py" for stem in (
    "arithmetic", "plain_core", "plain_auxiliary", "plain_advanced", "bugs_core", "bugs_auxiliary",
    "bugs_advanced", "rederive"))])  # fmt: skip
def test_runner_and_second_derivation_import_the_standard_library_only(name):
    import sys

    siblings = {path.stem for path in (kit.KIT / "derivation").glob("*.py")}
    tree = ast.parse((kit.KIT / name).read_text())
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module]
        for module in modules:
            root = module.split(".")[0]
            assert root in sys.stdlib_module_names or (name != "run.py" and root in siblings), module
            assert root not in ("forms", "core", "auxiliary", "advanced", "generate")
