"""The layer around Kimi Delta Attention: projections, convolutions, gates, output norm."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._axes import constrain
from ._config import KdaConfig
from ._conv import silu_conv1d
from ._kda import DecayGate, kda_gated_chunked, l2_normalize
from ._linear import init_normal, project
from ._norm import rms_norm
from ._parallel_positions import own_heads, to_heads, to_positions, whole_rows
from ._parallel_tensor import on_own_heads
from ._param import matrix, param
from ._precision import widen
from ._random import uniform
from ._rows import Rows


class Kda(eqx.Module):
    """Kimi Linear, arXiv:2510.26692, section 3, with full-rank gates and one output norm shared by the heads."""

    q: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "K"))
    k: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "K"))
    v: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "K"))
    q_conv: Float[Array, "H K W"] = eqx.field(metadata=param("conv"))
    k_conv: Float[Array, "H K W"] = eqx.field(metadata=param("conv"))
    v_conv: Float[Array, "H K W"] = eqx.field(metadata=param("conv"))
    forget: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "K"))
    A_log: Float[Array, " H"] = eqx.field(metadata=param("decay"))
    dt_bias: Float[Array, "H K"] = eqx.field(metadata=param("decay"))
    beta: Float[Array, "D H"] = eqx.field(metadata=matrix("D", "H"))
    gate: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "K"))
    out_norm: Float[Array, " K"] = eqx.field(metadata=param("norm"))
    out: Float[Array, "H K D"] = eqx.field(metadata=matrix("H K", "D"))
    config: KdaConfig = eqx.field(static=True)
    norm_eps: float = eqx.field(static=True)

    def __call__(self, x: Float[Array, "B S D"], rows: Rows) -> Float[Array, "B S D"]:
        """The layer on whole rows; every document starts with an empty state."""
        axes = rows.axes
        raw = tuple(constrain(y, "B S H K", axes) for y in self.raw_queries_keys_values(x))
        forget = project("bsd,dhk->bshk", x, self.forget, is_gate=True)
        heads, _ = on_own_heads(
            _recurrence, (raw, forget, self.write_strength(x)), (self.conv_weights, self.decay_gate), rows
        )
        return self.project_out(constrain(heads, "B S H K", axes), x)

    @property
    def conv_weights(self) -> tuple[Float[Array, "H K W"], Float[Array, "H K W"], Float[Array, "H K W"]]:
        """Convolution taps of q, k and v; the last tap meets the current position."""
        return self.q_conv, self.k_conv, self.v_conv

    def raw_queries_keys_values(
        self, x: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H K"], Float[Array, "B S H K"]]:
        """Projections, before the convolution."""
        q, k, v = (project("bsd,dhk->bshk", x, weight) for weight in (self.q, self.k, self.v))
        return q, k, v

    def activate(
        self, q: Float[Array, "B S H K"], k: Float[Array, "B S H K"], v: Float[Array, "B S H K"]
    ) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H K"], Float[Array, "B S H K"]]:
        """SiLU of all three; queries and keys to unit length, queries scaled by `K ** -0.5`."""
        q, k, v = jax.nn.silu(q), jax.nn.silu(k), jax.nn.silu(v)
        scale = jnp.asarray(self.config.head_dim**-0.5, dtype=q.dtype)
        return l2_normalize(q) * scale, l2_normalize(k), v

    @property
    def decay_gate(self) -> DecayGate:
        """The log-decay as a function of `x @ forget`."""
        return DecayGate(a_log=self.A_log, dt_bias=self.dt_bias, lower_bound=self.config.lower_bound)

    def log_decay(self, x: Float[Array, "B S D"]) -> Float[Array, "B S H K"]:
        """Log of each channel's decay, nats, at most 0, in at least float32."""
        return self.decay_gate(project("bsd,dhk->bshk", x, self.forget, is_gate=True))

    def write_strength(self, x: Float[Array, "B S D"]) -> Float[Array, "B S H"]:
        """Beta in (0, 1), in at least float32."""
        return jax.nn.sigmoid(widen(project("bsd,dh->bsh", x, self.beta, is_gate=True)))

    def project_out(self, heads: Float[Array, "B S H K"], x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Norm every head, gate every channel by `sigmoid(x @ gate)`, mix the heads."""
        gate = jax.nn.sigmoid(widen(project("bsd,dhk->bshk", x, self.gate)))
        heads = rms_norm(widen(heads), self.out_norm, self.norm_eps) * gate
        return project("bshk,hkd->bsd", heads.astype(x.dtype), self.out)


def _recurrence(
    activations: tuple[tuple[Array, Array, Array], Array, Array],
    weights: tuple[tuple[Array, Array, Array], DecayGate],
    rows: Rows,
) -> tuple[Float[Array, "B S H K"], None]:
    """Convolutions and the recurrence on whole rows."""
    raw, forget, strength = jax.tree.map(lambda y: to_heads(y, rows), activations)
    conv_weights, gate = jax.tree.map(lambda weight: own_heads(weight, rows), weights)
    segment_ids = whole_rows(rows).segment_ids
    q, k, v = (
        jnp.reshape(silu_conv1d(_merge(y), jnp.reshape(weight, (-1, weight.shape[-1])), segment_ids), y.shape)
        for y, weight in zip(raw, conv_weights, strict=True)
    )
    heads, _ = kda_gated_chunked(q, k, v, forget, strength, gate, segment_ids=segment_ids)
    return to_positions(heads, rows), None


def _merge(x: Float[Array, "B S H K"]) -> Float[Array, "B S HK"]:
    return jnp.reshape(x, (*x.shape[:2], -1))


def init_kda(config: KdaConfig, hidden_size: int, std: float, norm_eps: float, *, key: PRNGKeyArray) -> Kda:
    """Normal weights of standard deviation `std`, and the decay laws of Megatron's and transformers' KDA.

    A_log is the log of U(1, 16); dt_bias is the inverse softplus of a log-uniform step in [1e-3, 0.1], at least 1e-4
    (transformers 5.24, `BailingHybridPreTrainedModel._init_weights`). Convolution taps have variance 1/W.
    """
    keys = jax.random.split(key, 12)
    heads, width, taps = config.num_heads, config.head_dim, config.conv_kernel_size

    def wide(i: int) -> Float[Array, "D H K"]:
        return init_normal((hidden_size, heads, width), std, key=keys[i])

    def conv(i: int) -> Float[Array, "H K W"]:
        return init_normal((heads, width, taps), taps**-0.5, key=keys[i])

    step = jnp.exp(uniform(keys[9], (heads, width), math.log(1e-3), math.log(1e-1)))
    step = jnp.maximum(step, 1e-4)
    return Kda(
        q=wide(0),
        k=wide(1),
        v=wide(2),
        q_conv=conv(3),
        k_conv=conv(4),
        v_conv=conv(5),
        forget=wide(6),
        A_log=jnp.log(uniform(keys[8], (heads,), 1.0, 16.0)),
        dt_bias=step + jnp.log(-jnp.expm1(-step)),
        beta=init_normal((hidden_size, heads), std, key=keys[10]),
        gate=wide(7),
        out_norm=jnp.ones(width, dtype=jnp.float32),
        out=init_normal((heads, width, hidden_size), std, key=keys[11]),
        config=config,
        norm_eps=norm_eps,
    )
