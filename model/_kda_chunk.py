"""Chunks of Kimi Delta Attention as matrix products.

With G_i the sum of g from the chunk's start up to position i, S the state before the chunk and u_i the row that
position i writes,

    u_i = beta_i (v_i - S^T (k_i e^{G_i}) - sum_{j<i} (k_i e^{G_i - G_j}) . k_j  u_j)
    o_i = S^T (q_i e^{G_i}) + sum_{j<=i} (q_i e^{G_i - G_j}) . k_j  u_j
    S' = diag(e^{G_X}) S + sum_j (k_j e^{G_X - G_j}) u_j^T

so `(I + A) u = beta (v - ...)` with A strictly lower triangular (Kimi Linear, arXiv:2510.26692, sec. 3).

Decays. `e^{G_i}` underflows and `e^{-G_j}` overflows when gates are strong, and `G_i - G_j` from two long sums has
lost the digits of a weak gate that follows a strong one. Here every pair j < i is handled at the power of two h for
which i and j lie in the right and the left half of one aligned block of 2h positions: with m the middle, the decay
is `e^{g_{j+1} + ... + g_{m-1}} * e^{g_m + ... + g_i}`. Both factors are products of the decays `e^g` of single
positions, at most 1, that occur in the decay itself, and both go into operands of a matrix product.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._kda_scan import ChunkMask

BASE_SIZE = 16  # smaller blocks are masked in products of this size, not sliced out
PRECISION = jax.lax.Precision.HIGHEST  # float32 products, which TPU otherwise rounds to bfloat16


def kda_chunks(
    state: Float[Array, "B H K U"],
    q: Float[Array, "B N X H K"],
    k: Float[Array, "B N X H K"],
    v: Float[Array, "B N X H U"],
    g: Float[Array, "B N X H K"],
    beta: Float[Array, "B N X H"],
    mask: ChunkMask | None,
) -> tuple[Float[Array, "B H K U"], Float[Array, "B N X H U"]]:
    """The state after N chunks and their output, in the state's dtype.

    What does not need the state is made for all chunks together, so that N small operations are one.

    Args:
        state: State before the first chunk; its dtype is the one everything is computed in.
        q: Queries; X is a power of two.
        k: Keys.
        v: Values.
        g: Log-decays, at most 0.
        beta: Write strengths.
        mask: Documents of the chunks, or None for one document without padding. At padding g and beta must be 0.
    """
    q, k, v, g, beta = (jnp.moveaxis(x.astype(state.dtype), 3, 2) for x in (q, k, v, g, beta))
    erase, attend, from_start, to_end, keep = decayed_products(q, k, g)
    keep, strength = keep[..., None], beta[..., None]
    if mask is not None:
        same = mask.same[:, :, None]
        erase, attend = jnp.where(same, erase, 0), jnp.where(same, attend, 0)
        from_start = jnp.where(mask.first[:, :, None, :, None], from_start, 0)
        to_end = jnp.where(mask.last[:, :, None, :, None], to_end, 0)
        keep = jnp.where(mask.kept[:, :, None, None, None], keep, 0)
    chunks = Chunks(strength * erase, k * from_start, strength, v, k * to_end, keep)
    u, before, state = write_chunks(state, chunks)
    o = _matmul(q * from_start, before) + _matmul(attend, u)
    return state, jnp.moveaxis(o, 2, 3)


class Chunks(NamedTuple):
    """What chunks do to the state S in turn: u = (I + links)^-1 strength (v - reads S), S <- keep S + writes^T u.

    Attributes:
        links: Of a position's write on those before it in the chunk, strictly lower triangular.
        reads: Keys, decayed from the chunk's start.
        strength: Beta.
        v: Values.
        writes: Keys, decayed to the chunk's end.
        keep: Decay of the state over the chunk.
    """

    links: Float[Array, "B N H X X"]
    reads: Float[Array, "B N H X K"]
    strength: Float[Array, "B N H X 1"]
    v: Float[Array, "B N H X U"]
    writes: Float[Array, "B N H X K"]
    keep: Float[Array, "B N H K 1"]


@jax.custom_vjp
def write_chunks(
    state: Float[Array, "B H K U"], chunks: Chunks
) -> tuple[Float[Array, "B N H X U"], Float[Array, "B N H K U"], Float[Array, "B H K U"]]:
    """Rows u that every chunk writes, the state before every chunk, and the state after the last one.

    The entries of `links` on and above the diagonal must be 0. Three products of each chunk wait for the chunk before,
    forward and backward.
    """
    return _write_fwd(state, chunks)[0]


@jax.custom_vjp
def decayed_products(
    q: Float[Array, "*batch X K"], k: Float[Array, "*batch X K"], g: Float[Array, "*batch X K"]
) -> tuple[
    Float[Array, "*batch X X"],
    Float[Array, "*batch X X"],
    Float[Array, "*batch X K"],
    Float[Array, "*batch X K"],
    Float[Array, "*batch K"],
]:
    """All that a chunk needs of its log-decays g.

    Returns:
        Products of each k with the decayed k before it, strictly lower triangular; products of each q with the decayed
        k up to it, lower triangular; decay from the chunk's start up to a position, the position included; decay from
        a position to the chunk's end, the position not included; decay over the chunk.
    """
    return _products_fwd(q, k, g)[0]


def invert_unit_lower(a: Float[Array, "*batch X X"]) -> Float[Array, "*batch X X"]:
    """`(I + a)^-1` for strictly lower triangular `a`, from the inverses of diagonal blocks of 1, 2, 4, ... rows.

    Only products of blocks of `a` and of the inverse occur, so nothing grows that the inverse does not have (the
    powers of a Neumann series do: those of 16 equal keys reach 3432).
    """
    size = a.shape[-1]
    base = min(size, BASE_SIZE)
    diagonal = _blocks(a, base, 0)
    inverse = jnp.broadcast_to(jnp.eye(base, dtype=a.dtype), diagonal.shape)
    half = 1
    while half < base:
        lower = jnp.where(_straddles(base, half), diagonal, 0)
        # At half = 1 the inverse is still the identity.
        inverse = inverse - (lower if half == 1 else _matmul(inverse, _matmul(lower, inverse)))
        half *= 2
    while half < size:
        left, right = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _grow(inverse, -_matmul(right, _matmul(_blocks(a, half, 1), left)))
        half *= 2
    return inverse[..., 0, :, :]


def _write_fwd(state, chunks):
    inverse = invert_unit_lower(chunks.links)
    before, rests, rows = [], [], []
    for i in range(inverse.shape[1]):
        rest = chunks.v[:, i] - _matmul(chunks.reads[:, i], state)
        u = _matmul(inverse[:, i], chunks.strength[:, i] * rest)
        before.append(state)
        rests.append(rest)
        rows.append(u)
        state = chunks.keep[:, i] * state + _matmul(_transposed(chunks.writes[:, i]), u)
    before, rests, u = (jnp.stack(x, axis=1) for x in (before, rests, rows))
    return (u, before, state), (chunks, inverse, before, rests, u)


def _write_bwd(residuals, cotangents):
    chunks, inverse, before, rests, u = residuals
    d_u, d_before, d_state = cotangents
    d_after, solved = [], []
    for i in reversed(range(inverse.shape[1])):
        d_after.append(d_state)
        d_row = d_u[:, i] + _matmul(chunks.writes[:, i], d_state)
        solved.append(_matmul(_transposed(inverse[:, i]), d_row))
        d_rest = chunks.strength[:, i] * solved[-1]
        d_state = (
            chunks.keep[:, i] * d_state + d_before[:, i] - _matmul(_transposed(chunks.reads[:, i]), d_rest)
        )
    d_after, solved = (jnp.stack(x[::-1], axis=1) for x in (d_after, solved))
    d_v = chunks.strength * solved
    return d_state, Chunks(
        links=-jnp.tril(_matmul(solved, _transposed(u)), -1),
        reads=-_matmul(d_v, _transposed(before)),
        strength=_sum_last(solved * rests),
        v=d_v,
        writes=_matmul(u, _transposed(d_after)),
        keep=_sum_last(before * d_after),
    )


write_chunks.defvjp(_write_fwd, _write_bwd)


def _products_fwd(q, k, g):
    size = g.shape[-2]
    base = min(size, BASE_SIZE)
    attend = jnp.where(jnp.eye(base, dtype=bool), _split(_sum_last(q * k)[..., 0], base)[..., None], 0)
    erase = jnp.zeros_like(attend)
    # Decays from a half's start up to a position, and from a position to the half's end.
    prefix, suffix, decays = jnp.exp(g), jnp.ones_like(g), []
    half = 1
    while half < size:
        (p_left, p_right), (s_left, s_right) = _halves(prefix, half), _halves(suffix, half)
        decay = _join(s_left, p_right)
        decays.append(decay)
        prefix = _join(p_left, p_right * p_left[..., -1:, :])
        suffix = _join(s_left * p_right[..., -1:, :], s_right)
        rows, columns = _rows_and_columns(q, k, decay, half)
        products = _product("...xk,...yk->...xy", rows, columns)
        to_erase, to_attend = products[..., :half, :], products[..., half:, :]
        if half < base:
            erase, attend = erase + _place(to_erase, base), attend + _place(to_attend, base)
        else:
            erase, attend = _grow(erase, to_erase), _grow(attend, to_attend)
        half *= 2
    results = erase[..., 0, :, :], attend[..., 0, :, :], prefix, suffix, prefix[..., -1, :]
    return results, (q, k, decays, prefix, suffix)


def _products_bwd(residuals, cotangents):
    q, k, decays, from_start, to_end = residuals
    d_erase, d_attend, d_from_start, d_to_end, d_keep = cotangents
    size = q.shape[-2]
    base = min(size, BASE_SIZE)
    d_diagonal = jnp.where(jnp.eye(size, dtype=bool), d_attend, 0).sum(axis=-1, keepdims=True)
    d_q, d_k = d_diagonal * k, d_diagonal * q
    d_base = _blocks(d_erase, base, 0), _blocks(d_attend, base, 0)
    # Cotangents of the sums within halves, which reach every g of the sum; and, for each block of `half` positions, of
    # the sum over the block, which reaches every g of the block.
    d_prefix, d_suffix = d_from_start * from_start, d_to_end * to_end
    d_total = (d_keep * from_start[..., -1, :])[..., None, :]
    position = jnp.arange(size)[:, None]
    half = size // 2
    for decay in reversed(decays):
        if half < base:
            d_products = jnp.concatenate([_unplace(x, half) for x in d_base], axis=-2)
        else:
            d_products = jnp.concatenate([_blocks(x, half, 1) for x in (d_erase, d_attend)], axis=-2)
        rows, columns = _rows_and_columns(q, k, decay, half)
        d_rows = _product("...xy,...yk->...xk", d_products, columns)
        d_columns = _product("...xy,...xk->...yk", d_products, rows)
        d_k_level = _join(d_columns, d_rows[..., :half, :]) * decay
        d_q_level = _join(jnp.zeros_like(d_columns), d_rows[..., half:, :]) * decay
        d_q, d_k = d_q + d_q_level, d_k + d_k_level
        d_level = k * d_k_level + q * d_q_level
        d_left, d_right = _halves(d_prefix, half)[1].sum(axis=-2), _halves(d_suffix, half)[0].sum(axis=-2)
        d_total = jnp.repeat(d_total, 2, axis=-2) + _join(d_left[..., None, :], d_right[..., None, :])
        in_right = position // half % 2 == 1
        d_prefix, d_suffix = (
            d_prefix + jnp.where(in_right, d_level, 0),
            d_suffix + jnp.where(in_right, 0, d_level),
        )
        # Without it XLA:CPU fuses all levels into one loop that computes each of them again for every element.
        d_prefix, d_suffix, d_total = jax.lax.optimization_barrier((d_prefix, d_suffix, d_total))
        half //= 2
    return jax.lax.optimization_barrier((d_q, d_k, d_prefix + d_total))


decayed_products.defvjp(_products_fwd, _products_bwd)


def _rows_and_columns(q, k, decay, half):
    """What pairs of halves multiply: decayed [k; q] of the right halves, decayed k of the left halves."""
    (_, q_right), (k_left, k_right) = _halves(q * decay, half), _halves(k * decay, half)
    return jnp.concatenate([k_right, q_right], axis=-2), k_left


def _split(x, base):
    return x.reshape(*x.shape[:-1], x.shape[-1] // base, base)


def _place(products, base):
    """Blocks of `base` rows with the products [n, h, h] of blocks of 2h at their rows and columns, 0 elsewhere."""
    *batch, _, half, _ = products.shape
    both = jnp.stack([jnp.zeros_like(products), products], axis=-3)
    wide = jnp.tile(both.reshape(*batch, -1, base, half), base // half)
    return jnp.where(_straddles(base, half), wide, 0)


def _unplace(blocks, half):
    """The products [n, h, h] that `_place` has put into `blocks`."""
    *batch, count, base, _ = blocks.shape
    own = jnp.where(_straddles(base, half), blocks, 0)
    narrow = own.reshape(*batch, count, base, base // half, half).sum(axis=-2)
    return narrow.reshape(*batch, -1, 2, half, half)[..., 1, :, :]


def _straddles(size: int, half: int) -> Bool[Array, "X X"]:
    """Row and column are in the right and the left half of one aligned block of 2 * half positions."""
    index = jnp.arange(size) // half
    row, column = index[:, None], index[None, :]
    return (row % 2 == 1) & (column == row - 1)


def _product(equation, x, y):
    return jnp.einsum(equation, x, y, precision=PRECISION)


def _matmul(x, y):
    return _product("...xy,...yz->...xz", x, y)


def _transposed(x):
    return jnp.swapaxes(x, -1, -2)


def _sum_last(x):
    """Sums over the last axis, which stays, as a product: XLA's CPU compiler makes a slower operation of a sum."""
    return _matmul(x, jnp.ones((*x.shape[:-2], x.shape[-1], 1), x.dtype))


def _halves(x, half):
    *batch, size, dim = x.shape
    x = x.reshape(*batch, size // (2 * half), 2, half, dim)
    return x[..., 0, :, :], x[..., 1, :, :]


def _join(left, right):
    *batch, count, half, dim = left.shape
    return jnp.stack([left, right], axis=-3).reshape(*batch, 2 * count * half, dim)


def _grow(diagonal, lower):
    """Blocks [[d0, 0], [lower, d1]] of twice the size, from pairs d0, d1 of diagonal blocks."""
    left, right = diagonal[..., 0::2, :, :], diagonal[..., 1::2, :, :]
    top = jnp.concatenate([left, jnp.zeros_like(left)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([lower, right], axis=-1)], axis=-2)


def _blocks(a, size, below):
    """Blocks of the diagonal (`below` = 0), or the lower left quarters of the blocks of 2 * size rows (1)."""
    stride = size * (1 + below)
    starts = range(0, a.shape[-1], stride)
    return jnp.stack([a[..., i + below * size : i + stride, i : i + size] for i in starts], axis=-3)
