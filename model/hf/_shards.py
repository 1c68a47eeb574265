"""Reading folders of safetensors files, one tensor or part of a tensor at a time.

Nothing here unpickles: a folder that only holds `.bin` or `.pt` files is refused.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ._errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
FLOATS = ("F64", "F32", "F16", "BF16")  # what a parameter may be stored in
DTYPE_NAMES: Mapping[np.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What a header says about one tensor; the numbers stay on disk."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's numbers; 0 for an empty tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


class ShardReader:
    """The tensors of a folder of safetensors files, read from disk on demand.

    One file is open at a time, so the resident pages are those of one shard.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Read the headers of every shard.

        Args:
            path: A folder (with an index, or one or more `.safetensors` files) or one `.safetensors` file.

        Raises:
            CheckpointError: Nothing to read, only pickles, a shard of the index is missing, or a header is damaged.
        """
        self.path = Path(path)
        self.tensors: dict[str, TensorInfo] = {}
        self._open: tuple[Path, safe_open] | None = None
        files, expected = _find_files(self.path)
        for file in files:
            for info in _read_header(file):
                if info.name in self.tensors:
                    first = self.tensors[info.name].file.name
                    raise CheckpointError(
                        [f"{info.name}: stored twice, in {first} and in {file.name}; remove one"]
                    )
                self.tensors[info.name] = info
        lost = sorted(set(expected) - set(self.tensors))
        if lost:
            raise CheckpointError([f"{name}: listed in {INDEX_NAME} but in no shard" for name in lost])

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype, as a fresh array that does not alias the file."""
        info = self.tensors[name]
        array = self._handle(info.file).get_tensor(name)
        assert array.shape == info.shape
        return array

    def read_part(self, name: str, where: Any) -> np.ndarray:
        """`tensor[where]` for an index of whole numbers and slices with step 1; only that part is read."""
        info = self.tensors[name]
        index = where if isinstance(where, tuple) else (where,)
        # safetensors keeps no axis out, so a number is read as a slice of length 1 and dropped afterwards
        slices = tuple(slice(i, i + 1) if isinstance(i, int) else i for i in index)
        if not slices or 0 in info.shape:
            return self.read(name)[where]
        part = self._handle(info.file).get_slice(name)[slices]
        return part.reshape(
            [n for n, i in zip(part.shape, (*index, *(slice(None),) * part.ndim)) if not isinstance(i, int)]
        )

    def close(self) -> None:
        """Close the open shard, if any; reading opens it again."""
        self._open = None

    def _handle(self, file: Path) -> safe_open:
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, safe_open(file, framework="np"))
        return self._open[1]


def _find_files(path: Path) -> tuple[list[Path], list[str]]:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError([f"{path.name}: {_pickle_remedy()}"])
        return [path], []
    if not path.is_dir():
        raise CheckpointError([f"{path}: no such file or folder"])
    index = path / INDEX_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError([f"{INDEX_NAME}: has no weight_map; remove the file or write it anew"])
        names = sorted({str(name) for name in weight_map.values()})
        strange = [n for n in names if Path(n).name != n or not n.endswith(".safetensors")]
        if strange:
            raise CheckpointError(
                [f"{INDEX_NAME}: {n!r} is not a .safetensors file of this folder" for n in strange]
            )
        absent = [n for n in names if not (path / n).is_file()]
        if absent:
            raise CheckpointError([f"{n}: shard listed in {INDEX_NAME} is missing; fetch it" for n in absent])
        if SINGLE_NAME not in names and (path / SINGLE_NAME).is_file():
            raise CheckpointError(
                [f"{SINGLE_NAME}: is there beside {INDEX_NAME}, which does not list it; remove the stale one"]
            )
        return [path / n for n in names], list(weight_map)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for p in path.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise CheckpointError([f"{name}: {_pickle_remedy()}" for name in pickles])
        raise CheckpointError([f"{path}: holds no .safetensors file"])
    if len(files) > 1 and (path / SINGLE_NAME).is_file():
        return [path / SINGLE_NAME], []
    return files, []


def _pickle_remedy() -> str:
    return (
        "only .safetensors files are read, because loading a pickle runs code from the file; "
        "convert it with the program that wrote it (save_pretrained writes safetensors)"
    )


def read_json(path: Path) -> dict[str, object]:
    """The JSON object of a file; anything else is a `CheckpointError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or too deep
        raise CheckpointError([f"{path.name}: is not JSON ({error}); fetch it again"]) from error
    if not isinstance(value, dict):
        raise CheckpointError([f"{path.name}: must hold a JSON object, got {type(value).__name__}"])
    return value


def _read_header(file: Path) -> Iterator[TensorInfo]:
    try:
        with safe_open(file, framework="np") as handle:
            for name in handle.keys():  # noqa: SIM118  (safe_open is no mapping)
                part = handle.get_slice(name)
                yield TensorInfo(name=name, file=file, shape=tuple(part.get_shape()), dtype=part.get_dtype())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            [f"{file.name}: damaged or not safetensors ({error}); fetch it again"]
        ) from error
