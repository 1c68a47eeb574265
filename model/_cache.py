"""What a model remembers of the tokens it has read, layer by layer."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._config import GqaConfig, KdaConfig, LayerPlan, LightningConfig, MlaConfig, ModelConfig
from ._layer_plan import AlikeLayers
from ._precision import at_least_float32


class MlaCache(eqx.Module):
    """Key/value latents (normed) and shared rope keys (turned) of `max_length` positions."""

    latent: Float[Array, "B S C"]
    k_rope: Float[Array, "B S R"]


class GqaCache(eqx.Module):
    """Keys (normed and turned) and values of `max_length` positions."""

    k: Float[Array, "B S J K"]
    v: Float[Array, "B S J K"]


class KdaCache(eqx.Module):
    """The recurrent state, and the last W - 1 inputs of the three convolutions (q, k, v)."""

    state: Float[Array, "B H K K"]
    past: tuple[Float[Array, "B P C"], Float[Array, "B P C"], Float[Array, "B P C"]]


class LightningCache(eqx.Module):
    """The recurrent state."""

    state: Float[Array, "B H K K"]


MixerCache = MlaCache | GqaCache | KdaCache | LightningCache


class Cache(eqx.Module):
    """Memory of B sequences, each read up to its own length.

    Attributes:
        layers: Of each kind of layers; leading axes as those of the kind's parameters.
        length: Tokens read of each sequence. The caller keeps it at most `max_length`.
    """

    layers: tuple[MixerCache, ...]
    length: Int[Array, " B"]


def init_cache(config: ModelConfig, batch_size: int, max_length: int) -> Cache:
    """The memory of `batch_size` sequences of which nothing has been read.

    Recurrent states do not grow with `max_length`. MTP blocks are not part of decoding.

    Args:
        config: The model's.
        batch_size: B.
        max_length: Tokens each sequence may grow to, prompt included.
    """

    def empty(alike: AlikeLayers) -> MixerCache:
        one = _init_mixer(config, alike.kind, batch_size, max_length)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*alike.stack_shape, *x.shape)), one)

    layers = tuple(empty(alike) for alike in config.stack.alike)
    return Cache(layers=layers, length=jnp.zeros(batch_size, dtype=jnp.int32))


def _init_mixer(config: ModelConfig, plan: LayerPlan, batch_size: int, max_length: int) -> MixerCache:
    mixer = (config.kda or config.lightning) if plan.mixer == "linear" else (config.mla or config.gqa)
    dtype, wide = jnp.dtype(config.dtype), at_least_float32(config.dtype)
    rows = (batch_size, max_length)
    match mixer:
        case MlaConfig():
            return MlaCache(
                latent=jnp.zeros((*rows, mixer.kv_lora_rank), dtype),
                k_rope=jnp.zeros((*rows, mixer.qk_rope_head_dim), dtype),
            )
        case GqaConfig():
            shape = (*rows, mixer.num_kv_heads, mixer.head_dim)
            return GqaCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))
        case KdaConfig():
            width = mixer.num_heads * mixer.head_dim
            past = jnp.zeros((batch_size, mixer.conv_kernel_size - 1, width), dtype)
            state = jnp.zeros((batch_size, mixer.num_heads, mixer.head_dim, mixer.head_dim), wide)
            return KdaCache(state=state, past=(past, past, past))
        case LightningConfig():
            return LightningCache(
                state=jnp.zeros((batch_size, mixer.num_heads, mixer.head_dim, mixer.head_dim), wide)
            )
        case None:
            raise ValueError("a layer has no mixer; ModelConfig checks this")
