"""The router biases of stacked layers."""

import jax.numpy as jnp
import numpy as np
import pytest

from model import KdaConfig
from train._optimizer import OptimizerConfig
from train._router_bias import router_biases, update_router_bias
from train._schedule import ScheduleConfig

from .step_cases import tiny_config, tiny_model


@pytest.mark.slow
def test_each_bias_moves_by_the_counts_of_its_own_layer():
    """Dense, linear, full, 2 x (2 linear, full), MTP: layer i alone overloads expert i."""
    config = tiny_config(num_layers=9, layer_group_size=3, kda=KdaConfig(num_heads=4, head_dim=8))
    assert str(config.stack) == "linear+dense, linear+moe, full+moe, 2 x (2 linear+moe, full+moe)"
    model = tiny_model(config)
    experts = (np.arange(9) * 5) % 12  # the expert that each of the nine routers overloads
    counts = np.zeros((9, 12), np.int32)
    counts[np.arange(9), experts] = 8
    options = OptimizerConfig(schedule=ScheduleConfig(kind="constant", peak=1.0), router_bias_update_rate=0.5)
    before, after = (
        router_biases(model),
        router_biases(update_router_bias(model, jnp.asarray(counts), options)),
    )
    lowered = [np.argmin(np.asarray(new) - np.asarray(old), axis=-1) for old, new in zip(before, after)]
    routers = ([0, 2, 3, 5, 6], [1, 4, 7], [8])  # the dense layer has none
    for found, rows in zip(lowered, routers, strict=True):
        np.testing.assert_array_equal(found, np.squeeze(experts[np.array(rows)]))
