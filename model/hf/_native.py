"""Folders in our own layout: the arrays of a `Transformer` by dotted path, and its configuration.

    model.json              {"format": 2, "config": {...}, "hf": {...} or null}
    model.safetensors       or shards with model.safetensors.index.json

A folder of this kind is read without permuting anything, and any part of an array can be read by itself.
"""

import dataclasses
import json
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._config import Dtype, ModelConfig
from .._transformer import Transformer
from ._errors import CheckpointError
from ._hf_config import HfConfig
from ._leaves import Assembly, Slices, array_shapes, make_arrays
from ._load import CONFIG_NAME, MODEL_NAME, Opened, Progress, abstract_model, open_hf
from ._shard_writer import ShardWriter
from ._shards import DTYPES, INDEX_NAME, PICKLE_SUFFIXES, ShardReader

FORMAT = 2
_OWN_FILES = (MODEL_NAME, CONFIG_NAME, INDEX_NAME)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeFolder:
    """An opened folder; no numbers are read yet.

    Attributes:
        config: The model.
        hf: The `config.json` it came from; None when it came from nowhere.
        reader: Its arrays.
    """

    config: ModelConfig
    hf: HfConfig | None
    reader: ShardReader

    def array(self, path: str) -> "StoredArray":
        """One array; indexing it reads that part."""
        return StoredArray(self.reader, path)


class StoredArray:
    """An array on disk with the shape and indexing of a NumPy array."""

    def __init__(self, reader: ShardReader, path: str):
        """The array `path` of `reader`."""
        self._reader = reader
        self._path = path
        info = reader.tensors[path]
        self.shape = info.shape
        self.dtype = DTYPES[info.dtype]

    def __getitem__(self, where: Any) -> np.ndarray:
        """`array[where]`; only that part is read."""
        return self._reader.read_part(self._path, where)


