"""Numbers that differ from layer to layer and are no parameters, so that alike layers can be scanned."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._config import ModelConfig
from ._layer_plan import AlikeLayers
from ._lightning import lightning_slopes
from ._precision import at_least_float32


class LayerConstants(eqx.Module):
    """Constants of one layer, or of all of a kind with their leading axis; None where a layer needs none.

    Attributes:
        routed_limit: SwiGLU clamp of the routed experts.
        shared_limit: SwiGLU clamp of the shared expert.
        slopes: Decay rates of lightning attention's heads, nats per token.
    """

    routed_limit: Float[Array, "*L"] | None = None
    shared_limit: Float[Array, "*L"] | None = None
    slopes: Float[Array, "*L H"] | None = None


def layer_constants(config: ModelConfig, layer: int) -> LayerConstants:
    """Constants of main layer `layer`, in at least float32: of a float64 model they are not rounded."""
    moe, lightning, wide = config.moe, config.lightning, at_least_float32(config.dtype)

    def limit(limits: tuple[float, ...] | None) -> Float[Array, ""] | None:
        return None if limits is None else jnp.asarray(limits[layer], dtype=wide)

    slopes = None
    if lightning is not None:
        slopes = lightning_slopes(lightning.num_heads, layer=layer, num_layers=config.num_layers, dtype=wide)
    return LayerConstants(
        routed_limit=None if moe is None else limit(moe.expert_swiglu_limits),
        shared_limit=None if moe is None else limit(moe.shared_swiglu_limits),
        slopes=slopes,
    )


def stacked_constants(config: ModelConfig, alike: AlikeLayers) -> LayerConstants:
    """Constants of the layers of a kind, with their `stack_shape` as leading axes."""
    each = [layer_constants(config, i) for i in alike.layers]
    return jax.tree.map(lambda *x: jnp.reshape(jnp.stack(x), (*alike.stack_shape, *x[0].shape)), *each)
