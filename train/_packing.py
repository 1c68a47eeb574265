"""Packing documents into rows of equal length, with segment ids and restarting positions."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ._tokenizer import NUM_BYTES, ByteTokenizer


class Rows(NamedTuple):
    """Some rows of tokens as host arrays, `[B S]` each.

    `tokens`, `targets`, `segment_ids` (0 = padding) and `positions` are int32, `loss_mask` is bool.
    """

    tokens: np.ndarray
    targets: np.ndarray
    loss_mask: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows of `row_length` positions cut from one token stream; row `i` is made when asked for.

    Attributes:
        stream: All documents one after another, `bos ... eod bos ... eod`, and one closing `bos`.
        piece_starts: Offset of each piece in the stream, in tokens.
        piece_sizes: Length of each piece, 1 to `row_length` tokens.
        row_borders: Row `i` holds the pieces `row_borders[i]` to `row_borders[i + 1] - 1`.
        row_length: Positions of a row.
        eod_mask_loss: True leaves positions that hold `eod` unscored, as Megatron's option does.
        tokenizer: Gives the special ids.
    """

    stream: np.ndarray
    piece_starts: np.ndarray
    piece_sizes: np.ndarray
    row_borders: np.ndarray
    row_length: int
    eod_mask_loss: bool
    tokenizer: ByteTokenizer

    def __len__(self) -> int:
        return len(self.row_borders) - 1

    def __getitem__(self, row: int) -> Rows:
        """Row number `row`, as arrays of one dimension.

        The target of a position is the next token of its document. After `eod` comes `bos`, which
        opens every document and so tells nothing of the one that happens to follow: no target
        crosses a document. Padding has segment 0, the pad id, position 0, and is never scored.
        """
        out = empty_rows(1, self.row_length, self.tokenizer)
        tokens, targets, loss_mask, segment_ids, positions = (array[0] for array in out)
        at = 0
        for segment, piece in enumerate(range(self.row_borders[row], self.row_borders[row + 1]), start=1):
            start, size = int(self.piece_starts[piece]), int(self.piece_sizes[piece])
            here = slice(at, at + size)
            tokens[here] = self.stream[start : start + size]
            targets[here] = self.stream[start + 1 : start + size + 1]
            loss_mask[here] = (tokens[here] != self.tokenizer.eod_id) if self.eod_mask_loss else True
            segment_ids[here] = segment
            positions[here] = np.arange(size)
            at += size
        return Rows(tokens, targets, loss_mask, segment_ids, positions)


def pack_documents(
    documents: Sequence[bytes], row_length: int, tokenizer: ByteTokenizer, eod_mask_loss: bool
) -> PackedRows:
    """All documents in rows of `row_length`, none truncated, by best-fit decreasing.

    A document longer than a row is cut into pieces of `row_length` and a rest; its continuation is
    a segment of its own whose positions restart at 0. Pieces are placed from the longest to the
    shortest, each in the row where it leaves the least room (Ding et al., Fewer Truncations Improve
    Language Modeling, arXiv:2404.10830, section 3). The result depends on the arguments alone.

    Raises:
        ValueError: `row_length` is below 2.
    """
    if row_length < 2:
        raise ValueError(f"row_length must be at least 2 positions, got {row_length}")
    encoded = [tokenizer.encode(text) for text in documents]
    stream = np.concatenate([*encoded, np.array([tokenizer.bos_id], dtype=np.uint16)])
    starts, sizes = _cut([len(ids) for ids in encoded], row_length)
    rows = _best_fit(sizes, row_length)
    order = np.array([piece for row in rows for piece in row], dtype=np.int64)
    return PackedRows(
        stream=stream,
        piece_starts=starts[order],
        piece_sizes=sizes[order],
        row_borders=np.cumsum([0, *(len(row) for row in rows)]),
        row_length=row_length,
        eod_mask_loss=eod_mask_loss,
        tokenizer=tokenizer,
    )


def empty_rows(num_rows: int, row_length: int, tokenizer: ByteTokenizer) -> Rows:
    """Rows that hold nothing but padding; every array may be written to."""
    shape = (num_rows, row_length)
    return Rows(
        tokens=np.full(shape, tokenizer.pad_id, dtype=np.int32),
        targets=np.full(shape, tokenizer.pad_id, dtype=np.int32),
        loss_mask=np.zeros(shape, dtype=bool),
        segment_ids=np.zeros(shape, dtype=np.int32),
        positions=np.zeros(shape, dtype=np.int32),
    )


def num_scored_bytes(rows: Rows) -> int:
    """Number of scored targets that are bytes of text rather than special tokens."""
    return int(np.sum(rows.loss_mask & (rows.targets < NUM_BYTES)))


def _cut(document_sizes: Sequence[int], row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Start offset and length of every piece, documents in order."""
    starts: list[int] = []
    sizes: list[int] = []
    offset = 0
    for size in document_sizes:
        for start in range(0, size, row_length):
            starts.append(offset + start)
            sizes.append(min(row_length, size - start))
        offset += size
    return np.array(starts, dtype=np.int64), np.array(sizes, dtype=np.int64)


def _best_fit(sizes: np.ndarray, row_length: int) -> list[list[int]]:
    """Pieces of each row. Rows are opened in order, so equal input gives equal output."""
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # room left -> rows with that room
    rooms: list[int] = []  # keys of open_rows, ascending
    for piece in np.argsort(-sizes, kind="stable"):
        size = int(sizes[piece])
        at = bisect.bisect_left(rooms, size)
        if at == len(rooms):
            rows.append([])
            row, room = len(rows) - 1, row_length
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        rows[row].append(int(piece))
        left = room - size
        if left:
            if left not in open_rows:
                open_rows[left] = []
                bisect.insort(rooms, left)
            open_rows[left].append(row)
    return rows
