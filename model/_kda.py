"""Kimi Delta Attention: a linear attention whose state decays per channel and is corrected by the delta rule.

Per head, with state S [K, U] (zero at a document's start), log-decay g_t [K] and write strength beta_t:

    S <- diag(e^{g_t}) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t

Kimi Linear, arXiv:2510.26692, eq. 1. `kda_recurrent` is this, position by position: the oracle, and what decoding
uses. `kda_chunked` is the same function by matrix products.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._kda_chunk import PRECISION, kda_chunk
from ._kda_documents import number_documents, vary_together, zeros_beside
from ._kda_scan import scan_rows

CHUNK_SIZE = 64


def l2_normalize(x: Float[Array, "*shape"], *, epsilon: float = 1e-6) -> Float[Array, "*shape"]:
    """`x / sqrt(sum(x^2) + epsilon)` over the last axis, computed in at least float32, in `x`'s dtype.

    A zero vector stays zero. Source: fla's `l2norm`, as transformers 5.24 `bailing_hybrid` uses it: the epsilon is added
    to the sum, not to the norm.
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
    state = _initial(q, k, v, g, beta, initial_state)
    dtype = state.dtype
    inputs = tuple(jnp.moveaxis(x.astype(dtype), 1, 0) for x in (q, k, v, g, beta))
    if documents is None:
        fresh = scored = jnp.zeros(0)
    else:
        before = jnp.pad(documents.number[:, :-1], ((0, 0), (1, 0)))
        fresh, scored = (documents.number != before).T, documents.scored.T

    def one(state, xs):
        q, k, v, g, beta, *flags = xs
        old = state
        if flags:
            state = jnp.where(flags[0][:, None, None, None], 0, state)
        state = jnp.exp(g)[..., None] * state
        u = beta[..., None] * (v - jnp.einsum("bhk,bhku->bhu", k, state, precision=PRECISION))
        state = state + k[..., None] * u[..., None, :]
        o = jnp.einsum("bhk,bhku->bhu", q, state, precision=PRECISION)
        if flags:
            state = jnp.where(flags[1][:, None, None, None], state, old)
            o = jnp.where(flags[1][:, None, None], o, 0)
        return state, o

    xs = inputs if documents is None else (*inputs, fresh, scored)
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

    The backward pass keeps the states between chunks and computes each chunk again. No exponent is ever positive, so
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
    q, k, v, g, beta, initial_state, documents = vary_together((q, k, v, g, beta, initial_state, documents))
    state = _initial(q, k, v, g, beta, initial_state)
    return scan_rows(kda_chunk, chunk_size, state, (), (v, q, k, g, beta), documents)


def _initial(q, k, v, g, beta, initial_state):
    dtype = jnp.result_type(q, k, v, g, beta, jnp.float32)
    if initial_state is not None:
        return initial_state.astype(jnp.promote_types(dtype, initial_state.dtype))
    batch, _, heads, dim = k.shape
    return zeros_beside(q, (batch, heads, dim, v.shape[3]), dtype)
