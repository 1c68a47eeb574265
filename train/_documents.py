"""Documents of a run: the files of a folder, read as bytes, split into train and validation."""

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Folders of the standard library that are not library text: installed packages, and tests,
# which some distributions leave out.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file: its name relative to the folder, with forward slashes, and its bytes."""

    name: str
    text: bytes


def stdlib_folder() -> Path:
    """Folder of the running Python's own standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_documents(folder: Path, pattern: str) -> list[Document]:
    """The non-empty files of `folder` that match `pattern`, ordered by name.

    Files are read as bytes: no decoding can fail. Folders named in `EXCLUDED_FOLDERS` are left out.

    Args:
        folder: Where to look.
        pattern: Glob below the folder, for example `**/*.py`.
    Raises:
        ValueError: The folder does not exist or holds no such file.
    """
    if not folder.is_dir():
        raise ValueError(
            f"data.folder must be an existing folder, got {str(folder)!r}; create it or correct the path"
        )
    documents = [
        Document(name=path.relative_to(folder).as_posix(), text=path.read_bytes())
        for path in folder.glob(pattern)
        if path.is_file() and EXCLUDED_FOLDERS.isdisjoint(path.relative_to(folder).parts[:-1])
    ]
    documents = sorted((d for d in documents if d.text), key=lambda d: d.name)
    if not documents:
        raise ValueError(
            f"data.pattern must match at least one non-empty file below {str(folder)!r}, "
            f"got {pattern!r}; correct data.pattern or data.folder"
        )
    return documents


def split_documents(
    documents: Sequence[Document], validation_fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Train and validation documents, whole files each, every file in exactly one of the two.

    Files are ordered by a hash of (seed, name); the first `validation_fraction` of them, at least
    one, is validation. Adding a file moves at most one other file across the border.

    Raises:
        ValueError: There are fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError(
            f"a train/validation split by file needs at least 2 files, got {len(documents)}; widen data.pattern"
        )
    num_validation = min(max(1, round(validation_fraction * len(documents))), len(documents) - 1)
    ordered = sorted(documents, key=lambda d: _name_hash(seed, d.name))
    held_out = {d.name for d in ordered[:num_validation]}
    train = [d for d in documents if d.name not in held_out]
    validation = [d for d in documents if d.name in held_out]
    return train, validation


def cut_documents(documents: Sequence[Document], separator: str) -> list[Document]:
    """Every document cut behind each `separator`; the pieces are documents of their own, none is empty.

    The separator stays at the end of its piece: joined again, the pieces are the text.

    Raises:
        ValueError: `separator` is empty.
    """
    if not separator:
        raise ValueError("document_separator must not be empty; use null to keep files whole")
    mark = separator.encode()
    pieces: list[Document] = []
    for document in documents:
        *closed, rest = document.text.split(mark)
        texts = [text + mark for text in closed] + ([rest] if rest else [])
        pieces += [Document(name=f"{document.name}#{i}", text=text) for i, text in enumerate(texts)]
    return pieces


def documents_fingerprint(documents: Sequence[Document]) -> str:
    """Hex digest of every name and every byte; any change of the text changes it."""
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        for part in (document.name.encode(), document.text):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def _name_hash(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
