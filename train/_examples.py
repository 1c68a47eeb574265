"""A global batch with its targets and loss weights, cut into micro-steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int, PyTree

from eqx_loss import LossSemantics, LossWeights, loss_weights, shift_targets

from ._mesh import CONTEXT, ROW_AXES


class Batch(eqx.Module):
    """The rows of one optimizer step.

    Attributes:
        tokens: Inputs.
        targets: Token that each position predicts.
        loss_mask: True where the prediction is scored.
        segment_ids: Documents, unique in a row and contiguous; 0 is padding.
        positions: Position within the document.
    """

    tokens: Int[Array, "B S"]
    targets: Int[Array, "B S"]
    loss_mask: Bool[Array, "B S"]
    segment_ids: Int[Array, "B S"]
    positions: Int[Array, "B S"]


class Examples(eqx.Module):
    """What the model and the loss need of some rows; every mask and weight is that of the global batch.

    Attributes:
        tokens: Inputs.
        segment_ids: Documents.
        positions: Position within the document.
        targets: Target of the main head.
        mtp_targets: Target of each MTP depth.
        weights: Weights of every loss term.
    """

    tokens: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    targets: Int[Array, "B S"]
    mtp_targets: Int[Array, "M B S"]
    weights: LossWeights


def make_examples(batch: Batch, semantics: LossSemantics, num_mtp_layers: int) -> Examples:
    """`batch` with MTP targets and loss weights: integer work on whole rows, before anything is cut."""
    shifted = [
        shift_targets(
            batch.targets,
            batch.loss_mask,
            depth=depth,
            segment_ids=batch.segment_ids,
            roll_across_documents=semantics.mtp_roll_across_documents,
        )[0]
        for depth in range(1, num_mtp_layers + 1)
    ]
    none = jnp.zeros((0, *batch.tokens.shape), batch.targets.dtype)
    return Examples(
        tokens=batch.tokens,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        targets=batch.targets,
        mtp_targets=jnp.stack(shifted) if shifted else none,
        weights=loss_weights(
            batch.loss_mask, semantics, num_mtp_layers=num_mtp_layers, segment_ids=batch.segment_ids
        ),
    )


def cut_micro_steps(examples: Examples, num_micro_steps: int) -> PyTree:
    """Every array with a new first axis of micro-steps, which are contiguous blocks of rows."""

    def cut(path: tuple, array: Array) -> Array:
        axis = _row_axis(path)
        shape = array.shape
        blocks = array.reshape(
            *shape[:axis], num_micro_steps, shape[axis] // num_micro_steps, *shape[axis + 1 :]
        )
        return jnp.moveaxis(blocks, axis, 0)

    return jax.tree_util.tree_map_with_path(cut, examples)


def micro_step_partitions(micro_steps: PyTree) -> PyTree:
    """Partition of `cut_micro_steps`: rows over data, fsdp and expert, positions over context."""

    def partition(path: tuple, array: Array) -> PartitionSpec:
        before = (None,) * (1 + _row_axis(path))
        has_positions = array.ndim == len(before) + 2
        return PartitionSpec(*before, ROW_AXES, *((CONTEXT,) if has_positions else ()))

    return jax.tree_util.tree_map_with_path(partition, micro_steps)


def _row_axis(path: tuple) -> int:
    """Arrays of MTP depths have the depth in front of the row."""
    return 1 if path[-1].name.startswith("mtp") else 0
