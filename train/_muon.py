"""Muon: momentum made orthogonal by Newton-Schulz iterations, one matrix at a time.

Follows Megatron-Core's Muon where it differs from optax's: sgd momentum (no average, no bias correction), a
scale of `0.2 * sqrt(max(fan_in, fan_out))`, and matrices declared per parameter (per head, per component,
per expert).
Source: K. Jordan, github.com/KellerJordan/Muon; scale of arXiv:2502.16982, section 2.2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MATRICES_PER_CALL = 16


@dataclass(frozen=True)
class MatrixLayout:
    """How a parameter is read as matrices: every axis is a batch axis, part of the input or part of the
    output.

    Attributes:
        batch: Axes that count matrices (layers, experts, heads).
        fan_in: Axes that are contracted with the input, merged in this order.
        fan_out: Axes of the result, merged in this order.
    """

    batch: tuple[int, ...]
    fan_in: tuple[int, ...]
    fan_out: tuple[int, ...]

    def __post_init__(self) -> None:
        axes = sorted((*self.batch, *self.fan_in, *self.fan_out))
        if axes != list(range(len(axes))) or not self.fan_in or not self.fan_out:
            raise ValueError(
                "a matrix layout names every axis once, with at least one input and one output axis;"
                f" got batch={self.batch}, fan_in={self.fan_in}, fan_out={self.fan_out}"
            )


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Constants of Muon.

    Attributes:
        momentum: Decay of the momentum buffer, in [0, 1).
        num_iterations: Newton-Schulz steps.
        rms_scale: Factor of `sqrt(max(fan_in, fan_out))`; 0.2 gives updates of AdamW's usual size.
        eps: Added to the Frobenius norm.
        bfloat16_iterations: Rounds the iterates to bfloat16, as Megatron does; float32 otherwise.
    """

    momentum: float = 0.95
    num_iterations: int = 5
    rms_scale: float = 0.2
    eps: float = 1e-7
    bfloat16_iterations: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"muon momentum must be in [0, 1), got {self.momentum}")
        if self.num_iterations < 1:
            raise ValueError(f"muon num_iterations must be at least 1, got {self.num_iterations}")


class MuonState(NamedTuple):
    """Momentum buffers, float32, shaped as the parameters."""

    momentum: PyTree


