"""Which mesh axis splits which dimension: one table, and partitions of parameters by their declared axes."""

import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from model import ParamSpec

from ._mesh import CONTEXT, DATA, EXPERT, FSDP, ROW_AXES, TENSOR
from ._optimizer import parameter_paths

PARAMETER_AXES = {"E": EXPERT, "H": TENSOR, "J": TENSOR, "F": TENSOR, "V": TENSOR}
# Too small to be worth a gather in every layer: whole on every device.
WHOLE_ROLES = frozenset({"norm", "bias", "router_bias", "conv", "decay"})
BATCH_SPEC = PartitionSpec(ROW_AXES, CONTEXT)


def parameter_partition(spec: ParamSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Partition of one parameter: its letters by `PARAMETER_AXES`, and D (else the longest free axis) over
    fsdp.

    Norms, biases, convolutions and decays stay whole, but for their heads over tensor.

    Raises:
        ValueError: A size does not divide over its mesh axis.
    """
    letters = spec.axes.split()
    entries: list[str | None] = [None] * len(letters)
    for i, letter in enumerate(letters):
        name = PARAMETER_AXES.get(letter)
        if name is None or mesh.shape[name] == 1 or name in entries:
            continue
        if shape[i] % mesh.shape[name]:
            raise ValueError(
                f"axis {letter} of a parameter {spec.axes!r} has {shape[i]} entries, which mesh axis"
                f" {name}={mesh.shape[name]} does not divide; choose a divisor"
            )
        entries[i] = name
    if mesh.shape[FSDP] > 1 and spec.role not in WHOLE_ROLES:
        entries[_fsdp_axis(letters, entries, shape, mesh.shape[FSDP], spec.axes)] = FSDP
    return PartitionSpec(*entries)


def parameter_partitions(specs: PyTree, params: PyTree, mesh: Mesh) -> PyTree:
    """`parameter_partition` of every parameter; `specs` is the tree of `model.param_specs`."""
    leaves, treedef = jax.tree.flatten(params)
    spec_of = treedef.flatten_up_to(specs)
    return treedef.unflatten(
        [
            parameter_partition(spec, tuple(leaf.shape), mesh)
            for spec, leaf in zip(spec_of, leaves, strict=True)
        ]
    )


def over_data(partition: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """`partition` with the data axis added where fsdp already cuts, or to the first axis that it divides.

    A parameter without such an axis keeps its partition: it is then replicated over data.
    """
    entries = [*partition, *([None] * (len(shape) - len(partition)))]
    if mesh.shape[DATA] == 1:
        return partition
    order = sorted(range(len(shape)), key=lambda i: (entries[i] != FSDP, entries[i] is not None, i))
    for i in order:
        names = (
            () if entries[i] is None else (entries[i],) if isinstance(entries[i], str) else tuple(entries[i])
        )
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


def _fsdp_axis(
    letters: list[str], entries: list[str | None], shape: tuple[int, ...], size: int, axes: str
) -> int:
    free = [i for i, entry in enumerate(entries) if entry is None and letters[i] != "L"]
    wide = [i for i in free if letters[i] == "D"]
    candidates = wide or sorted(free, key=lambda i: -shape[i])
    for i in candidates:
        if shape[i] % size == 0:
            return i
    raise ValueError(
        f"no axis of a parameter {axes!r} of shape {shape} divides over mesh axis fsdp={size};"
        " choose a divisor of the model width"
    )
