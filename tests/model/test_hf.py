"""Ling-3 checkpoints in and out: spellings, shards, what is refused, and bit-exact round trips."""

import dataclasses
import json
import pathlib
import pickle
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model import GqaConfig, ModelConfig, init_model
from model.hf import CheckpointError, _shard_writer, load_hf, open_hf, save_hf
from model.hf.__main__ import main
from model.hf._hf_config import read_hf_config, write_hf_config
from model.hf._native import load_native

DATA = pathlib.Path(__file__).parents[1] / "golden" / "ling3" / "data"
CASES = ("g2_base", "g3_softplus_nonorm", "g4_qlora_leftpad", "g6_rightpad_nobias")
# transformers keeps these float32 when the rest is bfloat16
FLOAT32 = ("expert_bias", "mlp.gate.weight", "conv1d.weight", "dt_bias", "A_log")


def _copy(case: str, target: pathlib.Path) -> pathlib.Path:
    target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / case / name, target / name)
    return target


def _rewrite(folder: pathlib.Path, change) -> pathlib.Path:
    """Replace the weights of a folder by `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _assert_same_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype, name
        assert ours[name].shape == array.shape, name
        assert ours[name].tobytes() == array.tobytes(), name


def _assert_same_arrays(ours, theirs) -> None:
    leaves = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    for (path, a), b in leaves:
        assert a.dtype == b.dtype, path
        assert np.array_equal(np.asarray(a), np.asarray(b)), path


def _problems(folder: pathlib.Path) -> str:
    with pytest.raises(CheckpointError) as error:
        open_hf(folder)
    return "\n".join(error.value.problems)


@pytest.mark.parametrize("case", CASES)
def test_import_then_export_gives_every_bit_back(case, tmp_path):
    layout = json.loads((DATA / case / "meta.json").read_text())["layout"]
    assert main(["import", str(DATA / case), str(tmp_path / "ours"), "--quiet"]) == 0
    assert (
        main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--layout", layout, "--quiet"]) == 0
    )
    theirs = load_file(DATA / case / "model.safetensors")
    # without shared experts transformers stores shared-expert tensors of size 0
    _assert_same_bits(_weights(tmp_path / "back"), {name: x for name, x in theirs.items() if x.size})


def test_bfloat16_checkpoint_survives_a_round_trip_bit_by_bit(tmp_path):
    def to_bfloat16(tensors):
        for name, x in tensors.items():
            if not name.endswith(FLOAT32):
                tensors[name] = x.astype(ml_dtypes.bfloat16)

    source = _rewrite(_copy("g4_qlora_leftpad", tmp_path / "bf16"), to_bfloat16)
    assert main(["import", str(source), str(tmp_path / "ours"), "--quiet"]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--quiet"]) == 0
    theirs = load_file(source / "model.safetensors")
    assert {x.dtype.name for x in theirs.values()} == {"bfloat16", "float32"}
    _assert_same_bits(_weights(tmp_path / "back"), theirs)


def test_model_in_float32_saved_as_bfloat16_is_what_was_loaded(tmp_path):
    source = _copy("g4_qlora_leftpad", tmp_path / "bf16")
    _rewrite(
        source, lambda tensors: tensors.update({n: x.astype(ml_dtypes.bfloat16) for n, x in tensors.items()})
    )
    _, model = load_hf(source, dtype="float32")
    save_hf(tmp_path / "back", model, dtype="bfloat16")
    back = _weights(tmp_path / "back")
    for name, x in load_file(source / "model.safetensors").items():
        assert back[name].dtype == (np.float32 if name.endswith(FLOAT32) else ml_dtypes.bfloat16)
        assert np.array_equal(back[name].astype(np.float32), x.astype(np.float32)), name


@pytest.mark.parametrize("layout", ["hub", "save_pretrained"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_every_spelling_loads_to_the_same_model(layout, is_fused, tmp_path):
    config, model = load_hf(DATA / "g2_base", dtype="float32")
    save_hf(tmp_path, model, dtype="float32", layout=layout, fuse_experts=is_fused)
    names = set(_weights(tmp_path))
    assert ("model.layers.0.attention.o_proj.weight" in names) == (layout == "hub")
    assert ("model.layers.1.mlp.experts.gate_up_proj" in names) == is_fused
    other_config, other = load_hf(tmp_path, dtype="float32")
    assert other_config == config
    _assert_same_arrays(other, model)


def test_module_names_of_transformers_load_too(tmp_path):
    def rename(tensors):
        pairs = [
            ("model.word_embeddings", "model.embed_tokens"),
            (".attention.A_log", ".self_attn.forget_gate.A_log"),
            (".attention.dt_bias", ".self_attn.forget_gate.dt_bias"),
            (".attention.f_proj", ".self_attn.forget_gate.f_proj"),
            (".attention.dense", ".self_attn.o_proj"),
            (".attention.", ".self_attn."),
            (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
        ]
        for name in list(tensors):
            new = name
            for old, replacement in pairs:
                new = new.replace(old, replacement)
            tensors[new] = tensors.pop(name)
        for name in [n for n in tensors if ".q_conv1d." in n]:
            parts = [tensors.pop(name.replace("q_conv1d", f"{x}_conv1d")) for x in "qkv"]
            tensors[name.replace("q_conv1d", "conv1d")] = np.concatenate(parts)

    _, model = load_hf(DATA / "g2_base", dtype="float32")
    _, other = load_hf(_rewrite(_copy("g2_base", tmp_path), rename), dtype="float32")
    _assert_same_arrays(other, model)


def test_shards_and_their_index_hold_the_same_model(tmp_path):
    _, model = load_hf(DATA / "g2_base", dtype="float32")
    save_hf(tmp_path, model, dtype="float32", max_shard_bytes=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in _weights(tmp_path).values())
    assert all(sum(x.nbytes for x in load_file(tmp_path / f).values()) <= 60_000 for f in files)
    _assert_same_arrays(load_hf(tmp_path, dtype="float32")[1], model)


def test_import_hands_the_writer_one_tensor_at_a_time(tmp_path, monkeypatch):
    sizes = []
    write = _shard_writer.ShardWriter.write
    monkeypatch.setattr(
        _shard_writer.ShardWriter,
        "write",
        lambda self, name, array, **k: (sizes.append(array.nbytes), write(self, name, array, **k))[1],
    )
    assert main(["import", str(DATA / "g2_base"), str(tmp_path / "ours"), "--quiet"]) == 0
    largest = max(x.nbytes for x in load_file(DATA / "g2_base" / "model.safetensors").values())
    assert max(sizes) <= largest


def test_sharded_arrays_are_read_part_by_part_and_equal(tmp_path):
    _, model = load_hf(DATA / "g2_base", dtype="float32")
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    paths = jax.tree_util.tree_leaves_with_path(model)

    def sharding(leaf):
        spec = [
            axis if n % size == 0 else None
            for n, (axis, size) in zip(leaf.shape, (("a", 2), ("b", 4)), strict=False)
        ]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    shardings = {jax.tree_util.keystr(p, simple=True, separator="."): sharding(leaf) for p, leaf in paths}
    _, other = load_hf(DATA / "g2_base", dtype="float32", shardings=shardings)
    assert len({str(s.spec) for s in shardings.values()}) > 3
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(other), jax.tree.leaves(model), strict=True):
        assert a.sharding == shardings[jax.tree_util.keystr(path, simple=True, separator=".")]
        assert np.array_equal(np.asarray(a), np.asarray(b)), path


def test_our_layout_loads_to_the_same_model_sharded_or_not(tmp_path):
    _, model = load_hf(DATA / "g2_base", dtype="float32")
    assert main(["import", str(DATA / "g2_base"), str(tmp_path), "--quiet"]) == 0
    _, ours = load_native(tmp_path, dtype="float32")
    _assert_same_arrays(ours, model)
    mesh = jax.make_mesh((2,), ("a",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shardings = {
        jax.tree_util.keystr(p, simple=True, separator="."): split if leaf.shape[0] % 2 == 0 else whole
        for p, leaf in jax.tree_util.tree_leaves_with_path(model)
    }
    _assert_same_arrays(load_native(tmp_path, dtype="float32", shardings=shardings)[1], model)


def test_missing_extra_and_misshaped_tensors_are_listed_by_name(tmp_path, capsys):
    def damage(tensors):
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.9.attention.q_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.norm.weight"] = np.zeros(25, np.float32)
        tensors["lm_head.weight"] = np.zeros((61, 24), np.int32)

    folder = _rewrite(_copy("g2_base", tmp_path / "bad"), damage)
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 2
    text = capsys.readouterr().err
    assert "model.layers.1.mlp.experts.3.up_proj.weight: missing, expected [12, 24]" in text
    assert "model.layers.9.attention.q_proj.weight: extra, [2, 2]" in text
    assert "model.norm.weight: shape [25], expected [24]" in text
    assert "lm_head.weight: dtype I32 is not read" in text
    assert "4 problems" in text
    assert not (tmp_path / "ours").exists()


def test_pickles_are_refused_and_never_opened(tmp_path, capsys):
    class Bomb:
        def __reduce__(self):
            return (pathlib.Path(tmp_path / "exploded").touch, ())

    shutil.copy(DATA / "g2_base" / "config.json", tmp_path / "config.json")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert main(["check", str(tmp_path)]) == 2
    assert "pytorch_model.bin: only .safetensors files are read" in capsys.readouterr().err
    assert not (tmp_path / "exploded").exists()


def test_index_may_not_point_out_of_the_folder(tmp_path):
    _copy("g2_base", tmp_path)
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'../other.safetensors' is not a .safetensors file of this folder" in _problems(tmp_path)


def test_shard_of_the_index_that_is_not_there_is_named(tmp_path):
    _copy("g2_base", tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors: shard listed in" in _problems(tmp_path)


def test_truncated_file_is_named(tmp_path):
    file = _copy("g2_base", tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "model.safetensors: damaged or not safetensors" in _problems(tmp_path)


def test_folder_with_weights_is_not_overwritten(tmp_path, capsys):
    _copy("g2_base", tmp_path / "full")
    before = (tmp_path / "full" / "model.safetensors").read_bytes()
    assert main(["import", str(DATA / "g2_base"), str(tmp_path / "full")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "full" / "model.safetensors").read_bytes() == before


def test_tensors_decide_layer_kinds_when_the_file_does_not(tmp_path):
    # transformers leaves an incomplete last group linear, the hub code makes it full attention; both exist.
    folder = _copy("g2_base", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 0}
    del raw["layer_types"], raw["mlp_layer_types"]
    (folder / "config.json").write_text(json.dumps(raw))

    def first_three_layers(tensors):
        for name in [n for n in tensors if n.startswith(("model.layers.3.", "model.layers.4."))]:
            del tensors[name]

    config = open_hf(_rewrite(folder, first_three_layers)).config
    assert [layer.mixer for layer in config.layer_plan] == ["linear", "full", "linear"]


@pytest.mark.parametrize("case", CASES)
def test_config_written_in_either_spelling_reads_back(case):
    hf = read_hf_config(json.loads((DATA / case / "config.json").read_text()))
    for layout in ("hub", "save_pretrained"):
        raw = write_hf_config(hf, layout=layout, dtype="float32")
        again = read_hf_config(json.loads(json.dumps(raw)))
        assert again.layout == layout
        for name in type(hf).__dataclass_fields__:
            if name not in ("layout", "layer_types"):
                assert getattr(again, name) == getattr(hf, name), name
        assert (again.layer_types or again.default_layer_types()) == (
            hf.layer_types or hf.default_layer_types()
        )


def test_hub_config_names_the_layers_where_two_readers_derive_others():
    hf = read_hf_config(json.loads((DATA / "g4_qlora_leftpad" / "config.json").read_text()))
    assert "layer_types" not in write_hf_config(hf, layout="hub", dtype="float32")
    # transformers would make the fourth layer of this model linear, the hub code full attention
    incomplete = dataclasses.replace(hf, layer_group_size=3)
    raw = write_hf_config(incomplete, layout="hub", dtype="float32")
    assert raw["layer_types"] == ["linear_attention"] * 2 + ["full_attention"] * 2


def test_head_dim_means_kda_on_the_hub_and_rope_in_save_pretrained():
    hub = read_hf_config(json.loads((DATA / "g4_qlora_leftpad" / "config.json").read_text()))
    saved = read_hf_config(json.loads((DATA / "g3_softplus_nonorm" / "config.json").read_text()))
    assert (hub.kda_head_dim, hub.qk_rope_head_dim) == (16, 4)
    assert (saved.kda_head_dim, saved.qk_rope_head_dim) == (8, 6)
    assert write_hf_config(hub, layout="save_pretrained", dtype="float32")["head_dim"] == 4


def test_every_problem_of_a_config_is_reported_at_once():
    raw = json.loads((DATA / "g2_base" / "config.json").read_text())
    raw |= {
        "hidden_size": "24",
        "n_group": 3,
        "hidden_act": "gelu",
        "num_key_value_heads": 1,
        "rms_norm_eps": None,
    }
    raw["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4}
    del raw["kv_lora_rank"]
    with pytest.raises(CheckpointError) as error:
        read_hf_config(raw)
    text = "\n".join(error.value.problems)
    assert "hidden_size must be a whole number of at least 1, got '24'" in text
    assert "spellings of one field must agree" in text
    assert "hidden_act must be 'silu', got 'gelu'" in text
    assert "num_key_value_heads must equal num_attention_heads=2, got 1" in text
    assert "rope_type must be 'default', got 'yarn'" in text
    assert "kv_lora_rank must be a whole number" in text
    assert len(error.value.problems) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object or null, got 'yarn'"),
        ({"rope_scaling": {"factor": 4}}, "rope_type must be 'default', got ['factor']"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "got ['full_attention']"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta must be a finite number, got nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a finite number, got inf"),
        ({"num_hidden_layers": 10**9, "layer_types": None, "mlp_layer_types": None}, "at most 1000"),
        ({"num_experts": 10**9}, "num_experts must be a whole number of at least 0 and at most 100000"),
        ({"expert_swiglu_limit_list": [True] * 4}, "must be a list of numbers and nulls"),
        ({"eos_token_id": [True]}, "eos_token_id must be a whole number"),
    ],
)
def test_numbers_that_make_no_model_are_refused(changes, message):
    raw = json.loads((DATA / "g2_base" / "config.json").read_text())
    with pytest.raises(CheckpointError) as error:
        read_hf_config(raw | changes)
    (problem,) = error.value.problems
    assert message in problem


def test_model_that_is_no_ling3_is_not_exported(tmp_path):
    config = ModelConfig(
        vocab_size=8,
        hidden_size=8,
        num_layers=1,
        intermediate_size=8,
        gqa=GqaConfig(num_heads=1, num_kv_heads=1, head_dim=8, rope_head_dim=8),
    )
    model = jax.eval_shape(lambda key: init_model(config, key=key), jax.random.key(0))
    with pytest.raises(CheckpointError, match="full-attention layers must be MLA, got GQA"):
        save_hf(tmp_path, model)
    assert list(tmp_path.iterdir()) == []


def test_swiglu_limits_reach_the_model_and_one_of_an_mtp_layer_is_refused(tmp_path):
    folder = _copy("g2_base", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"expert_swiglu_limit_list": [0, 0, 10, 4, None]}))
    moe = open_hf(folder).config.moe
    assert moe is not None
    assert moe.expert_swiglu_limits == (np.inf, np.inf, 10.0, 4.0)
    (folder / "config.json").write_text(json.dumps(raw | {"expert_swiglu_limit_list": [0, 0, 10, 4, 4]}))
    assert "expert_swiglu_limit_list limits an MTP layer" in _problems(folder)
