"""The output head and its loss, by the path that suits the platform."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eqx_loss import HeadLoss, cross_entropy, head_loss


def head(
    hidden: Float[Array, "B S D"],
    unembed: Float[Array, "D V"],
    targets: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    weights: Float[Array, "B S"],
    z_loss_multiplier: float = 0.0,
) -> HeadLoss:
    """Cross-entropy of `hidden @ unembed` against `targets`, weighted and per token."""
    logits = jnp.einsum(
        "bsd,dv->bsv", hidden, unembed.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return head_loss(cross_entropy(logits, targets, mask), weights, z_loss_multiplier=z_loss_multiplier)
