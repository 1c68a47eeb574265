"""Kimi Delta Attention: a linear attention whose state decays per channel and is corrected by the delta rule.

Per head, with state S [K, U] (zero at a document's start), log-decay g_t [K] and write strength beta_t:

    S <- diag(e^{g_t}) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t

Kimi Linear, arXiv:2510.26692, eq. 1. `kda_recurrent` is this, position by position: the oracle, and what decoding
uses. `kda_chunked` is the same function by matrix products; `kda_gated_chunked` is `kda_chunked` of normalized queries
and keys and of a `DecayGate`'s log-decays, none of which it keeps.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Shaped

from ._kda_chunk import PRECISION, kda_chunks
from ._kda_documents import number_documents, vary_together, zeros_beside
from ._kda_scan import ChunkMask, scan_rows

CHUNK_SIZE = 64
# Chunks are prepared together while an array of them is no larger: several such arrays fit into a CPU core's cache.
STEP_BYTES = 256 * 1024


class DecayGate(eqx.Module):
    """Log-decay of each channel as a function of a projection of the token.

    `lower_bound * sigmoid(exp(a_log) * (f + dt_bias))`, in (lower_bound, 0) (safe gate), or without a bound
    `-exp(a_log) * softplus(f + dt_bias)`.

    Attributes:
        a_log: Logarithm of each head's rate.
        dt_bias: Bias of each channel.
        lower_bound: Most negative log-decay, nats; None for the softplus form.
    """

    a_log: Float[Array, " H"]
    dt_bias: Float[Array, "H K"]
    lower_bound: float | None = eqx.field(static=True)

    def __call__(self, f: Float[Array, "*positions H K"]) -> Float[Array, "*positions H K"]:
        """Log-decay in nats, at least float32."""
        dtype = jnp.result_type(f, self.a_log, self.dt_bias, jnp.float32)
        rate = jnp.exp(self.a_log.astype(dtype))[:, None]
        x = f.astype(dtype) + self.dt_bias.astype(dtype)
        if self.lower_bound is None:
            return -rate * jax.nn.softplus(x)
        return self.lower_bound * jax.nn.sigmoid(rate * x)


def l2_normalize(x: Float[Array, "*shape"], *, epsilon: float = 1e-6) -> Float[Array, "*shape"]:
    """`x / sqrt(sum(x^2) + epsilon)` over the last axis, computed in at least float32, in `x`'s dtype.

    A zero vector stays zero. The epsilon is added to the sum, not to the norm, as in transformers 5.24
    `bailing_hybrid`.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def kda_recurrent(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H U"],
    g: Float[Array, "B S H K"],
    beta: Float[Array, "B S H"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    initial_state: Float[Array, "B H K U"] | None = None,
) -> tuple[Float[Array, "B S H U"], Float[Array, "B H K U"]]:
    """Kimi Delta Attention, one position after another. Arguments and results are those of `kda_chunked`."""
    documents = None if segment_ids is None else number_documents(segment_ids)
    q, k, v, g, beta, initial_state, documents = vary_together((q, k, v, g, beta, initial_state, documents))
    state = _initial(initial_state, v, q, k, g, beta)
    rows, flags = (v, q, k, g, beta), ()
    if documents is not None:
        rows = tuple(_zero_padding(x, documents.scored) for x in rows)
        before = jnp.pad(documents.number[:, :-1], ((0, 0), (1, 0)))
        flags = (documents.number != before,)
    xs = tuple(jnp.moveaxis(x, 1, 0) for x in (*(x.astype(state.dtype) for x in rows), *flags))

    def one(state, xs):
        v, q, k, g, beta, *fresh = xs
        for restarts in fresh:
            state = jnp.where(restarts[:, None, None, None], 0, state)
        # At padding g = 0 and beta = 0: the state stays; q = 0: the output is 0.
        state = jnp.exp(g)[..., None] * state
        u = beta[..., None] * (v - jnp.einsum("bhk,bhku->bhu", k, state, precision=PRECISION))
        state = state + k[..., None] * u[..., None, :]
        return state, jnp.einsum("bhk,bhku->bhu", q, state, precision=PRECISION)

    state, o = jax.lax.scan(one, state, xs)
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state


def kda_chunked(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H U"],
    g: Float[Array, "B S H K"],
    beta: Float[Array, "B S H"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    initial_state: Float[Array, "B H K U"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "B S H U"], Float[Array, "B H K U"]]:
    """Kimi Delta Attention by matrix products inside chunks and a scan over chunks.

    The backward pass keeps states between chunks and computes the chunks again. No exponent is ever positive, so
    any g <= 0 is safe, -inf excepted.

    Args:
        q: Queries, already normalized and scaled.
        k: Keys, already normalized.
        v: Values.
        g: Log-decay per channel, nats, at most 0.
        beta: Write strength, in [0, 1].
        segment_ids: Packed-document ids, unique within a row; 0 is padding. The state restarts with each document.
            Padding leaves the state as it is, outputs 0 and has no gradient. None: one document, no padding.
        initial_state: State that the first document of each row goes on from; None is zero.
        chunk_size: Positions of a chunk, a power of two.

    Returns:
        Output in `v`'s dtype, and the state after the last position that is not padding, which is that of the row's
        last document; the state's dtype is the widest of the arguments' and float32. With S = 0 or a row of padding
        it is the initial state.

    Raises:
        ValueError: `chunk_size` is no power of two.
    """
    documents = None if segment_ids is None else number_documents(segment_ids)
    rows, initial_state, documents = vary_together(((v, q, k, g, beta), initial_state, documents))
    state = _initial(initial_state, *rows)
    return scan_rows(_plain_step, chunk_size, state, None, rows, documents, step_bytes=STEP_BYTES)


def kda_gated_chunked(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H U"],
    f: Float[Array, "B S H K"],
    beta: Float[Array, "B S H"],
    gate: DecayGate,
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    initial_state: Float[Array, "B H K U"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "B S H U"], Float[Array, "B H K U"]]:
    """`kda_chunked(l2_normalize(q) / sqrt(K), l2_normalize(k), v, gate(f), beta)`, chunk by chunk.

    The normalized queries and keys and the log-decays exist for one chunk at a time, forward and backward; in the
    state's dtype, whatever the dtype of `q` and `k`.

    Args:
        q: Queries, neither normalized nor scaled.
        k: Keys, not normalized.
        v: Values.
        f: Input of the gate.
        beta: Write strength, in [0, 1].
        gate: The log-decay as a function of `f`.
        segment_ids: As in `kda_chunked`.
        initial_state: As in `kda_chunked`.
        chunk_size: As in `kda_chunked`.

    Returns:
        As `kda_chunked`.

    Raises:
        ValueError: `chunk_size` is no power of two.
    """
    documents = None if segment_ids is None else number_documents(segment_ids)
    rows, gate, initial_state, documents = vary_together(((v, q, k, f, beta), gate, initial_state, documents))
    state = _initial(initial_state, *rows)
    return scan_rows(_gated_step, chunk_size, state, gate, rows, documents, step_bytes=STEP_BYTES)


def _plain_step(
    state: Array, params: None, rows: tuple[Array, ...], mask: ChunkMask | None
) -> tuple[Array, Array]:
    del params
    out_dtype = rows[0].dtype
    v, q, k, g, beta = _without_padding(rows, mask)
    state, o = kda_chunks(state, q, k, v, g, beta, mask)
    return state, o.astype(out_dtype)


def _gated_step(
    state: Array, gate: DecayGate, rows: tuple[Array, ...], mask: ChunkMask | None
) -> tuple[Array, Array]:
    out_dtype = rows[0].dtype
    v, q, k, f, beta = _without_padding(tuple(x.astype(state.dtype) for x in rows), mask)
    # A padding position's log-decay is not 0 where f is.
    (g,) = _without_padding((gate(f),), mask)
    q, k = l2_normalize(q) * q.shape[-1] ** -0.5, l2_normalize(k)
    state, o = kda_chunks(state, q, k, v, g, beta, mask)
    return state, o.astype(out_dtype)


def _without_padding(rows: tuple[Array, ...], mask: ChunkMask | None) -> tuple[Array, ...]:
    return rows if mask is None else tuple(_zero_padding(x, mask.scored) for x in rows)


def _zero_padding(x: Shaped[Array, "..."], scored: Bool[Array, "*positions"]) -> Shaped[Array, "..."]:
    """`x` [*positions, ...], 0 where it is not `scored`."""
    return jnp.where(jnp.expand_dims(scored, tuple(range(scored.ndim, x.ndim))), x, 0)


def _initial(initial_state: Array | None, v: Array, *rows: Array) -> Array:
    """The initial state in the widest dtype; zeros when there is none."""
    dtype: DTypeLike = jnp.result_type(v, *rows, jnp.float32)
    if initial_state is not None:
        return initial_state.astype(jnp.promote_types(dtype, initial_state.dtype))
    batch, _, heads, dim = rows[0].shape
    return zeros_beside(v, (batch, heads, dim, v.shape[3]), dtype)
