"""The choice of implementation, tile sizes and layout, from shapes and backend alone."""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ._linear_xent_cut import VocabCut
from ._linear_xent_dispatch import Workload, choose
from ._linear_xent_pass import TokenCut, num_token_tiles
from ._linear_xent_tiling import TileSizes, tile_sizes
from ._linear_xent_types import (
    AUTO_EXECUTION,
    EXACT_RULES,
    Backend,
    Implementation,
    UnembedResidency,
    XentExecution,
    XentRules,
    XentSharding,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class XentPlan:
    """How a call of the fused output layer will run.

    Attributes:
        implementation: The chosen one; never "auto".
        reason: Why, in one sentence.
        estimated_seconds: Roofline of each candidate; empty where the chip is not known or there is
            no choice. An estimate, not a measurement.
        token_cut: Token tiles of a device.
        vocab_cut: Columns of a device and their tiles.
        keep_rows: True where rows stay a dimension of a tile, for the compiler to partition.
        num_token_tiles: Token tiles of one head on one device.
        sharding: The layout of the arguments; None without a mesh.
        residency: Layout of `unembed` during the pass.
        logits_bytes: Largest buffer with both a token and a vocabulary dimension, bytes a device.
        gradient_bytes: Accumulator of the gradient of `unembed`, bytes a device.
        num_products: Matrix products of the size tokens x D x V, loss and gradients together.
    """

    implementation: Implementation
    reason: str
    estimated_seconds: tuple[tuple[Implementation, float], ...]
    token_cut: TokenCut
    vocab_cut: VocabCut
    keep_rows: bool
    num_token_tiles: int
    sharding: XentSharding | None
    residency: UnembedResidency
    logits_bytes: int
    gradient_bytes: int
    num_products: int


def explain_linear_cross_entropy(
    hidden: jax.Array | jax.ShapeDtypeStruct,
    unembed: jax.Array | jax.ShapeDtypeStruct,
    *,
    rules: XentRules = EXACT_RULES,
    execution: XentExecution = AUTO_EXECUTION,
) -> XentPlan:
    """The plan that `linear_cross_entropy` follows for arguments of these shapes and types.

    Args:
        hidden: `[B, S, D]`, or `[M, B, S, D]` for several heads; only shape and type are read.
        unembed: `[D, V]`; only shape and type are read.
        rules: The mathematics.
        execution: Wishes; what it forces is followed, what it leaves open is chosen here.

    Raises:
        ValueError: Shapes that do not fit together or the mesh, or an implementation that cannot
            do what `rules` asks.
    """
    num_heads, rows, positions = _token_shape(hidden, unembed, rules, execution)
    backend = _backend(execution)
    sharding = execution.sharding
    accumulator = jnp.promote_types(jnp.promote_types(hidden.dtype, unembed.dtype), jnp.float32)
    outside = sharding is not None and not sharding.inside_shard_map
    if sharding is not None and outside:
        rows, positions = _local_tokens(rows, positions, sharding)
    residency, axes = _residency(unembed, accumulator, execution)
    num_shards = 1 if sharding is None else sharding.size(axes)
    num_columns = unembed.shape[1] // num_shards if outside else unembed.shape[1]
    token_axes = () if sharding is None else (*sharding.rows, *sharding.positions)
    travel = tuple(axis for axis in axes if axis in token_axes)
    num_travel = 1 if sharding is None else sharding.size(travel)
    forms = _forms(hidden, unembed, accumulator, backend, rules, execution)
    score_bytes = 2 if forms.narrow_scores else accumulator.itemsize
    sizes = tile_sizes(
        rows, positions, (unembed.shape[0], num_columns), num_travel, score_bytes, backend, execution
    )
    vocab_cut = VocabCut(
        num_columns=num_columns,
        tile_size=sizes.columns,
        num_classes=num_columns * num_shards if rules.vocab_size is None else rules.vocab_size,
        axes=axes,
        num_shards=num_shards,
        keep_logits=sizes.keep_logits,
        narrow_scores=forms.narrow_scores and sizes.keep_logits,
        split_hidden=forms.split_hidden,
        split_unembed=forms.split_unembed,
        operand_dtype=forms.operand,
        accumulator_dtype=accumulator,
        row_major_gradient=backend == "tpu",
        gather_targets=backend == "cpu",
    )
    num_tiles = num_token_tiles(positions if sizes.keep_rows else rows * positions, sizes.positions)
    num_tokens = num_heads * rows * positions * num_travel
    work = _workload(num_tokens, num_heads * num_tiles, unembed.shape[0], vocab_cut)
    choice = choose(execution.implementation, work, rules, backend, _device_kind(execution))
    return XentPlan(
        implementation=choice.implementation,
        reason=choice.reason,
        estimated_seconds=choice.estimated_seconds,
        token_cut=TokenCut(sizes.positions, travel, _meeting_axes(sharding, axes), num_travel),
        vocab_cut=vocab_cut,
        keep_rows=sizes.keep_rows,
        num_token_tiles=num_tiles,
        sharding=sharding,
        residency=residency,
        logits_bytes=_logits_bytes(rows, num_travel, sizes, vocab_cut),
        gradient_bytes=unembed.shape[0] * num_columns * vocab_cut.sum_bytes,
        num_products=work.num_products,
    )


def _workload(num_tokens: int, num_token_tiles: int, width: int, cut: VocabCut) -> Workload:
    return Workload(
        num_tokens=num_tokens,
        width=width,
        num_columns=cut.num_columns,
        num_token_tiles=num_token_tiles,
        operand_bytes=cut.operand_dtype.itemsize,
        sum_bytes=cut.sum_bytes,
        score_bytes=cut.score_bytes,
        num_products=3 if cut.keep_logits else 4,
        cuts_vocabulary=cut.num_shards > 1,
        wide_floats=cut.accumulator_dtype == jnp.float64,
    )


def _logits_bytes(rows: int, num_travel: int, sizes: TileSizes, cut: VocabCut) -> int:
    """Bytes of the largest buffer with a token and a vocabulary dimension."""
    tokens = (rows if sizes.keep_rows else 1) * sizes.positions * num_travel
    numbers = tokens * sizes.columns * (cut.num_tiles if sizes.keep_logits else 1)
    return numbers * cut.score_bytes


def _token_shape(
    hidden: jax.Array | jax.ShapeDtypeStruct,
    unembed: jax.Array | jax.ShapeDtypeStruct,
    rules: XentRules,
    execution: XentExecution,
) -> tuple[int, int, int]:
    if hidden.ndim not in (3, 4) or unembed.ndim != 2 or hidden.shape[-1] != unembed.shape[0]:
        raise ValueError(
            "hidden must be [B, S, D] or [M, B, S, D] and unembed [D, V] with the same D, got "
            f"{hidden.shape} and {unembed.shape}"
        )
    num_heads = hidden.shape[0] if hidden.ndim == 4 else 1
    num_columns = unembed.shape[1]
    if execution.sharding is not None and execution.sharding.inside_shard_map:
        num_columns *= execution.sharding.size(execution.sharding.vocab)
    if rules.vocab_size is not None and rules.vocab_size > num_columns:
        raise ValueError(f"vocab_size must be at most V={num_columns}, got {rules.vocab_size}")
    if len(rules.z_loss_multipliers(num_heads)) != num_heads:
        raise ValueError(
            f"z_loss_multiplier must hold one number a head ({num_heads}) or be one number, got "
            f"{rules.z_loss_multiplier}"
        )
    return num_heads, hidden.shape[-3], hidden.shape[-2]


def _meeting_axes(sharding: XentSharding | None, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Mesh axes whose devices must visit the same tiles."""
    if sharding is None:
        return ()
    return axes if sharding.inside_shard_map else sharding.mapped_axes


def _backend(execution: XentExecution) -> Backend:
    if execution.backend is not None:
        return execution.backend
    platform, _ = _device(execution)
    if platform == "cpu":
        return "cpu"
    return "tpu" if platform == "tpu" else "gpu"


def _device_kind(execution: XentExecution) -> str | None:
    """The chip's name; None where the backend was given without a mesh, so the chip is unknown."""
    if execution.backend is not None and execution.sharding is None:
        return None
    return _device(execution)[1]


def _device(execution: XentExecution) -> tuple[str, str]:
    """Platform and kind of a device that the call will run on."""
    mesh = None if execution.sharding is None else execution.sharding.mesh
    device = cast(Any, jax.devices()[0] if mesh is None else mesh.devices.flat[0])
    return str(device.platform), str(device.device_kind)


def _local_tokens(rows: int, positions: int, sharding: XentSharding) -> tuple[int, int]:
    local: list[int] = []
    for name, size, axes in (("B", rows, sharding.rows), ("S", positions, sharding.positions)):
        devices = sharding.size(axes)
        if size % devices:
            raise ValueError(
                f"{name}={size} must be divisible by the {devices} devices of {axes}; pad the batch"
            )
        local.append(size // devices)
    return local[0], local[1]


def _residency(
    unembed: jax.Array | jax.ShapeDtypeStruct, accumulator: jnp.dtype, execution: XentExecution
) -> tuple[UnembedResidency, tuple[str, ...]]:
    """Where unembed lives during the pass, and the mesh axes that cut its columns then."""
    sharding = execution.sharding
    if sharding is None or sharding.inside_shard_map:
        return "gathered", () if sharding is None else sharding.vocab
    width, columns = unembed.shape
    for size, axes in ((width, sharding.unembed_axes(0)), (columns, sharding.unembed_axes(1))):
        if size % sharding.size(axes):
            raise ValueError(
                f"unembed {unembed.shape} must be divisible by its layout {sharding.unembed}, and {size} is "
                f"not by {axes}; pad the vocabulary and set vocab_size"
            )
    # The all-to-all over the innermost axis of D comes first, so it cuts the columns outermost.
    all_axes = (*sharding.unembed_axes(1), *reversed(sharding.unembed_axes(0)))
    gathered = width * columns // sharding.size(sharding.vocab)
    fits = gathered * (unembed.dtype.itemsize + accumulator.itemsize) <= sharding.max_gathered_bytes
    divisible = columns % sharding.size(all_axes) == 0
    if sharding.residency == "stationary" and not divisible:
        raise ValueError(
            f"residency='stationary' needs V={columns} divisible by the {sharding.size(all_axes)} devices of "
            f"{all_axes}; use 'gathered', or pad the vocabulary and set vocab_size"
        )
    stationary = sharding.residency == "stationary" or (
        sharding.residency == "auto" and divisible and not fits and all_axes != sharding.vocab
    )
    return ("stationary", all_axes) if stationary else ("gathered", sharding.vocab)


class _Forms(NamedTuple):
    """Type of the operands, and what is held in fewer bits."""

    operand: jnp.dtype
    narrow_scores: bool = False
    split_hidden: bool = False
    split_unembed: bool = False


def _forms(
    hidden: jax.Array | jax.ShapeDtypeStruct,
    unembed: jax.Array | jax.ShapeDtypeStruct,
    accumulator: jnp.dtype,
    backend: Backend,
    rules: XentRules,
    execution: XentExecution,
) -> _Forms:
    if execution.compute_dtype is not None:
        operand = jnp.dtype(execution.compute_dtype)
    elif backend == "cpu":
        # Left to itself a CPU keeps the score gradients exact.
        operand = accumulator
    else:
        operand = jnp.promote_types(hidden.dtype, unembed.dtype)
    if backend != "tpu" or accumulator != jnp.float32:
        return _Forms(operand)
    # On a mesh the sums are reduced over devices as float32 before they are cast.
    splits = execution.sharding is None
    return _Forms(
        operand,
        # A soft cap's slope needs the score itself, to more digits than the steps have.
        narrow_scores=operand == jnp.bfloat16 and rules.logit_soft_cap is None,
        split_hidden=splits and hidden.dtype == jnp.bfloat16,
        split_unembed=splits and unembed.dtype == jnp.bfloat16,
    )
