"""Facts about the rows of a batch that every layer shares."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ._axes import Axes
from ._parallel import Parallel


class Rows(eqx.Module):
    """Documents packed into rows.

    Attributes:
        segment_ids: Document ids, unique within a row; 0 is padding. Documents do not see each other.
        positions: Position within the document.
        router_mask: Positions counted in the router's sums.
        axes: Where activations live, or None.
        parallel: The mesh axes of the `shard_map` the model runs in, or None.
    """

    segment_ids: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    router_mask: Bool[Array, "B S"]
    axes: Axes | None = eqx.field(static=True, default=None)
    parallel: Parallel | None = eqx.field(static=True, default=None)


def make_rows(
    tokens: Int[Array, "B S"],
    segment_ids: Int[Array, "B S"] | None,
    positions: Int[Array, "B S"] | None,
    router_mask: Bool[Array, "B S"] | None,
    axes: Axes | None,
    parallel: Parallel | None = None,
) -> Rows:
    """`Rows` with the defaults filled in: one document a row, positions 0, 1, ..., every position counted."""
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=tokens.dtype), tokens.shape)
    if router_mask is None:
        router_mask = jnp.ones(tokens.shape, dtype=bool)
    return Rows(
        segment_ids=segment_ids, positions=positions, router_mask=router_mask, axes=axes, parallel=parallel
    )
