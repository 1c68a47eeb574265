"""Writing folders of safetensors files, one block of numbers at a time."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from ._errors import CheckpointError
from ._partial import SUFFIX, open_partial, remove_partials
from ._shards import DTYPE_NAMES, DTYPES, INDEX_NAME, SINGLE_NAME


class ShardWriter:
    """Writes tensors of known shape into safetensors shards with an index, one block of numbers at a time.

    The headers are written first and every block goes to its place with one `pwrite`, so that memory holds one block,
    and blocks may come in any order. A tensor larger than `max_shard_bytes` gets a shard of its own.
    A context: at its end files get their final names, and an error removes them. A process that is killed leaves
    `.partial` files, which the next writer to the same folder removes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
        *,
        max_shard_bytes: int = 5_000_000_000,
        progress: Callable[[str], None] | None = None,
    ):
        """Plan the shards and write their headers.

        Args:
            path: Folder to write to; created when missing.
            tensors: Shape and dtype of every tensor, in file order.
            max_shard_bytes: Bytes of numbers in one shard.
            progress: Called with a line of text when files of a killed process were removed.

        Raises:
            ValueError: `max_shard_bytes` is not positive or a dtype has no safetensors name.
            CheckpointError: Another process writes to the folder.
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
        self._names = (
            [SINGLE_NAME] if len(plan) == 1 else [_shard_name(i, len(plan)) for i in range(len(plan))]
        )
        self._weight_map: dict[str, str] = {}
        self._left: list[str] = []
        try:
            for index, names in enumerate(plan):
                self._start_shard(index, names)
            # Not before: two writers that start together see each other's files.
            self._left += remove_partials(self.path, [f"{name}{SUFFIX}" for name in self._names])
        except BaseException:
            self._remove()
            raise
        if self._left and progress is not None:
            progress(f"removed what a killed process left: {min(self._left)}, {len(self._left)} in all")

    def __enter__(self) -> "ShardWriter":
        """This writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`close`, or after an error the files are removed."""
        if kind is None:
            self.close()
        else:
            self._remove()

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
            f"{n}: {self._written[n]} of {size} elements written"
            for n, size in sizes.items()
            if self._written[n] != size
        ]
        if missing:
            self._remove()
            raise CheckpointError(missing)
        for name in self._names:
            os.replace(self.path / f"{name}{SUFFIX}", self.path / name)
        self._close_handles()
        if len(self._names) > 1:
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": dict(sorted(self._weight_map.items())),
            }
            (self.path / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")

    def _remove(self) -> None:
        """Removes the files that this writer opened."""
        for name, _ in zip(self._names, self._handles, strict=False):
            (self.path / f"{name}{SUFFIX}").unlink(missing_ok=True)
        self._close_handles()

    def _close_handles(self) -> None:
        for handle in self._handles:
            os.close(handle)
        self._handles = []

    def _start_shard(self, index: int, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in names:
            shape, dtype = self._tensors[name]
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            header[name] = {
                "dtype": DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (
            -len(text) % 8
        )  # the numbers start on a multiple of 8 bytes, as other writers have it
        path = self.path / f"{self._names[index]}{SUFFIX}"
        handle, was_left = open_partial(path)
        self._handles.append(handle)
        self._left += [path.name] * was_left
        os.write(handle, len(text).to_bytes(8, "little"))
        os.write(handle, text)
        os.ftruncate(handle, 8 + len(text) + offset)
        self.total_bytes += offset
        for name in names:
            begin = header[name]["data_offsets"][0]  # pyright: ignore[reportIndexIssue]
            self._places[name] = (index, 8 + len(text) + begin)
            self._weight_map[name] = self._names[index]
            self._written[name] = 0


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
