"""The layer around lightning attention: projections, norms, rope, output gate."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._axes import constrain
from ._config import LightningConfig, RopeConfig
from ._gqa import partial_rope
from ._lightning import lightning_chunked
from ._linear import init_normal, project
from ._norm import rms_norm
from ._parallel_positions import own_heads, to_heads, to_positions, whole_rows
from ._parallel_tensor import on_own_heads
from ._param import matrix, param
from ._precision import widen
from ._rows import Rows


class Lightning(eqx.Module):
    """Gated linear attention with a fixed decay per head, as in Ling 2.x (hub code `BailingMoeV2_5LinearAttention`)."""

    q: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "H K"))
    k: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "H K"))
    v: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "H K"))
    q_norm: Float[Array, " K"] | None = eqx.field(metadata=param("norm"))
    k_norm: Float[Array, " K"] | None = eqx.field(metadata=param("norm"))
    gate: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "H K"))
    out_norm: Float[Array, "H K"] = eqx.field(metadata=param("norm"))
    out: Float[Array, "H K D"] = eqx.field(metadata=matrix("H K", "D"))
    config: LightningConfig = eqx.field(static=True)
    rope: RopeConfig = eqx.field(static=True)
    norm_eps: float = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "B S D"], rows: Rows, slopes: Float[Array, " H"]
    ) -> Float[Array, "B S D"]:
        """The layer on whole rows; every document starts with an empty state. `slopes` are the decay rates."""
        heads, _ = on_own_heads(_recurrence, self.queries_keys_values(x, rows), slopes, rows)
        return self.project_out(constrain(heads, "B S H K", rows.axes), x)

    def queries_keys_values(
        self, x: Float[Array, "B S D"], rows: Rows
    ) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H K"], Float[Array, "B S H K"]]:
        """Normed and turned queries and keys, and values; queries scaled by `K ** -0.5`."""
        q, k, v = (
            constrain(project("bsd,dhk->bshk", x, weight), "B S H K", rows.axes)
            for weight in (self.q, self.k, self.v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, self.norm_eps), rms_norm(k, self.k_norm, self.norm_eps)
        q = partial_rope(q, rows, self.config.rope_head_dim, self.rope)
        k = partial_rope(k, rows, self.config.rope_head_dim, self.rope)
        return q * jnp.asarray(self.config.head_dim**-0.5, dtype=q.dtype), k, v

    def project_out(self, heads: Float[Array, "B S H K"], x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Norm every group of heads, gate every channel by `sigmoid(x @ gate)`, mix the heads."""
        groups = self.config.num_norm_groups
        grouped = jnp.reshape(widen(heads), (*heads.shape[:2], groups, -1))
        normed = rms_norm(grouped, jnp.reshape(self.out_norm, (groups, -1)), self.norm_eps)
        gate = jax.nn.sigmoid(widen(project("bsd,dhk->bshk", x, self.gate)))
        heads = (jnp.reshape(normed, heads.shape) * gate).astype(x.dtype)
        return project("bshk,hkd->bsd", heads, self.out)


def _recurrence(
    qkv: tuple[Array, Array, Array], slopes: Float[Array, " H"], rows: Rows
) -> tuple[Float[Array, "B S H K"], None]:
    """The recurrence on whole rows."""
    q, k, v = (to_heads(y, rows) for y in qkv)
    heads, _ = lightning_chunked(q, k, v, own_heads(slopes, rows), segment_ids=whole_rows(rows).segment_ids)
    return to_positions(heads, rows), None


def init_lightning(
    config: LightningConfig,
    rope: RopeConfig,
    hidden_size: int,
    std: float,
    norm_eps: float,
    *,
    key: PRNGKeyArray,
) -> Lightning:
    """Normal weights of standard deviation `std`; norm scales 1."""
    keys = jax.random.split(key, 5)
    heads, width = config.num_heads, config.head_dim
    q, k, v, gate = (init_normal((hidden_size, heads, width), std, key=keys[i]) for i in range(4))
    norm = jnp.ones(width, dtype=jnp.float32) if config.use_qk_norm else None
    return Lightning(
        q=q,
        k=k,
        v=v,
        q_norm=norm,
        k_norm=norm,
        gate=gate,
        out_norm=jnp.ones((heads, width), dtype=jnp.float32),
        out=init_normal((heads, width, hidden_size), std, key=keys[4]),
        config=config,
        rope=rope,
        norm_eps=norm_eps,
    )
