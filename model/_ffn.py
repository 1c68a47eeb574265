"""The gated feed-forward SwiGLU (arXiv:2002.05202)."""

import equinox as eqx
import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray

from ._axes import Axes, constrain
from ._linear import init_normal, project
from ._made_once import made_once, slope_made_once
from ._norm import scale_beside
from ._parallel import Parallel
from ._parallel_tensor import cut_along, on_own_cut, sum_of_cuts
from ._param import matrix
from ._swiglu import swiglu
from ._swiglu_kernel import fused_swiglu


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


def fused_feed_forward(
    ffn: SwiGlu, x: Float[Array, "B S D"], norm: Float[Array, " D"], eps: float, parallel: Parallel | None
) -> Float[Array, "B S D"]:
    """`ffn(rms_norm(x, norm, eps))` by the kernels of TPUs, each device its cut of the width under a tensor axis.

    Raises:
        ValueError: The tiles of the kernels do not divide the work.
    """

    def own(*operands: Array) -> Array:
        y = fused_swiglu(*operands)
        return y if parallel is None or parallel.tensor_axis is None else sum_of_cuts(y, parallel)

    x, scale = scale_beside(x, eps)
    matrices = [weight.astype(x.dtype) for weight in (ffn.gate, ffn.up, ffn.down)]
    specs = (PartitionSpec(),) * 3
    if parallel is not None:
        specs = (*specs, cut_along(1, parallel), cut_along(1, parallel), cut_along(0, parallel))
    return on_own_cut(own, parallel, specs, PartitionSpec())(x, scale, norm, *matrices)


def init_swiglu(hidden_size: int, intermediate_size: int, std: float, *, key: PRNGKeyArray) -> SwiGlu:
    """Normal weights of standard deviation `std`."""
    gate_key, up_key, down_key = jax.random.split(key, 3)
    return SwiGlu(
        gate=init_normal((hidden_size, intermediate_size), std, key=gate_key),
        up=init_normal((hidden_size, intermediate_size), std, key=up_key),
        down=init_normal((intermediate_size, hidden_size), std, key=down_key),
    )
