"""The activation of SwiGLU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(
    gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"], limit: Float[Array, ""] | None
) -> Float[Array, "*batch F"]:
    """`silu(gate) * up`; with a limit L, `min(silu(gate), L) * clip(up, -L, L)`. L may be inf."""
    activation = jax.nn.silu(gate)
    if limit is not None:
        bound = limit.astype(gate.dtype)
        activation, up = jnp.minimum(activation, bound), jnp.clip(up, -bound, bound)
    return activation * up
