"""The device mesh: five named axes, built and checked in one place.

`data` holds replicas, `fsdp` shards parameters and rows, `expert` shards experts and rows, `context` shards
positions, `tensor` shards heads, the ffn width and the vocabulary. Several slices are joined over the
data-centre network along `data` (or `fsdp`); every other axis stays inside a slice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from model import SWIGLU_TILE

DATA, FSDP, EXPERT, CONTEXT, TENSOR = "data", "fsdp", "expert", "context", "tensor"
MESH_AXES = (DATA, FSDP, EXPERT, CONTEXT, TENSOR)
ROW_AXES = (DATA, FSDP, EXPERT)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; at most one may be -1, which takes the devices that are left.

    `num_slices` slices (groups of devices with a fast interconnect) are laid along `slice_axis`, whose size
    is the whole size, slices included.

    Attributes:
        expert_exchange: What travels along the expert axis: copies of tokens to their experts and back (`tokens`),
            the weights of experts to all tokens (`weights`), or what sends fewer bytes (`auto`).
        expert_buffer: Rows that a device receives at most when tokens travel, as a multiple of the even share (the
            copies of one device's tokens). Copies beyond it are dropped and counted. None has room for all.
    """

    data: int = 1
    fsdp: int = -1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    num_slices: int = 1
    slice_axis: Literal["data", "fsdp"] = "data"
    expert_exchange: Literal["auto", "tokens", "weights"] = "auto"
    expert_buffer: float | None = None

    def __post_init__(self) -> None:
        for name, size in zip(MESH_AXES, self.sizes, strict=True):
            if size != -1 and size < 1:
                raise ValueError(f"mesh axis {name} must be -1 or at least 1, got {size}")
        if self.sizes.count(-1) > 1:
            free = [name for name, size in zip(MESH_AXES, self.sizes, strict=True) if size == -1]
            raise ValueError(
                f"at most one mesh axis may be -1, got -1 for {', '.join(free)}; give numbers for the others"
            )
        if self.num_slices < 1:
            raise ValueError(f"num_slices must be at least 1, got {self.num_slices}")
        self._check_exchange()

    def _check_exchange(self) -> None:
        buffer = self.expert_buffer
        if buffer is None:
            return
        if not 1 <= buffer < math.inf:
            raise ValueError(
                f"expert_buffer must be at least 1, the even share, got {buffer}; use null for room for all copies"
            )
        if self.expert_exchange == "weights":
            raise ValueError(
                f"expert_buffer={buffer} bounds the copies of tokens that travel, but with expert_exchange=weights none"
                " do; set expert_buffer to null, or expert_exchange to tokens"
            )

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Sizes as written, in the order of `MESH_AXES`."""
        return (self.data, self.fsdp, self.expert, self.context, self.tensor)


@dataclass(frozen=True, kw_only=True)
class MeshWork:
    """What a mesh has to divide: the sizes of one training step.

    `num_rows` and `num_positions` are those of the global batch; `num_experts` is 0 for a model without
    experts, `num_kv_heads` for one whose heads share no keys and values, `fused_ffn_size` without `fused_swiglu`.
    """

    num_rows: int
    num_positions: int
    gradient_accumulation_steps: int
    num_heads: int
    num_kv_heads: int = 0
    num_experts: int
    vocab_size: int
    ffn_sizes: tuple[int, ...] = ()
    fused_ffn_size: int = 0
    model_size: int = 0


def mesh_sizes(config: MeshConfig, num_devices: int) -> tuple[int, int, int, int, int]:
    """Sizes of the axes on `num_devices` devices, with -1 resolved.

    Raises:
        ValueError: The product of the sizes is not the number of devices, or the slices do not divide their
        axis.
    """
    known = math.prod(size for size in config.sizes if size != -1)
    written = " x ".join(f"{name} {size}" for name, size in zip(MESH_AXES, config.sizes, strict=True))
    if -1 in config.sizes:
        if num_devices % known:
            raise ValueError(
                f"mesh {written}: the fixed axes multiply to {known}, which does not"
                f" divide {num_devices} devices"
            )
    elif known != num_devices:
        raise ValueError(
            f"mesh {written} needs {known} devices, got {num_devices}; set one axis to -1 to fill it"
        )
    sizes = tuple(num_devices // known if size == -1 else size for size in config.sizes)
    joined = sizes[MESH_AXES.index(config.slice_axis)]
    if joined % config.num_slices:
        raise ValueError(
            f"num_slices={config.num_slices} must divide mesh axis {config.slice_axis}, got {joined};"
            " slices are joined along that axis only"
        )
    return sizes  # pyright: ignore[reportReturnType]  # five in, five out


def make_mesh(config: MeshConfig, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of `config` over `devices` (all devices of all processes when None), axes in `MESH_AXES`
    order.

    Within a slice the axes follow the torus of the chips; slices are consecutive along `config.slice_axis`.
    Devices without a `slice_index` (CPU) are cut into `num_slices` runs of equal length.

    Raises:
        ValueError: The sizes do not fit the devices, or the devices form another number of slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_sizes(config, len(devices))
    granules = _slices(devices, config.num_slices)
    axis = MESH_AXES.index(config.slice_axis)
    inner = list(sizes)
    inner[axis] //= config.num_slices
    blocks = [_device_block(tuple(inner), granule) for granule in granules]
    # Auto: jax.make_mesh would default to Explicit, which stock equinox layers do not support.
    return Mesh(np.concatenate(blocks, axis=axis), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def check_mesh(mesh: Mesh, work: MeshWork) -> None:
    """Refuse a mesh that does not divide the work, with the numbers.

    Raises:
        ValueError: All broken rules at once: rows, positions, heads, experts, ffn widths, vocabulary, model
        width, and on TPUs what the kernels of feed-forwards divide.
    """
    shape = dict(mesh.shape)
    rows = math.prod(shape[name] for name in ROW_AXES)
    rows_rule = " x ".join(f"{name} {shape[name]}" for name in ROW_AXES)
    steps = work.gradient_accumulation_steps
    problems: list[str] = []
    if work.num_rows % (rows * steps):
        problems.append(
            f"{work.num_rows} rows do not divide into {steps} micro-steps on {rows} row shards ({rows_rule}):"
            f" the batch must be a multiple of {rows * steps} rows"
        )
    if work.num_experts == 0 and shape[EXPERT] > 1:
        problems.append(
            f"mesh axis expert is {shape[EXPERT]} but the model has no experts; set mesh.expert=1"
        )
    for count, what, name in (
        (work.num_positions, "positions", CONTEXT),
        (work.num_experts, "experts", EXPERT),
        (work.num_heads, "heads", TENSOR),
        (work.num_kv_heads, "key/value heads", TENSOR),
        (work.vocab_size, "vocabulary entries", TENSOR),
        *((size, "ffn units", TENSOR) for size in work.ffn_sizes),
        (work.model_size, "model width", FSDP),
    ):
        if count % shape[name]:
            problems.append(
                f"{count} {what} do not divide over mesh axis {name}={shape[name]}: use a divisor"
            )
    if work.num_heads % shape[TENSOR] == 0 and work.num_heads // shape[TENSOR] % shape[CONTEXT]:
        problems.append(
            f"{work.num_heads} heads do not divide over mesh axes {TENSOR}={shape[TENSOR]} x"
            f" {CONTEXT}={shape[CONTEXT]}: their product must be a divisor"
        )
    if mesh.devices.flat[0].platform == "tpu":
        problems += kernel_problems(work, shape)
    if problems:
        raise ValueError(
            "mesh " + " x ".join(f"{k} {v}" for k, v in shape.items()) + ": " + "; ".join(problems)
        )


def kernel_problems(work: MeshWork, shape: Mapping[str, int]) -> list[str]:
    """What the tiles of `fused_swiglu` do not divide on one device of a mesh with axes of these sizes."""
    if not work.fused_ffn_size:
        return []
    # Positions, not tokens: evaluation has other numbers of rows.
    sizes = {
        "positions": work.num_positions // shape[CONTEXT],
        "units of the dense ffn": work.fused_ffn_size // shape[TENSOR],
        "model width": work.model_size,
    }
    return [
        f"{size} {what} of a device are no multiple of {SWIGLU_TILE}, as model.fused_swiglu needs:"
        " change them, or set it to false"
        for what, size in sizes.items()
        if size % SWIGLU_TILE
    ]


def _slices(devices: list[jax.Device], num_slices: int) -> list[list[jax.Device]]:
    indices = {getattr(device, "slice_index", None) for device in devices}
    if len(indices) == 1 and num_slices == 1:
        return [devices]
    if len(indices) == 1:
        length = len(devices) // num_slices
        return [devices[i * length : (i + 1) * length] for i in range(num_slices)]
    if len(indices) != num_slices:
        raise ValueError(
            f"num_slices={num_slices} but the devices form {len(indices)} slices; set mesh.num_slices"
        )
    groups: dict[int, list[jax.Device]] = {}
    for device in devices:
        groups.setdefault(device.slice_index, []).append(device)
    return [groups[index] for index in sorted(groups)]


def _device_block(shape: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    if devices[0].platform == "cpu":
        return np.asarray(devices).reshape(shape)
    return mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
