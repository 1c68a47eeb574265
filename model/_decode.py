"""Reading tokens with a memory of those before: prompts and, one token at a time, what is generated."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._block import Block, Mixer
from ._cache import Cache, GqaCache, KdaCache, LightningCache, MixerCache, MlaCache
from ._constants import LayerConstants, stacked_constants
from ._conv import causal_conv1d_after, last_inputs
from ._delta import Kda
from ._gla import Lightning
from ._gqa import Gqa
from ._kda import kda_chunked, kda_recurrent
from ._lightning import lightning_chunked, lightning_recurrent
from ._linear import project
from ._mla import Mla
from ._norm import rms_norm
from ._precision import at_least_float32
from ._rows import Rows
from ._stack import run_layers
from ._transformer import Transformer


def decode(
    model: Transformer,
    tokens: Int[Array, "B S"],
    cache: Cache,
    *,
    num_tokens: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Logits of each sequence's next token (at least float32), and the memory after reading `tokens`.

    Pure: the cache given stays as it was. Logits equal those of the whole sequences read at once. Attention scores
    of S new tokens against the whole cache are held in memory: read a long prompt in pieces.

    Args:
        model: The model.
        tokens: New tokens, padded on the right.
        cache: Memory of the tokens before.
        num_tokens: How many of the S tokens are real, at least 1. None: all of them.
    """
    batch, length = tokens.shape
    if num_tokens is None:
        num_tokens = jnp.full(batch, length, dtype=jnp.int32)
    offsets = jnp.arange(length, dtype=jnp.int32)
    new = _New(
        rows=Rows(
            segment_ids=(offsets < num_tokens[:, None]).astype(jnp.int32),
            positions=cache.length[:, None] + offsets,
            router_mask=jnp.ones(tokens.shape, dtype=bool),
        ),
        start=cache.length,
    )
    x, cache = _read_layers(model, model.embed_tokens(tokens), cache, new)
    last = jnp.take_along_axis(x, (num_tokens - 1)[:, None, None], axis=1)[:, 0]
    hidden = rms_norm(last, model.final_norm, model.config.rms_norm_eps)
    wide = at_least_float32(hidden.dtype)
    logits = jnp.einsum("bd,dv->bv", hidden, model.unembed.astype(hidden.dtype), preferred_element_type=wide)
    return logits, eqx.tree_at(lambda c: c.length, cache, cache.length + num_tokens)


class _New(eqx.Module):
    """The new tokens: their rows, and how many tokens each sequence had before."""

    rows: Rows
    start: Int[Array, " B"]


def _read_layers(
    model: Transformer, x: Float[Array, "B S D"], cache: Cache, new: _New
) -> tuple[Float[Array, "B S D"], Cache]:
    stack = model.config.stack

    def layer(
        x: Array, new: _New, given: tuple[Block, MixerCache, LayerConstants]
    ) -> tuple[Array, MixerCache]:
        block, old, constants = given
        return _read_block(block, x, old, new, constants)

    constants = [stacked_constants(model.config, alike) for alike in stack.alike]
    x, memories = run_layers(
        layer, x, new, list(zip(model.layers, cache.layers, constants, strict=True)), stack
    )
    return x, Cache(layers=memories, length=cache.length)


def _read_block(
    block: Block, x: Float[Array, "B S D"], cache: MixerCache, new: _New, constants: LayerConstants
) -> tuple[Float[Array, "B S D"], MixerCache]:
    normed = rms_norm(x, block.mixer_norm, block.norm_eps)
    mixed, cache = _read_mixer(block.mixer, normed, cache, new, constants)
    x = x + mixed
    y, _ = block.feed_forward(x, new.rows, constants)
    return x + y, cache


def _read_mixer(
    mixer: Mixer, x: Float[Array, "B S D"], cache: MixerCache, new: _New, constants: LayerConstants
) -> tuple[Float[Array, "B S D"], MixerCache]:
    match mixer, cache:
        case Mla(), MlaCache():
            return _read_mla(mixer, x, cache, new)
        case Gqa(), GqaCache():
            return _read_gqa(mixer, x, cache, new)
        case Kda(), KdaCache():
            return _read_kda(mixer, x, cache, new)
        case Lightning(), LightningCache():
            assert constants.slopes is not None  # layer_constants gives them
            return _read_lightning(mixer, x, cache, new, constants.slopes)
        case _:
            raise ValueError(
                f"{type(cache).__name__} is no memory of {type(mixer).__name__}; use init_cache(model.config, ...)"
            )


