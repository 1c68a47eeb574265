"""Scalars of TensorBoard event files, read without TensorFlow or protobuf.

An event file is a TFRecord file: length (u64), masked CRC-32C of the length, payload, masked
CRC-32C of the payload. A payload is an `Event` message. Field numbers:
tensorflow/core/util/event.proto, framework/summary.proto, framework/tensor.proto.
"""

import struct
from collections.abc import Iterator

from ._types import Parsed, Row

_DT_FLOAT, _DT_DOUBLE = 1, 2
_CASTAGNOLI = 0x82F63B78
_MASK_DELTA = 0xA282EAD8


def is_event_file(head: bytes) -> bool:
    """True when the first twelve bytes are a TFRecord header with the right checksum."""
    return len(head) >= 12 and struct.unpack("<I", head[8:12])[0] == masked_crc32c(head[:8])


def parse_events(blobs: list[bytes]) -> Parsed:
    """Rows of event files, in the order given. One row holds one scalar.

    A record cut off at the end of a file, or one whose checksum is wrong, is counted as skipped;
    nothing after a damaged length can be read.
    """
    rows: list[Row] = []
    num_skipped = 0
    for blob in blobs:
        for record in _records(blob):
            if record is None:
                num_skipped += 1
                continue
            try:
                rows.extend(_event_rows(record))
            except (ValueError, IndexError, struct.error):
                num_skipped += 1
    return Parsed(rows, num_skipped)


def masked_crc32c(data: bytes) -> int:
    """TFRecord's masked CRC-32C (Castagnoli) of the bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _crc_table() -> tuple[int, ...]:
    table: list[int] = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _crc_table()


def _records(blob: bytes) -> Iterator[bytes | None]:
    """Payloads; None for a damaged one."""
    at = 0
    while at < len(blob):
        header = blob[at : at + 12]
        if not is_event_file(header):
            yield None
            return
        (length,) = struct.unpack("<Q", header[:8])
        payload = blob[at + 12 : at + 12 + length]
        footer = blob[at + 12 + length : at + 16 + length]
        if len(footer) < 4:
            yield None
            return
        yield payload if struct.unpack("<I", footer)[0] == masked_crc32c(payload) else None
        at += 16 + length


def _event_rows(record: bytes) -> list[Row]:
    step = 0
    rows: list[Row] = []
    values: list[bytes] = []
    for field, value in _fields(record):
        if field == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >= 1 << 63 else value
        elif field == 5 and isinstance(value, bytes):
            values.extend(part for number, part in _fields(value) if number == 1 and isinstance(part, bytes))
    for message in values:
        scalar = _scalar(message)
        if scalar is not None:
            rows.append(Row(step, {scalar[0]: scalar[1]}))
    return rows


def _scalar(message: bytes) -> tuple[str, float] | None:
    """Tag and number of a `Summary.Value`, or None for text, images and histograms."""
    tag, number = "", None
    for field, value in _fields(message):
        if not isinstance(value, bytes):
            continue
        if field == 1:
            tag = value.decode("utf-8", "replace")
        elif field == 2:
            number = struct.unpack("<f", value)[0]
        elif field == 8:
            number = _tensor_scalar(value)
    return None if number is None or not tag else (tag, float(number))


def _tensor_scalar(message: bytes) -> float | None:
    """The element of a `TensorProto` of one float, or None."""
    dtype = 0
    data = b""
    for field, value in _fields(message):
        if field == 1 and isinstance(value, int):
            dtype = value
        elif field in (4, 5, 6) and isinstance(value, bytes):  # content, float_val, double_val
            data = data or value
    if dtype == _DT_FLOAT and len(data) == 4:
        return struct.unpack("<f", data)[0]
    if dtype == _DT_DOUBLE and len(data) == 8:
        return struct.unpack("<d", data)[0]
    return None


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and raw value of a protobuf message (varints as int, the rest as bytes)."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"protobuf wire type must be 0, 1, 2 or 5, got {wire}")
        if at + size > len(message):
            raise ValueError(f"protobuf field of {size} bytes exceeds its message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("protobuf varint is longer than ten bytes")
