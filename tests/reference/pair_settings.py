"""The run that PyTorch and this project both train: sizes, optimizer and batches. NumPy alone.

Rows are packed with documents of up to 200 tokens and end in padding of very different length, so that the estimators
(per token, per row) differ by much more than the tolerance.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "train_pair"
WEIGHTS = FOLDER / "weights"
SEED = 20260825

NUM_STEPS = 50
MICRO_STEPS = 2  # gradient accumulation
DATA_RANKS = 4  # PyTorch: one after the other, averaged as DDP does; here: devices, as many as there are
MICRO_BATCH_SIZE = 1
NUM_ROWS = MICRO_STEPS * DATA_RANKS * MICRO_BATCH_SIZE
NUM_POSITIONS = 256
VOCAB_SIZE = 64
END_OF_DOCUMENT = 0

PEAK, WARMUP_STEPS, FINAL = (
    1e-3,
    10,
    1e-4,
)  # learning rate: linear warm-up, then cosine to FINAL at the last step
B1, B2, EPS = 0.9, 0.95, 1e-8
WEIGHT_DECAY = 0.1  # not of vectors (norms, biases, A_log): Megatron's rule
MAX_GRAD_NORM = 1.0
MTP_LOSS_SCALING_FACTOR = 0.1
MOE_Z_LOSS_COEFF = 1e-3
ROUTER_BIAS_UPDATE_RATE = 1e-3

FLAGS = {"pt": True, "mb": False}  # calculate_per_token_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """One global batch, every array `[B, S]`; micro-step m of rank r is row `m * DATA_RANKS + r`.

    Attributes:
        tokens: Inputs.
        targets: The next token of the row.
        loss_mask: False at the end of a document (Megatron's `eod_mask_loss`) and at padding.
        segment_ids: Documents from 1 on; 0 is padding.
        positions: Position within the document.
    """

    tokens: np.ndarray
    targets: np.ndarray
    loss_mask: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def batches() -> Iterator[Rows]:
    """The batches of all steps, from a fixed Markov chain."""
    # Only `random()` is drawn: its stream is the same for every NumPy.
    draw = np.random.Generator(np.random.PCG64(SEED)).random
    logits = 6.0 * draw((VOCAB_SIZE, VOCAB_SIZE - 1)) + 6.0 * draw(VOCAB_SIZE - 1)
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    cumulative = np.cumsum(chances, axis=1)
    for _ in range(NUM_STEPS):
        rows = [_row(draw, cumulative, place) for place in range(NUM_ROWS)]
        yield Rows(**{name: np.stack([row[name] for row in rows]) for name in rows[0]})


def learning_rate(step: int) -> float:
    """Rate of the update of `step`, counted from 1."""
    if step <= WARMUP_STEPS:
        return PEAK * step / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (NUM_STEPS - WARMUP_STEPS)
    return FINAL + (PEAK - FINAL) * 0.5 * (1.0 + float(np.cos(np.pi * progress)))


def documents(segment_ids: np.ndarray) -> list[slice]:
    """Where the documents of one row are."""
    starts = np.flatnonzero(np.diff(segment_ids, prepend=0) > 0)
    return [slice(int(s), int(s + np.sum(segment_ids == segment_ids[s]))) for s in starts]


def _row(draw, cumulative: np.ndarray, place: int) -> dict[str, np.ndarray]:
    """A row; odd places are between a sixth and all of it full, even ones full."""
    filled = NUM_POSITIONS if place % 2 == 0 else int(NUM_POSITIONS * (1 + 5 * draw()) / 6)
    stream = np.zeros(NUM_POSITIONS + 1, np.int32)
    segments = np.zeros(NUM_POSITIONS, np.int32)
    positions = np.zeros(NUM_POSITIONS, np.int32)
    start, number = 0, 0
    while start < filled:
        number += 1
        end = min(start + 20 + int(180 * draw()), filled)
        token = 1 + int((VOCAB_SIZE - 1) * draw())
        for i in range(start, end):
            stream[i] = token
            token = 1 + int(np.searchsorted(cumulative[token], draw()))
        stream[end - 1] = END_OF_DOCUMENT
        segments[start:end] = number
        positions[start:end] = np.arange(end - start)
        start = end
    tokens, targets = stream[:-1], stream[1:]
    return {
        "tokens": tokens,
        "targets": targets,
        "loss_mask": (segments != 0) & (tokens != END_OF_DOCUMENT),
        "segment_ids": segments,
        "positions": positions,
    }
