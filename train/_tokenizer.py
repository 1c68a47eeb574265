"""Byte-level tokenizer: ids 0..255 are the bytes themselves, then the special tokens."""

from dataclasses import dataclass

import numpy as np

NUM_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """Lossless tokenizer of any byte string; needs no file and no training.

    Attributes:
        pad_id: Fills the tail of a row; never scored, never attended to.
        bos_id: Opens every document, so that its first byte is predicted too.
        eod_id: Closes every document.
    """

    pad_id: int = NUM_BYTES
    bos_id: int = NUM_BYTES + 1
    eod_id: int = NUM_BYTES + 2

    @property
    def vocab_size(self) -> int:
        """Number of ids in use; a model may pad its vocabulary above it."""
        return NUM_BYTES + 3

    def encode(self, text: bytes) -> np.ndarray:
        """One document as uint16 ids: `bos`, the bytes, `eod`. An empty text gives two ids."""
        ids = np.empty(len(text) + 2, dtype=np.uint16)
        ids[0] = self.bos_id
        ids[1:-1] = np.frombuffer(text, dtype=np.uint8)
        ids[-1] = self.eod_id
        return ids

    def decode(self, ids: np.ndarray) -> bytes:
        """The bytes among `ids`; special tokens are dropped."""
        ids = np.asarray(ids)
        return ids[ids < NUM_BYTES].astype(np.uint8).tobytes()
