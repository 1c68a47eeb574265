"""Causal attention within documents, a block of queries by a block of keys at a time, with its own backward.

Memory is O(S) and only block pairs on or below the diagonal are computed. Heads: J key heads, each serving G query
heads. FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._made_once import made_once_on_cpu
from ._precision import at_least_float32

DEFAULT_BLOCK = 256


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def blockwise_attention(
    q: Float[Array, "B S J G K"],
    k: Float[Array, "B S J K"],
    v: Float[Array, "B S J U"],
    segment_ids: Int[Array, "B S"],
    block_size: int = DEFAULT_BLOCK,
) -> tuple[Float[Array, "B S J G U"], Float[Array, "J G"]]:
    """Attention output, and each head's largest logit over the pairs that count.

    A query sees the keys of its own segment that do not come after it. Logits are `q . k`: scale `q` before.
    Softmax is in at least float32. Padding (segment 0) sees padding only, and its logits are left out of the
    maximum, which is -inf when all is padding. No gradient flows through the maximum.

    Args:
        q: Scaled queries.
        k: Keys.
        v: Values.
        segment_ids: Document ids.
        block_size: Queries and keys in a block.
    """
    return _forward(q, k, v, segment_ids, block_size)[0]


def max_attention_logits(
    q: Float[Array, "B S J G K"],
    k: Float[Array, "B S J K"],
    segment_ids: Int[Array, "B S"],
    block_size: int = DEFAULT_BLOCK,
) -> Float[Array, "J G"]:
    """The second result of `blockwise_attention` alone, for kernels that do not tell. No gradient."""
    q, k = jax.lax.stop_gradient((q, k))
    block = min(block_size, q.shape[1])
    qh, kh, _, segments = _to_blocks(q, k, k, segment_ids, block)
    wide = at_least_float32(q.dtype)

    def query_block(top, i):
        qi, si = _block(qh, i, block, 3), _block(segments, i, block, 1)

        def key_block(j, top):
            mask = _mask(si, _block(segments, j, block, 1), i, j, block) & (si > 0)[:, None, None, :, None]
            logits = jnp.einsum("bjgqk,bjsk->bjgqs", qi, _block(kh, j, block, 2), preferred_element_type=wide)
            return jnp.maximum(top, jnp.max(jnp.where(mask, logits, -jnp.inf), axis=(0, 3, 4)))

        return jax.lax.fori_loop(0, i + 1, key_block, top), None

    start = jnp.full(q.shape[2:4], -jnp.inf, wide)
    return jax.lax.scan(query_block, start, jnp.arange(segments.shape[1] // block))[0]


def _forward(q, k, v, segment_ids, block_size):
    length, block = q.shape[1], min(block_size, q.shape[1])
    qh, kh, vh, segments = _to_blocks(q, k, v, segment_ids, block)
    wide = at_least_float32(q.dtype)

    def query_block(_, i):
        qi, si = _block(qh, i, block, 3), _block(segments, i, block, 1)

        def key_block(j, carry):
            acc, high, total = carry
            mask = _mask(si, _block(segments, j, block, 1), i, j, block)
            logits = jnp.einsum("bjgqk,bjsk->bjgqs", qi, _block(kh, j, block, 2), preferred_element_type=wide)
            logits = made_once_on_cpu(jnp.where(mask, logits, -jnp.inf))
            new_high = jnp.maximum(high, jnp.max(logits, axis=-1))
            # A row with no key yet has high = -inf; subtracting 0 instead keeps -inf - -inf out.
            safe = jnp.where(jnp.isfinite(new_high), new_high, 0)
            weights = jnp.exp(logits - safe[..., None])
            decay = jnp.exp(high - safe)
            values = jnp.einsum(
                "bjgqs,bjsu->bjgqu",
                weights.astype(v.dtype),
                _block(vh, j, block, 2),
                preferred_element_type=wide,
            )
            return acc * decay[..., None] + values, new_high, total * decay + jnp.sum(weights, axis=-1)

        rows = qi.shape[:-1]
        start = (
            jnp.zeros((*rows, v.shape[-1]), wide),
            jnp.full(rows, -jnp.inf, wide),
            jnp.zeros(rows, wide),
        )
        acc, high, total = jax.lax.fori_loop(0, i + 1, key_block, start)
        top = jnp.max(jnp.where(si[:, None, None, :] > 0, high, -jnp.inf), axis=(0, 3))
        return None, ((acc / total[..., None]).astype(q.dtype), high + jnp.log(total), top)

    _, (out, lse, top) = jax.lax.scan(query_block, None, jnp.arange(segments.shape[1] // block))
    out = _from_blocks(out, length)
    return (out, jnp.max(top, axis=0)), (q, k, v, segment_ids, out, lse)


def _backward(block_size, residuals, cotangents):
    q, k, v, segment_ids, out, lse = residuals
    length, block = q.shape[1], min(block_size, q.shape[1])
    wide = at_least_float32(q.dtype)
    qh, kh, vh, segments = _to_blocks(q, k, v, segment_ids, block)
    d_out = cotangents[0]
    # Row sums of d_out * out are the softmax's normalizing term.
    delta = _heads_first(jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1), block, 2)
    d_out = _heads_first(d_out, block, 2)

    def query_block(carry, inputs):
        i, lse_i = inputs
        qi, di, si = (_block(x, i, block, axis) for x, axis in ((qh, 3), (d_out, 3), (segments, 1)))
        delta_i = _block(delta, i, block, 3)

        # Keys before queries: then only the narrow operands of the products have to be transposed, not the weights.
        def key_block(j, carry):
            dq, dk, dv = carry
            kj, vj = _block(kh, j, block, 2), _block(vh, j, block, 2)
            mask = jnp.moveaxis(_mask(si, _block(segments, j, block, 1), i, j, block), 4, 2)
            logits = jnp.einsum("bjsk,bjgqk->bjsgq", kj, qi, preferred_element_type=wide)
            weights = made_once_on_cpu(jnp.where(mask, jnp.exp(logits - lse_i[:, :, None]), 0))
            d_weights = jnp.einsum("bjsu,bjgqu->bjsgq", vj, di, preferred_element_type=wide)
            d_logits = made_once_on_cpu(weights * (d_weights - delta_i[:, :, None])).astype(q.dtype)
            dv_j = jnp.einsum("bjsgq,bjgqu->bjsu", weights.astype(v.dtype), di, preferred_element_type=wide)
            dk_j = jnp.einsum("bjsgq,bjgqk->bjsk", d_logits, qi, preferred_element_type=wide)
            dq_j = jnp.einsum("bjks,bjsgq->bjkgq", _turned(kj), d_logits, preferred_element_type=wide)
            return dq + dq_j, _add_block(dk, dk_j, j, block), _add_block(dv, dv_j, j, block)

        start = jnp.zeros((*qi.shape[:2], qi.shape[4], *qi.shape[2:4]), wide)
        dq, dk, dv = jax.lax.fori_loop(0, i + 1, key_block, (start, *carry))
        return (dk, dv), jnp.moveaxis(dq, 2, 4)

    start = (jnp.zeros(kh.shape, wide), jnp.zeros(vh.shape, wide))
    (dk, dv), dq = jax.lax.scan(query_block, start, (jnp.arange(segments.shape[1] // block), lse))
    dk, dv = (jnp.moveaxis(x, 2, 1)[:, :length] for x in (dk, dv))
    return _from_blocks(dq, length).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


def _mask(
    q_segments: Int[Array, "B X"],
    k_segments: Int[Array, "B Y"],
    i: Int[Array, ""],
    j: Int[Array, ""],
    block: int,
) -> Bool[Array, "B 1 1 X Y"]:
    """Whether query x of block i sees key y of block j."""
    offsets = jnp.arange(block)
    causal = (i * block + offsets)[:, None] >= (j * block + offsets)[None, :]
    return (causal & (q_segments[:, :, None] == k_segments[:, None, :]))[:, None, None]


def _to_blocks(q, k, v, segment_ids, block):
    """Heads before positions, positions padded to whole blocks with segment -1 (which no document has)."""
    padding = -q.shape[1] % block
    segments = jnp.pad(segment_ids, ((0, 0), (0, padding)), constant_values=-1)
    return _heads_first(q, block, 2), _heads_first(k, block, 1), _heads_first(v, block, 1), segments


def _heads_first(x: Float[Array, "B S *heads_width"], block: int, num_heads_axes: int) -> Array:
    """`x` padded to whole blocks, with its positions after its head axes."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x, 1, 1 + num_heads_axes)


def _from_blocks(x: Float[Array, "N B J G X U"], length: int) -> Float[Array, "B S J G U"]:
    num_blocks, batch, kv_heads, groups, block, width = x.shape
    x = jnp.transpose(x, (1, 0, 4, 2, 3, 5))
    return jnp.reshape(x, (batch, num_blocks * block, kv_heads, groups, width))[:, :length]


def _block(x: Array, i: Int[Array, ""], block: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis)


def _turned(x: Float[Array, "B J S K"]) -> Float[Array, "B J K S"]:
    return made_once_on_cpu(jnp.swapaxes(x, 2, 3))


def _add_block(x: Array, update: Array, i: Int[Array, ""], block: int) -> Array:
    new = _block(x, i, block, 2) + update
    return jax.lax.dynamic_update_slice_in_dim(x, new, i * block, 2)


blockwise_attention.defvjp(_forward, _backward)
