"""Lightning attention: linear attention whose state decays by one constant per head.

Per head, with state S [K, U] (zero at a document's start):  S <- e^{-slope} S + k_t v_t^T;  o_t = S^T q_t

Lightning Attention-2, arXiv:2401.04658; the gated linear attention (GLA) layers of Ling 2.x. `lightning_recurrent` is
this, position by position: the oracle, and what decoding uses. `lightning_chunked` is the same by matrix products.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int

from ._kda_chunk import PRECISION
from ._kda_documents import number_documents, vary_together, zeros_beside
from ._kda_scan import ChunkMask, scan_rows

CHUNK_SIZE = 64


def lightning_slopes(
    num_heads: int, *, layer: int, num_layers: int, dtype: DTypeLike = jnp.float32
) -> Float[Array, " H"]:
    """Decay rate of each head of layer `layer` (from 0) of `num_layers`, nats per token.

    ALiBi slopes `2^(-8 h / H)`, h = 1 .. H, times `1 - (layer - 1) / (num_layers - 1) + 1e-5`: deeper layers forget
    less. `layer - 1` is the released code's, which numbers layers from 0 too: layer 0 forgets by more than its slope.
    When H is no power of two, the slopes of the next lower power come first and every other slope of the next higher
    one after them. Computed in float64, returned in `dtype`. Source: `BailingMoeV2_5LinearAttention`, hub code of
    inclusionAI/Ling-2.5.
    """

    def slopes(count: int) -> list[float]:
        if count & (count - 1) == 0:
            return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]
        lower = 1 << (count.bit_length() - 1)
        return slopes(lower) + slopes(2 * lower)[0::2][: count - lower]

    scale = 1 - (layer - 1) / max(num_layers - 1, 1) + 1e-5
    return jnp.asarray(np.asarray(slopes(num_heads)) * scale, dtype)


def lightning_recurrent(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H U"],
    slope: Float[Array, " H"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    initial_state: Float[Array, "B H K U"] | None = None,
) -> tuple[Float[Array, "B S H U"], Float[Array, "B H K U"]]:
    """Lightning attention, one position after another. Arguments and results are those of `lightning_chunked`."""
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    documents = number_documents(segment_ids)
    q, k, v, slope, initial_state, documents = vary_together((q, k, v, slope, initial_state, documents))
    state = _initial(q, k, v, slope, initial_state)
    decay = jnp.exp(-slope.astype(state.dtype))[:, None, None]
    before = jnp.pad(documents.number[:, :-1], ((0, 0), (1, 0)))
    rows = tuple(jnp.moveaxis(x.astype(state.dtype), 1, 0) for x in (q, k, v))

    def one(state, xs):
        q, k, v, fresh, scored = xs
        held = jnp.where(fresh[:, None, None, None], 0, state)
        new = decay * held + k[..., None] * v[..., None, :]
        o = jnp.einsum("bhk,bhku->bhu", q, new, precision=PRECISION)
        # Padding is never a document's first position, so `state` is `held` there.
        return jnp.where(scored[:, None, None, None], new, state), jnp.where(scored[:, None, None], o, 0)

    flags = ((documents.number != before).T, documents.scored.T)
    state, o = jax.lax.scan(one, state, (*rows, *flags))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state


def lightning_chunked(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H U"],
    slope: Float[Array, " H"],
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    initial_state: Float[Array, "B H K U"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "B S H U"], Float[Array, "B H K U"]]:
    """Lightning attention by matrix products inside chunks and a scan over chunks.

    The backward pass keeps the states between chunks and computes each chunk again.

    Args:
        q: Queries, already scaled.
        k: Keys.
        v: Values.
        slope: Decay rate of each head, nats per token, at least 0.
        segment_ids: Packed-document ids, unique within a row; 0 is padding. The state restarts with each document.
            Padding leaves the state as it is, undecayed, outputs 0 and has no gradient. None: one document.
        initial_state: State that the first document of each row goes on from; None is zero.
        chunk_size: Positions of a chunk, a power of two.

    Returns:
        Output in `v`'s dtype, and the state after the last position that is not padding; the state's dtype is the
        widest of the arguments' and float32.

    Raises:
        ValueError: `chunk_size` is no power of two.
    """
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    documents = number_documents(segment_ids)
    q, k, v, slope, initial_state, documents = vary_together((q, k, v, slope, initial_state, documents))
    state = _initial(q, k, v, slope, initial_state)
    return scan_rows(_lightning_chunk, chunk_size, state, slope, (v, q, k), documents)


def _lightning_chunk(
    state: Float[Array, "B H K U"],
    slope: Float[Array, " H"],
    inputs: tuple[Array, ...],
    mask: ChunkMask | None,
) -> tuple[Float[Array, "B H K U"], Float[Array, "B 1 X H U"]]:
    assert mask is not None
    mask = ChunkMask(*(x[:, 0] for x in mask))  # one chunk at a time
    rate = slope.astype(state.dtype)[:, None]
    scored = mask.scored[:, None, :, None]
    v, q, k = (jnp.where(scored, jnp.moveaxis(x[:, 0].astype(state.dtype), 2, 1), 0) for x in inputs)
    count = jnp.cumsum(mask.scored.astype(state.dtype), axis=1)[:, None]  # positions decayed over
    apart = jnp.tril(count[..., :, None] - count[..., None, :])  # at least 0: no exponent is positive
    decay = jnp.where(jnp.tril(mask.same)[:, None], jnp.exp(-rate[..., None] * apart), 0)
    from_start = jnp.where(mask.first[:, None], jnp.exp(-rate * count), 0)
    to_end = jnp.where(mask.last[:, None], jnp.exp(-rate * (count[..., -1:] - count)), 0)
    keep = jnp.where(mask.kept[:, None, None], jnp.exp(-rate * count[..., -1:]), 0)
    attend = _product("bhxk,bhyk->bhxy", q, k) * decay
    o = _product("bhxk,bhku->bhxu", q * from_start[..., None], state) + _product("bhxy,bhyu->bhxu", attend, v)
    state = keep[..., None] * state + _product("bhxk,bhxu->bhku", k * to_end[..., None], v)
    return state, jnp.moveaxis(o, 1, 2)[:, None]


def _product(equation, x, y):
    return jnp.einsum(equation, x, y, precision=PRECISION)


def _initial(q, k, v, slope, initial_state):
    dtype = jnp.result_type(q, k, v, slope, jnp.float32)
    if initial_state is not None:
        return initial_state.astype(jnp.promote_types(dtype, initial_state.dtype))
    batch, _, heads, dim = k.shape
    return zeros_beside(q, (batch, heads, dim, v.shape[3]), dtype)
