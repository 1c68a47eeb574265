"""One chunk of Kimi Delta Attention as matrix products.

With G_i the sum of g up to position i of the chunk, S the state before it and u_i the row that position i writes,

    u_i = beta_i (v_i - S^T (k_i e^{G_i}) - sum_{j<i} (k_i e^{G_i - G_j}) . k_j  u_j)
    o_i = S^T (q_i e^{G_i}) + sum_{j<=i} (q_i e^{G_i - G_j}) . k_j  u_j
    S' = diag(e^{G_X}) S + sum_j (k_j e^{G_X - G_j}) u_j^T

so `(I + A) u = beta (v - ...)` with A strictly lower triangular (Kimi Linear, arXiv:2510.26692, sec. 3).

Decays. `e^{G_i}` underflows and `e^{-G_j}` overflows when gates are strong, and `G_i - G_j` from two long sums has lost
the digits of a weak gate that follows a strong one. Here every pair j < i is handled at the largest power of two h for
which i and j lie in different halves of an aligned block of 2h positions: with m the middle, the decay is
`e^{g_{j+1} + ... + g_{m-1}} * e^{g_m + ... + g_i}`. Both sums have only terms of the decay itself, both exponents are at
most 0, and both factors are matrix-product operands.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._kda_scan import ChunkMask

BASE_SIZE = 16  # below it, blocks are too small for a matrix unit: their halves are masked, not sliced
PRECISION = jax.lax.Precision.HIGHEST  # float32 products, which TPU otherwise rounds to bfloat16


def kda_chunk(
    state: Float[Array, "B H K U"], params: tuple[()], inputs: tuple[Array, ...], mask: ChunkMask | None
) -> tuple[Float[Array, "B H K U"], Float[Array, "B X H U"]]:
    """The state after a chunk and the chunk's output.

    Args:
        state: State before the chunk; its dtype is the one everything is computed in.
        params: Nothing; every chunk is a function of its inputs.
        inputs: v, q, k, g [B, X, H, *] and beta [B, X, H] of the chunk; X is a power of two.
        mask: Documents of the chunk, or None for one document without padding.
    """
    del params
    out_dtype = inputs[0].dtype
    v, q, k, g, beta = (jnp.moveaxis(x.astype(state.dtype), 1, 2) for x in inputs)
    if mask is not None:
        scored = mask.scored[:, None, :]
        v, q, k, g = (jnp.where(scored[..., None], x, 0) for x in (v, q, k, g))
        beta = jnp.where(scored, beta, 0)
    levels, prefix, suffix = gate_sums(g)
    erase, attend = decayed_products(q, k, levels)
    erase = erase * beta[..., None]
    from_start, to_end, keep = jnp.exp(prefix), jnp.exp(suffix), jnp.exp(prefix[..., -1, :, None])
    if mask is not None:
        same = mask.same[:, None]
        erase, attend = jnp.where(same, erase, 0), jnp.where(same, attend, 0)
        from_start = jnp.where(mask.first[:, None, :, None], from_start, 0)
        to_end = jnp.where(mask.last[:, None, :, None], to_end, 0)
        keep = jnp.where(mask.kept[:, None, None, None], keep, 0)
    size = v.shape[2]
    read = _product("bhxk,bhku->bhxu", jnp.concatenate([k * from_start, q * from_start], axis=2), state)
    u = solve_unit_lower(erase, beta[..., None] * (v - read[:, :, :size]))
    o = read[:, :, size:] + _product("bhxy,bhyu->bhxu", attend, u)
    state = keep * state + _product("bhxk,bhxu->bhku", k * to_end, u)
    return state, jnp.moveaxis(o, 2, 1).astype(out_dtype)


def gate_sums(
    g: Float[Array, "B H X K"],
) -> tuple[list[Float[Array, "B H X K"]], Float[Array, "B H X K"], Float[Array, "B H X K"]]:
    """Sums of log-decays to and from the middle of the aligned blocks of 2, 4, ..., X positions, and of the chunk.

    Returns:
        For each block size 2h: at a position of the right half the sum of g from the middle to it, at one of the left
        half the sum of g after it and before the middle; then the sum from the chunk's start to a position, the
        position included; then the sum from a position to the chunk's end, the position not included.
    """
    size = g.shape[2]
    prefix, suffix, levels = g, jnp.zeros_like(g), []
    half = 1
    while half < size:
        (p_left, p_right), (s_left, s_right) = _halves(prefix, half), _halves(suffix, half)
        levels.append(_join(s_left, p_right, g.shape))
        prefix = _join(p_left, p_right + p_left[..., -1:, :], g.shape)
        suffix = _join(s_left + p_right[..., -1:, :], s_right, g.shape)
        half *= 2
    return levels, prefix, suffix


def decayed_products(
    q: Float[Array, "B H X K"], k: Float[Array, "B H X K"], levels: list[Float[Array, "B H X K"]]
) -> tuple[Float[Array, "B H X X"], Float[Array, "B H X X"]]:
    """Products of each k, and of each q, with the decayed earlier k: strictly lower and lower triangular.

    Args:
        q: Queries.
        k: Keys.
        levels: Log-decays of `gate_sums`.
    """
    size = q.shape[2]
    base = min(size, BASE_SIZE)
    num_base = base.bit_length() - 1
    erase, attend = _base_products(q, k, levels[:num_base], base)
    half = base
    for level in levels[num_base:]:
        decay = jnp.exp(level)
        (_, q_right), (k_left, k_right) = _halves(q * decay, half), _halves(k * decay, half)
        rows = jnp.concatenate([k_right, q_right], axis=-2)
        products = _product("bhnxk,bhnyk->bhnxy", rows, k_left)
        erase = _grow(erase, products[..., :half, :])
        attend = _grow(attend, products[..., half:, :])
        half *= 2
    return erase[:, :, 0], attend[:, :, 0]


@jax.custom_vjp
def solve_unit_lower(a: Float[Array, "B H X X"], b: Float[Array, "B H X U"]) -> Float[Array, "B H X U"]:
    """`(I + a)^-1 b` for strictly lower triangular `a`; the entries of `a` on and above the diagonal must be 0."""
    return _solve_fwd(a, b)[0]


def invert_unit_lower(a: Float[Array, "B H X X"]) -> Float[Array, "B H X X"]:
    """`(I + a)^-1` for strictly lower triangular `a`, from the inverses of diagonal blocks of 1, 2, 4, ... positions.

    Only products with the true inverse's own blocks occur, so nothing grows that the inverse does not have (the powers
    of a Neumann series do: with equal keys those of 16 positions reach 3432).
    """
    size = a.shape[-1]
    base = min(size, BASE_SIZE)
    diagonal = _diagonal_blocks(a, base)
    index = jnp.arange(base)
    inverse = jnp.broadcast_to(jnp.eye(base, dtype=a.dtype), diagonal.shape)
    half = 1
    while half < base:
        block = jnp.where(_apart(index, half), diagonal, 0)
        if half > 1:
            block = _product("bhnxy,bhnyz->bhnxz", inverse, _product("bhnxy,bhnyz->bhnxz", block, inverse))
        inverse = inverse - block
        half *= 2
    while half < size:
        lower = _lower_blocks(a, half)
        left, right = inverse[:, :, 0::2], inverse[:, :, 1::2]
        block = -_product("bhnxy,bhnyz->bhnxz", right, _product("bhnxy,bhnyz->bhnxz", lower, left))
        inverse = _grow(inverse, block)
        half *= 2
    return inverse[:, :, 0]


def _solve_fwd(a, b):
    inverse = invert_unit_lower(a)
    u = _product("bhxy,bhyu->bhxu", inverse, b)
    return u, (inverse, u)


def _solve_bwd(residuals, d_u):
    inverse, u = residuals
    d_b = _product("bhyx,bhyu->bhxu", inverse, d_u)
    return -jnp.tril(_product("bhxu,bhyu->bhxy", d_b, u), -1), d_b


solve_unit_lower.defvjp(_solve_fwd, _solve_bwd)


def _base_products(q, k, levels, base):
    batch, heads, size, dim = q.shape
    # Level 0 has no decay: it is the diagonal of the product of q and k.
    decay = jnp.exp(jnp.stack([jnp.zeros_like(q), *levels], axis=2))
    shape = (batch, heads, len(levels) + 1, size // base, base, dim)
    cols = (k[:, :, None] * decay).reshape(shape)
    rows = jnp.concatenate([cols, (q[:, :, None] * decay).reshape(shape)], axis=-2)
    products = _product("bhlnxk,bhlnyk->bhlnxy", rows, cols)
    index = jnp.arange(base)
    apart = jnp.stack(
        [_apart(index, 1 << level) for level in range(len(levels))] or [jnp.zeros((base, base), bool)]
    )
    own = jnp.eye(base, dtype=bool)[None]
    zero = jnp.zeros_like(own)
    apart = apart[: len(levels)]
    erase = jnp.where(jnp.concatenate([zero, apart])[:, None], products[..., :base, :], 0).sum(axis=2)
    attend = jnp.where(jnp.concatenate([own, apart])[:, None], products[..., base:, :], 0).sum(axis=2)
    return erase, attend


def _apart(index, half):
    """Pairs (i, j) in the right and the left half of one aligned block of 2 * half positions."""
    row, column = index[:, None] // half, index[None, :] // half
    return (row % 2 == 1) & (column == row - 1)


def _product(equation, x, y):
    return jnp.einsum(equation, x, y, precision=PRECISION)


def _halves(x, half):
    batch, heads, size, dim = x.shape
    x = x.reshape(batch, heads, size // (2 * half), 2, half, dim)
    return x[:, :, :, 0], x[:, :, :, 1]


def _join(left, right, shape):
    return jnp.stack([left, right], axis=3).reshape(shape)


def _grow(diagonal, lower):
    """Blocks [[d0, 0], [lower, d1]] of twice the size, from pairs d0, d1 of diagonal blocks."""
    left, right = diagonal[:, :, 0::2], diagonal[:, :, 1::2]
    top = jnp.concatenate([left, jnp.zeros_like(left)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([lower, right], axis=-1)], axis=-2)


def _diagonal_blocks(a, size):
    count = a.shape[-1] // size
    return jnp.stack(
        [a[..., i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)], axis=2
    )


def _lower_blocks(a, half):
    count = a.shape[-1] // (2 * half)
    starts = [2 * half * i for i in range(count)]
    return jnp.stack([a[..., s + half : s + 2 * half, s : s + half] for s in starts], axis=2)
