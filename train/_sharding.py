"""Which mesh axis splits which dimension: one table, and partitions of parameters by their declared axes."""

import math
from typing import Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from model import (
    ExpertExchange,
    MoeConfig,
    Parallel,
    ParamSpec,
    cut_axes,
    cut_dimension,
    is_expert,
    tensor_dimension,
)

from ._mesh import CONTEXT, DATA, EXPERT, FSDP, ROW_AXES, TENSOR
from ._optimizer import parameter_paths

Dtype = Literal["float32", "bfloat16"]
BATCH_SPEC = PartitionSpec(ROW_AXES, CONTEXT)


def make_parallel(
    mesh: Mesh,
    *,
    moe: MoeConfig | None,
    gather_dtype: Dtype,
    reduce_dtype: Dtype,
    exchange: ExpertExchange | None = None,
) -> Parallel:
    """The mesh axes a model is told of: those of more than one device, data apart."""
    num_experts = 0 if moe is None else moe.num_experts
    wide = {name: size for name, size in mesh.shape.items() if size > 1}
    return Parallel(
        fsdp_axes=(FSDP,) if FSDP in wide else (),
        expert_axis=EXPERT if EXPERT in wide else None,
        context_axis=CONTEXT if CONTEXT in wide else None,
        tensor_axis=TENSOR if TENSOR in wide else None,
        whole_experts=num_experts % math.prod(mesh.shape[name] for name in (EXPERT, FSDP, CONTEXT)) == 0,
        sizes=tuple(wide.items()),
        gather_dtype=gather_dtype,
        reduce_dtype=reduce_dtype,
        platform=mesh.devices.flat[0].platform,
        exchange=ExpertExchange() if exchange is None else exchange,
    )


def parameter_partition(
    spec: ParamSpec, shape: tuple[int, ...], mesh: Mesh, parallel: Parallel
) -> PartitionSpec:
    """Partition of one parameter: cut as `model.cut_dimension` says, experts over expert, the rest over
    tensor.

    Norms, biases, convolutions and decays stay whole, but for their heads over tensor.

    Raises:
        ValueError: A size does not divide over its mesh axes.
    """
    letters = spec.axes.split()
    names: list[tuple[str, ...]] = [() for _ in letters]
    dimension = cut_dimension(spec, parallel)
    if dimension is not None:
        names[dimension] = cut_axes(spec, parallel)
    if is_expert(spec) and parallel.expert_axis is not None:
        names[letters.index("E")] = (parallel.expert_axis, *names[letters.index("E")])
    if mesh.shape[TENSOR] > 1:
        wide = tensor_dimension(spec)
        if wide is not None:
            names[wide] = (*names[wide], TENSOR)
    for letter, size, group in zip(letters, shape, names, strict=True):
        count = math.prod(mesh.shape[name] for name in group)
        if size % count:
            raise ValueError(
                f"axis {letter} of a parameter {spec.axes!r} has {size} entries, which {count} devices"
                f" ({' x '.join(f'{name} {mesh.shape[name]}' for name in group)}) do not divide;"
                " move devices to the data axis or choose a divisor"
            )
    return PartitionSpec(*(group[0] if len(group) == 1 else group or None for group in names))


def parameter_partitions(specs: PyTree, params: PyTree, mesh: Mesh, parallel: Parallel) -> PyTree:
    """`parameter_partition` of every parameter; `specs` is the tree of `model.param_specs`."""
    leaves, treedef = jax.tree.flatten(params)
    return treedef.unflatten(
        [
            parameter_partition(spec, tuple(leaf.shape), mesh, parallel)
            for spec, leaf in zip(treedef.flatten_up_to(specs), leaves, strict=True)
        ]
    )


def over_data(partition: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """`partition` with the data axis added where fsdp already cuts, or to the first axis that it divides.

    A parameter without such an axis keeps its partition: it is then replicated over data.
    """
    entries = [*partition, *([None] * (len(shape) - len(partition)))]
    if mesh.shape[DATA] == 1:
        return partition
    groups: list[tuple[str, ...]] = [
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries
    ]
    order = sorted(range(len(shape)), key=lambda i: (FSDP not in groups[i], bool(groups[i]), i))
    for i in order:
        names = groups[i]
        if shape[i] % (mesh.shape[DATA] * math.prod(mesh.shape[n] for n in names)) == 0:
            entries[i] = (*names, DATA)
            return PartitionSpec(*entries)
    return partition


def named(partitions: PyTree, mesh: Mesh) -> PyTree:
    """`NamedSharding` of every `PartitionSpec` in a tree."""
    return jax.tree.map(
        lambda p: NamedSharding(mesh, p), partitions, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def partitions_by_path(tree: PyTree, params: PyTree, partitions: PyTree) -> PyTree:
    """Partition of every leaf of `tree` (optimizer state): that of the parameter whose path ends its path.

    A leaf that stands for no parameter, such as a step count, is whole.
    """
    table = dict(
        zip(
            parameter_paths(params),
            jax.tree.leaves(partitions, is_leaf=lambda x: isinstance(x, PartitionSpec)),
            strict=True,
        )
    )

    def find(path: str) -> PartitionSpec:
        parts = path.split(".")
        suffixes = (".".join(parts[i:]) for i in range(len(parts)))
        return next((table[suffix] for suffix in suffixes if suffix in table), PartitionSpec())

    return jax.tree.unflatten(jax.tree.structure(tree), [find(path) for path in parameter_paths(tree)])
