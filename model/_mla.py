"""Multi-head latent attention with a head-wise output gate."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import causal_attention
from ._axes import constrain
from ._config import MlaConfig, RopeConfig
from ._linear import init_normal, project
from ._norm import rms_norm
from ._param import matrix, param
from ._precision import widen
from ._rope import apply_rope
from ._rows import Rows


class DirectQuery(eqx.Module):
    """Queries straight from x."""

    nope: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "H K"))
    rope: Float[Array, "D H R"] = eqx.field(metadata=matrix("D", "H R"))

    def __call__(self, x: Float[Array, "B S D"]) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H R"]]:
        """Each head's dims without position, and its dims that are to turn."""
        return project("bsd,dhk->bshk", x, self.nope), project("bsd,dhr->bshr", x, self.rope)


class LatentQuery(eqx.Module):
    """Queries from a normed latent of x."""

    down: Float[Array, "D Q"] = eqx.field(metadata=matrix("D", "Q"))
    norm: Float[Array, " Q"] = eqx.field(metadata=param("norm"))
    nope: Float[Array, "Q H K"] = eqx.field(metadata=matrix("Q", "H K"))
    rope: Float[Array, "Q H R"] = eqx.field(metadata=matrix("Q", "H R"))
    eps: float = eqx.field(static=True)

    def __call__(self, x: Float[Array, "B S D"]) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H R"]]:
        """Each head's dims without position, and its dims that are to turn."""
        latent = rms_norm(project("bsd,dq->bsq", x, self.down), self.norm, self.eps)
        return project("bsq,qhk->bshk", latent, self.nope), project("bsq,qhr->bshr", latent, self.rope)


class Mla(eqx.Module):
    """Queries from x or from a latent of x; keys and values from a latent of x; one rope key for all heads.

    DeepSeek-V2, arXiv:2405.04434, eq. 9 to 19, with a head-wise output gate.
    """

    query: DirectQuery | LatentQuery
    kv_down: Float[Array, "D CR"] = eqx.field(metadata=matrix("D", "CR"))
    kv_norm: Float[Array, " C"] = eqx.field(metadata=param("norm"))
    k_up: Float[Array, "C H K"] = eqx.field(metadata=matrix("C", "H K"))
    v_up: Float[Array, "C H U"] = eqx.field(metadata=matrix("C", "H U"))
    gate: Float[Array, "D H"] | None = eqx.field(metadata=matrix("D", "H"))
    out: Float[Array, "H U D"] = eqx.field(metadata=matrix("H U", "D"))
    config: MlaConfig = eqx.field(static=True)
    rope: RopeConfig = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "B S D"], rows: Rows, record_max_logits: bool = False
    ) -> tuple[Float[Array, "B S D"], Float[Array, " H"] | None]:
        """Attention of every position, and each head's largest logit where asked for."""
        q_nope, q_rope = self.queries(x, rows)
        latent, k_rope = self.latents(x, rows)
        k_nope = constrain(project("bsc,chk->bshk", latent, self.k_up), "B S H K", rows.axes)
        v = constrain(project("bsc,chu->bshu", latent, self.v_up), "B S H U", rows.axes)
        q = jnp.concatenate([q_nope, q_rope], axis=-1)
        shared = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], k_rope.shape[-1]))
        k = jnp.concatenate([k_nope, shared], axis=-1)
        heads, max_logits = causal_attention(
            q, k, v, rows, scale=self.config.softmax_scale, record_max_logits=record_max_logits
        )
        return self.project_out(heads, x), max_logits

    def queries(
        self, x: Float[Array, "B S D"], rows: Rows
    ) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H R"]]:
        """The query of every head: its dims without position, and its turned dims."""
        nope, rope = self.query(x)
        nope, rope = constrain(nope, "B S H K", rows.axes), constrain(rope, "B S H R", rows.axes)
        return nope, self._turn(rope, rows)

    def latents(
        self, x: Float[Array, "B S D"], rows: Rows
    ) -> tuple[Float[Array, "B S C"], Float[Array, "B S R"]]:
        """The normed key/value latent and the turned shared key: all that a cache must keep."""
        latent, k_rope = jnp.split(
            project("bsd,dc->bsc", x, self.kv_down), [self.config.kv_lora_rank], axis=-1
        )
        return rms_norm(latent, self.kv_norm, self.config.latent_norm_eps), self._turn(k_rope, rows)

    def project_out(self, heads: Float[Array, "B S H U"], x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Gate each head by `sigmoid(x @ gate)` (in at least float32), then mix the heads."""
        if self.gate is not None:
            gate = jax.nn.sigmoid(widen(project("bsd,dh->bsh", x, self.gate, is_gate=True)))
            heads = (widen(heads) * gate[..., None]).astype(x.dtype)
        return project("bshu,hud->bsd", heads, self.out)

    def _turn(self, x: Float[Array, "B S *heads R"], rows: Rows) -> Float[Array, "B S *heads R"]:
        return apply_rope(x, rows.positions, self.rope, interleaved=self.config.rope_interleaved)


def init_mla(config: MlaConfig, rope: RopeConfig, hidden_size: int, std: float, *, key: PRNGKeyArray) -> Mla:
    """Normal weights of standard deviation `std`; norm scales 1."""
    query_key, kv_key, k_key, v_key, gate_key, out_key = jax.random.split(key, 6)
    heads, kv_rank = config.num_heads, config.kv_lora_rank
    return Mla(
        query=_init_query(config, hidden_size, std, key=query_key),
        kv_down=init_normal((hidden_size, kv_rank + config.qk_rope_head_dim), std, key=kv_key),
        kv_norm=jnp.ones(kv_rank, dtype=jnp.float32),
        k_up=init_normal((kv_rank, heads, config.qk_nope_head_dim), std, key=k_key),
        v_up=init_normal((kv_rank, heads, config.v_head_dim), std, key=v_key),
        gate=init_normal((hidden_size, heads), std, key=gate_key) if config.output_gate else None,
        out=init_normal((heads, config.v_head_dim, hidden_size), std, key=out_key),
        config=config,
        rope=rope,
    )


def _init_query(
    config: MlaConfig, hidden_size: int, std: float, *, key: PRNGKeyArray
) -> DirectQuery | LatentQuery:
    down_key, nope_key, rope_key = jax.random.split(key, 3)
    heads, rank = config.num_heads, config.q_lora_rank
    width = hidden_size if rank is None else rank
    nope = init_normal((width, heads, config.qk_nope_head_dim), std, key=nope_key)
    rope = init_normal((width, heads, config.qk_rope_head_dim), std, key=rope_key)
    if rank is None:
        return DirectQuery(nope=nope, rope=rope)
    return LatentQuery(
        down=init_normal((hidden_size, rank), std, key=down_key),
        norm=jnp.ones(rank, dtype=jnp.float32),
        nope=nope,
        rope=rope,
        eps=config.latent_norm_eps,
    )