def _read_mla(
    mla: Mla, x: Float[Array, "B S D"], cache: MlaCache, new: _New
) -> tuple[Float[Array, "B S D"], MlaCache]:
    """Attention in the latent space: `k_up` is applied to the query, `v_up` to the result, never to the cache."""
    q_nope, q_rope = mla.queries(x, new.rows)
    latent, k_rope = mla.latents(x, new.rows)
    cache = MlaCache(latent=_write(cache.latent, latent, new), k_rope=_write(cache.k_rope, k_rope, new))
    wide = at_least_float32(x.dtype)
    q_latent = project("bshk,chk->bshc", q_nope, mla.k_up)
    logits = jnp.einsum("bshc,btc->bhst", q_latent, cache.latent, preferred_element_type=wide)
    logits += jnp.einsum("bshr,btr->bhst", q_rope, cache.k_rope, preferred_element_type=wide)
    weights = _softmax(logits * mla.config.softmax_scale, new)
    mixed = jnp.einsum("bhst,btc->bshc", weights.astype(x.dtype), cache.latent)
    return mla.project_out(project("bshc,chu->bshu", mixed, mla.v_up), x), cache


def _read_gqa(
    gqa: Gqa, x: Float[Array, "B S D"], cache: GqaCache, new: _New
) -> tuple[Float[Array, "B S D"], GqaCache]:
    q, k, v = gqa.queries_keys_values(x, new.rows)
    cache = GqaCache(k=_write(cache.k, k, new), v=_write(cache.v, v, new))
    batch, length, num_heads, width = q.shape
    q = jnp.reshape(q, (batch, length, k.shape[2], -1, width))
    logits = jnp.einsum("bsjgk,btjk->bjgst", q, cache.k, preferred_element_type=at_least_float32(x.dtype))
    merged = jnp.reshape(logits * width**-0.5, (batch, num_heads, length, -1))
    weights = jnp.reshape(_softmax(merged, new), logits.shape)
    heads = jnp.einsum("bjgst,btjk->bsjgk", weights.astype(x.dtype), cache.v)
    return project("bshk,hkd->bsd", jnp.reshape(heads, (batch, length, num_heads, width)), gqa.out), cache


def _read_kda(
    kda: Kda, x: Float[Array, "B S D"], cache: KdaCache, new: _New
) -> tuple[Float[Array, "B S D"], KdaCache]:
    ids = new.rows.segment_ids
    mixed, past = [], []
    for raw, weight, before in zip(kda.raw_queries_keys_values(x), kda.conv_weights, cache.past, strict=True):
        flat = jnp.reshape(raw, (*raw.shape[:2], -1))
        taps = jnp.reshape(weight, (-1, weight.shape[-1]))
        mixed.append(
            jnp.reshape(
                causal_conv1d_after(flat, taps, before, ids, jnp.ones_like(before[..., 0], ids.dtype)),
                raw.shape,
            )
        )
        past.append(last_inputs(flat, before, ids))
    q, k, v = kda.activate(*mixed)
    run = kda_recurrent if x.shape[1] == 1 else kda_chunked
    heads, state = run(
        q, k, v, kda.log_decay(x), kda.write_strength(x), segment_ids=ids, initial_state=cache.state
    )
    return kda.project_out(heads, x), KdaCache(state=state, past=(past[0], past[1], past[2]))


def _read_lightning(
    layer: Lightning, x: Float[Array, "B S D"], cache: LightningCache, new: _New, slopes: Float[Array, " H"]
) -> tuple[Float[Array, "B S D"], LightningCache]:
    q, k, v = layer.queries_keys_values(x, new.rows)
    run = lightning_recurrent if x.shape[1] == 1 else lightning_chunked
    heads, state = run(q, k, v, slopes, segment_ids=new.rows.segment_ids, initial_state=cache.state)
    return layer.project_out(heads, x), LightningCache(state=state)


def _write(
    memory: Float[Array, "B T *rest"], rows: Float[Array, "B S *rest"], new: _New
) -> Float[Array, "B T *rest"]:
    """`memory` with the new rows of each sequence after its old ones.

    Padding is written as well: the next real token overwrites it before anything attends to it.
    """
    positions = new.start[:, None] + jnp.arange(rows.shape[1])
    batch = jnp.arange(rows.shape[0])[:, None]
    return memory.at[batch, positions].set(rows.astype(memory.dtype), mode="drop")


def _softmax(logits: Float[Array, "B H S T"], new: _New) -> Float[Array, "B H S T"]:
    """Weights of the cached positions up to each new token's own."""
    return jax.nn.softmax(jnp.where(_visible(logits.shape[-1], new)[:, None], logits, -jnp.inf), axis=-1)


def _visible(max_length: int, new: _New) -> Bool[Array, "B S T"]:
    return jnp.arange(max_length) <= new.rows.positions[:, :, None]
