"""QK-clip: shrink the query and key weights of heads whose attention logits grow too large."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._block import Block
from ._layer_plan import AlikeLayers
from ._mla import Mla
from ._transformer import Transformer

DEFAULT_THRESHOLD = 100.0


def clip_factors(
    max_logits: Float[Array, "*N H"], threshold: float = DEFAULT_THRESHOLD
) -> Float[Array, "*N H"]:
    """`min(1, threshold / (max_logit + 1e-6))` for positive logits, 1 otherwise.

    MuonClip, Kimi K2, arXiv:2507.20534, algorithm 1; the 1e-6 is MaxText's (`qk_clip_utils.py`).
    """
    positive = max_logits > 0
    return jnp.where(positive, jnp.minimum(1, threshold / (jnp.where(positive, max_logits, 1) + 1e-6)), 1)


def qk_clip(
    model: Transformer, max_logits: Float[Array, "N H"], threshold: float = DEFAULT_THRESHOLD
) -> Transformer:
    """`model` with every head of every MLA layer scaled so that its largest logit is at most `threshold`.

    Per head with factor eta: query and key dims without rope by sqrt(eta) each, query rope dims by eta; the rope key
    is shared by the heads and stays. Values stay. Applied after the optimizer step, on the new weights.

    Args:
        model: The model; its full-attention layers are MLA.
        max_logits: As `ModelOutput.max_logits`, the maximum (not the sum) over micro-steps and devices.
        threshold: Largest logit allowed.

    Raises:
        ValueError: The model has other full attention than MLA, or another number of MLA layers than `max_logits`.
    """
    config = model.config
    if config.mla is None:
        raise ValueError("qk_clip needs MLA layers, got a model with gqa; drop qk-clip for this model")
    plan = [layer.mixer == "full" for layer in config.layer_plan] + [True] * config.num_mtp_layers
    if max_logits.shape[0] != sum(plan):
        raise ValueError(
            f"max_logits must have one row per MLA layer, {sum(plan)} here, got {max_logits.shape[0]}; "
            "pass ModelOutput.max_logits"
        )
    factors = clip_factors(max_logits, threshold)
    row_of = {layer: row for row, layer in enumerate(i for i, full in enumerate(plan) if full)}

    def clipped(block: Block, alike: AlikeLayers) -> Block:
        if alike.kind.mixer != "full":
            return block
        clip = _clip_block
        for _ in alike.stack_shape:
            clip = eqx.filter_vmap(clip)
        return clip(block, factors[np.reshape([row_of[i] for i in alike.layers], alike.stack_shape)])

    layers = tuple(
        clipped(block, alike) for block, alike in zip(model.layers, config.stack.alike, strict=True)
    )
    mtp = tuple(
        eqx.tree_at(lambda m: m.block, m, _clip_block(m.block, factors[row_of[config.num_layers + k]]))
        for k, m in enumerate(model.mtp)
    )
    return eqx.tree_at(lambda m: (m.layers, m.mtp), model, (layers, mtp))


def _clip_block(block: Block, eta: Float[Array, " H"]) -> Block:
    assert isinstance(block.mixer, Mla)  # qk_clip picks the full-attention layers
    root = jnp.sqrt(eta)[:, None]

    def weights(b: Any) -> tuple[Any, Any, Any]:  # `tree_at` calls it with other leaves than arrays
        return b.mixer.query.nope, b.mixer.query.rope, b.mixer.k_up

    nope, rope, k_up = weights(block)
    scaled = ((nope, root), (rope, eta[:, None]), (k_up, root))
    return eqx.tree_at(weights, block, tuple((w * factor).astype(w.dtype) for w, factor in scaled))
