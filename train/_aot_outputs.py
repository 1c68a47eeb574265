"""Whether the files that a command will write can be written, asked before a compilation of an hour."""

from collections.abc import Sequence
from pathlib import Path


def report_files(path: Path, is_sweep: bool) -> list[Path]:
    """`path` and what is written beside it: tables, a picture, and of a sweep every report."""
    suffixes = (".md", ".png", ".sweep.json") if is_sweep else (".md", ".png")
    return [path, *(path.with_suffix(suffix) for suffix in suffixes)]


def check_outputs(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Makes the folders of `outputs`.

    Raises:
        ValueError: One of them cannot be written, is named twice, or is one of `inputs`.
    """
    seen = {path.resolve(): "is read by this command" for path in inputs}
    for path in outputs:
        if path.resolve() in seen:
            raise ValueError(
                f"{path}: {seen[path.resolve()]}; give every file another name, the report one in .json"
            )
        seen[path.resolve()] = "would be written twice"
        _check_output(path)


def _check_output(path: Path) -> None:
    was_there = path.exists()
    if was_there and not path.is_file():
        raise ValueError(f"{path}: is no file; name a file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        words = f"{path.parent} is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(f"{path}: cannot be written: {words}; name another file") from error
