"""From a model to a Ling-3 checkpoint folder, tensor by tensor."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from .._config import ModelConfig
from .._transformer import Transformer
from ._convert_config import to_hf_config
from ._errors import CheckpointError
from ._hf_config import HfConfig, Layout, write_hf_config
from ._layout import rules
from ._leaves import Assembly, leaf_paths
from ._load import CONFIG_NAME, Progress
from ._rule import Rule
from ._shards import ShardWriter

StoredDtype = Literal["bfloat16", "float32", "float64"]
_NUMPY = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32), "float64": np.dtype(np.float64)}
# transformers keeps these in float32 when the rest is bfloat16 (_keep_in_fp32_modules_strict)
_KEPT_IN_FLOAT32 = ("expert_bias", "mlp.gate.weight", "conv1d.weight", "dt_bias", "A_log")


def save_hf(
    path: str | os.PathLike[str],
    model: Transformer,
    *,
    dtype: StoredDtype = "bfloat16",
    layout: Layout = "hub",
    fuse_experts: bool = False,
    hf: HfConfig | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> None:
    """Write `config.json` and the weights of `model`; one tensor at a time is on the host.

    Args:
        path: Folder to write to. It must not hold safetensors files yet.
        model: The model; its arrays may be sharded over the devices of this process.
        dtype: Dtype of the tensors. With bfloat16, router, convolution and decay tensors stay float32, as transformers
            wants them.
        layout: Spelling of names and of `config.json`.
        fuse_experts: True writes `experts.gate_up_proj` and `experts.down_proj`, all experts of a layer together.
        hf: The `config.json` the model came from, for what a model does not know: token ids, context length.
        max_shard_bytes: Bytes of a shard.
        progress: Called with a line of text for every shard-sized step.

    Raises:
        CheckpointError: Ling-3's format cannot hold the model, or the folder holds weights already.
    """
    arrays = dict(zip(leaf_paths(model), jax.tree.leaves(model), strict=True))
    write_hf(
        path,
        model.config,
        arrays,
        dtype=dtype,
        layout=layout,
        fuse_experts=fuse_experts,
        hf=hf,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
    )


def write_hf(
    path: str | os.PathLike[str],
    config: ModelConfig,
    arrays: Mapping[str, Any],
    *,
    dtype: StoredDtype,
    layout: Layout,
    fuse_experts: bool,
    hf: HfConfig | None,
    max_shard_bytes: int,
    progress: Progress | None,
) -> None:
    """`save_hf` of arrays by dotted path; each is indexed block by block, so they may be lazy."""
    folder = Path(path)
    there = sorted(p.name for p in folder.glob("*.safetensors")) if folder.is_dir() else []
    if there:
        raise CheckpointError([f"{folder / name}: is there already; write to an empty folder" for name in there])
    own = to_hf_config(config)
    table = _table(config, layout=layout, fuse_experts=fuse_experts)
    assembly = Assembly(table, {name: tuple(array.shape) for name, array in arrays.items()})
    target = _NUMPY[dtype]
    plan = {rule.name: (rule.shape, _stored_dtype(rule.name, target)) for rule in table}
    writer = ShardWriter(folder, plan, max_shard_bytes=max_shard_bytes)
    for number, rule in enumerate(table):
        writer.write(rule.name, assembly.join(rule, arrays).astype(plan[rule.name][1]))
        if progress is not None and (number + 1) % 500 == 0:
            progress(f"{number + 1}/{len(table)} {rule.name}")
    writer.close()
    raw = write_hf_config(_with_facts_of(own, hf), layout=layout, dtype=dtype)
    (folder / CONFIG_NAME).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def to_checkpoint_tensors(model: Transformer, *, layout: Layout = "hub") -> dict[str, np.ndarray]:
    """Every tensor under its checkpoint name, in the model's own dtype and all in memory.

    `model` may be a gradient: the same permutations turn a gradient of our arrays into that of the checkpoint's tensors.
    """
    arrays = dict(zip(leaf_paths(model), jax.tree.leaves(model), strict=True))
    table = _table(model.config, layout=layout, fuse_experts=False)
    assembly = Assembly(table, {name: tuple(array.shape) for name, array in arrays.items()})
    return {rule.name: assembly.join(rule, arrays) for rule in table}


def _table(config: ModelConfig, *, layout: Layout, fuse_experts: bool) -> list[Rule]:
    last = config.num_layers + config.num_mtp_layers
    return rules(config, layout=layout, fused_layers=frozenset(range(last)) if fuse_experts else frozenset())


def _stored_dtype(name: str, target: np.dtype) -> np.dtype:
    kept = target == _NUMPY["bfloat16"] and name.endswith(_KEPT_IN_FLOAT32)
    return _NUMPY["float32"] if kept else target


def _with_facts_of(own: HfConfig, source: HfConfig | None) -> HfConfig:
    import dataclasses

    if source is None:
        return own
    return dataclasses.replace(
        own,
        max_position_embeddings=source.max_position_embeddings,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
