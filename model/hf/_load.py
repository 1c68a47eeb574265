"""From a Ling-3 checkpoint folder to a model, array by array."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from .._config import Dtype, ModelConfig
from .._transformer import Transformer, init_model
from ._convert_config import to_model_config
from ._errors import CheckpointError
from ._hf_config import HfConfig, read_hf_config
from ._layout import checkpoint_names, fused_names, layer_types_of, rules
from ._leaves import Assembly, Slices, array_shapes, make_arrays
from ._rule import Rule
from ._shards import FLOATS, ShardReader, read_json

CONFIG_NAME = "config.json"
MODEL_NAME = "model.json"  # of our own layout
Progress = Callable[[str], None]
_KNOWN_EXTRAS = (".inv_freq",)  # a constant that some writers store


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A checkpoint whose names, shapes and dtypes were checked; no numbers are read yet.

    Attributes:
        config: The model it holds.
        hf: Its `config.json`.
        reader: Its tensors.
        rules: One rule for each tensor.
        stored_names: Name in the file, by the name in the rule.
    """

    config: ModelConfig
    hf: HfConfig
    reader: ShardReader
    rules: tuple[Rule, ...]
    stored_names: Mapping[str, str]

    def read(self, rule: Rule) -> np.ndarray:
        """The tensor of a rule, in its stored dtype."""
        return self.reader.read(self.stored_names[rule.name])


def open_hf(path: str | os.PathLike[str], *, dtype: Dtype = "bfloat16") -> Opened:
    """Read `config.json` and the shards' headers, and check every name, shape and dtype.

    Args:
        path: Folder of a checkpoint, in either spelling, sharded or not.
        dtype: Compute dtype of the model.

    Raises:
        CheckpointError: Missing, extra and mis-shaped tensors, one line each by name, or an unreadable folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file; name the folder that holds it" if folder.exists() else "no such folder"
        raise CheckpointError([f"{folder}: {what}"])
    if (folder / MODEL_NAME).is_file() and not (folder / CONFIG_NAME).is_file():
        raise CheckpointError(
            [f"{folder}: is in our layout ({MODEL_NAME}), not Hugging Face's; export it first"]
        )
    reader = ShardReader(folder)
    hf = read_hf_config(_read_raw_config(folder))
    stored = checkpoint_names(iter(reader.tensors))
    types = hf.layer_types or layer_types_of(iter(stored), hf.num_hidden_layers)
    config = to_model_config(hf, types, dtype=dtype)
    table = tuple(rules(config, fused=fused_names(iter(stored))))
    problems = _problems(table, stored, reader, hf)
    if problems:
        raise CheckpointError(problems)
    return Opened(config=config, hf=hf, reader=reader, rules=table, stored_names=stored)


def load_hf(
    path: str | os.PathLike[str],
    *,
    dtype: Dtype = "bfloat16",
    param_dtype: Dtype = "float32",
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    progress: Progress | None = None,
) -> tuple[ModelConfig, Transformer]:
    """The configuration and the model of a checkpoint folder.

    Without `shardings`, memory holds the model and one of our arrays twice. With them, every device's part of an array
    is put together from the tensors it needs, so the host holds one part and one tensor.

    Args:
        path: The folder.
        dtype: Compute dtype of the model.
        param_dtype: Dtype of the parameters; float32 holds a bfloat16 checkpoint exactly.
        shardings: Where each array goes, by its dotted path; None puts all on the default device.
        progress: Called with a line of text for every array.

    Raises:
        CheckpointError: As `open_hf`.
    """
    opened = open_hf(path, dtype=dtype)
    skeleton = abstract_model(opened.config)
    assembly = Assembly(opened.rules, array_shapes(skeleton))

    def part(path: str, where: Slices) -> np.ndarray:
        if progress is not None:
            progress(f"{path} {list(assembly.shapes[path])}")
        return assembly.read_block(path, where, jax.numpy.dtype(param_dtype), opened.read)

    arrays = list(make_arrays(assembly.shapes, shardings, part))
    opened.reader.close()
    return opened.config, jax.tree.unflatten(jax.tree.structure(skeleton), arrays)


def abstract_model(config: ModelConfig) -> Transformer:
    """The model of `config` with `jax.ShapeDtypeStruct`s in place of arrays."""
    return eqx.filter_eval_shape(lambda key: init_model(config, key=key), jax.random.key(0))


def _read_raw_config(folder: Path) -> dict[str, object]:
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise CheckpointError([f"{file}: missing; a checkpoint folder holds it beside the weights"])
    return read_json(file)


def _problems(
    table: tuple[Rule, ...], stored: Mapping[str, str], reader: ShardReader, hf: HfConfig
) -> list[str]:
    wanted = {rule.name: rule.shape for rule in table}
    problems = [
        f"{name}: missing, expected {list(shape)}" for name, shape in wanted.items() if name not in stored
    ]
    for name, file_name in stored.items():
        info = reader.tensors[file_name]
        if name not in wanted:
            if not name.endswith(_KNOWN_EXTRAS) and not _is_empty_shared(name, info.shape, hf):
                problems.append(
                    f"{file_name}: extra, {list(info.shape)}; config.json describes no such tensor"
                )
        elif info.shape != wanted[name]:
            problems.append(f"{file_name}: shape {list(info.shape)}, expected {list(wanted[name])}")
        elif info.dtype not in FLOATS:
            problems.append(f"{file_name}: dtype {info.dtype} is not read; convert it to BF16 or F32")
    return problems


def _is_empty_shared(name: str, shape: tuple[int, ...], hf: HfConfig) -> bool:
    """Without shared experts, transformers stores shared-expert tensors of size 0."""
    return hf.num_shared_experts == 0 and ".mlp.shared_experts." in name and 0 in shape
