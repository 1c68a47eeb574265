"""One pass over the token tiles of all heads: losses, and gradients accumulated in one buffer.

Tiles are visited through a list of those that matter, so a tile that is neither weighted nor
scored costs nothing, and the loops inside a tile keep fixed lengths.
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._linear_xent_cut import VocabCut
from ._linear_xent_narrow import KeptScores, Sum, no_scores, no_sum, write_sum
from ._linear_xent_tile import Norm, TileLoss, TokenTile, repeat, tile_gradient, tile_loss
from ._linear_xent_types import XentRules


class Tokens(NamedTuple):
    """Tokens of all heads on one device; M counts the heads.

    `xent_weight` and `z_weight` are the cotangents of the per-token cross-entropy and squared
    log-partition; both are 0 outside `scored`.
    """

    hidden: Float[Array, "M B S D"]
    targets: Int[Array, "M B S"]
    scored: Bool[Array, "M B S"]
    xent_weight: Float[Array, "M B S"]
    z_weight: Float[Array, "M B S"]


class Losses(NamedTuple):
    """Per-token cross-entropy (0 where not scored) and log-partition (0 in skipped tiles)."""

    xent: Float[Array, "M B S"]
    log_partition: Float[Array, "M B S"]


class Gradients(NamedTuple):
    """Gradients in the accumulation type: hidden [M, B, S, D], unembed [D, V]."""

    hidden: Sum
    unembed: Sum


# Losses, gradients, and one buffer for the kept scores of whichever tile is visited: a buffer made
# anew for each tile would be cleared for each.
Carried = tuple[Losses, Gradients, KeptScores | None]


class TokenCut(NamedTuple):
    """Static description of the token tiles of one device.

    `tile_size` positions of every row make a tile. `travel_axes` are mesh axes over which hidden
    states of a tile are gathered, because those axes hold different columns of `unembed`, and
    `num_travel` the devices along them;
    `mesh_axes` are all axes whose devices must agree on the tiles to visit.
    """

    tile_size: int
    travel_axes: tuple[str, ...] = ()
    mesh_axes: tuple[str, ...] = ()
    num_travel: int = 1


def loss_pass(
    tokens: Tokens, unembed: Float[Array, "D V"], rules: XentRules, token_cut: TokenCut, cut: VocabCut
) -> Losses:
    """Losses of every scored token; no gradient is computed."""
    order, count = _visits(tokens.scored, token_cut)

    def visit(k: Int[Array, ""], losses: Losses) -> Losses:
        return _visit_loss(order[k], losses, tokens, unembed, rules, token_cut, cut)

    return repeat(count, visit, _no_losses(tokens), expected=len(order))


def fused_pass(
    tokens: Tokens, unembed: Float[Array, "D V"], rules: XentRules, token_cut: TokenCut, cut: VocabCut
) -> tuple[Losses, Gradients]:
    """Losses of every scored token and the gradients of `sum(xent_weight * xent + z_weight * lse^2)`.

    Scores are computed once where `cut.keep_logits`. Tiles that are scored but weigh nothing get
    their losses alone, in a second loop.
    """
    weighted = _weighted(tokens)
    order, count = _visits(weighted, token_cut)

    def visit(k: Int[Array, ""], carry: Carried) -> Carried:
        losses, gradients, kept = carry
        index = order[k]
        tile = _read_tile(tokens, index, token_cut, cut)
        loss, kept = tile_loss(tile, unembed, kept, rules, cut)
        losses = _write_losses(losses, loss, index, token_cut)
        hidden, total = tile_gradient(tile, unembed, loss.norm, kept, gradients.unembed, rules, cut)
        return losses, _write_hidden(gradients, hidden, total, index, token_cut, cut), kept

    start = (_no_losses(tokens), no_gradients(tokens, unembed, cut), _no_scores(tokens, token_cut, cut))
    losses, gradients, _ = repeat(count, visit, start, expected=len(order))
    rest, rest_count = _visits(tokens.scored, token_cut, except_for=weighted)

    def visit_rest(k: Int[Array, ""], losses: Losses) -> Losses:
        # Of the one tile of a device the compiler would else form the scores before the loop, visited or not.
        own, _ = jax.lax.optimization_barrier((tokens, k))
        return _visit_loss(rest[k], losses, own, unembed, rules, token_cut, cut)

    # Either loop may visit every tile, but not both: costs are counted for a batch whose tokens all weigh.
    losses = repeat(rest_count, visit_rest, losses, expected=0)
    # Together: nobody waits for the losses, so `unembed` would live until the end of a training step.
    return jax.lax.optimization_barrier((losses, gradients))


def gradient_pass(
    tokens: Tokens,
    log_partition: Float[Array, "M B S"],
    unembed: Float[Array, "D V"],
    start: Gradients,
    rules: XentRules,
    token_cut: TokenCut,
    cut: VocabCut,
    *,
    is_usual: bool,
) -> Gradients:
    """`start` plus the gradients at these weights, scores recomputed from a known log-partition.

    `is_usual` is False where the weights are all 0 but in rare calls: costs are then counted as 0.

    Rows of `start.hidden` in visited tiles are replaced, so pass 0 there.
    """
    order, count = _visits(_weighted(tokens), token_cut)

    def visit(k: Int[Array, ""], gradients: Gradients) -> Gradients:
        index = order[k]
        tile = _read_tile(tokens, index, token_cut, cut)
        known = _gather_tile(_slice(log_partition, index, token_cut), token_cut)
        norm = Norm(peak=known, partition=jnp.ones_like(known))
        hidden, total = tile_gradient(tile, unembed, norm, None, gradients.unembed, rules, cut)
        return _write_hidden(gradients, hidden, total, index, token_cut, cut)

    return repeat(count, visit, start, expected=len(order) if is_usual else 0)


def no_gradients(tokens: Tokens, unembed: Float[Array, "D V"], cut: VocabCut) -> Gradients:
    """Gradients of nothing, in the form that a pass adds to."""
    dtype = cut.accumulator_dtype
    return Gradients(
        hidden=no_sum(tokens.hidden.shape, dtype, split=cut.split_hidden),
        unembed=no_sum(unembed.shape, dtype, split=cut.split_unembed),
    )


def num_token_tiles(num_positions: int, tile_size: int) -> int:
    """Tiles of one row of positions; the last one starts early when it would run over."""
    return -(-num_positions // tile_size)


def _weighted(tokens: Tokens) -> Bool[Array, "M B S"]:
    return (tokens.xent_weight != 0) | (tokens.z_weight != 0)


def _visits(
    wanted: Bool[Array, "M B S"], token_cut: TokenCut, *, except_for: Bool[Array, "M B S"] | None = None
) -> tuple[Int[Array, " N"], Int[Array, ""]]:
    """Tiles that hold a wanted token, first in the list, and how many they are (on any device)."""
    needed = _tiles_with(wanted, token_cut)
    if except_for is not None:
        needed = needed & ~_tiles_with(except_for, token_cut)
    return jnp.argsort(~needed, stable=True), jnp.sum(needed, dtype=jnp.int32)


def _tiles_with(tokens: Bool[Array, "M B S"], token_cut: TokenCut) -> Bool[Array, " N"]:
    heads, rows, positions = tokens.shape
    tiles = num_token_tiles(positions, token_cut.tile_size)
    padded = jnp.pad(tokens, ((0, 0), (0, 0), (0, tiles * token_cut.tile_size - positions)))
    found = jnp.any(padded.reshape(heads, rows, tiles, token_cut.tile_size), axis=(1, 3)).reshape(
        heads * tiles
    )
    if token_cut.mesh_axes:
        # Devices meet in collectives inside a tile, so all visit the tiles that any of them needs.
        found = cast(Array, lax.psum(found.astype(jnp.int32), token_cut.mesh_axes)) > 0
    return found


def _place(
    index: Int[Array, ""], positions: int, token_cut: TokenCut
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """Head of a tile, its first position, and the first position that no earlier tile counts."""
    tiles = num_token_tiles(positions, token_cut.tile_size)
    first = (index % tiles) * token_cut.tile_size
    return index // tiles, jnp.minimum(first, positions - token_cut.tile_size), first


def _slice(array: Array, index: Int[Array, ""], token_cut: TokenCut) -> Array:
    head, start, _ = _place(index, array.shape[2], token_cut)
    sizes = (1, array.shape[1], token_cut.tile_size, *array.shape[3:])
    starts = (head, 0, start, *(0 for _ in array.shape[3:]))
    return lax.dynamic_slice(array, starts, sizes)[0]


def _write(array: Array, tile: Array, index: Int[Array, ""], token_cut: TokenCut) -> Array:
    head, start, _ = _place(index, array.shape[2], token_cut)
    starts = (head, 0, start, *(0 for _ in array.shape[3:]))
    return lax.dynamic_update_slice(array, tile[None].astype(array.dtype), starts)


def _read_tile(tokens: Tokens, index: Int[Array, ""], token_cut: TokenCut, cut: VocabCut) -> TokenTile:
    _, start, first = _place(index, tokens.targets.shape[2], token_cut)
    rows = tokens.targets.shape[1]
    scored = _slice(tokens.scored, index, token_cut)
    hidden = jnp.where(scored[..., None], _slice(tokens.hidden, index, token_cut), 0)
    fresh = start + jnp.arange(token_cut.tile_size) >= first
    tile = TokenTile(
        hidden=hidden.astype(cut.operand_dtype),
        targets=_slice(tokens.targets, index, token_cut),
        scored=scored,
        fresh=jnp.broadcast_to(fresh, (rows, token_cut.tile_size)),
        xent_weight=_slice(tokens.xent_weight, index, token_cut),
        z_weight=_slice(tokens.z_weight, index, token_cut),
    )
    return TokenTile(*(_gather_tile(part, token_cut) for part in tile))


def _gather_tile(tile: Array, token_cut: TokenCut) -> Array:
    if not token_cut.travel_axes:
        return tile
    return cast(Array, lax.all_gather(tile, token_cut.travel_axes, axis=1, tiled=True))


def _own_part(tile: Array, token_cut: TokenCut) -> Array:
    if not token_cut.travel_axes:
        return tile
    start = lax.axis_index(token_cut.travel_axes) * token_cut.tile_size
    return lax.dynamic_slice_in_dim(tile, start, token_cut.tile_size, 1)


def _visit_loss(
    index: Int[Array, ""],
    losses: Losses,
    tokens: Tokens,
    unembed: Float[Array, "D V"],
    rules: XentRules,
    token_cut: TokenCut,
    cut: VocabCut,
) -> Losses:
    tile = _read_tile(tokens, index, token_cut, cut)
    loss, _ = tile_loss(tile, unembed, None, rules, cut)
    return _write_losses(losses, loss, index, token_cut)


def _write_losses(losses: Losses, loss: TileLoss, index: Int[Array, ""], token_cut: TokenCut) -> Losses:
    return Losses(
        xent=_write(losses.xent, _own_part(loss.xent, token_cut), index, token_cut),
        log_partition=_write(
            losses.log_partition, _own_part(loss.log_partition, token_cut), index, token_cut
        ),
    )


def _write_hidden(
    gradients: Gradients,
    hidden: Float[Array, "B S D"],
    unembed: Sum,
    index: Int[Array, ""],
    token_cut: TokenCut,
    cut: VocabCut,
) -> Gradients:
    if token_cut.travel_axes:
        hidden = cast(Array, lax.psum_scatter(hidden, token_cut.travel_axes, scatter_dimension=1, tiled=True))
    positions = jax.tree.leaves(gradients.hidden)[0].shape[2]
    rest = tuple(axis for axis in cut.axes if axis not in token_cut.travel_axes)
    if rest:
        hidden = cast(Array, lax.psum(hidden, rest))
    head, start, _ = _place(index, positions, token_cut)
    return Gradients(hidden=write_sum(gradients.hidden, hidden[None], (head, 0, start, 0)), unembed=unembed)


def _no_losses(tokens: Tokens) -> Losses:
    zero = jnp.zeros(tokens.targets.shape, tokens.xent_weight.dtype)
    return Losses(xent=zero, log_partition=zero)


def _no_scores(tokens: Tokens, token_cut: TokenCut, cut: VocabCut) -> KeptScores | None:
    if not cut.keep_logits:
        return None
    positions = token_cut.tile_size * token_cut.num_travel
    shape = (cut.num_tiles, tokens.targets.shape[1], positions, cut.tile_size)
    return no_scores(shape, cut.accumulator_dtype, narrow=cut.narrow_scores)
