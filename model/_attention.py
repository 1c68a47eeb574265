"""Causal attention within documents, by the implementation of the devices that run it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._blockwise import blockwise_attention, max_attention_logits
from ._parallel_positions import all_heads, is_cut, repeat_heads, to_heads, to_positions, whole_rows
from ._parallel_tensor import on_own_heads
from ._rows import Rows
from ._splash import splash_attention, splash_supports


def causal_attention(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S J K"],
    v: Float[Array, "B S J U"],
    rows: Rows,
    *,
    scale: float,
    record_max_logits: bool = False,
) -> tuple[Float[Array, "B S H U"], Float[Array, " H"] | None]:
    """Softmax attention of every position to its own document up to itself, and the largest logit per head.

    Query head h uses key/value head `h // (H / J)`. A mesh of TPUs (`rows.axes`) runs the Pallas splash kernel,
    everything else `blockwise_attention`.

    Args:
        q: Queries, unscaled.
        k: Keys.
        v: Values.
        rows: Segment ids, and where activations live.
        scale: Factor of the logits.
        record_max_logits: Also return the largest scaled logit of each head over the pairs that count (padding
            does not; -inf when there is none). No gradient.
    """

    def own(qkv: tuple[Array, Array, Array], _: None, rows: Rows) -> tuple[Array, Array | None]:
        return _attention(*qkv, rows, scale, record_max_logits)

    return on_own_heads(own, (q, k, v), None, rows)


def _attention(
    q: Array, k: Array, v: Array, rows: Rows, scale: float, record_max_logits: bool
) -> tuple[Float[Array, "B S H U"], Float[Array, " H"] | None]:
    """`causal_attention` of the heads of one device."""
    if is_cut(rows):
        q, k, v = (
            to_heads(q, rows),
            to_heads(repeat_heads(k, rows), rows),
            to_heads(repeat_heads(v, rows), rows),
        )
        out, top = _attention(q, k, v, whole_rows(rows), scale, record_max_logits)
        return to_positions(out, rows), all_heads(top, rows)
    batch, length, num_heads, _ = q.shape
    q = q * jnp.asarray(scale, dtype=q.dtype)
    grouped = jnp.reshape(q, (batch, length, k.shape[2], num_heads // k.shape[2], -1))
    axes = rows.axes
    platform = rows.parallel.platform if rows.parallel else axes.platform if axes else None
    if platform == "tpu" and splash_supports(length):
        out = splash_attention(q, k, v, rows.segment_ids, axes)
        top = max_attention_logits(grouped, k, rows.segment_ids) if record_max_logits else None
    else:
        out, top = blockwise_attention(grouped, k, v, rows.segment_ids)
        out = jnp.reshape(out, (batch, length, num_heads, -1))
    if top is None or not record_max_logits:
        return out, None
    return out, jax.lax.stop_gradient(jnp.reshape(top, num_heads))
