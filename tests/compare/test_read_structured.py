"""Readers of JSON Lines, JSON, CSV and TensorBoard."""

import json
import math
import struct

import numpy as np
import pytest

from eqx_loss.compare import LogError, LogFormat, read_run
from eqx_loss.compare._tfevents import masked_crc32c

from . import logs
from .test_read_text import assert_series, read

LM = logs.curve(60)
MTP = logs.curve(60, seed=1, end=2.3)


def test_metrics_jsonl_is_exact(tmp_path):
    run = read(tmp_path, logs.metrics_jsonl(LM, MTP))
    assert run.format is LogFormat.JSONL
    assert_series(run, "learning/lm_loss", np.arange(60), LM, 0)
    assert_series(run, "learning/raw_mtp_loss", np.arange(60), MTP, 0)


def test_jsonl_tolerates_headers_nested_objects_words_for_nan_and_a_cut_last_line(tmp_path):
    lines = [
        '{"kind": "header", "config": {"seed": 1}}',
        '{"step": 0, "scalar": {"learning/lm_loss": 2.5}}',
        '{"step": 1, "scalar": {"learning/lm_loss": NaN}}',
        '{"step": 2, "scalar": {"learning/lm_loss": "Infinity"}}',
        '{"step": 3, "scalar": {"learning/lm_loss": null}}',
        '{"step": 4.5, "scalar": {"learning/lm_loss": 9}}',
        '{"step": true, "scalar": {"learning/lm_loss": 9}}',
        '{"step": 5, "scalar": {"learning/lm_lo',
    ]
    run = read(tmp_path, "\n".join(lines))
    series = run.find("scalar/learning/lm_loss")
    np.testing.assert_array_equal(series.steps, [0, 1, 2])
    assert series.values[0] == 2.5
    assert math.isnan(series.values[1])
    assert series.values[2] == math.inf
    assert run.num_skipped == 1


def test_a_single_jsonl_row_is_a_run_of_one_step(tmp_path):
    run = read(tmp_path, '{"step": 0, "learning/lm_loss": 2.5}\n')
    assert run.format is LogFormat.JSONL
    assert run.find("learning/lm_loss").values[0] == 2.5


def test_reference_json_is_numbered_by_maxtext_step(tmp_path):
    run = read(tmp_path, logs.reference_json(LM, MTP))
    assert run.format is LogFormat.REFERENCE
    assert_series(run, "lm_loss", np.arange(60), LM, 5e-7)
    assert_series(run, "mtp_loss", np.arange(60), MTP, 5e-7)
    bare = read(tmp_path, json.dumps(json.loads(logs.reference_json(LM, MTP))["losses"]))
    assert_series(bare, "lm_loss", np.arange(60), LM, 5e-7)


def test_trainer_state_leaves_out_evaluation_and_summary(tmp_path):
    run = read(tmp_path, logs.trainer_state(LM), "trainer_state.json")
    assert run.format is LogFormat.TRAINER_STATE
    assert_series(run, "loss", np.arange(1, 61), LM, 0)
    assert run.find("train_loss") is None
    assert run.find("eval_loss") is None
    assert_series(read_run(tmp_path), "loss", np.arange(1, 61), LM, 0)  # the folder of a checkpoint


def test_megatron_golden_values_are_read(tmp_path):
    run = read(tmp_path, logs.golden_json(LM))
    assert run.format is LogFormat.GOLDEN
    assert_series(run, "lm loss", np.arange(1, 61), LM, 0)


def test_wandb_panel_export_loses_run_prefix_and_min_max(tmp_path):
    run = read(tmp_path, logs.wandb_csv(LM))
    assert run.format is LogFormat.CSV
    assert run.names == ("learning/lm_loss",)
    assert_series(run, "learning/lm_loss", np.arange(60), LM, 0)


def test_csv_of_two_runs_keeps_the_prefixes(tmp_path):
    run = read(tmp_path, "Step,a - loss,b - loss\n0,1.5,2.5\n1,1.25,\n")
    assert run.names == ("a - loss", "b - loss")
    np.testing.assert_array_equal(run.find("b - loss").steps, [0])


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_separator_bom_and_ragged_rows(tmp_path, delimiter):
    text = "\ufeff" + "\n".join(
        delimiter.join(row) for row in (["_step", "train/loss"], ["1", "2.5"], ["2", "nan"], ["3"])
    )
    run = read(tmp_path, text)
    np.testing.assert_array_equal(run.find("train/loss").steps, [1, 2])
    assert math.isnan(run.find("train/loss").values[1])
    assert run.num_skipped == 1


