"""The comparison with MaxText, as far as it needs no MaxText: protocol, ratios, refusals, equal works."""

import json
import math

import pytest

from bench import _maxtext_table, _maxtext_works, aot_vs_maxtext, maxtext_child, train_vs_maxtext
from train._aot_report import num_parameters
from train._config_load import load_config

# Counted by MaxText 0.2.5 itself; it leaves out the 4 x 8 entries of the router bias of work a.
MAXTEXT_PARAMETERS = {"a": 8_761_472 + 32, "b": 60_039_680}
SIZE = {"tokens": 100, "model_flops": 1e9}


def turn(seconds, cpu_seconds=1.0, peak_bytes=100):
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes, "loss": 1.0}


def first(seconds):
    return {
        "num_parameters": 7,
        "seconds_to_first_step": seconds,
        "cpu_seconds_to_first_step": seconds,
        "loss": 2.0,
    }


def case():
    steps = {
        "ours": [turn(1.0, 1.0), turn(10.0, 1.0), turn(3.0, 1.0, 60)],
        "maxtext": [turn(2.0, 2.0), turn(30.0, 2.0), turn(12.0, 2.0)],
    }
    firsts = {"ours": first(4.0), "maxtext": first(10.0)}
    return _maxtext_table.summary("a", "float32", firsts, steps, [2e9, 2e9, 2e9], SIZE)


def test_a_turn_travels_from_child_to_parent():
    said = []
    turns = maxtext_child.Turns(said.append, lambda: "go\n")
    turns.facts["num_parameters"] = 5
    turns.wait()
    read = train_vs_maxtext.read_turn(said[0])
    assert read is not None
    assert read["num_parameters"] == 5
    assert 0 <= read["cpu_seconds"] <= read["total_cpu_seconds"]
    assert read["peak_bytes"] > 2**20


def test_a_child_ends_when_the_parent_does_not_say_go(monkeypatch):
    ended = []
    monkeypatch.setattr(maxtext_child.os, "_exit", ended.append)
    maxtext_child.Turns(lambda text: None, lambda: "").wait()
    assert ended == [0]


@pytest.mark.parametrize("line", ["", "completed step: 0\n"])
def test_other_lines_are_no_turns(line):
    assert train_vs_maxtext.read_turn(line) is None


def test_ratio_of_steps_is_the_median_over_pairs_of_turns():
    # Pairs: 2, 3 and 4; the ratio of the medians would be 12 / 3 = 4.
    assert case()["ratios"]["tokens_per_second"] == 3


def test_share_of_the_product_rate_is_model_flops_over_seconds_and_rate():
    # 1e9 FLOPs at 2e9 a second are 0.5 s; turns took 1, 10 and 3 s.
    assert case()["ours"]["product_rate_share"] == pytest.approx(0.5 / 3)


def test_peak_memory_is_that_of_the_last_step():
    assert case()["ratios"]["peak_bytes"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("name", "ratio", "reached"),
    [
        ("tokens_per_second", 1.5, True),
        ("tokens_per_second", 1.4, False),
        ("seconds_to_first_step", 0.5, True),
        ("seconds_to_first_step", 0.6, False),
        ("peak_bytes", 0.7, True),
        ("peak_bytes", 0.8, False),
    ],
)
def test_reach_is_a_least_for_speed_and_a_most_for_cost(name, ratio, reached):
    assert _maxtext_table.reaches(name, ratio) is reached


def test_table_marks_what_is_reached():
    text = _maxtext_table.table([case()])
    assert "| a, float32 | tokens/s | 33 | 8 | 3.00 | >= 1.5 | yes |" in text
    assert "| a, float32 | to first step, s | 4.0 | 10.0 | 0.40 | <= 0.5 | yes |" in text


def test_cases_are_written_as_they_finish(tmp_path):
    _maxtext_table.write([case()], str(tmp_path / "out.json"), str(tmp_path / "out.csv"))
    assert json.loads((tmp_path / "out.json").read_text())["cases"][0]["work"] == "a"
    assert "a,float32,peak_bytes,60,100,0.6" in (tmp_path / "out.csv").read_text()


@pytest.mark.parametrize("script", [train_vs_maxtext, aot_vs_maxtext])
@pytest.mark.parametrize("arguments", [[], ["--maxtext-python", "/nowhere/python"]])
def test_without_an_environment_the_scripts_say_how_to_make_one(script, arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as error:
        script.main()
    assert error.value.code == 2
    assert "maxtext[tpu]==0.2.5" in capsys.readouterr().err


def test_changes_replace_settings_of_the_same_name():
    changed = _maxtext_works.replace_settings(["steps=1", "dtype=float32"], ["dtype=bfloat16", "x=1"])
    assert changed == ["steps=1", "dtype=bfloat16", "x=1"]


@pytest.mark.parametrize("work", ["a", "b"])
def test_works_have_as_many_parameters_as_in_maxtext(work):
    assert num_parameters(train_vs_maxtext.load_work(work, "float32")) == MAXTEXT_PARAMETERS[work]


@pytest.mark.parametrize("name", sorted(_maxtext_works.COMPILED))
def test_compiled_cases_have_configs(name):
    case = _maxtext_works.COMPILED[name]
    config = load_config(_maxtext_works.CONFIGS / f"{case.config}.yaml", case.changes)
    settings = dict(s.split("=") for s in case.settings)
    num_devices = math.prod(int(size) for size in case.topology.split(":")[1].split("x"))
    assert case.their_topology == f"v5p-{2 * num_devices}"
    assert config.batch.num_rows == num_devices * int(settings["per_device_batch_size"])
    assert config.batch.num_positions == int(settings["max_target_length"])
    assert config.model.num_mtp_layers == int(settings.get("mtp_num_layers", 0))


def test_memory_is_the_peak_or_all_arrays_together_and_code():
    memory = dict.fromkeys(aot_vs_maxtext._MEMORY, 0) | {
        "argument_size_in_bytes": 10,
        "output_size_in_bytes": 11,
        "alias_size_in_bytes": 9,
        "temp_size_in_bytes": 5,
        "generated_code_size_in_bytes": 1,
    }
    assert aot_vs_maxtext.memory_bytes(memory) == 18
    assert aot_vs_maxtext.memory_bytes(memory | {"peak_memory_in_bytes": 20}) == 21
    assert aot_vs_maxtext.memory_bytes(memory | {"peak_memory_in_bytes": 15}) == 16


def test_a_side_that_failed_has_no_ratio_and_says_why():
    ours = {"failure": "out of memory"}
    assert aot_vs_maxtext.ratios(ours, {}) == {}
    text = aot_vs_maxtext.table({"case": "llama3-8b", "topology": "v5p:2x2x1", "ours": ours})
    assert "ours did not compile: out of memory" in text


PROGRAM = """HloModule m
ENTRY %main (p: f32[8,4], q: f32[4,2]) -> f32[8,2] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[4,2]{1,0} parameter(1)
  ROOT %d = f32[8,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_both_sides_are_counted_from_the_text_of_their_program():
    facts = {"memory": dict.fromkeys(aot_vs_maxtext._MEMORY, 1), "mesh": {"fsdp": 4}}
    cost = aot_vs_maxtext.cost_of(PROGRAM, facts)
    assert cost["flops"] == 2 * 8 * 4 * 2
    assert cost["memory_bytes"] == 2
