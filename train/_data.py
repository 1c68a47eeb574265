"""The data of a run: documents packed into rows, and rows into global batches by step number.

A batch is a function of (files, config, seed, step) alone. The position in the data is the number of
steps done; neither the number of processes nor the mesh changes which rows a step trains on, nor their order.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from ._documents import cut_documents, documents_fingerprint, read_documents, split_documents, stdlib_folder
from ._packing import PackedRows, Rows, empty_rows, pack_documents
from ._tokenizer import ByteTokenizer

# grain's sources are protocols with unbound type variables.
_source: Any = grain.MapDataset.source
# Steps are drawn from an endless repetition of the rows; grain wants a length.
_MAX_STEPS = 2**40


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text a run reads, and how it becomes rows.

    Attributes:
        folder: Read all files below it; None is the standard library of the running Python.
        pattern: Glob below the folder.
        validation_fraction: Share of the files, in (0, 1), that is never trained on; at least one file.
        split_seed: Decides which files those are.
        document_separator: Cuts every file into documents behind this text (two blank lines end a top-level
            definition of Python); None keeps a file as one document.
        eod_mask_loss: True leaves positions that hold the end-of-document token unscored.
    """

    folder: str | None = None
    pattern: str = "**/*.py"
    validation_fraction: float = 0.05
    split_seed: int = 0
    document_separator: str | None = None
    eod_mask_loss: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be in (0, 1), got {self.validation_fraction}")
        if not self.pattern:
            raise ValueError("pattern must not be empty; use '**/*' for every file")
        if self.document_separator == "":
            raise ValueError("document_separator must not be empty; use null to keep files whole")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Both splits of the text, packed into rows.

    Attributes:
        train: Rows to train on.
        validation: Rows of files that `train` holds nothing of.
        fingerprint: Digest of the text, its split and its packing; equal digests give equal rows.
    """

    train: PackedRows
    validation: PackedRows
    fingerprint: str
    tokenizer: ByteTokenizer

    @property
    def num_train_tokens(self) -> int:
        """Tokens of the training split, special tokens included."""
        return int(self.train.piece_sizes.sum())


def load_dataset(config: DataConfig, num_positions: int) -> Dataset:
    """Read, split and pack the text.

    Args:
        config: Where the text is.
        num_positions: Length of a row.
    Raises:
        ValueError: The folder is missing, or holds fewer than two files.
    """
    tokenizer = ByteTokenizer()
    folder = stdlib_folder() if config.folder is None else Path(config.folder)
    train, validation = split_documents(
        read_documents(folder, config.pattern), config.validation_fraction, config.split_seed
    )
    if config.document_separator is not None:
        # After the split: a file's documents are alike, and must not be on both sides.
        train, validation = (cut_documents(s, config.document_separator) for s in (train, validation))
    packed = [
        pack_documents([d.text for d in split], num_positions, tokenizer, config.eod_mask_loss)
        for split in (train, validation)
    ]
    parts = (
        documents_fingerprint(train),
        documents_fingerprint(validation),
        num_positions,
        config.eod_mask_loss,
    )
    fingerprint = hashlib.blake2b(repr((tokenizer, *parts)).encode(), digest_size=16).hexdigest()
    return Dataset(train=packed[0], validation=packed[1], fingerprint=fingerprint, tokenizer=tokenizer)


class TrainBatches:
    """Rows of the global batch of every step, by step number (a grain data source).

    Every pass over the rows has a new order, drawn from the seed and the number of the pass. Row `r` of
    step `n` is element `n * num_rows + r` of the endless sequence of passes.
    """

    def __init__(
        self, rows: PackedRows, num_rows: int, seed: int, local_rows: np.ndarray | None = None
    ) -> None:
        """Args:
        rows: Rows to draw from.
        num_rows: Rows of the global batch.
        seed: Decides the order.
        local_rows: Which rows of the global batch this process needs; None is all.
        """
        self._samples = _source(rows).seed(seed).shuffle().repeat(None)
        self._num_rows = num_rows
        self._local_rows = np.arange(num_rows) if local_rows is None else local_rows

    def __len__(self) -> int:
        return _MAX_STEPS

    def __getitem__(self, step: int) -> Rows:
        rows = [self._samples[step * self._num_rows + int(row)] for row in self._local_rows]
        return _stack(rows)

    def __repr__(self) -> str:
        return f"TrainBatches(num_rows={self._num_rows})"


def train_batches(source: TrainBatches, step: int) -> Iterator[Rows]:
    """Batches of the steps from `step` on, without end, made ahead by one thread.

    Starting late costs nothing: step number `step` is the whole state.
    """
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    iterator = iter(_source(source).to_iter_dataset(options))
    iterator.set_state({"next_index": step})
    return iterator


def validation_batches(dataset: Dataset, num_rows: int, max_batches: int) -> list[Rows]:
    """The same rows of the validation split at every call, in an order drawn once from a fixed seed.

    The last batch is filled up with padding rows when the split has fewer than `num_rows * max_batches` rows.
    """
    rows = dataset.validation
    # Packing puts whole rows of long files first: a prefix would score these alone.
    order = np.random.default_rng(0).permutation(len(rows))[: num_rows * max_batches]
    padding = empty_rows(1, rows.row_length, dataset.tokenizer)
    padding = Rows(*(array[0] for array in padding))
    return [
        _stack([rows[int(i)] for i in chunk] + [padding] * (num_rows - len(chunk)))
        for chunk in np.split(order, range(num_rows, len(order), num_rows))
    ]


def local_row_numbers(sharding: NamedSharding, num_rows: int, num_positions: int) -> np.ndarray:
    """Rows of a global batch that the devices of this process hold under `sharding`, ascending."""
    blocks = sharding.addressable_devices_indices_map((num_rows, num_positions)).values()
    numbers = [np.arange(num_rows)[block[0]] for block in blocks if block is not None]
    return np.unique(np.concatenate(numbers))


def put_rows(
    rows: Rows, local_rows: np.ndarray, num_rows: int, sharding: NamedSharding
) -> tuple[jax.Array, ...]:
    """The arrays of `rows` as global arrays under `sharding`.

    Args:
        rows: Those rows of the global batch that `local_rows` names, in that order.
        num_rows: Rows of the global batch.
    """

    def put(array: np.ndarray) -> jax.Array:
        def block(index: Any) -> np.ndarray:
            wanted = np.arange(num_rows)[index[0]]
            return array[np.searchsorted(local_rows, wanted)][:, index[1]]

        return jax.make_array_from_callback((num_rows, array.shape[1]), sharding, block)

    return tuple(put(array) for array in rows)


def _stack(rows: list[Rows]) -> Rows:
    return Rows(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))
