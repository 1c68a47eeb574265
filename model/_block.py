"""One layer: a mixer and a feed-forward, each behind a norm and beside a residual."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, PRNGKeyArray

from ._axes import constrain
from ._config import LayerPlan, ModelConfig
from ._constants import LayerConstants
from ._delta import Kda, init_kda
from ._ffn import SwiGlu, fused_feed_forward, init_swiglu
from ._gla import Lightning, init_lightning
from ._gqa import Gqa, init_gqa
from ._made_once import slope_made_once
from ._mla import Mla, init_mla
from ._moe import Moe, init_moe, whole_moe
from ._norm import norm_beside, rms_norm
from ._parallel_weights import whole
from ._param import param
from ._router import RouterFacts
from ._rows import Rows

Mixer = Mla | Gqa | Kda | Lightning
FullAttention = (Mla, Gqa)


class BlockFacts(eqx.Module):
    """What a layer knows beside its output; None where it has no such part."""

    router: RouterFacts | None
    max_logits: Float[Array, " H"] | None


class Block(eqx.Module):
    """`x += mixer(norm(x)); x += ffn(norm(x))`."""

    mixer_norm: Float[Array, " D"] = eqx.field(metadata=param("norm"))
    mixer: Mixer
    ffn_norm: Float[Array, " D"] = eqx.field(metadata=param("norm"))
    ffn: SwiGlu | Moe
    norm_eps: float = eqx.field(static=True)
    record_max_logits: bool = eqx.field(static=True)
    fused_swiglu: bool = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "B S D"], rows: Rows, constants: LayerConstants | None = None
    ) -> tuple[Float[Array, "B S D"], BlockFacts]:
        """The residual stream after this layer, and the layer's facts."""
        normed = rms_norm(x, self.mixer_norm, self.norm_eps)
        if self._is_fused(rows):
            # As the kernel reads the stream; products would rather have it the other way round, and copy it.
            normed = with_layout_constraint(normed, Layout(major_to_minor=(0, 1, 2)))
        max_logits = None
        mixer = whole(self.mixer, rows.parallel)
        if isinstance(mixer, FullAttention):
            mixed, max_logits = mixer(normed, rows, self.record_max_logits)
        elif isinstance(mixer, Lightning):
            assert constants is not None  # the stack passes them
            assert constants.slopes is not None
            mixed = mixer(normed, rows, constants.slopes)
        else:
            mixed = mixer(normed, rows)
        x = slope_made_once(constrain(x + mixed, "B S D", rows.axes))
        y, router = self.feed_forward(x, rows, constants)
        return constrain(x + y, "B S D", rows.axes), BlockFacts(router=router, max_logits=max_logits)

    def feed_forward(
        self, x: Float[Array, "B S D"], rows: Rows, constants: LayerConstants | None
    ) -> tuple[Float[Array, "B S D"], RouterFacts | None]:
        """The second half without its residual."""
        if isinstance(self.ffn, SwiGlu) and self._is_fused(rows):
            ffn = whole(self.ffn, rows.parallel)
            return fused_feed_forward(ffn, x, self.ffn_norm, self.norm_eps, rows.parallel), None
        normed = norm_beside(x, self.ffn_norm, self.norm_eps)
        if isinstance(self.ffn, Moe):
            return whole_moe(self.ffn, rows.parallel)(normed, rows, constants)
        return whole(self.ffn, rows.parallel)(normed, rows.axes), None

    def _is_fused(self, rows: Rows) -> bool:
        wanted = self.fused_swiglu and isinstance(self.ffn, SwiGlu)
        return wanted and rows.parallel is not None and rows.parallel.platform == "tpu"


def init_block(config: ModelConfig, plan: LayerPlan, *, key: PRNGKeyArray) -> Block:
    """A layer as `plan` says."""
    mixer_key, ffn_key = jax.random.split(key)
    width, std = config.hidden_size, config.initializer_range
    ones = jnp.ones(width, dtype=jnp.float32)
    if plan.ffn == "moe" and config.moe is not None:
        ffn: SwiGlu | Moe = init_moe(config.moe, width, std, key=ffn_key)
    else:
        ffn = init_swiglu(width, config.intermediate_size or 0, std, key=ffn_key)
    return Block(
        mixer_norm=ones,
        mixer=_init_mixer(config, plan, key=mixer_key),
        ffn_norm=ones,
        ffn=ffn,
        norm_eps=config.rms_norm_eps,
        record_max_logits=config.record_max_logits,
        fused_swiglu=config.fused_swiglu,
    )


def _init_mixer(config: ModelConfig, plan: LayerPlan, *, key: PRNGKeyArray) -> Mixer:
    width, std, eps = config.hidden_size, config.initializer_range, config.rms_norm_eps
    if plan.mixer == "linear" and config.kda is not None:
        return init_kda(config.kda, width, std, eps, key=key)
    if plan.mixer == "linear" and config.lightning is not None:
        return init_lightning(config.lightning, config.rope, width, std, eps, key=key)
    if config.mla is not None:
        return init_mla(config.mla, config.rope, width, std, key=key)
    assert config.gqa is not None  # ModelConfig checks it
    return init_gqa(config.gqa, config.rope, width, std, eps, key=key)
