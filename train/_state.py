"""The training state: parameters, optimizer state and counters, born in shards."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from model import ModelConfig, Transformer, init_model, param_specs

from ._optimizer import Optimizer, OptimizerConfig, parameter_paths
from ._sharding import make_parallel, named, over_data, parameter_partitions, partitions_by_path


class TrainState(eqx.Module):
    """Everything a step reads and writes.

    Attributes:
        model: Parameters, float32.
        optimizer: State of `Optimizer.init`.
        step: Steps done, skipped ones included; the data order and the learning rate follow it.
        num_skipped: Steps whose gradient was not finite.
    """

    model: Transformer
    optimizer: PyTree
    step: Int[Array, ""]
    num_skipped: Int[Array, ""]


def make_optimizer(config: OptimizerConfig, model_config: ModelConfig) -> Optimizer:
    """The optimizer of a model, bound to the metadata that its parameters declare."""
    model = abstract_model(model_config)
    specs = param_specs(model)
    treedef = jax.tree.structure(model)
    return Optimizer(config, dict(zip(parameter_paths(model), treedef.flatten_up_to(specs), strict=True)))


@functools.cache
def abstract_model(config: ModelConfig) -> Transformer:
    """The model of `config` with `jax.ShapeDtypeStruct`s in place of arrays; traced once a configuration."""
    return eqx.filter_eval_shape(lambda key: init_model(config, key=key), jax.random.key(0))


def abstract_state(config: ModelConfig, optimizer: Optimizer) -> TrainState:
    """The state of a run with `jax.ShapeDtypeStruct`s in place of arrays, without shardings."""
    return eqx.filter_eval_shape(lambda model: _first_state(model, optimizer), abstract_model(config))


def model_partitions(config: ModelConfig, mesh: Mesh) -> PyTree:
    """`PartitionSpec` of every parameter, as a tree like the model."""
    model = abstract_model(config)
    parallel = make_parallel(mesh, moe=config.moe, gather_dtype="float32", reduce_dtype="float32")
    return parameter_partitions(param_specs(model), model, mesh, parallel)


def state_shardings(config: ModelConfig, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """`NamedSharding` of every array of the state, as a tree like the state."""
    state = abstract_state(config, optimizer)
    partitions = model_partitions(config, mesh)
    moments = optimizer_partitions(optimizer, state.model, partitions, mesh)
    placed = eqx.tree_at(
        lambda s: (s.model, s.optimizer, s.step, s.num_skipped),
        state,
        (
            partitions,
            partitions_by_path(state.optimizer, state.model, moments),
            PartitionSpec(),
            PartitionSpec(),
        ),
    )
    return named(placed, mesh)


def optimizer_partitions(optimizer: Optimizer, model: PyTree, partitions: PyTree, mesh: Mesh) -> PyTree:
    """Partition of the moments of every parameter: that of the parameter, over data too when asked for."""
    if not optimizer.config.shard_state_over_data:
        return partitions
    return jax.tree.map(
        lambda leaf, partition: over_data(partition, tuple(leaf.shape), mesh), model, partitions
    )


def init_state(config: ModelConfig, optimizer: Optimizer, mesh: Mesh, *, key: PRNGKeyArray) -> TrainState:
    """The state before the first step. Every array is created in its shards and never exists whole."""
    shardings = state_shardings(config, optimizer, mesh)
    # Optimizing a program that runs once costs ten times its run on CPU (34 s against 4 s of compilation).
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_backend_optimization_level": 0} if is_cpu else None
    build = jax.jit(
        lambda key: _first_state(init_model(config, key=key), optimizer),
        out_shardings=shardings,
        compiler_options=options,
    )
    return build(key)


def _first_state(model: Transformer, optimizer: Optimizer) -> TrainState:
    return TrainState(
        model=model,
        optimizer=optimizer.init(model),
        step=jnp.zeros((), jnp.int32),
        num_skipped=jnp.zeros((), jnp.int32),
    )
