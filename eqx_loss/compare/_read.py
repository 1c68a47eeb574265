"""From a path to a run: open, decompress, recognize the format, parse."""

import csv
import json
import pathlib
import zlib
from typing import cast

from . import _structured as structured
from . import _text as text_logs
from ._tfevents import is_event_file, parse_events
from ._types import LogError, LogFormat, Parsed, Run, assemble

_KNOWN = (
    "Megatron, MaxText or torchtitan output, JSON Lines, TensorBoard events, CSV, trainer_state.json or "
    "reference JSON"
)
_DIRECTORY_FILES = ("metrics.jsonl", "trainer_state.json")
_TEXT_READERS = {
    LogFormat.MEGATRON: text_logs.parse_megatron,
    LogFormat.MAXTEXT: text_logs.parse_maxtext,
    LogFormat.TORCHTITAN: text_logs.parse_torchtitan,
}


def read_run(path: str | pathlib.Path, log_format: LogFormat | None = None) -> Run:
    """The run logged at `path`: a file (gzip or plain) or a directory of event files or metrics.

    Args:
        path: File or directory.
        log_format: How to read it; None recognizes the format from the content.

    Raises:
        LogError: The path is missing, empty, of no known format, or holds no step.
    """
    source = pathlib.Path(path)
    if source.is_dir():
        return _read_directory(source, log_format)
    if not source.is_file():
        raise LogError(f"{path}: a log must be an existing file or directory; check the path")
    data = _decompress(source)
    if not data.strip():
        raise LogError(f"{path}: the file is empty; nothing was logged or the copy failed")
    if log_format is LogFormat.TENSORBOARD or (log_format is None and is_event_file(data[:12])):
        return assemble(str(path), LogFormat.TENSORBOARD, parse_events([data]))
    text = text_logs.strip_ansi(_decode(data))
    try:
        found, parsed = _parse_text(text, str(path), log_format)
    except csv.Error as error:
        raise LogError(f"{path}: not a readable CSV ({error}); re-export it") from error
    return assemble(str(path), found, parsed)


def _parse_text(text: str, path: str, wanted: LogFormat | None) -> tuple[LogFormat, Parsed]:
    parsed: Parsed | None = None
    log_format = wanted
    if log_format is None:
        log_format, parsed = _recognize(text, path)
    if parsed is not None:
        return log_format, parsed
    match log_format:
        case LogFormat.MEGATRON | LogFormat.MAXTEXT | LogFormat.TORCHTITAN:
            return log_format, _TEXT_READERS[log_format](text)
        case LogFormat.JSONL:
            return log_format, structured.parse_jsonl(text)
        case LogFormat.CSV:
            return log_format, structured.parse_csv(text, path)
        case LogFormat.TRAINER_STATE:
            return log_format, structured.parse_trainer_state(_document(text, path), path)
        case LogFormat.REFERENCE:
            return log_format, structured.parse_reference(_document(text, path), path)
        case LogFormat.GOLDEN:
            return log_format, structured.parse_golden(_document(text, path), path)
        case LogFormat.TENSORBOARD:
            raise LogError(
                f"{path}: not a TensorBoard event file; leave the format out to have it recognized"
            )


def _recognize(text: str, path: str) -> tuple[LogFormat, Parsed | None]:
    """The format the content shows; step lines of a trainer win over what wraps them.

    The rows too, where they had to be read to recognize it.
    """
    document = _try_document(text)
    if isinstance(document, list):
        return LogFormat.REFERENCE, None
    if isinstance(document, dict):
        record = cast("dict[str, object]", document)
        if "log_history" in record:
            return LogFormat.TRAINER_STATE, None
        if "losses" in record:
            return LogFormat.REFERENCE, None
        if structured.looks_like_golden(record):
            return LogFormat.GOLDEN, None
    found = {log_format: reader(text) for log_format, reader in _TEXT_READERS.items()}
    best = max(found, key=lambda log_format: len(found[log_format].rows))
    if found[best].rows:
        return best, found[best]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if sum(line.startswith("{") for line in lines) * 2 > len(lines) and structured.parse_jsonl(text).rows:
        return LogFormat.JSONL, None
    if lines and structured.has_step_column(lines[0]):
        return LogFormat.CSV, None
    if text.lstrip()[:1] in ("{", "[") and not (lines and _try_document(lines[0])):
        _document(text, path)  # says where the JSON breaks off
    raise LogError(
        f"{path}: no training step recognized; a log must be {_KNOWN}. First line: "
        f"{lines[0][:80] if lines else ''!r}"
    )


def _read_directory(source: pathlib.Path, log_format: LogFormat | None) -> Run:
    for name in _DIRECTORY_FILES:
        if (source / name).is_file() and log_format is not LogFormat.TENSORBOARD:
            return read_run(source / name, log_format)
    events = sorted(path for path in source.rglob("*tfevents*") if path.is_file())
    folders = sorted({path.parent for path in events})
    if source in folders:
        folders = [source]
    if not folders:
        raise LogError(
            f"{source}: a log directory must hold event files, metrics.jsonl or trainer_state.json"
        )
    if len(folders) > 1:
        names = ", ".join(str(folder.relative_to(source)) for folder in folders)
        raise LogError(
            f"{source}: a log directory must hold one run, got {len(folders)}; name one of: {names}"
        )
    blobs = [_decompress(path) for path in events if path.parent == folders[0]]
    return assemble(str(source), LogFormat.TENSORBOARD, parse_events(blobs))


def _decompress(source: pathlib.Path) -> bytes:
    """The bytes of the file; of a gzip file all members, up to where it breaks off."""
    data = source.read_bytes()
    if not data.startswith(b"\x1f\x8b"):
        return data
    parts: list[bytes] = []
    while data.startswith(b"\x1f\x8b"):
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(data))
        except zlib.error as error:
            if not parts:
                raise LogError(f"{source}: not a readable gzip file ({error}); copy it again") from error
            break
        data = member.unused_data
    return b"".join(parts)


def _decode(data: bytes) -> str:
    """UTF-8 or UTF-16 text; undecodable bytes become replacement characters, NULs are dropped."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    return data.decode("utf-8-sig", "replace").replace("\0", "")


def _try_document(text: str) -> object:
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _document(text: str, path: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise LogError(
            f"{path}: not valid JSON ({error}); the file may be cut short, write it again"
        ) from error
