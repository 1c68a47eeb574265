"""FLOPs, bytes and collectives of one run of a compiled program, loops counted by their trips.

XLA's own `cost_analysis()` counts a loop's body once and sees nothing inside kernels.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ._hlo_bytes import moved_bytes
from ._hlo_parse import Instruction, Program, Shape, run_counts

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# (instruction, shapes of its operands) -> FLOPs of a kernel; None for a kernel it does not know.
KernelFlops = Callable[[Instruction, list[Shape]], int | None]


@dataclass(frozen=True)
class CollectiveUse:
    """Collectives of one kind over the same mesh axes.

    Attributes:
        kind: XLA's name.
        axis: Mesh axes along which it talks, joined by " x ".
        count: Executions in one run of the program.
        num_bytes: Bytes of the larger side (input or result) of all executions, per device.
        wire_bytes: Bytes that a device sends for them on a ring.
    """

    kind: str
    axis: str
    count: int
    num_bytes: int
    wire_bytes: int


@dataclass(frozen=True)
class ProgramCost:
    """What one run of a program costs a device.

    Attributes:
        flops: Of matrix products and convolutions, kernels of known formula included.
        kernel_flops: The part of kernels.
        unknown_kernels: Executions of kernels without a formula, by name.
        num_bytes: Read and written by all operations, as far as fusions are seen as one.
        collectives: Sums by kind and axis.
    """

    flops: int
    kernel_flops: int
    unknown_kernels: Mapping[str, int]
    num_bytes: int
    collectives: tuple[CollectiveUse, ...]


def count_program(
    program: Program, mesh_shape: Mapping[str, int], kernel_flops: KernelFlops | None = None
) -> ProgramCost:
    """The cost of one run of `program`, per device.

    Args:
        program: From `parse_program`.
        mesh_shape: Axis sizes, in order; partitions are numbered along them.
        kernel_flops: Formulas for kernels.
    """
    counts = run_counts(program)
    fused = _fused(program)
    flops = inside = num_bytes = 0
    unknown: dict[str, int] = {}
    collectives: dict[tuple[str, str], list[int]] = {}
    for name, body in program.computations.items():
        times = counts[name]
        if times == 0:
            continue
        shapes = {i.name: i.shapes for i in body}
        for instruction in body:
            operands = [s for o in instruction.operands for s in shapes.get(o, ())]
            flops += times * instruction_flops(instruction, operands)
            if _is_kernel(instruction):
                known = None if kernel_flops is None else kernel_flops(instruction, operands)
                inside += times * (known or 0)
                if known is None:
                    label = _kernel_name(instruction)
                    unknown[label] = unknown.get(label, 0) + times
            if name not in fused:
                num_bytes += times * moved_bytes(program, instruction, operands)
            kind = _collective_kind(instruction, name)
            if kind is not None:
                use = collectives.setdefault((kind, _axes(instruction, mesh_shape)), [0, 0, 0])
                size = _collective_bytes(instruction, operands)
                use[0] += times
                use[1] += times * size
                use[2] += times * _wire_bytes(kind, size, _group_size(instruction, mesh_shape))
    return ProgramCost(
        flops=flops + inside,
        kernel_flops=inside,
        unknown_kernels=unknown,
        num_bytes=num_bytes,
        collectives=tuple(
            CollectiveUse(kind, axis, *use) for (kind, axis), use in sorted(collectives.items())
        ),
    )


def instruction_flops(instruction: Instruction, operands: list[Shape]) -> int:
    """FLOPs of one execution of a `dot` or `convolution` (a multiplication and an addition count as two), else 0."""
    if instruction.opcode == "dot":
        contracted = _numbers(instruction.attributes, "lhs_contracting_dims")
        return 2 * instruction.shapes[0].num_elements * math.prod(operands[0].dims[d] for d in contracted)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, operands)
    return 0


def _convolution_flops(instruction: Instruction, operands: list[Shape]) -> int:
    """TPUs write every matrix product as a convolution; batch dimensions become dilated windows, mostly holes."""
    labels = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", instruction.attributes)
    if labels is None:
        return 0
    left, right, out = labels.groups()
    lhs, rhs, result = operands[0].dims, operands[1].dims, instruction.shapes[0].dims
    groups = _number(instruction.attributes, "feature_group_count")
    batch_groups = _number(instruction.attributes, "batch_group_count")
    pairs = 1
    for spatial in sorted(set(left) - {"b", "f"}):
        pairs *= _window_pairs(
            instruction.attributes,
            int(spatial),
            lhs[left.index(spatial)],
            rhs[right.index(spatial)],
            result[out.index(spatial)],
        )
    features = lhs[left.index("f")] // groups * result[out.index("f")]
    return 2 * features * (lhs[left.index("b")] // batch_groups) * pairs


def _window_pairs(attributes: str, index: int, size: int, window: int, result: int) -> int:
    """(result position, window position) pairs that meet an entry of the input and no padding or hole."""

    def field(name: str, default: str) -> str:
        match = re.search(rf"window=\{{[^}}]*\b{name}=([\d\-x_]+)", attributes)
        return match.group(1).split("x")[index] if match else default

    stride, left_dilation = int(field("stride", "1")), int(field("lhs_dilate", "1"))
    right_dilation, low = int(field("rhs_dilate", "1")), int(field("pad", "0_0").split("_")[0])
    starts = np.arange(result, dtype=np.int64) * stride - low
    total = 0
    for k in range(window):
        at = starts + k * right_dilation
        total += int(np.sum((at >= 0) & (at <= (size - 1) * left_dilation) & (at % left_dilation == 0)))
    return total


def _fused(program: Program) -> set[str]:
    return {
        target
        for body in program.computations.values()
        for i in body
        if i.opcode == "fusion"
        for kind, target in i.called()
        if kind == "calls"
    }


def _is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and '"tpu_custom_call"' in instruction.attributes


def _kernel_name(instruction: Instruction) -> str:
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", instruction.name)


def _collective_kind(instruction: Instruction, computation: str) -> str | None:
    base = instruction.opcode.removesuffix("-start")
    if base not in COLLECTIVES:
        return None
    # TPUs spell reduce-scatter as a fusion of an all-reduce and a slice.
    return "reduce-scatter" if computation.startswith("all-reduce-scatter") else base


def _collective_bytes(instruction: Instruction, operands: list[Shape]) -> int:
    """Bytes of the larger side; the result of a `-start` may hold the operands as well."""
    given = sum(s.num_bytes for s in operands)
    made = instruction.num_bytes
    return max(given, made - given if instruction.opcode.endswith("-start") else made)


def replica_groups(attributes: str) -> list[list[int]]:
    """Partitions that talk to each other, from either spelling of `replica_groups`, or pairs of a permute."""
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if pairs:
        return [[int(n) for n in p.split(",")] for p in re.findall(r"\{(\d+,\d+)\}", pairs.group(1))]
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if listed:
        return [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", listed.group(1))]
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if named:
        return _named_groups(named.group(1), named.group(2))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota is None:
        return []
    shape, source = (tuple(int(n) for n in iota.group(k).split(",")) for k in (1, 2))
    numbers = np.arange(math.prod(source)).reshape(source)
    if iota.group(3):
        numbers = numbers.transpose([int(n) for n in iota.group(3).split(",")])
    return numbers.reshape(shape).tolist()


def _named_groups(mesh: str, names: str) -> list[list[int]]:
    """Groups of the spelling `mesh['data'=2,'fsdp'=4] {'fsdp'}`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    inside = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", names)]
    outside = [i for i in range(len(sizes)) if i not in inside]
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    width = math.prod(numbers.shape[i] for i in inside)
    return numbers.transpose([*outside, *inside]).reshape(-1, width).tolist()


