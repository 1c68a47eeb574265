"""Grouped-query attention with rope, as in Llama, Qwen3 and Ling-2.0."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import causal_attention
from ._axes import constrain
from ._config import GqaConfig, RopeConfig
from ._joined import Part, Together
from ._linear import init_normal, project
from ._norm import rms_norm
from ._param import matrix, param
from ._rope import apply_rope, apply_rope_apart
from ._rows import Rows


class Gqa(eqx.Module):
    """Query head h attends with key/value head `h // (H / J)` (arXiv:2305.13245)."""

    q: Float[Array, "D H K"] = eqx.field(metadata=matrix("D", "H K"))
    k: Float[Array, "D J K"] = eqx.field(metadata=matrix("D", "J K"))
    v: Float[Array, "D J K"] = eqx.field(metadata=matrix("D", "J K"))
    q_bias: Float[Array, "H K"] | None = eqx.field(metadata=param("bias"))
    k_bias: Float[Array, "J K"] | None = eqx.field(metadata=param("bias"))
    v_bias: Float[Array, "J K"] | None = eqx.field(metadata=param("bias"))
    q_norm: Float[Array, " K"] | None = eqx.field(metadata=param("norm"))
    k_norm: Float[Array, " K"] | None = eqx.field(metadata=param("norm"))
    out: Float[Array, "H K D"] = eqx.field(metadata=matrix("H K", "D"))
    config: GqaConfig = eqx.field(static=True)
    rope: RopeConfig = eqx.field(static=True)
    norm_eps: float = eqx.field(static=True)

    @property
    def together(self) -> Together | None:
        """Queries, keys and values, where rope reads them from the product: else each would be copied out of it."""
        is_plain = self.q_bias is None and self.q_norm is None
        turns_whole = self.config.rope_head_dim == self.config.head_dim
        return Together(("q", "k", "v"), axis=1) if is_plain and turns_whole else None

    def __call__(
        self, x: Float[Array, "B S D"], rows: Rows, record_max_logits: bool = False
    ) -> tuple[Float[Array, "B S D"], Float[Array, " H"] | None]:
        """Attention of every position, and each head's largest logit where asked for."""
        q, k, v = self.queries_keys_values(x, rows)
        heads, max_logits = causal_attention(
            q, k, v, rows, scale=self.config.head_dim**-0.5, record_max_logits=record_max_logits
        )
        return project("bshk,hkd->bsd", heads, self.out), max_logits

    def queries_keys_values(
        self, x: Float[Array, "B S D"], rows: Rows
    ) -> tuple[Float[Array, "B S H K"], Float[Array, "B S J K"], Float[Array, "B S J K"]]:
        """Normed and turned queries and keys, and values."""
        if isinstance(self.q, Part):
            joined = project("bsd,dhk->bshk", x, self.q.joined)
            q, k, v = apply_rope_apart(joined, rows.positions, self.rope, self.q.sizes)
            return q, k, v
        q, k, v = (project("bsd,dhk->bshk", x, weight) for weight in (self.q, self.k, self.v))
        if self.q_bias is not None and self.k_bias is not None and self.v_bias is not None:
            q, k, v = (
                y + bias.astype(y.dtype) for y, bias in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias))
            )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, self.norm_eps), rms_norm(k, self.k_norm, self.norm_eps)
        q = partial_rope(q, rows, self.config.rope_head_dim, self.rope)
        k = partial_rope(k, rows, self.config.rope_head_dim, self.rope)
        axes = rows.axes
        return constrain(q, "B S H K", axes), constrain(k, "B S J K", axes), constrain(v, "B S J K", axes)


def partial_rope(
    x: Float[Array, "B S H K"], rows: Rows, rope_head_dim: int, rope: RopeConfig
) -> Float[Array, "B S H K"]:
    """`x` with its first `rope_head_dim` dims turned, halves paired."""
    turned = apply_rope(x[..., :rope_head_dim], rows.positions, rope, interleaved=False)
    return jnp.concatenate([turned, x[..., rope_head_dim:]], axis=-1)


def init_gqa(
    config: GqaConfig, rope: RopeConfig, hidden_size: int, std: float, norm_eps: float, *, key: PRNGKeyArray
) -> Gqa:
    """Normal weights of standard deviation `std`; biases 0; norm scales 1."""
    q_key, k_key, v_key, out_key = jax.random.split(key, 4)
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    bias, norm = config.use_qkv_bias, config.use_qk_norm
    return Gqa(
        q=init_normal((hidden_size, heads, width), std, key=q_key),
        k=init_normal((hidden_size, kv_heads, width), std, key=k_key),
        v=init_normal((hidden_size, kv_heads, width), std, key=v_key),
        q_bias=jnp.zeros((heads, width), dtype=jnp.float32) if bias else None,
        k_bias=jnp.zeros((kv_heads, width), dtype=jnp.float32) if bias else None,
        v_bias=jnp.zeros((kv_heads, width), dtype=jnp.float32) if bias else None,
        q_norm=jnp.ones(width, dtype=jnp.float32) if norm else None,
        k_norm=jnp.ones(width, dtype=jnp.float32) if norm else None,
        out=init_normal((heads, width, hidden_size), std, key=out_key),
        config=config,
        rope=rope,
        norm_eps=norm_eps,
    )
