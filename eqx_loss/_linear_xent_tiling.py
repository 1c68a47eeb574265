"""Tile sizes from shapes and backend."""

import math
from typing import NamedTuple

from ._linear_xent_types import Backend, XentExecution

# Tiles on a CPU, measured at D = 512, V = 157,184, CPU seconds of T = 1024: 256 x 4912 6.2, 512 x 4096
# 6.0, 512 x 2456 5.8, 512 x 1228 5.7, 1024 x 2048 7.6 (the two best with gathered target scores). The
# gradient of unembed is read and written once per token tile, so few are better, but the operands of a
# product must stay in the cache.
CPU_TOKENS = 512
CPU_LOGITS_BYTES = 308 << 20
# Kept logits on an accelerator, as a share of the float32 gradient of unembed. At 3/8 in float32 a tile has
# 3/8 D tokens; at 1/4 in 16 bits D/2, which at D = 2048 do 614 flops for each byte of unembed and of its
# gradient (3 bytes a number) that a tile moves: TPU v5p needs 166 and v6e 560 to be bound by its products.
# With 1/4, all that a call takes is less than the float32 gradient and the float32 result of tokamax's kernel.
LOGITS_SHARE = {4: 3 / 8, 2: 1 / 4}
MIN_LOGITS_BYTES = 64 << 20
# With a budget of its own on an accelerator, the share of a tile's scores in float32: wide tiles read and write the
# gradient of hidden less often.
TILE_SHARE = 1 / 3
TARGET_COLUMNS = {"cpu": 1280, "gpu": 4096, "tpu": 4096}
# Tokens come in whole sublanes; columns in whole lanes of an accelerator. On a CPU a broken vector costs
# less than columns computed twice: 157,184 is 128 tiles of 1228.
TOKEN_GRAIN = 8
COLUMN_GRAIN = {"cpu": 4, "gpu": 128, "tpu": 128}


class TileSizes(NamedTuple):
    """Whether rows stay a dimension of a tile, whether logits are kept, positions (of each row) and columns."""

    keep_rows: bool
    keep_logits: bool
    positions: int
    columns: int


def tile_sizes(
    rows: int,
    positions: int,
    matrix: tuple[int, int],
    num_travel: int,
    score_bytes: int,
    backend: Backend,
    execution: XentExecution,
) -> TileSizes:
    """The tiles of one device: those wished for, cut to what there is, or chosen.

    Args:
        rows: Rows of this device.
        positions: Positions of this device.
        matrix: Shape (D, V) of `unembed` as this device works on it.
        num_travel: Devices whose tokens meet in one tile.
        score_bytes: Bytes of a kept logit.
        backend: Where it runs.
        execution: Wishes.
    """
    tiling = execution.tiling
    width, num_columns = matrix
    num_tokens = rows * positions
    if tiling is not None:
        tokens, columns, keep_logits = tiling.token_tile_size, tiling.vocab_tile_size, tiling.keep_logits
        tokens, columns = min(tokens, max(num_tokens, 1)), min(columns, num_columns)
    else:
        keep_logits = True
        budget = execution.max_logits_bytes or _logits_budget(width * num_columns, score_bytes, backend)
        affordable = max(1, budget // (score_bytes * num_columns * num_travel))
        if backend == "cpu" and execution.max_logits_bytes is None:
            affordable = min(affordable, max(1, CPU_TOKENS // num_travel))
        tokens = even_tile(max(num_tokens, 1), _round_down(affordable), TOKEN_GRAIN)
        target = TARGET_COLUMNS[backend]
        if backend != "cpu" and execution.max_logits_bytes is not None:
            target = max(target, int(TILE_SHARE * budget) // (4 * tokens * num_travel))
        columns = balanced_tile(num_columns, target, COLUMN_GRAIN[backend])
    # Without a mesh the compiler may have cut the rows: a tile that takes a piece of every row
    # keeps them where they are.
    keep_rows = execution.sharding is None and rows <= tokens
    if keep_rows:
        tokens = max(1, min(positions, math.ceil(tokens / max(rows, 1))))
    return TileSizes(keep_rows, keep_logits, tokens, columns)


def even_tile(total: int, target: int, grain: int) -> int:
    """The size of equal tiles of at most `target`, rounded up to `grain` where that keeps below it."""
    size = -(-total // -(-total // target))
    return min(size + -size % grain, max(target, size), total)


def balanced_tile(total: int, target: int, grain: int) -> int:
    """A tile size near `target`, a multiple of `grain` where `total` allows, with the least overhang.

    The overhang of the last tile is computed twice, so it is time: 157,184 columns in tiles of 4096
    waste 1.6 %, in tiles of 3584 or 5248 less than 0.4 %.
    """
    if total <= target:
        return total
    if total < 2 * grain:
        return total
    low, high = max(grain, target // 2), min(target * 3 // 2, total)
    candidates = range(low - low % grain, high + 1, grain)
    return min(candidates, key=lambda size: (-(-total // size) * size - total, abs(size - target)))


def _logits_budget(num_weights: int, score_bytes: int, backend: Backend) -> int:
    if backend == "cpu":
        return CPU_LOGITS_BYTES
    share = LOGITS_SHARE[min(score_bytes, 4)]
    return max(MIN_LOGITS_BYTES, int(share * num_weights * max(score_bytes, 4)))


def _round_down(tokens: int) -> int:
    for grain in (128, 8):
        if tokens >= grain:
            return tokens - tokens % grain
    return tokens
