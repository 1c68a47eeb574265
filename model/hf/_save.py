"""From a model to a Ling-3 checkpoint folder, tensor by tensor."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from .._config import ModelConfig
from .._transformer import Transformer
from ._convert_config import to_hf_config
from ._hf_config import HfConfig, Layout, write_hf_config
from ._layout import fused_expert_names, rules
from ._leaves import Assembly, leaf_paths
from ._load import CONFIG_NAME, Progress
from ._native import refuse_weights
from ._rule import Rule
from ._shard_writer import ShardWriter

StoredDtype = Literal["bfloat16", "float32", "float64", "stored"]
_NUMPY = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
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
        dtype: Dtype of the tensors; "stored" is that of each array. With bfloat16, router, convolution and decay
            tensors stay float32, as transformers wants them.
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
    refuse_weights(folder)
    own = to_hf_config(config)
    table = _table(config, layout=layout, fuse_experts=fuse_experts)
    assembly = Assembly(table, {name: tuple(array.shape) for name, array in arrays.items()})
    plan = {rule.name: (rule.shape, _stored_dtype(rule, dtype, arrays)) for rule in table}
    on_host = _OnHost(arrays)
    with ShardWriter(folder, plan, max_shard_bytes=max_shard_bytes, progress=progress) as writer:
        for number, rule in enumerate(sorted(table, key=lambda rule: rule.leaves)):
            writer.write(rule.name, assembly.join(rule, on_host).astype(plan[rule.name][1]))
            if progress is not None and (number + 1) % 500 == 0:
                progress(f"{number + 1}/{len(table)} {rule.name}")
    name = str(plan["lm_head.weight"][1])
    raw = write_hf_config(_with_facts_of(own, hf), layout=layout, dtype=name)
    (folder / CONFIG_NAME).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def to_checkpoint_tensors(model: Transformer, *, layout: Layout = "hub") -> dict[str, np.ndarray]:
    """Every tensor under its checkpoint name, in the model's own dtype and all in memory.

    `model` may be a gradient: the same permutations make it the gradient with respect to the checkpoint's tensors.
    """
    leaves = (np.asarray(leaf) for leaf in jax.tree.leaves(model))
    arrays = dict(zip(leaf_paths(model), leaves, strict=True))
    table = _table(model.config, layout=layout, fuse_experts=False)
    assembly = Assembly(table, {name: array.shape for name, array in arrays.items()})
    return {rule.name: assembly.join(rule, arrays) for rule in table}


class _OnHost(Mapping[str, Any]):
    """Arrays copied to the host when asked for; the last few stay, because rules come sorted by array."""

    def __init__(self, arrays: Mapping[str, Any], num_kept: int = 2):
        self._arrays = arrays
        self._num_kept = num_kept
        self._kept: dict[str, Any] = {}

    def __getitem__(self, path: str) -> Any:
        if path not in self._kept:
            array = self._arrays[path]
            while len(self._kept) >= self._num_kept:
                del self._kept[next(iter(self._kept))]
            self._kept[path] = np.asarray(array) if isinstance(array, jax.Array) else array
        return self._kept[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _table(config: ModelConfig, *, layout: Layout, fuse_experts: bool) -> list[Rule]:
    return rules(config, layout=layout, fused=fused_expert_names(config) if fuse_experts else frozenset())


def _stored_dtype(rule: Rule, dtype: StoredDtype, arrays: Mapping[str, Any]) -> np.dtype:
    if dtype == "stored":
        return max((np.dtype(arrays[leaf].dtype) for leaf in rule.leaves), key=lambda kind: kind.itemsize)
    kept = dtype == "bfloat16" and rule.name.endswith(_KEPT_IN_FLOAT32)
    return _NUMPY["float32"] if kept else _NUMPY[dtype]


def _with_facts_of(own: HfConfig, source: HfConfig | None) -> HfConfig:
    if source is None:
        return own
    return dataclasses.replace(
        own,
        max_position_embeddings=source.max_position_embeddings,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
