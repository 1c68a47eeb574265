"""What the checkpoint commands refuse: one clear line each, exit code 2, and nothing written."""

import errno
import fcntl
import json
import pathlib
import pickle
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model import generate
from model.hf.__main__ import main
from model.hf._shard_writer import ShardWriter

SOURCE = pathlib.Path(__file__).parents[1] / "golden" / "ling3" / "data" / "g2_base"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """A good checkpoint, to be broken."""
    target = tmp_path / "hf"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SOURCE / name, target / name)
    return target


def _refusal(arguments, capsys) -> list[str]:
    """Lines on standard error of a command that must end with exit code 2 and write nothing on standard output."""
    assert main([str(x) for x in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()


def _import(folder, capsys) -> list[str]:
    target = folder.parent / "ours"
    lines = _refusal(["import", folder, target, "--quiet"], capsys)
    assert not target.exists()
    return lines


def _shard(folder):
    """Two shards and their index, in place of the single file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, file in enumerate(("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")):
        save_file({name: tensors[name] for name in names[part::2]}, folder / file)
        weight_map |= dict.fromkeys(names[part::2], file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_paths_that_are_no_checkpoint_are_named(folder, capsys, tmp_path):
    assert _import(tmp_path / "nowhere", capsys)[0] == f"{tmp_path / 'nowhere'}: no such folder"
    assert "is a file; name the folder" in _import(folder / "model.safetensors", capsys)[0]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert _import(empty, capsys)[0] == f"{empty}: holds no .safetensors file"
    (folder / "config.json").unlink()
    assert "config.json: missing; a checkpoint folder holds it" in _import(folder, capsys)[0]


def test_target_that_is_a_file_is_refused(folder, capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file; name a folder to write" in _refusal(["import", folder, tmp_path / "file"], capsys)[0]
    assert "Not a directory" in _refusal(["import", folder, tmp_path / "file" / "x"], capsys)[0]
    assert (tmp_path / "file").read_text() == "mine"


def test_what_a_killed_import_left_is_removed_and_named(folder, capsys, tmp_path):
    target = tmp_path / "ours"
    target.mkdir()
    for name in ("model.safetensors.partial", "model-00001-of-00002.safetensors.partial", "mine.partial"):
        (target / name).write_bytes(b"x" * 10**6)
    assert main(["import", str(folder), str(target)]) == 0
    assert "left: model-00001-of-00002.safetensors.partial, 2 in all" in capsys.readouterr().err
    assert {p.name for p in target.iterdir()} == {"model.json", "model.safetensors", "mine.partial"}
    assert (target / "model.safetensors").stat().st_size < 10**6
    assert len(load_file(target / "model.safetensors")) > 0


@pytest.mark.parametrize("name", ["model.safetensors.partial", "model-00001-of-00002.safetensors.partial"])
def test_folder_that_another_process_writes_to_is_left_alone(name, folder, capsys, tmp_path):
    target = tmp_path / "ours"
    target.mkdir()
    with (target / name).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b"half")
        file.flush()
        assert "another process is writing it" in _refusal(["import", folder, target, "--quiet"], capsys)[0]
        assert [p.name for p in target.iterdir()] == [name]
        assert (target / name).read_bytes() == b"half"


def test_full_disk_leaves_nothing_behind(folder, capsys, tmp_path, monkeypatch):
    def write(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "write", write)
    assert "No space left" in _refusal(["import", folder, tmp_path / "ours", "--quiet"], capsys)[0]
    assert list((tmp_path / "ours").iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", INDEX, "model.json", "a.safetensors", "pytorch_model.bin"])
def test_folder_with_parts_of_a_checkpoint_is_not_written_to(name, folder, capsys, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / name).write_text("mine")
    assert f"{name}: is there already" in _refusal(["import", folder, target], capsys)[0]
    assert [p.name for p in target.iterdir()] == [name]
    assert (target / name).read_text() == "mine"


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_shard_size_must_be_a_positive_number(size, folder, capsys, tmp_path):
    arguments = ["import", folder, tmp_path / "ours", f"--max-shard-gb={size}"]
    assert "--max-shard-gb must be positive and finite" in _refusal(arguments, capsys)[0]


def test_truncated_shard_is_named(folder, capsys):
    _shard(folder)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])  # the header is whole, the numbers are not
    assert _import(folder, capsys)[0].startswith(f"{file.name}: damaged or not safetensors")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": ["x"], "b": 3}}', "is not a .safetensors file of this folder"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "is not a .safetensors file of this folder"),
    ],
)
def test_damaged_index_is_named(text, message, folder, capsys):
    (folder / INDEX).write_text(text)
    lines = _import(folder, capsys)
    assert lines[0].startswith(INDEX)
    assert message in lines[0]


def test_tensor_of_the_index_that_no_shard_holds_is_named(folder, capsys):
    _shard(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.lost.weight"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    assert _import(folder, capsys)[0] == f"model.lost.weight: listed in {INDEX} but in no shard"


@pytest.mark.parametrize("text", ["{", "[1]", "\xff\xfe", "[" * 100_000])
def test_damaged_config_is_named(text, folder, capsys):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert _import(folder, capsys)[0].startswith("config.json: ")


def test_tensor_of_the_other_mixer_does_not_change_what_a_layer_is(folder, capsys):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.attention.A_log"]  # a KDA layer
    tensors["model.layers.1.attention.b_proj.weight"] = np.zeros((2, 24), np.float32)  # an MLA layer
    save_file(tensors, folder / "model.safetensors")
    assert _import(folder, capsys) == [
        "model.layers.0.attention.A_log: missing, expected [2]",
        "model.layers.1.attention.b_proj.weight: extra, [2, 24]; config.json describes no such tensor",
        "2 problems",
    ]


def test_single_file_beside_an_index_that_does_not_list_it_is_refused(folder, capsys):
    whole = (folder / "model.safetensors").read_bytes()
    _shard(folder)
    (folder / "model.safetensors").write_bytes(whole)
    assert "model.safetensors: is there beside model.safetensors.index.json" in _import(folder, capsys)[0]


def test_other_architectures_are_refused_by_name(folder, capsys):
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "model_type must be one of" in _import(folder, capsys)[0]
    assert "got 'llama'" in main_error(folder, capsys)


def main_error(folder, capsys) -> str:
    """What `generate` says of a folder it cannot read."""
    assert generate.main([str(folder), "--ids", "1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_two_spellings_of_one_tensor_are_refused(folder, capsys):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.word_embeddings.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    (line, count) = _import(folder, capsys)
    assert "is another spelling of" in line
    assert "model.embed_tokens.weight" in line
    assert "model.word_embeddings.weight" in line
    assert count == "1 problem"


def test_pickle_named_safetensors_and_pickle_paths_are_never_opened(folder, capsys):
    class Bomb:
        def __reduce__(self):
            return (pathlib.Path(folder / "exploded").touch, ())

    bomb = pickle.dumps(Bomb())
    (folder / "model.safetensors").write_bytes(bomb)
    assert _import(folder, capsys)[0].startswith("model.safetensors: damaged or not safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "consolidated.pt").write_bytes(bomb)
    assert _import(folder, capsys)[0].startswith("consolidated.pt: only .safetensors files are read")
    assert "only .safetensors files are read" in main_error(folder, capsys)
    assert not (folder / "exploded").exists()


def test_folders_of_the_other_kind_are_told_apart(folder, capsys, tmp_path):
    assert main(["import", str(folder), str(tmp_path / "ours"), "--quiet"]) == 0
    capsys.readouterr()
    lines = _refusal(["import", tmp_path / "ours", tmp_path / "again"], capsys)
    assert "is in our layout (model.json)" in lines[0]
    lines = _refusal(["export", folder, tmp_path / "back"], capsys)
    assert "model.json: missing; `python -m model.hf import` writes such a folder" in lines[0]


def test_folder_without_a_name_is_not_the_working_folder(folder, capsys):
    with pytest.raises(SystemExit):
        main(["import", str(folder), ""])
    assert "must name a folder, got an empty text" in capsys.readouterr().err


def test_damaged_folder_of_ours_is_named(folder, capsys, tmp_path):
    ours = tmp_path / "ours"
    assert main(["import", str(folder), str(ours), "--quiet"]) == 0
    capsys.readouterr()
    good = load_file(ours / "model.safetensors")
    tensors = dict(good)
    del tensors["final_norm"]
    tensors["more"] = np.zeros(2, np.float32)
    tensors["embed"] = np.zeros((2, 3), np.float32)
    save_file(tensors, ours / "model.safetensors")
    lines = _refusal(["export", ours, tmp_path / "back"], capsys)
    assert "final_norm: missing, expected [24]" in lines
    assert "more: extra, [2]; the model has no such array" in lines
    assert "embed: shape [2, 3], expected [61, 24]" in lines
    save_file(good, ours / "model.safetensors")
    (ours / "model.json").write_text('{"format": 2, "config": {"vocab_size": 3}, "hf": null}')
    assert "model.json: cannot be read" in _refusal(["export", ours, tmp_path / "back"], capsys)[0]
    assert not (tmp_path / "back").exists()


def test_generate_names_what_is_wrong_before_it_loads_a_model(folder, capsys, tmp_path):
    cases = [
        ([str(tmp_path / "nowhere"), "--prompt", "a"], "nowhere: no such folder"),
        ([str(folder), "--prompt", "a"], "tokenizer.json: no such file; --prompt needs a tokenizer"),
        ([str(folder), "--ids", "1", "--tokenizer", str(tmp_path / "t.json")], "t.json: no such file"),
        ([str(folder), "--ids", "1", "--seed", "-1"], "--seed must be in [0, 2**32), got -1"),
        (
            [str(folder), "--ids", "1", "--temperature", "nan"],
            "temperature must be 0 or more and finite, got nan",
        ),
        ([str(folder), "--ids", "1", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        ([str(folder), "--ids", "one"], "--ids must be whole numbers"),
    ]
    for arguments, message in cases:
        assert generate.main(arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert message in shown.err
    (folder / "tokenizer.json").write_text("{}")
    assert generate.main([str(folder), "--prompt", "a"]) == 2
    assert "tokenizer.json: is no tokenizer" in capsys.readouterr().err
