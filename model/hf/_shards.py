"""Reading and writing folders of safetensors files, one tensor at a time.

Nothing here unpickles: a folder that only holds `.bin` or `.pt` files is refused.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
                    raise CheckpointError([f"{info.name}: stored twice, in {first} and in {file.name}; remove one"])
                self.tensors[info.name] = info
        lost = sorted(set(expected) - set(self.tensors))
        if lost:
            raise CheckpointError([f"{name}: listed in {INDEX_NAME} but in no shard" for name in lost])

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype, as a fresh array that does not alias the file."""
        info = self.tensors[name]
        if self._open is None or self._open[0] != info.file:
            self.close()
            self._open = (info.file, safe_open(info.file, framework="np"))
        array = self._open[1].get_tensor(name)
        assert array.shape == info.shape
        return array

    def close(self) -> None:
        """Close the open shard, if any; reading opens it again."""
        self._open = None


class ShardWriter:
    """Writes tensors of known shape into safetensors shards with an index, one block of numbers at a time.

    The headers are written first and every block goes to its place with one `pwrite`, so that memory holds one block,
    and blocks may come in any order. A tensor larger than `max_shard_bytes` gets a shard of its own.
    Files appear under their final name when `close` is called; a writer that is not closed leaves only `.partial` files.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
        *,
        max_shard_bytes: int = 5_000_000_000,
    ):
        """Plan the shards and write their headers.

        Args:
            path: Folder to write to; created when missing.
            tensors: Shape and dtype of every tensor, in file order.
            max_shard_bytes: Bytes of numbers in one shard.

        Raises:
            ValueError: `max_shard_bytes` is not positive or a dtype has no safetensors name.
        """
        if max_shard_bytes <= 0:
            raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.total_bytes = 0
        self._places: dict[str, tuple[int, int]] = {}
        self._written: dict[str, int] = {}
        self._tensors = dict(tensors)
        self._handles: list[int] = []
        plan = _plan_shards(self._tensors, max_shard_bytes)
        self._names = [SINGLE_NAME] if len(plan) == 1 else [_shard_name(i, len(plan)) for i in range(len(plan))]
        self._weight_map: dict[str, str] = {}
        for index, names in enumerate(plan):
            self._start_shard(index, names)

    def write(self, name: str, array: np.ndarray, *, start: int = 0) -> None:
        """Write a block of a tensor's numbers in row-major order.

        Args:
            name: A name of the plan.
            array: The block; its dtype must be the planned one.
            start: Offset of the block in the tensor, in elements.

        Raises:
            ValueError: The dtype differs from the plan or the block does not fit.
        """
        shape, dtype = self._tensors[name]
        if array.dtype != dtype:
            raise ValueError(f"{name} is planned as {dtype}, got {array.dtype}; cast it first")
        size = int(np.prod(shape, dtype=np.int64))
        if start < 0 or start + array.size > size:
            raise ValueError(f"{name} has {size} elements; a block of {array.size} at {start} does not fit")
        handle, offset = self._places[name]
        _pwrite_all(self._handles[handle], np.ascontiguousarray(array), offset + start * dtype.itemsize)
        self._written[name] += array.size

    def close(self) -> None:
        """Check that every number was written, then give the files their names and write the index.

        Raises:
            CheckpointError: A tensor was not written in full.
        """
        sizes = {name: int(np.prod(shape, dtype=np.int64)) for name, (shape, _) in self._tensors.items()}
        missing = [
            f"{n}: {self._written[n]} of {size} elements written" for n, size in sizes.items() if self._written[n] != size
        ]
        for handle in self._handles:
            os.close(handle)
        self._handles = []
        if missing:
            raise CheckpointError(missing)
        for name in self._names:
            os.replace(self.path / f"{name}.partial", self.path / name)
        if len(self._names) > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(self._weight_map.items()))}
            (self.path / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _start_shard(self, index: int, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in names:
            shape, dtype = self._tensors[name]
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the numbers start on a multiple of 8 bytes, as other writers have it
        handle = os.open(self.path / f"{self._names[index]}.partial", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._handles.append(handle)
        os.write(handle, len(text).to_bytes(8, "little"))
        os.write(handle, text)
        os.ftruncate(handle, 8 + len(text) + offset)
        self.total_bytes += offset
        for name in names:
            begin = header[name]["data_offsets"][0]  # pyright: ignore[reportIndexIssue]
            self._places[name] = (index, 8 + len(text) + begin)
            self._weight_map[name] = self._names[index]
            self._written[name] = 0


def _find_files(path: Path) -> tuple[list[Path], list[str]]:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise CheckpointError([f"{path.name}: {_pickle_remedy()}"])
        return [path], []
    if not path.is_dir():
        raise CheckpointError([f"{path}: no such file or folder"])
    index = path / INDEX_NAME
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError([f"{INDEX_NAME}: has no weight_map; remove the file or write it anew"])
        names = sorted(set(weight_map.values()))
        strange = [n for n in names if not isinstance(n, str) or Path(n).name != n or not n.endswith(".safetensors")]
        if strange:
            raise CheckpointError([f"{INDEX_NAME}: {n!r} is not a .safetensors file of this folder" for n in strange])
        absent = [n for n in names if not (path / n).is_file()]
        if absent:
            raise CheckpointError([f"{n}: shard listed in {INDEX_NAME} is missing; fetch it" for n in absent])
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


def _read_json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
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
    except SafetensorError as error:
        raise CheckpointError([f"{file.name}: damaged or not safetensors ({error}); fetch it again"]) from error


def _plan_shards(tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], max_bytes: int) -> list[list[str]]:
    bad = sorted({str(dtype) for _, dtype in tensors.values() if dtype not in DTYPE_NAMES})
    if bad:
        raise ValueError(f"dtypes must be one of {sorted(DTYPES)}, got {bad}; cast first")
    plan: list[list[str]] = [[]]
    used = 0
    for name, (shape, dtype) in tensors.items():
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if plan[-1] and used + size > max_bytes:
            plan.append([])
            used = 0
        plan[-1].append(name)
        used += size
    return plan


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _pwrite_all(handle: int, array: np.ndarray, offset: int) -> None:
    view = memoryview(array.reshape(-1).view(np.uint8)) if array.size else memoryview(b"")
    done = 0
    while done < len(view):  # one call writes at most 2 GiB
        done += os.pwrite(handle, view[done:], offset + done)
