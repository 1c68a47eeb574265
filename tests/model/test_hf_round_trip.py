"""Checkpoints that go in and out again, in every way of storing them: spelling, fused experts, dtype; with MTP."""

import itertools
import pathlib

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from model.hf.__main__ import main

SOURCE = (
    pathlib.Path(__file__).parents[1] / "golden" / "ling3" / "data" / "g2_base"
)  # save_pretrained, one MTP layer
# transformers keeps these float32 when the rest is bfloat16
FLOAT32 = ("expert_bias", "mlp.gate.weight", "conv1d.weight", "dt_bias", "A_log")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The source in our layout."""
    folder = tmp_path_factory.mktemp("round_trip") / "ours"
    assert main(["import", str(SOURCE), str(folder), "--quiet"]) == 0
    return folder


def _stored(tensors, name: str, rows: int, layout: str, is_kda_layer: bool) -> np.ndarray:
    """The part of a checkpoint that holds the source's tensor `name` of `rows` rows."""
    layer, _, rest = name.partition(".mlp.experts.")
    if f"{layer}.mlp.experts.gate_up_proj" in tensors:
        expert, kind, _ = rest.split(".")
        if kind == "down_proj":
            return tensors[f"{layer}.mlp.experts.down_proj"][int(expert)]
        both = tensors[f"{layer}.mlp.experts.gate_up_proj"][int(expert)]
        return both[:rows] if kind == "gate_proj" else both[rows:]
    if layout == "hub" and is_kda_layer:
        name = name.replace(".attention.dense.", ".attention.o_proj.")
    return tensors[name]


@pytest.mark.parametrize(
    ("layout", "fused", "dtype"),
    list(itertools.product(("hub", "save_pretrained"), (False, True), ("bfloat16", "float32"))),
)
def test_every_way_of_storing_keeps_every_bit(layout, fused, dtype, ours, tmp_path):
    first, inside, second = (tmp_path / name for name in ("first", "inside", "second"))
    options = ["--quiet", "--layout", layout, *(["--fuse-experts"] if fused else [])]
    assert main(["export", str(ours), str(first), "--dtype", dtype, *options]) == 0
    assert main(["import", str(first), str(inside), "--quiet"]) == 0
    assert main(["export", str(inside), str(second), *options]) == 0
    stored, again = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()
    assert list(stored) == list(again)
    for name, x in stored.items():
        assert again[name].dtype == x.dtype, name
        assert again[name].tobytes() == x.tobytes(), name

    source = load_file(SOURCE / "model.safetensors")
    kda_layers = {name.split(".attention.")[0] for name in source if name.endswith(".A_log")}
    for name, x in source.items():
        got = _stored(stored, name, x.shape[0], layout, name.split(".attention.")[0] in kda_layers)
        is_kept = dtype == "float32" or name.endswith(FLOAT32)
        want = x.astype(np.float32 if is_kept else ml_dtypes.bfloat16)
        assert got.dtype == want.dtype, name
        assert got.tobytes() == want.tobytes(), name
