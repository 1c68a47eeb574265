"""Finding and reading cases: NumPy and JSON only."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

OPERATOR_INPUTS = ("q", "k", "v", "g", "beta")


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A folder with a checkpoint, inputs and expected numbers.

    Attributes:
        name: Path below the judged folder.
        path: The folder; `config.json` and the weights are in it.
        inputs: `input_ids`, `attention_mask`, `labels`.
        expected: Expected tensors.
        grads: Stored gradients, `main/<name>` and `mtp/<name>`.
        meta: `meta.json`; empty when there is none.
    """

    name: str
    path: Path
    inputs: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]
    meta: dict


@dataclass(frozen=True, kw_only=True)
class OperatorCase:
    """One file of an operator: inputs, results, gradients."""

    name: str
    tensors: dict[str, np.ndarray]


def find_cases(root: Path) -> tuple[list[ModelCase], list[OperatorCase]]:
    """Every case at or below `root`, in name order.

    A model case is a folder with `config.json` and `inputs.safetensors`; an operator file is a `.safetensors` file that
    holds q, k, v, g and beta.
    """
    if root.is_file():
        return [], [OperatorCase(name=root.stem, tensors=load_file(root))]
    folders = sorted(
        p.parent for p in root.rglob("inputs.safetensors") if (p.parent / "config.json").is_file()
    )
    models = [_read_model(folder, _name(folder, root)) for folder in folders]
    operators = []
    for file in sorted(root.rglob("*.safetensors")):
        if file.parent in folders:
            continue
        tensors = load_file(file)
        if all(name in tensors for name in OPERATOR_INPUTS):
            operators.append(OperatorCase(name=_name(file.with_suffix(""), root), tensors=tensors))
    return models, operators


def _name(path: Path, root: Path) -> str:
    return path.name if path == root else path.relative_to(root).as_posix()


def _read_model(folder: Path, name: str) -> ModelCase:
    def optional(file: str) -> dict[str, np.ndarray]:
        return load_file(folder / file) if (folder / file).is_file() else {}

    meta = folder / "meta.json"
    return ModelCase(
        name=name,
        path=folder,
        inputs=load_file(folder / "inputs.safetensors"),
        expected=optional("expected.safetensors"),
        grads=optional("grads.safetensors"),
        meta=json.loads(meta.read_text()) if meta.is_file() else {},
    )
