"""Other ways to the same per-token losses: the plain path, and tokamax's TPU kernel."""

import importlib
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ._linear_xent_plan import XentPlan
from ._linear_xent_types import XentRules
from ._xent import TokenLosses, cross_entropy

MOSAIC_LANES = 128


def unfused_token_losses(
    hidden: Float[Array, "M B S D"],
    unembed: Float[Array, "D V"],
    targets: Int[Array, "M B S"],
    mask: Bool[Array, "M B S"],
    rules: XentRules,
    plan: XentPlan,
) -> TokenLosses:
    """Per-token losses by the plan's implementation, differentiable by its own rules."""
    hidden = jnp.where(mask[..., None], hidden, 0)
    if plan.implementation == "plain":
        return _plain(hidden, unembed, targets, mask, rules, plan)
    return _mosaic(hidden, unembed, targets, mask, plan)


def _plain(
    hidden: Float[Array, "M B S D"],
    unembed: Float[Array, "D V"],
    targets: Int[Array, "M B S"],
    mask: Bool[Array, "M B S"],
    rules: XentRules,
    plan: XentPlan,
) -> TokenLosses:
    dtype = plan.vocab_cut.accumulator_dtype
    logits = jnp.einsum("mbsd,dv->mbsv", hidden, unembed, preferred_element_type=dtype)
    return cross_entropy(
        logits,
        targets,
        mask,
        logit_soft_cap=rules.logit_soft_cap,
        label_smoothing=rules.label_smoothing,
        vocab_size=rules.vocab_size,
    )


def _mosaic(
    hidden: Float[Array, "M B S D"],
    unembed: Float[Array, "D V"],
    targets: Int[Array, "M B S"],
    mask: Bool[Array, "M B S"],
    plan: XentPlan,
) -> TokenLosses:
    """`z_term` is 0: the kernel keeps its log-partition to itself, and the plan allows no z loss."""
    num_classes = unembed.shape[1]
    in_range = (targets >= 0) & (targets < num_classes)
    labels = jnp.where(mask & in_range, targets, 0)
    xent = _on_devices(hidden, unembed, labels, plan)
    xent = jnp.where(mask, jnp.where(in_range, xent, jnp.nan), 0)
    return TokenLosses(xent=xent, z_term=jnp.zeros_like(xent))


def _on_devices(hidden: Array, unembed: Array, labels: Array, plan: XentPlan) -> Array:
    """Kernel losses; a kernel cannot be partitioned by the compiler, so a mesh maps it."""
    dtype = plan.vocab_cut.operand_dtype

    def body(hidden: Array, unembed: Array, labels: Array) -> Array:
        if plan.sharding is not None:
            for dimension in (0, 1):
                for axis in reversed(plan.sharding.unembed_axes(dimension)):
                    unembed = cast(Array, lax.all_gather(unembed, axis, axis=dimension, tiled=True))
        # The kernel writes whole lanes: with 600 tokens it would write 640 losses.
        overhang = -labels.size % MOSAIC_LANES
        flat = jnp.pad(hidden.reshape(-1, hidden.shape[-1]).astype(dtype), ((0, overhang), (0, 0)))
        losses = _kernel(flat, jnp.pad(labels.reshape(-1), (0, overhang)), unembed.astype(dtype))
        losses = losses[: labels.size].astype(plan.vocab_cut.accumulator_dtype)
        return losses.reshape(labels.shape)

    if plan.sharding is None:
        return body(hidden, unembed, labels)
    per_token = PartitionSpec(None, plan.sharding.rows or None, plan.sharding.positions or None)
    mapped = jax.shard_map(
        body,
        mesh=plan.sharding.mesh,
        in_specs=(per_token, plan.sharding.unembed, per_token),
        out_specs=per_token,
        check_vma=False,
    )
    return mapped(hidden, unembed, labels)


def _kernel(hidden: Array, labels: Array, unembed: Array) -> Array:
    # Imported here: an extra, and 89 packages. Asked for by name: its own fallback order ends at a
    # path that materializes logits in bfloat16.
    tokamax: Any = importlib.import_module("tokamax")
    losses = tokamax.linear_softmax_cross_entropy_loss(
        hidden, labels, unembed, reduction="none", implementation="mosaic_tpu"
    )
    return cast(Array, losses)
