"""The router bias: moved by the sign of the load after every step, outside the optimizer."""

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from eqx_loss import updated_router_bias
from model import Transformer

from ._optimizer import OptimizerConfig


def update_router_bias(model: Transformer, counts: Int[Array, "L E"], config: OptimizerConfig) -> Transformer:
    """`model` with every router bias moved towards an even load; MTP routers included.

    Args:
        model: Parameters after the optimizer's step.
        counts: Assignments of the whole global batch, routers in the order of `RouterStats`.
        config: Rate and zero-mean rule.
    """
    biases = router_biases(model)
    if not biases:
        return model
    rows = _counts_of_biases(model, counts)
    moved = [
        updated_router_bias(
            bias, row, rate=config.router_bias_update_rate, zero_mean=config.router_bias_zero_mean
        )
        for bias, row in zip(biases, rows, strict=True)
    ]
    flat, treedef = jax.tree_util.tree_flatten_with_path(model)
    queue = iter(moved)
    return jax.tree.unflatten(treedef, [next(queue) if _is_bias(path) else leaf for path, leaf in flat])


def router_biases(model: Transformer) -> list[Float[Array, "*L E"]]:
    """Router biases in the order of `config.stack`, those of alike layers stacked, then of the MTP depths."""
    return [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model) if _is_bias(path)]


def _is_bias(path: tuple) -> bool:
    return path[-1].name == "router_bias"


def _counts_of_biases(model: Transformer, counts: Int[Array, "L E"]) -> list[Int[Array, "*L E"]]:
    """Rows of `counts` that belong to each array of `router_biases`, with its leading axes."""
    config = model.config
    routed = [i for i, layer in enumerate(config.layer_plan) if layer.ffn == "moe"]
    row_of = {layer: row for row, layer in enumerate(routed)}
    main = [
        counts[np.reshape([row_of[i] for i in alike.layers], alike.stack_shape)]
        for alike in config.stack.alike
        if alike.kind.ffn == "moe"
    ]
    return [*main, *(counts[i] for i in range(len(routed), counts.shape[0]))]
