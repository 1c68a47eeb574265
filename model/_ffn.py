"""The gated feed-forward SwiGLU (arXiv:2002.05202)."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._axes import Axes, constrain
from ._linear import init_normal, project
from ._made_once import made_once, slope_made_once
from ._param import matrix


class SwiGlu(eqx.Module):
    """`(silu(x @ gate) * (x @ up)) @ down`."""

    gate: Float[Array, "D F"] = eqx.field(metadata=matrix("D", "F"))
    up: Float[Array, "D F"] = eqx.field(metadata=matrix("D", "F"))
    down: Float[Array, "F D"] = eqx.field(metadata=matrix("F", "D"))

    def __call__(
        self, x: Float[Array, "B S D"], axes: Axes | None = None, limit: Float[Array, ""] | None = None
    ) -> Float[Array, "B S D"]:
        """The feed-forward of every position; `limit` clamps as `swiglu` says."""
        gate = constrain(project("bsd,df->bsf", x, self.gate), "B S F", axes)
        up = constrain(project("bsd,df->bsf", x, self.up), "B S F", axes)
        # One operation makes the slopes of gate and up, and the product for the gradient of `down`.
        gate, up = slope_made_once((gate, up))
        hidden = made_once(swiglu(gate, up, limit))
        return project("bsf,fd->bsd", hidden, self.down)


def swiglu(
    gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"], limit: Float[Array, ""] | None
) -> Float[Array, "*batch F"]:
    """`silu(gate) * up`; with a limit L, `min(silu(gate), L) * clip(up, -L, L)`. L may be inf."""
    activation = jax.nn.silu(gate)
    if limit is not None:
        bound = limit.astype(gate.dtype)
        activation, up = jnp.minimum(activation, bound), jnp.clip(up, -bound, bound)
    return activation * up


def init_swiglu(hidden_size: int, intermediate_size: int, std: float, *, key: PRNGKeyArray) -> SwiGlu:
    """Normal weights of standard deviation `std`."""
    gate_key, up_key, down_key = jax.random.split(key, 3)
    return SwiGlu(
        gate=init_normal((hidden_size, intermediate_size), std, key=gate_key),
        up=init_normal((hidden_size, intermediate_size), std, key=up_key),
        down=init_normal((intermediate_size, hidden_size), std, key=down_key),
    )