def scale_by_muon(
    config: MuonConfig,
    layouts: PyTree,
    shardings: PyTree | None = None,
) -> optax.GradientTransformation:
    """Turns gradients into orthogonal directions: `buf = momentum * buf + g`, then Newton-Schulz of `g +
    momentum * buf`.

    Args:
        config: Constants.
        layouts: A `MatrixLayout` for each parameter.
        shardings: `NamedSharding` of each parameter, or None on one device. Matrices then travel to the
            devices that hold a share of them (all-to-all), so no device ever holds a whole stacked
            parameter.
    """

    def init(params: PyTree) -> MuonState:
        return MuonState(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        # Any: optax types every state as one union.
        del params
        buffers = jax.tree.map(lambda g, m: config.momentum * m + g, updates, state.momentum)
        ahead = jax.tree.map(lambda g, m: g + config.momentum * m, updates, buffers)
        leaves, treedef = jax.tree.flatten(ahead)
        layout_of = treedef.flatten_up_to(layouts)
        sharding_of = [None] * len(leaves) if shardings is None else treedef.flatten_up_to(shardings)
        directions = [
            orthogonal_update(leaf, layout, config, sharding)
            for leaf, layout, sharding in zip(leaves, layout_of, sharding_of, strict=True)
        ]
        return jax.tree.unflatten(treedef, directions), MuonState(buffers)

    return optax.GradientTransformation(init, update)


def orthogonal_update(
    direction: Float[Array, "..."],
    layout: MatrixLayout,
    config: MuonConfig,
    sharding: NamedSharding | None = None,
) -> Float[Array, "..."]:
    """`direction` with each of its matrices made orthogonal and scaled; a zero matrix stays zero."""
    if sharding is None:
        return _orthogonal_local(direction, layout, config)
    order = (*layout.batch, *layout.fan_in, *layout.fan_out)
    names = _axis_names(sharding.spec, direction.ndim)
    num_batch = len(layout.batch)
    moved = _moved_layout(layout)

    def body(local: Float[Array, "..."]) -> Float[Array, "..."]:
        block = local.transpose(order)
        batch_shape = block.shape[:num_batch]
        block = block.reshape(-1, *block.shape[num_batch:])
        cuts = [(i, names[axis]) for i, axis in enumerate(order[num_batch:], start=1) if names[axis]]
        block, counts = _travel(block, cuts, sharding.mesh)
        block = _orthogonal_local(block, moved, config)
        block = _travel_back(block, cuts, counts)
        return block.reshape(*batch_shape, *block.shape[1:]).transpose(_inverse(order))

    # check_vma: the all-to-alls give every device the block it started from, which the checker cannot see.
    return jax.shard_map(
        body, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
    )(direction)


def newton_schulz(matrices: Float[Array, "N R C"], config: MuonConfig) -> Float[Array, "N R C"]:
    """Approximately `U V^T` of each matrix's singular value decomposition, float32; needs R <= C for economy.

    `X <- a X + (b A + c A A) X` with `A = X X^T`, from X of Frobenius norm 1.
    """
    a, b, c = COEFFICIENTS
    dtype = jnp.bfloat16 if config.bfloat16_iterations else jnp.float32
    norm = jnp.sqrt(jnp.sum(jnp.square(matrices), axis=(1, 2), keepdims=True))
    x = (matrices / (norm + config.eps)).astype(dtype)

    def product(equation: str, left: Array, right: Array) -> Array:
        return jnp.einsum(equation, left, right, precision=jax.lax.Precision.HIGHEST)

    def iterate(_: Array, x: Array) -> Array:
        gram = product("nrc,nsc->nrs", x, x)
        polynomial = b * gram + c * product("nrs,nst->nrt", gram, gram)
        return a * x + product("nrs,nsc->nrc", polynomial, x)

    # A loop: unrolled, these products are two thirds of all products of a large model's step to compile.
    return jax.lax.fori_loop(0, config.num_iterations, iterate, x).astype(jnp.float32)


def _orthogonal_local(
    direction: Float[Array, "..."], layout: MatrixLayout, config: MuonConfig
) -> Float[Array, "..."]:
    order = (*layout.batch, *layout.fan_in, *layout.fan_out)
    shape = tuple(direction.shape[axis] for axis in order)
    fan_in = math.prod(direction.shape[axis] for axis in layout.fan_in)
    fan_out = math.prod(direction.shape[axis] for axis in layout.fan_out)
    matrices = direction.transpose(order).reshape(-1, fan_in, fan_out)
    tall = fan_in > fan_out
    if tall:
        matrices = matrices.swapaxes(1, 2)
    scale = config.rms_scale * math.sqrt(max(fan_in, fan_out))
    if matrices.shape[0] > MATRICES_PER_CALL:
        # A bounded number at once: the Gram matrices of a whole expert stack would not fit.
        result = jax.lax.map(
            lambda m: newton_schulz(m[None], config)[0], matrices, batch_size=MATRICES_PER_CALL
        )
    else:
        result = newton_schulz(matrices, config)
    if tall:
        result = result.swapaxes(1, 2)
    return (scale * result).reshape(shape).transpose(_inverse(order))


def _travel(
    block: Array, cuts: Sequence[tuple[int, tuple[str, ...]]], mesh: Mesh | AbstractMesh
) -> tuple[Array, list[int]]:
    counts: list[int] = []
    for axis, names in cuts:
        counts.append(block.shape[0])
        short = -block.shape[0] % math.prod(mesh.shape[name] for name in names)
        block = jnp.pad(block, [(0, short)] + [(0, 0)] * (block.ndim - 1))
        block = jax.lax.all_to_all(block, names, split_axis=0, concat_axis=axis, tiled=True)
    return block, counts


def _travel_back(block: Array, cuts: Sequence[tuple[int, tuple[str, ...]]], counts: Sequence[int]) -> Array:
    for (axis, names), count in zip(reversed(cuts), reversed(counts), strict=True):
        block = jax.lax.all_to_all(block, names, split_axis=axis, concat_axis=0, tiled=True)[:count]
    return block


def _axis_names(spec: PartitionSpec, rank: int) -> list[tuple[str, ...]]:
    entries = [*spec, *([None] * (rank - len(spec)))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def _moved_layout(layout: MatrixLayout) -> MatrixLayout:
    num_in, num_out = len(layout.fan_in), len(layout.fan_out)
    return MatrixLayout(
        batch=(0,), fan_in=tuple(range(1, 1 + num_in)), fan_out=tuple(range(1 + num_in, 1 + num_in + num_out))
    )


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda i: order[i]))
