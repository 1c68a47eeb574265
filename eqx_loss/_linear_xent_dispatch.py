"""Which implementation serves a call: what each can do, and a roofline where the chip is known."""

import dataclasses
import importlib.util

from ._linear_xent_types import (
    REFUSED_IMPLEMENTATIONS,
    Backend,
    Implementation,
    ImplementationWish,
    XentRules,
)

# Peak bfloat16 products (flop/s) and memory bandwidth (bytes/s) of one chip, from the vendor's
# system-architecture pages (cloud.google.com/tpu/docs), by jax's `device_kind`.
CHIPS = {
    "TPU v5 lite": (197e12, 0.82e12),
    "TPU v5": (459e12, 2.77e12),
    "TPU v6 lite": (918e12, 1.64e12),
    "TPU7x": (2307e12, 7.37e12),
}
# Token block of tokamax's kernels: each block reads all of unembed, and its gradient back.
MOSAIC_TOKENS = 1024
# The hidden dimension must fill whole sublanes of every generation.
MOSAIC_GRAIN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One call on one device.

    Attributes:
        num_tokens: Tokens whose logits this device forms (all heads).
        width: D.
        num_columns: Columns of this device.
        num_token_tiles: Token tiles of all heads.
        operand_bytes: Bytes of one operand of the products.
        sum_bytes: Bytes of one number of the gradient of `unembed` while it grows.
        score_bytes: Bytes of one kept score.
        num_products: Products of the tiled path.
        cuts_vocabulary: Whether other devices hold other columns.
        wide_floats: Whether the arguments are float64.
    """

    num_tokens: int
    width: int
    num_columns: int
    num_token_tiles: int
    operand_bytes: int
    sum_bytes: int
    score_bytes: int
    num_products: int
    cuts_vocabulary: bool
    wide_floats: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """An implementation, why, and the estimated seconds of each candidate (empty: chip unknown)."""

    implementation: Implementation
    reason: str
    estimated_seconds: tuple[tuple[Implementation, float], ...] = ()


def choose(
    wish: ImplementationWish, work: Workload, rules: XentRules, backend: Backend, device_kind: str | None
) -> Choice:
    """The implementation for this call.

    Raises:
        ValueError: The wish cannot do what `rules` asks, or is not installed.
    """
    if work.num_tokens == 0:
        return Choice(implementation="plain", reason="there are no tokens")
    obstacle = mosaic_obstacle(work, rules, backend)
    match wish:
        case "tiled":
            return Choice(implementation="tiled", reason="forced")
        case "plain":
            return Choice(implementation="plain", reason="forced")
        case "tokamax_mosaic_tpu":
            if obstacle is not None:
                raise ValueError(
                    f"implementation='tokamax_mosaic_tpu' cannot serve this call: {obstacle}; use 'auto'"
                )
            return Choice(implementation="tokamax_mosaic_tpu", reason="forced")
        case "tokamax_chunked_xla" | "tokamax_xla" | "maxtext_vocab_tiling":
            raise ValueError(
                f"implementation must give correct per-token losses; {wish!r} cannot: "
                f"{REFUSED_IMPLEMENTATIONS[wish]}. Use 'auto' or 'tiled'"
            )
        case "auto":
            return _fastest(work, obstacle, device_kind)


def mosaic_obstacle(work: Workload, rules: XentRules, backend: Backend) -> str | None:
    """Why tokamax's TPU kernel cannot serve this call; None where it can."""
    if backend != "tpu":
        return f"it runs on TPU, and the backend is {backend}"
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed"
    if isinstance(rules.z_loss_multiplier, tuple) or rules.z_loss_multiplier > 0:
        return "it returns no log-partition, which the z term needs"
    if rules.logit_soft_cap is not None or rules.label_smoothing > 0:
        return "it has neither soft cap nor label smoothing"
    if rules.vocab_size is not None:
        return "it takes every column for a class, and vocab_size is set"
    if work.cuts_vocabulary:
        return "it needs the whole vocabulary on each device"
    if work.width % MOSAIC_GRAIN:
        return f"it needs D to be a multiple of {MOSAIC_GRAIN}, and D={work.width}"
    if work.wide_floats:
        return "it accumulates in float32, and the arguments are float64"
    return None


def tiled_seconds(work: Workload, chip: tuple[float, float]) -> float:
    """Roofline of the tiled path: its products, or its traffic to and from memory."""
    rate, bandwidth = chip
    matrix = work.width * work.num_columns
    per_tile = matrix * (2 * work.operand_bytes + 2 * work.sum_bytes)
    # Kept logits are written once, and read by each of the two products of the gradient.
    passes = 3 if work.num_products == 3 else 0
    logits = passes * work.num_tokens * work.num_columns * work.score_bytes
    flops = 2 * work.num_products * work.num_tokens * matrix
    return max(flops / rate, (work.num_token_tiles * per_tile + logits) / bandwidth)


def mosaic_seconds(work: Workload, chip: tuple[float, float]) -> float:
    """Roofline of tokamax's kernels: one product forward, three backward, no logits in memory."""
    rate, bandwidth = chip
    matrix = work.width * work.num_columns
    blocks = -(-work.num_tokens // MOSAIC_TOKENS)
    traffic = blocks * matrix * (3 * work.operand_bytes + 2 * 4)
    return max(8 * work.num_tokens * matrix / rate, traffic / bandwidth)


def _fastest(work: Workload, obstacle: str | None, device_kind: str | None) -> Choice:
    chip = None if device_kind is None else CHIPS.get(device_kind)
    products = f"{work.num_products} matrix products"
    if obstacle is not None:
        return Choice(implementation="tiled", reason=f"{products}; tokamax_mosaic_tpu: {obstacle}")
    if chip is None:
        return Choice(implementation="tiled", reason=f"{products} against 4; chip {device_kind} unknown")
    ours, theirs = tiled_seconds(work, chip), mosaic_seconds(work, chip)
    estimates: tuple[tuple[Implementation, float], ...] = (("tiled", ours), ("tokamax_mosaic_tpu", theirs))
    winner: Implementation = "tiled" if ours <= theirs else "tokamax_mosaic_tpu"
    reason = f"roofline of {device_kind}: tiled {ours * 1e3:.1f} ms, mosaic {theirs * 1e3:.1f} ms"
    return Choice(implementation=winner, reason=reason, estimated_seconds=estimates)
