"""Where activations live: logical dimensions to mesh axes, as a value that is passed in."""

import dataclasses

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axes:
    """A mesh and the mesh axes of each logical dimension.

    Attributes:
        mesh: The devices.
        rules: Pairs of a dimension letter and the mesh axis (or axes) it is split over; letters that are not
            listed are not split.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    rules: tuple[tuple[str, MeshAxes], ...]

    @property
    def platform(self) -> str:
        """What the mesh is made of: "tpu", "gpu", "cpu". An abstract mesh says it by its device kind."""
        if isinstance(self.mesh, jax.sharding.Mesh):
            return self.mesh.devices.flat[0].platform
        device = self.mesh.abstract_device
        return "tpu" if device is not None and "tpu" in device.device_kind.lower() else "cpu"

    def spec(self, dims: str) -> PartitionSpec:
        """Partition of an array whose axes are `dims`, e.g. "B S D"."""
        table = dict(self.rules)
        return PartitionSpec(*(table.get(dim) for dim in dims.split()))


def constrain(x: Shaped[Array, "*shape"], dims: str, axes: Axes | None) -> Shaped[Array, "*shape"]:
    """`x`, told to the partitioner to be split as `axes` says; `x` itself when `axes` is None."""
    if axes is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(axes.mesh, axes.spec(dims)))