def _axes(instruction: Instruction, mesh_shape: Mapping[str, int]) -> str:
    """Mesh axes along which the members of a group differ."""
    groups = replica_groups(instruction.attributes)
    sizes = tuple(mesh_shape.values())
    if not groups:
        return " x ".join(name for name, size in mesh_shape.items() if size > 1) or "none"
    found = set()
    for group in groups:
        places = np.asarray(np.unravel_index(group, sizes))
        found |= {name for name, row in zip(mesh_shape, places, strict=True) if len(set(row.tolist())) > 1}
    return " x ".join(name for name in mesh_shape if name in found) or "none"


def _group_size(instruction: Instruction, mesh_shape: Mapping[str, int]) -> int:
    groups = replica_groups(instruction.attributes)
    return len(groups[0]) if groups else math.prod(mesh_shape.values())


def _wire_bytes(kind: str, size: int, group: int) -> int:
    """Bytes a device sends: on a ring, all but its own share; an all-reduce goes round twice."""
    if group <= 1:
        return 0
    match kind:
        case "all-reduce":
            return 2 * size * (group - 1) // group
        case "collective-permute" | "collective-broadcast":
            return size
        case _:
            return size * (group - 1) // group


def _numbers(attributes: str, name: str) -> list[int]:
    match = re.search(rf"{name}=\{{([\d,]*)\}}", attributes)
    return [int(n) for n in match.group(1).split(",") if n] if match else []


def _number(attributes: str, name: str) -> int:
    match = re.search(rf"{name}=(\d+)", attributes)
    return int(match.group(1)) if match else 1
