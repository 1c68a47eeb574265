"""Configuration: strict reading, all problems at once, exact round trip."""

import dataclasses
from pathlib import Path

import pytest

from model import ModelConfig
from train._config import Config, config_warnings
from train._config_load import (
    ConfigError,
    config_from_tree,
    config_to_tree,
    dump_config,
    load_config,
    parse_yaml,
)

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"


def refusal(*overrides: str) -> list[str]:
    """Lines of the refusal of the quickstart with `overrides`, its heading left out."""
    with pytest.raises(ConfigError) as error:
        load_config(QUICKSTART, overrides)
    return [line.strip() for line in str(error.value).splitlines()[1:]] or [str(error.value)]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_loads_and_its_resolved_form_reads_back_equal(path):
    config = load_config(path)
    text = dump_config(config)
    assert config_from_tree(parse_yaml(text, "resolved"), "resolved") == config
    assert list(parse_yaml(text, "resolved")) == [f.name for f in dataclasses.fields(Config)]


def test_sections_are_the_frozen_objects_of_their_packages():
    config = load_config(QUICKSTART)
    assert type(config.model) is ModelConfig
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.seed = 1  # pyright: ignore


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("run.seed=7", ("run", "seed"), 7),
        ("optimizer.schedule.peak=3e-4", ("optimizer", "schedule", "peak"), 3e-4),
        ("optimizer.schedule.peak=1", ("optimizer", "schedule", "peak"), 1.0),
        ("run.folder=no", ("run", "folder"), "no"),
        ("run.folder=2026-11-29", ("run", "folder"), "2026-11-29"),
        ("run.seed=010", ("run", "seed"), 10),
        ("run.seed=1_000", ("run", "seed"), 1000),
        ("model.mtp=null", ("model", "mtp"), None),
        ("mesh.fsdp=2", ("mesh", "fsdp"), 2),
        ("data.pattern=a=b", ("data", "pattern"), "a=b"),
        ("loss.load_balance_scope=sequence", ("loss", "load_balance_scope"), "sequence"),
    ],
)
def test_override_sets_one_value_read_as_yaml_1_2(override, path, value):
    tree = config_to_tree(load_config(QUICKSTART, [override]))
    plain = config_to_tree(load_config(QUICKSTART))
    for name in path[:-1]:
        tree, plain = tree[name], plain[name]
    assert tree.pop(path[-1]) == value
    plain.pop(path[-1])
    assert tree == plain


def test_override_may_create_an_optional_section():
    config = load_config(QUICKSTART, ["model.mtp=null", "model.mtp.num_layers=2"])
    assert config.model.num_mtp_layers == 2


def test_absent_folder_and_schedule_length_are_derived():
    config = load_config(QUICKSTART, ["run.num_steps=77"])
    assert config.run.folder == "runs/quickstart"
    assert config.optimizer.schedule.total_steps == 77
    assert load_config(QUICKSTART, ["optimizer.schedule.total_steps=99"]).optimizer.schedule.total_steps == 99


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layer=3", "model.num_layer: unknown key (value 3); did you mean num_layers?"),
        (
            "batch.micro_batch_size=3",
            "batch.micro_batch_size: unknown key (value 3); did you mean loss.micro_batch_size?",
        ),
        ("zz=1", "zz: unknown key (value 1); valid keys are run, model, loss,"),
        (
            "loss.calculate_per_token_loss='false'",
            'loss.calculate_per_token_loss: must be a valid boolean, got "false"',
        ),
        ("loss.calculate_per_token_loss=0", "loss.calculate_per_token_loss: must be a valid boolean, got 0"),
        ("batch.num_rows=2.0", "batch.num_rows: must be a valid integer, got 2.0"),
        ("run.seed=true", "run.seed: must be a valid integer, got true"),
        ("optimizer.eps='1e-8'", 'optimizer.eps: must be a valid number, got "1e-8"'),
        (
            "model.dtype=float16",
            "model.dtype: must be 'bfloat16', 'float32' or 'float64', got \"float16\"; did you mean bfloat16?",
        ),
        ("data=3", "data: must be a section of keys, got 3"),
        ("run=null", "run: must be a section of keys, got null"),
        (
            "optimizer.decay_rules=[{pattern: a, multiplir: 2}]",
            "optimizer.decay_rules.0.multiplir: unknown key (value 2); did you mean multiplier?",
        ),
    ],
)
def test_refusal_names_path_value_rule_and_nearest_name(override, message):
    assert any(line.startswith(message) for line in refusal(override)), refusal(override)


def test_all_problems_are_reported_at_once():
    lines = refusal("model.num_layer=3", "batch.num_rows=x", "loss.calculate_per_token_loss=1", "data=[]")
    assert [line.split(":")[0] for line in lines] == [
        "model.num_layer",
        "loss.calculate_per_token_loss",
        "batch.num_rows",
        "data",
    ]


def test_a_missing_value_is_named():
    tree = config_to_tree(load_config(QUICKSTART))
    del tree["batch"]["num_rows"], tree["loss"]
    with pytest.raises(
        ConfigError, match=r"loss: is required and missing\n  batch.num_rows: is required and missing"
    ):
        config_from_tree(tree, "x.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "key 'a' is given twice, in lines 1 and 3"),
        ("run:\n  seed: 1\n  seed: 1\n", "key 'seed' is given twice, in lines 2 and 3"),
        ("1: a\n", "a key must be a name, got '1'"),
        ("a: [1\n", "line 2, column 1"),
        ("a: !!python/object:os.system x\n", "could not determine a constructor"),
    ],
)
def test_broken_yaml_is_refused_with_its_line(text, message):
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, "x.yaml")
    assert message in str(error.value)
    assert str(error.value).startswith("x.yaml: line")


@pytest.mark.parametrize("override", ["run.seed", "=3", ".seed=3", "run..seed=1"])
def test_an_override_without_path_or_value_is_refused(override):
    assert "must look like section.key=value" in refusal(override)[0]


def test_an_override_through_a_value_is_refused():
    assert "run.seed is a int, not a section" in refusal("run.seed.x=1")[0]


def test_rules_across_sections_are_checked_together():
    lines = refusal("loss.micro_batch_size=3", "model.vocab_size=20")
    assert [line.split(":")[0] for line in lines] == ["loss.micro_batch_size", "model.vocab_size"]
    assert "must divide the 8 rows of a micro-step" in lines[0]


def test_the_pair_that_no_megatron_run_has_is_warned_of():
    pair = ["loss.calculate_per_token_loss=false", "loss.mtp_per_layer_loss_norm=false"]
    assert [
        "no Megatron run does this" in line for line in config_warnings(load_config(QUICKSTART, pair))
    ] == [True]
    assert (
        config_warnings(
            load_config(
                QUICKSTART, ["loss.mtp_per_layer_loss_norm=false", "loss.calculate_per_token_loss=true"]
            )
        )
        == []
    )
    assert config_warnings(load_config(QUICKSTART)) == []
