"""Files that are being written, under a temporary name: one process each, and what a killed one left is removed."""

import fcntl
import os
import re
from collections.abc import Collection
from pathlib import Path

from ._errors import CheckpointError

SUFFIX = ".partial"
_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors\.partial")


def open_partial(path: Path) -> tuple[int, bool]:
    """A handle of the empty file `path`, and whether a process that has ended left one there.

    The file is locked until the handle is closed or this process ends, however it ends.

    Raises:
        CheckpointError: Another process writes it.
    """
    was_there = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            was_there = was_there or os.fstat(handle).st_size > 0
            _lock(handle, path, was_there)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                os.ftruncate(handle, 0)
                return handle, was_there
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # removed by another process before it was locked here


def remove_partials(folder: Path, own: Collection[str]) -> list[str]:
    """Removes what processes that have ended left in `folder`, but for the files `own`; their names.

    Raises:
        CheckpointError: Another process writes one of them.
    """
    left = sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.name not in own)
    for path in left:
        handle, _ = open_partial(path)
        path.unlink()
        os.close(handle)
    return [path.name for path in left]


def _lock(handle: int, path: Path, was_there: bool) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            [f"{path}: another process is writing it; wait for it, or write to another folder"]
        ) from None
    except OSError as error:
        if was_there:
            raise CheckpointError(
                [f"{path}: is there, and whether a process writes it cannot be told ({error.strerror}); if none"
                 " does, remove it"]
            ) from error  # fmt: skip
