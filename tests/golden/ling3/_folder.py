"""Finding and reading cases: NumPy and JSON only."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

OPERATOR_INPUTS = ("q", "k", "v", "g", "beta")
MODEL_INPUTS = ("input_ids", "attention_mask", "labels")
MODEL_FILES = ("config.json", "inputs.safetensors", "expected.safetensors")


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


@dataclass(frozen=True, kw_only=True)
class BrokenCase:
    """A case that cannot be read: it is judged as a failure, never left out."""

    name: str
    reason: str


Case = ModelCase | OperatorCase | BrokenCase


def find_cases(root: Path) -> list[Case]:
    """Every case at or below `root`: models in name order, then operator files, then what cannot be read.

    A folder with any of a model case's files is a model case. A `.safetensors` file outside such folders is an operator
    file; it must hold q, k, v, g, beta and o. An empty list: there is nothing that looks like a case.
    """
    if root.is_file():
        return [_read_operator(root, root.stem)]
    folders = sorted({p.parent for name in MODEL_FILES for p in root.rglob(name)})
    files = [file for file in sorted(root.rglob("*.safetensors")) if file.parent not in folders]
    cases: list[Case] = [_read_model(folder, _name(folder, root)) for folder in folders]
    cases += [_read_operator(file, _name(file.with_suffix(""), root)) for file in files]
    return sorted(cases, key=lambda case: isinstance(case, BrokenCase))


def _name(path: Path, root: Path) -> str:
    return path.name if path == root else path.relative_to(root).as_posix()


def _read_model(folder: Path, name: str) -> ModelCase | BrokenCase:
    absent = [file for file in MODEL_FILES if not (folder / file).is_file()]
    if not any(folder.glob("model*.safetensors")):
        absent.append("model.safetensors")
    if absent:
        return BrokenCase(name=name, reason=f"{', '.join(absent)}: missing; a model case needs it")
    try:
        inputs, expected = (_tensors(folder / f"{part}.safetensors") for part in ("inputs", "expected"))
        grads = folder / "grads.safetensors"
        case = ModelCase(
            name=name,
            path=folder,
            inputs=inputs,
            expected=expected,
            grads=_tensors(grads) if grads.is_file() else {},
            meta=_object(folder / "meta.json"),
        )
    except ValueError as error:
        return BrokenCase(name=name, reason=str(error))
    problem = next(_problems_of_model(case), None)
    return case if problem is None else BrokenCase(name=name, reason=problem)


def _problems_of_model(case: ModelCase) -> Iterator[str]:
    for tensor in MODEL_INPUTS:
        if tensor not in case.inputs:
            yield f"inputs.safetensors: holds no {tensor}"
    shapes = {tensor: case.inputs[tensor].shape for tensor in MODEL_INPUTS if tensor in case.inputs}
    if len(set(shapes.values())) != 1 or any(len(shape) != 2 for shape in shapes.values()):
        yield f"inputs.safetensors: all must have one shape [B, T], got {shapes}"
    if "logits" not in case.expected:
        yield "expected.safetensors: holds no logits; there is nothing to judge"
    if not case.grads and not case.meta.get("grad_summary"):
        yield "grads.safetensors and meta.json: hold no gradient; one of them must"


def _read_operator(file: Path, name: str) -> OperatorCase | BrokenCase:
    try:
        tensors = _tensors(file)
    except ValueError as error:
        return BrokenCase(name=name, reason=str(error))
    absent = [tensor for tensor in (*OPERATOR_INPUTS, "o") if tensor not in tensors]
    if absent:
        return BrokenCase(name=name, reason=f"{file.name}: no operator file, holds no {', '.join(absent)}")
    return OperatorCase(name=name, tensors=tensors)


def _tensors(file: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file.name}: damaged or not safetensors ({error}); fetch it again") from error


def _object(file: Path) -> dict:
    """A JSON object; empty when there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or too deep
        raise ValueError(f"{file.name}: is not JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file.name}: must hold a JSON object, got {type(value).__name__}")
    return value
