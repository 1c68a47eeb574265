"""The folder of a run: what is in it, who may write to it, and how a run begins or goes on there."""

import fcntl
import shutil
from pathlib import Path
from typing import IO

from ._metrics import METRICS_FILE, PERF_FILE, TENSORBOARD_FOLDER
from ._report import REPORT_FILE

CONFIG_FILE = "config.yaml"
CHECKPOINT_FOLDER = "checkpoints"
_LOCK_FILE = ".lock"
_OUTPUTS = (METRICS_FILE, PERF_FILE, TENSORBOARD_FOLDER, REPORT_FILE, CONFIG_FILE, CHECKPOINT_FOLDER)


class RunFolderError(RuntimeError):
    """The folder cannot be used; the text says why and what to do."""


class RunFolder:
    """A run folder held by this process; a context manager that lets go of it at its end."""

    def __init__(self, path: Path, *, is_fresh: bool) -> None:
        """Takes hold of `path`, created if absent.

        Args:
            is_fresh: True first deletes what an earlier run wrote there.
        Raises:
            RunFolderError: Another process trains there, or the folder holds something that is no run.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(
                f"cannot create run folder {str(path)!r}: {error.strerror}; set run.folder"
            ) from None
        foreign = [p.name for p in path.iterdir() if p.name not in (*_OUTPUTS, _LOCK_FILE)]
        if foreign and not (path / CONFIG_FILE).exists():
            raise RunFolderError(
                f"run folder {str(path)!r} holds {foreign[0]!r} and no {CONFIG_FILE}: it is not a run folder; "
                "set run.folder to a new one"
            )
        self._lock = _lock(path)
        if is_fresh:
            for name in _OUTPUTS:
                _delete(path / name)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def write_config(self, text: str) -> None:
        """Writes the resolved configuration."""
        (self.path / CONFIG_FILE).write_text(text, encoding="utf-8")


def _lock(path: Path) -> IO[str]:
    file = (path / _LOCK_FILE).open("w")
    try:
        # Released by the system when the process ends, however it ends.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunFolderError(
            f"another process is training in {str(path)!r}; wait for it, stop it, or set run.folder"
        ) from None
    return file


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