def is_native(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is in our layout."""
    return (Path(path) / MODEL_NAME).is_file()


def import_hf(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: Dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> ModelConfig:
    """Turn a Hugging Face folder into one of our layout; memory holds one tensor at a time.

    Args:
        source: The checkpoint.
        target: Folder to write; it must not hold weights yet.
        dtype: Dtype of every array; None keeps what is stored (the widest, where an array joins several tensors).
        max_shard_bytes: Bytes of a shard.
        progress: Called with a line of text now and then.

    Raises:
        CheckpointError: The source cannot be read, or the target holds weights.
    """
    folder = Path(target)
    refuse_weights(folder)
    opened = open_hf(source)
    shapes = array_shapes(abstract_model(opened.config))
    assembly = Assembly(opened.rules, shapes)
    dtypes = {path: _dtype_of(opened, assembly, path, dtype) for path in shapes}
    order = sorted(opened.rules, key=lambda rule: opened.reader.tensors[opened.stored_names[rule.name]].file)
    plan = {path: (shapes[path], dtypes[path]) for path in shapes}
    with ShardWriter(folder, plan, max_shard_bytes=max_shard_bytes, progress=progress) as writer:
        for number, rule in enumerate(order):
            parts = rule.split(opened.read(rule), assembly.block_shapes(rule))
            for leaf, part in zip(rule.leaves, parts, strict=True):
                leading = shapes[leaf][: len(rule.index)]
                start = int(np.ravel_multi_index(rule.index, leading)) if rule.index else 0
                writer.write(leaf, part.astype(dtypes[leaf]), start=start * part.size)
            if progress is not None and ((number + 1) % 500 == 0 or number + 1 == len(order)):
                progress(f"{number + 1}/{len(order)} {rule.name}")
    opened.reader.close()
    write_model_json(folder, opened.config, opened.hf)
    return opened.config


def open_native(path: str | os.PathLike[str]) -> NativeFolder:
    """Read the configuration and the shards' headers of a folder in our layout, and check names and shapes.

    Raises:
        CheckpointError: No such folder, another format, or arrays that are missing, extra or mis-shaped, one line each.
    """
    folder = Path(path)
    config, hf = _read_model_json(folder)
    reader = ShardReader(folder)
    wanted = array_shapes(abstract_model(config))
    problems = [
        f"{name}: missing, expected {list(shape)}" for name, shape in wanted.items() if name not in reader
    ]
    for name, info in reader.tensors.items():
        if name not in wanted:
            problems.append(f"{name}: extra, {list(info.shape)}; the model has no such array")
        elif info.shape != wanted[name]:
            problems.append(f"{name}: shape {list(info.shape)}, expected {list(wanted[name])}")
    if problems:
        raise CheckpointError(problems)
    return NativeFolder(config=config, hf=hf, reader=reader)


def load_native(
    path: str | os.PathLike[str],
    *,
    dtype: Dtype = "bfloat16",
    param_dtype: Dtype = "float32",
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> tuple[ModelConfig, Transformer]:
    """The configuration and the model of a folder in our layout; arguments as `load_hf`."""
    folder = open_native(path)
    config = dataclasses.replace(folder.config, dtype=dtype)
    skeleton = abstract_model(config)

    def part(path: str, where: Slices) -> np.ndarray:
        return folder.array(path)[where].astype(jax.numpy.dtype(param_dtype))

    arrays = list(make_arrays(array_shapes(skeleton), shardings, part))
    folder.reader.close()
    return config, jax.tree.unflatten(jax.tree.structure(skeleton), arrays)


def write_model_json(folder: Path, config: ModelConfig, hf: HfConfig | None) -> None:
    """Write `model.json`, last of all: a folder without it is not complete."""
    value = {
        "format": FORMAT,
        "config": dataclasses.asdict(config),
        "hf": None if hf is None else dataclasses.asdict(hf),
    }
    # Infinity is JSON as Python reads and writes it: a SwiGLU limit that does not limit.
    (folder / MODEL_NAME).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def refuse_weights(folder: Path) -> None:
    """Raise `CheckpointError` when a folder holds a checkpoint or a part of one already, or is no folder."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError([f"{folder}: is a file; name a folder to write"])
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    # an index or a config.json that stayed behind would describe the new weights wrongly
    there = [n for n in names if n in _OWN_FILES or n.endswith((".safetensors", *PICKLE_SUFFIXES))]
    if there:
        raise CheckpointError(
            [f"{folder / name}: is there already; write to an empty folder" for name in there]
        )


def _dtype_of(opened: Opened, assembly: Assembly, path: str, dtype: Dtype | None) -> np.dtype:
    if dtype is not None:
        return jax.numpy.dtype(dtype)
    stored = {
        opened.reader.tensors[opened.stored_names[rule.name]].dtype for rule, _ in assembly.sources[path]
    }
    return max((DTYPES[name] for name in stored), key=lambda kind: kind.itemsize)


def _read_model_json(folder: Path) -> tuple[ModelConfig, HfConfig | None]:
    file = folder / MODEL_NAME
    if not file.is_file():
        raise CheckpointError([f"{file}: missing; `python -m model.hf import` writes such a folder"])
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if value.get("format") != FORMAT:
            raise CheckpointError(
                [
                    f"{MODEL_NAME}: format must be {FORMAT}, got {value.get('format')!r}; import the checkpoint again"
                ]
            )
        config = _from_tree(ModelConfig, value["config"])
        hf = None if value["hf"] is None else _from_tree(HfConfig, value["hf"])
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            [f"{MODEL_NAME}: cannot be read ({error}); import the checkpoint again"]
        ) from error
    return config, hf


def _from_tree(hint: Any, value: Any) -> Any:
    """The dataclass, tuple or scalar that `dataclasses.asdict` and JSON made `value` from."""
    if value is None:
        return None
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        nested = [o for o in options if dataclasses.is_dataclass(o) or typing.get_origin(o) is tuple]
        return _from_tree(nested[0], value) if nested and isinstance(value, dict | list) else value
    if dataclasses.is_dataclass(hint):
        kinds = typing.get_type_hints(hint)
        return typing.cast(Any, hint)(**{name: _from_tree(kinds[name], item) for name, item in value.items()})
    return tuple(value) if isinstance(value, list) else value
