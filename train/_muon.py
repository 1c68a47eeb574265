"""Muon: momentum made orthogonal by Newton-Schulz iterations, one matrix at a time.

Follows Megatron-Core's Muon where it differs from optax's: sgd momentum (no average, no bias correction), a
scale of `0.2 * sqrt(max(fan_in, fan_out))`, and matrices declared per parameter (per head, per component,
per expert).
Source: K. Jordan, github.com/KellerJordan/Muon; scale of arXiv:2502.16982, section 2.2.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MATRICES_PER_CALL = 16
# Of one group of alike matrices on one device: what travels is held a few times over.
BYTES_TOGETHER = 2**30


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
        if shardings is None:
            directions = [
                orthogonal_update(leaf, layout, config)
                for leaf, layout in zip(leaves, layout_of, strict=True)
            ]
        else:
            directions = orthogonal_updates(leaves, layout_of, config, treedef.flatten_up_to(shardings))
        return jax.tree.unflatten(treedef, directions), MuonState(buffers)

    return optax.GradientTransformation(init, update)


def orthogonal_update(
    direction: Float[Array, "..."], layout: MatrixLayout, config: MuonConfig
) -> Float[Array, "..."]:
    """`direction` with each of its matrices made orthogonal and scaled; a zero matrix stays zero."""
    order = (*layout.batch, *layout.fan_in, *layout.fan_out)
    shape = tuple(direction.shape[axis] for axis in order)
    fan_in = math.prod(direction.shape[axis] for axis in layout.fan_in)
    fan_out = math.prod(direction.shape[axis] for axis in layout.fan_out)
    matrices = direction.transpose(order).reshape(-1, fan_in, fan_out)
    tall = fan_in > fan_out
    if tall:
        matrices = matrices.swapaxes(1, 2)
    scale = config.rms_scale * math.sqrt(max(fan_in, fan_out))
    result = _in_calls(matrices, config)
    if tall:
        result = result.swapaxes(1, 2)
    return (scale * result).reshape(shape).transpose(_inverse(order))


def orthogonal_updates(
    directions: Sequence[Float[Array, "..."]],
    layouts: Sequence[MatrixLayout],
    config: MuonConfig,
    shardings: Sequence[NamedSharding],
) -> list[Float[Array, "..."]]:
    """`orthogonal_update` of each direction, on the devices of its sharding.

    Alike matrices of all parameters travel and iterate together: few large messages instead of many small ones, no
    device waits while others hold the one matrix of a small parameter, and a program that compiles in a fraction of the
    time.
    """
    results: list[Array] = [*directions]
    for members in _alike(directions, layouts, shardings):
        done = _update_together(
            [directions[i] for i in members],
            [layouts[i] for i in members],
            config,
            [shardings[i] for i in members],
        )
        for i, result in zip(members, done, strict=True):
            results[i] = result
    return results


def newton_schulz(matrices: Float[Array, "N R C"], config: MuonConfig) -> Float[Array, "N R C"]:
    """Approximately `U V^T` of each matrix's singular value decomposition, float32; needs R <= C for economy.

    `X <- a X + (b A + c A A) X` with `A = X X^T`, from X of Frobenius norm 1.
    """
    a, b, c = COEFFICIENTS
    dtype = jnp.bfloat16 if config.bfloat16_iterations else jnp.float32
    norm = jnp.sqrt(jnp.sum(jnp.square(matrices), axis=(1, 2), keepdims=True))
    x = (matrices / (norm + config.eps)).astype(dtype)

    # HIGH: three bfloat16 passes on a TPU, 16 bits. HIGHEST takes twice the passes and five times as long to compile.
    def product(equation: str, left: Array, right: Array) -> Array:
        return jnp.einsum(equation, left, right, precision=jax.lax.Precision.HIGH)

    def iterate(_: Array, x: Array) -> Array:
        gram = product("nrc,nsc->nrs", x, x)
        polynomial = b * gram + c * product("nrs,nst->nrt", gram, gram)
        return a * x + product("nrs,nsc->nrc", polynomial, x)

    # A loop: unrolled, these products are two thirds of all products of a large model's step to compile.
    return jax.lax.fori_loop(0, config.num_iterations, iterate, x).astype(jnp.float32)


def _in_calls(matrices: Float[Array, "N R C"], config: MuonConfig) -> Float[Array, "N R C"]:
    """`newton_schulz` of a bounded number at once: the Gram matrices of a whole expert stack would not fit."""
    count = matrices.shape[0]
    num_calls = -(-count // MATRICES_PER_CALL)
    if num_calls <= 1:
        return newton_schulz(matrices, config)
    # Calls of equal size: a shorter last one would be compiled apart.
    size = -(-count // num_calls)
    padded = jnp.pad(matrices, ((0, num_calls * size - count), (0, 0), (0, 0)))
    calls = padded.reshape(num_calls, size, *matrices.shape[1:])
    return jax.lax.map(lambda m: newton_schulz(m, config), calls).reshape(padded.shape)[:count]


def _alike(
    directions: Sequence[Array], layouts: Sequence[MatrixLayout], shardings: Sequence[NamedSharding]
) -> list[list[int]]:
    """Indices of parameters whose matrices have one shape and one cut, as many as `BYTES_TOGETHER` holds."""
    groups: dict[Hashable, list[list[int]]] = {}
    filled: dict[Hashable, int] = {}
    for i, (direction, layout, sharding) in enumerate(zip(directions, layouts, shardings, strict=True)):
        shape = sharding.shard_shape(direction.shape)
        names = _axis_names(sharding.spec, direction.ndim)
        inner = (*layout.fan_in, *layout.fan_out)
        key = (len(layout.fan_in), *((shape[axis], names[axis]) for axis in inner))
        size = 4 * math.prod(shape)
        if key not in groups or filled[key] + size > BYTES_TOGETHER:
            groups.setdefault(key, []).append([])
            filled[key] = 0
        groups[key][-1].append(i)
        filled[key] += size
    return [members for several in groups.values() for members in several]


def _update_together(
    directions: list[Array], layouts: list[MatrixLayout], config: MuonConfig, shardings: list[NamedSharding]
) -> list[Array]:
    mesh = shardings[0].mesh
    orders = [(*layout.batch, *layout.fan_in, *layout.fan_out) for layout in layouts]
    moved = _moved_layout(layouts[0])
    names = _axis_names(shardings[0].spec, directions[0].ndim)
    inner = orders[0][len(layouts[0].batch) :]
    cuts = [(i, names[axis]) for i, axis in enumerate(inner, start=1) if names[axis]]

    def body(cut: list[Array]) -> list[Array]:
        blocks = [x.transpose(order) for x, order in zip(cut, orders, strict=True)]
        flat = [b.reshape(-1, *b.shape[len(layout.batch) :]) for b, layout in zip(blocks, layouts)]
        block, counts = _travel(jnp.concatenate(flat), cuts, mesh)
        block = _travel_back(orthogonal_update(block, moved, config), cuts, counts)
        ends = [int(n) for n in np.cumsum([x.shape[0] for x in flat])[:-1]]
        parts = jnp.split(block, ends)
        return [p.reshape(b.shape).transpose(_inverse(o)) for p, b, o in zip(parts, blocks, orders)]

    specs = [sharding.spec for sharding in shardings]
    # check_vma: the all-to-alls give every device the block it started from, which the checker cannot see.
    return jax.shard_map(body, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(directions)


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
