"""What the fused output layer computes (`XentRules`) and how it is carried out (`XentExecution`)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

Implementation = Literal["tiled", "plain", "tokamax_mosaic_tpu"]
# "auto" or a name; the last three are refused with a reason instead of being unknown.
ImplementationWish = Literal[
    "auto",
    "tiled",
    "plain",
    "tokamax_mosaic_tpu",
    "tokamax_chunked_xla",
    "tokamax_xla",
    "maxtext_vocab_tiling",
]
Backend = Literal["cpu", "gpu", "tpu"]
UnembedResidency = Literal["auto", "gathered", "stationary"]

REPLICATED = PartitionSpec()

# Implementations people ask for by name, and why they cannot serve here.
REFUSED_IMPLEMENTATIONS = {
    "tokamax_chunked_xla": (
        "it lets zero-padded vocabulary columns into the log-sum-exp whenever V is no multiple of its "
        "block (tokamax 0.0.17: 14.93 nats instead of 11.97 at V=157184)"
    ),
    "tokamax_xla": "it materializes [T, V] logits, which 'plain' does with fewer copies and in float32",
    "maxtext_vocab_tiling": (
        "it returns one scalar sum, so neither per-token losses nor per-sample weights exist"
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class XentRules:
    """The mathematics of one output layer, the same options as `cross_entropy` and `head_loss`.

    Attributes:
        z_loss_multiplier: Coefficient of `sum(weights * logsumexp^2)`, one for every head or one
            each; 0 turns the term off.
        logit_soft_cap: If given, logits become `cap * tanh(logits / cap)`.
        label_smoothing: Share in [0, 1) of the target mass spread evenly over the vocabulary.
        vocab_size: Number of real classes; columns of `unembed` from there on are padding. None
            means all of them.
    """

    z_loss_multiplier: float | tuple[float, ...] = 0.0
    logit_soft_cap: float | None = None
    label_smoothing: float = 0.0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if min(self.z_loss_multipliers(1)) < 0:
            raise ValueError(
                f"z_loss_multiplier must be >= 0, got {self.z_loss_multiplier}; use 0 to turn it off"
            )
        if self.logit_soft_cap is not None and self.logit_soft_cap <= 0:
            raise ValueError(
                f"logit_soft_cap must be positive, got {self.logit_soft_cap}; use None for no cap"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(
                f"vocab_size must be at least 1, got {self.vocab_size}; use None for all columns"
            )

    def z_loss_multipliers(self, num_heads: int) -> tuple[float, ...]:
        """The coefficient of each head."""
        if isinstance(self.z_loss_multiplier, tuple):
            return self.z_loss_multiplier
        return (self.z_loss_multiplier,) * num_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class XentTiling:
    """Sizes of one tile on one device.

    Attributes:
        token_tile_size: Tokens of a tile.
        vocab_tile_size: Columns of a tile.
        keep_logits: True keeps the logits of one token tile (`token_tile_size x V` of the device)
            between log-sum-exp and gradient: three matrix products in all. False recomputes them
            tile by tile: four products, and no buffer with a vocabulary dimension but the gradient.
    """

    token_tile_size: int
    vocab_tile_size: int
    keep_logits: bool = True

    def __post_init__(self) -> None:
        if self.token_tile_size < 1 or self.vocab_tile_size < 1:
            raise ValueError(
                "token_tile_size and vocab_tile_size must be at least 1, got "
                f"{self.token_tile_size} and {self.vocab_tile_size}; pass no tiling to have them chosen"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class XentSharding:
    """Where the arguments live on a mesh; given it, every device tiles its own tokens only.

    Attributes:
        mesh: The mesh of the arguments.
        rows: Mesh axes that cut the rows (B) of hidden, targets, weights and mask.
        positions: Mesh axes that cut their positions (S).
        vocab: Mesh axes that cut the vocabulary; every device keeps its own columns and the
            log-sum-exp is combined over these axes.
        unembed: Layout of `unembed` (D, V). The axes of its V dimension start with `vocab`. Its
            other axes are gathered, or kept: see `residency`.
        residency: "gathered" gathers the remaining axes of `unembed` once per call.
            "stationary" never gathers it: those axes become vocabulary axes, and hidden states
            travel instead, one token tile at a time. "auto" gathers while the gathered copy and its
            float32 gradient stay below `max_gathered_bytes`.
        max_gathered_bytes: Budget of "auto", bytes a device.
        inside_shard_map: True where the call stands inside a `shard_map` already: the arguments are
            one device's parts, `unembed` is cut by `vocab` alone, and summing its gradient over the
            devices with other tokens is the caller's. False inside a `shard_map` over other axes:
            the arguments are whole along the axes named here, and tokens and columns are those of
            one device along the others.
    """

    mesh: Mesh
    rows: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    unembed: PartitionSpec = REPLICATED
    residency: UnembedResidency = "auto"
    max_gathered_bytes: int = 4 << 30
    inside_shard_map: bool = False

    def __post_init__(self) -> None:
        used = (*self.rows, *self.positions, *self.vocab)
        if len(set(used)) < len(used):
            raise ValueError(
                f"rows, positions and vocab must name different mesh axes, got {self.rows}, "
                f"{self.positions} and {self.vocab}"
            )
        unknown = sorted({*used, *self.unembed_axes(0), *self.unembed_axes(1)} - set(self.mesh.axis_names))
        if unknown:
            raise ValueError(f"axes must be of the mesh {self.mesh.axis_names}, got {unknown}")
        columns = self.unembed_axes(1)
        if columns[: len(self.vocab)] != self.vocab:
            raise ValueError(
                f"the V dimension of unembed must be cut by vocab={self.vocab} first, got {columns}; "
                "order the axes of its PartitionSpec so"
            )
        if self.inside_shard_map and (
            self.rows or self.positions or self.unembed_axes(0) or columns != self.vocab
        ):
            raise ValueError(
                "inside_shard_map takes vocab alone: rows and positions are this device's already, and unembed "
                f"must be cut by {self.vocab} in its V dimension only, got rows={self.rows}, "
                f"positions={self.positions}, unembed={self.unembed}"
            )

    def unembed_axes(self, dimension: int) -> tuple[str, ...]:
        """Mesh axes that cut one dimension of `unembed` (0: D, 1: V), outermost first."""
        spec = tuple(self.unembed)
        entry = spec[dimension] if dimension < len(spec) else None
        if entry is None:
            return ()
        return (entry,) if isinstance(entry, str) else tuple(entry)

    @property
    def mapped_axes(self) -> tuple[str, ...]:
        """Mesh axes that a `shard_map` around this call, if any, has left to it."""
        around = jax.sharding.get_abstract_mesh().manual_axes
        return tuple(axis for axis in self.mesh.axis_names if axis not in around)

    def size(self, axes: tuple[str, ...]) -> int:
        """Number of devices along these axes together."""
        total = 1
        for axis in axes:
            total *= self.mesh.shape[axis]
        return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class XentExecution:
    """How the fused output layer is carried out; changes speed and memory, never the result.

    Attributes:
        implementation: "auto" chooses by `explain_linear_cross_entropy`; the others force one.
        tiling: Tile sizes; None has them chosen from shapes and backend.
        sharding: Layout on a mesh; None means one device, or arrays the compiler partitions
            (correct, but the gradient of `unembed` is then reduced once per token tile).
        compute_dtype: Type of the operands of the three products; None is the promoted type of
            hidden and unembed on an accelerator, and at least float32 on a CPU. Each product
            sums in float32 (or float64); on a TPU, sums whose result is bfloat16 are held in 24
            bits between token tiles.
        backend: Where it will run; None asks the mesh, else the default backend.
        max_logits_bytes: Budget of the kept logits, bytes a device; None is the backend's default. On an
            accelerator a larger budget also makes vocabulary tiles wider.
    """

    implementation: ImplementationWish = "auto"
    tiling: XentTiling | None = None
    sharding: XentSharding | None = None
    compute_dtype: DTypeLike | None = None
    backend: Backend | None = None
    max_logits_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.compute_dtype is not None and not jnp.issubdtype(self.compute_dtype, jnp.floating):
            raise ValueError(f"compute_dtype must be a float type, got {self.compute_dtype}")
        if self.max_logits_bytes is not None and self.max_logits_bytes < 1:
            raise ValueError(f"max_logits_bytes must be at least 1, got {self.max_logits_bytes}; use None")


EXACT_RULES = XentRules()
AUTO_EXECUTION = XentExecution()