def test_csv_without_a_step_column_says_so(tmp_path):
    with pytest.raises(LogError, match="step column"):
        read(tmp_path, "epoch,loss\n1,2.0\n", log_format=LogFormat.CSV)


def test_tensorboard_scalars_are_read_from_file_and_folder(tmp_path):
    path = logs.write_events(tmp_path, LM, MTP)
    for source in (path, tmp_path):
        run = read_run(source)
        assert run.format is LogFormat.TENSORBOARD
        assert_series(run, "learning/lm_loss", np.arange(60), LM, 6e-8)  # stored as float32
        assert_series(run, "learning/raw_mtp_loss", np.arange(60), MTP, 6e-8)


def field(number, wire, payload):
    """One protobuf field: varint (0), 64-bit (1), length-delimited (2) or 32-bit (5)."""
    key = varint(number << 3 | wire)
    return key + (varint(len(payload)) + payload if wire == 2 else payload)


def varint(value):
    value &= (1 << 64) - 1
    parts = []
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def record(payload):
    head = struct.pack("<Q", len(payload))
    crcs = [struct.pack("<I", masked_crc32c(part)) for part in (head, payload)]
    return head + crcs[0] + payload + crcs[1]


@pytest.mark.parametrize(
    "tensor",
    [
        field(1, 0, varint(1)) + field(5, 2, struct.pack("<f", 2.5)),  # float_val, as TensorFlow 2 writes
        field(1, 0, varint(1)) + field(4, 2, struct.pack("<f", 2.5)),  # tensor_content
        field(1, 0, varint(2)) + field(6, 2, struct.pack("<d", 2.5)),  # double_val
    ],
)
def test_scalars_stored_as_tensors_are_read(tmp_path, tensor):
    value = field(1, 2, b"lm loss") + field(8, 2, tensor)
    text = field(1, 2, b"notes") + field(8, 2, field(1, 0, varint(7)) + field(8, 2, b"hello"))
    event = field(1, 1, struct.pack("<d", 0.0)) + field(2, 0, varint(7))
    event += field(5, 2, field(1, 2, value) + field(1, 2, text))
    before = field(2, 0, varint(-1)) + field(5, 2, field(1, 2, value))  # a negative step is ten bytes
    run = read(tmp_path, record(field(3, 2, b"brain.Event:2")) + record(before) + record(event), "x.tfevents")
    assert run.names == ("lm loss",)
    np.testing.assert_array_equal(run.find("lm loss").steps, [-1, 7])
    np.testing.assert_array_equal(run.find("lm loss").values, [2.5, 2.5])


def test_the_checksum_is_crc32c():
    # RFC 3720, appendix B.4: 32 bytes of zeros; masked as TFRecord does.
    crc = 0x8A9136AA
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc32c(bytes(32)) == masked


def test_a_cut_or_damaged_event_file_keeps_what_is_whole(tmp_path):
    whole = logs.write_events(tmp_path, LM).read_bytes()
    cut = read(tmp_path, whole[: len(whole) * 2 // 3], "cut.tfevents")
    assert 1 <= len(cut.series[0].steps) < 60
    assert cut.num_skipped == 1
    at = whole.index(b"learning/lm_loss", len(whole) // 2) + 3  # inside a payload
    damaged = read(tmp_path, whole[:at] + b"X" + whole[at + 1 :], "damaged.tfevents")
    assert len(damaged.find("learning/lm_loss").steps) == 59
    assert damaged.num_skipped == 1
    assert damaged.names == ("learning/lm_loss",)


def test_a_folder_of_two_runs_asks_for_one(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        logs.write_events(tmp_path / name, LM[:3])
    with pytest.raises(LogError, match="first, second"):
        read_run(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LogError, match="must hold event files"):
        read_run(tmp_path / "empty")


def test_event_files_of_a_restarted_job_are_joined(tmp_path):
    second = LM[30:] + 0.5
    logs.write_events(tmp_path / "1", LM[:40]).rename(tmp_path / "events.out.tfevents.1.host")
    logs.write_events(tmp_path / "2", second, first=30).rename(tmp_path / "events.out.tfevents.2.host")
    run = read_run(tmp_path)
    assert_series(run, "learning/lm_loss", np.arange(60), np.concatenate([LM[:30], second]), 6e-8)
    assert run.restarts == (30,)
    assert run.num_repeated == 10
