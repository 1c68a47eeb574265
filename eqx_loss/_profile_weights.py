"""`loss_weights`: the weights of every term of a whole global batch, under any semantics."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._layout import BatchLayout
from ._loss_weights import LossWeights, clean_loss_weights
from ._megatron_weights import megatron_weights
from ._micro_step_weights import micro_step_weights
from ._release_rules import MegatronRules, MicroStepRules
from ._semantics import LossSemantics


def loss_weights(
    loss_mask: Bool[Array, "B S"],
    semantics: LossSemantics,
    *,
    num_mtp_layers: int = 0,
    segment_ids: Int[Array, "B S"] | None = None,
    token_scale: Float[Array, "B S"] | None = None,
    router_mask: Bool[Array, "B S"] | None = None,
    layout: BatchLayout | None = None,
) -> LossWeights:
    """The weights of every loss term of a whole global batch under `semantics`.

    Formulas: `docs/semantics.md`. No gradient flows through them. An empty group, depth or batch
    weighs 0, but NaN where a release's profile says that the release has 0 / 0 there; the masks
    then cover the group, so that the NaN reaches value and gradient as it does in that release.

    Args:
        loss_mask: True where the next-token prediction is scored; all rows of the step.
        semantics: The normalization.
        num_mtp_layers: MTP depths `M`, at least 0.
        segment_ids: Packed-document ids, contiguous in a row; 0 is padding. None: every row is
            one document without padding.
        token_scale: Non-negative fractional weight of each token as a target of the main head;
            MTP depth k uses that of its own target.
        router_mask: True where router terms count a position. None: all positions, or those with
            a non-zero segment id under `mask_padding_in_router_losses`.
        layout: How the reproduced run cuts the batch. Our own rules need none; a profile that
            does says so. Its groups must agree with `micro_batch_size`.

    Raises:
        ValueError: `micro_batch_size` does not divide the rows or disagrees with `layout`,
            `num_mtp_layers` is negative, padding is to be masked without `segment_ids`, or a
            profile needs a layout.
    """
    num_rows = loss_mask.shape[0]
    arrange = BatchLayout(num_micro_batches=1) if layout is None else layout
    check_layout(semantics, layout, num_rows)
    if segment_ids is not None:
        segment_ids = arrange.arranged(segment_ids)
    if token_scale is not None:
        token_scale = arrange.arranged(token_scale)
    if router_mask is not None:
        router_mask = arrange.arranged(router_mask)
    weights = clean_loss_weights(
        arrange.arranged(loss_mask),
        semantics,
        num_mtp_layers=num_mtp_layers,
        segment_ids=segment_ids,
        token_scale=token_scale,
        router_mask=router_mask,
    )
    match semantics.rules:
        case None:
            pass
        case MegatronRules() as rules:
            padding = semantics.mask_padding_in_router_losses and segment_ids is not None
            weights = megatron_weights(
                weights,
                semantics,
                rules,
                segment_ids=segment_ids,
                router_mask=weights.router_mask if padding or router_mask is not None else None,
                layout=layout,
            )
        case MicroStepRules() as rules:
            weights = micro_step_weights(weights, semantics, rules, layout)
    return jax.lax.stop_gradient(_restored(weights, arrange, num_rows))


def check_layout(semantics: LossSemantics, layout: BatchLayout | None, num_rows: int) -> None:
    """Raises ValueError if the layout's micro-batches are not those of `semantics`."""
    if layout is None:
        return
    size = layout.micro_batch_size(num_rows)
    if not isinstance(semantics.rules, MicroStepRules) and size != semantics.micro_batch_size:
        raise ValueError(
            f"the layout has micro-batches of {size} rows but micro_batch_size is "
            f"{semantics.micro_batch_size}; give both the same size"
        )


def _restored(weights: LossWeights, layout: BatchLayout, num_rows: int) -> LossWeights:
    """Every array with its rows back in the batch's order."""
    if layout.row_order is None:
        return weights

    def restore(path: tuple[Any, ...], array: Array) -> Array:
        if path[-1].name == "load_balance_objective":
            return layout.restored(array.reshape(num_rows, -1)).reshape(-1)
        axis = 1 if path[0].name.startswith("mtp_") and path[0].name != "mtp_routers" else 0
        return jnp.moveaxis(layout.restored(jnp.moveaxis(array, axis, 0)), 0, axis)

    return jax.tree_util.tree_map_with_path(restore, weights)
