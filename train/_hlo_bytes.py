"""Bytes that an operation of a compiled program moves."""

import math
import re
from collections.abc import Sequence

from ._hlo_parse import Instruction, Program, Shape

# Move no data by themselves, or are counted where their parts are.
_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "call-start",
        "custom-call-start",
        "custom-call-update",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "async-start",
        "async-update",
        "async-done",
        "iota",
        "domain",
        "add-dependency",
    }
)


# On another core of the chip, counted there; memory that is not written yet.
_IDLE_CALLS = ("called_computations=", 'custom_call_target="AllocateBuffer"')


# First and end of what is read along each axis.
_Box = tuple[tuple[int, int], ...]
# `[first:end` of a slice and `low_high` of a pad, axis by axis.
_PAIRS = {
    "slice": re.compile(r"\[(\d+):(\d+)"),
    "pad": re.compile(r"(?:(?<=padding=)|(?<=x))(-?\d+)_(-?\d+)"),
}


def moved_bytes(program: Program, instruction: Instruction, operands: list[Shape]) -> int:
    """Bytes that one execution reads from and writes to main memory, a fusion seen as one operation."""
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0
    if instruction.opcode == "custom-call" and any(name in instruction.attributes for name in _IDLE_CALLS):
        return 0
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * _main_bytes(instruction.shapes)
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * _main_bytes(operands[1:2])
    if instruction.opcode in ("copy-start", "slice-start"):
        # The result holds the target, the source and a token.
        source, target = operands[:1], instruction.shapes[:1]
        size = min(s.num_bytes for s in (*source, *target)) if source and target else 0
        return size * sum(s.is_in_main_memory for s in (*source, *target))
    if instruction.opcode != "fusion":
        return _main_bytes(instruction.shapes) + _main_bytes(operands)
    body = _body(program, instruction)
    read = sum(_read_bytes(program, body, i) for i in body if i.opcode == "parameter")
    return read + _written_bytes(program, body, instruction.shapes)


def _main_bytes(shapes: Sequence[Shape]) -> int:
    return sum(shape.num_bytes for shape in shapes if shape.is_in_main_memory)


def _body(program: Program, fusion: Instruction) -> tuple[Instruction, ...]:
    return next((program.computations[t] for kind, t in fusion.called() if kind == "calls"), ())


def _read_bytes(program: Program, body: Sequence[Instruction], value: Instruction) -> int:
    """Bytes of `value`, a parameter of a fusion or a view of one, that are read; slices where only those are."""
    if not _main_bytes(value.shapes):
        return 0
    total = 0
    boxes: list[_Box] = []
    for user in (i for i in body if value.name in i.operands):
        is_first = user.operands[0] == value.name
        if user.opcode in ("slice", "pad") and is_first:
            boxes += _boxes(body, user, value.shapes[0].dims)
        elif user.opcode in ("dynamic-slice", "gather") and is_first:
            total += user.num_bytes
        elif user.opcode in ("bitcast", "copy") or _only_copies(program, user):
            # Inside a fusion another layout is a view: no part is made that is not used.
            total += _read_bytes(program, body, user)
        elif user.opcode == "fusion":
            inside = _body(program, user)
            numbers = {str(n) for n, name in enumerate(user.operands) if name == value.name}
            total += sum(
                _read_bytes(program, inside, i)
                for i in inside
                if i.opcode == "parameter" and i.attributes.split(")")[0] in numbers
            )
        elif not (user.opcode == "dynamic-update-slice" and is_first):
            return value.num_bytes
    return min(total + Shape(value.shapes[0].dtype, (_num_inside(boxes),)).num_bytes, value.num_bytes)


def _boxes(body: Sequence[Instruction], user: Instruction, sizes: Sequence[int]) -> list[_Box]:
    """What `user`, a slice or a pad of an array of these sizes, reads of it; of a pad, what slices of it read."""
    numbers = [(int(a), int(b)) for a, b in _PAIRS[user.opcode].findall(user.attributes)]
    if user.opcode == "slice":
        return [tuple(numbers)]
    users = [i for i in body if user.name in i.operands]
    padded = user.shapes[0].dims
    is_cut = bool(users) and all(i.opcode == "slice" for i in users)
    cuts = (
        [box for i in users for box in _boxes(body, i, padded)] if is_cut else [tuple((0, n) for n in padded)]
    )

    def inside(end: int, low: int, size: int) -> int:
        return min(max(end - low, 0), size)

    return [
        tuple(
            (inside(start, low, size), inside(end, low, size))
            for (start, end), (low, _), size in zip(box, numbers, sizes, strict=True)
        )
        for box in cuts
    ]


def _num_inside(boxes: Sequence[_Box]) -> int:
    """Entries that are read: those of all boxes, or of the box around them where they overlap, as shifts of a part."""
    if not boxes:
        return 0
    apart = sum(math.prod(end - start for start, end in box) for box in boxes)
    around = math.prod(max(e for _, e in axis) - min(s for s, _ in axis) for axis in zip(*boxes, strict=True))
    return min(apart, around)


def _only_copies(program: Program, fusion: Instruction) -> bool:
    """Whether a fusion inside a fusion is nothing but one operand in another layout."""
    inside = _body(program, fusion) if fusion.opcode == "fusion" else ()
    return len(inside) == 2 and inside[0].opcode == "parameter" and inside[1].opcode in ("bitcast", "copy")


def _written_bytes(program: Program, body: Sequence[Instruction], shapes: Sequence[Shape]) -> int:
    """Bytes of the results of a fusion, only what is new where a result is written in place."""
    by_name = {i.name: i for i in body}
    root = next((i for i in body if i.is_root), None)
    results = [root] if root is None or root.opcode != "tuple" else [by_name.get(o) for o in root.operands]
    if len(results) != len(shapes):
        return _main_bytes(shapes)
    total = 0
    for result, shape in zip(results, shapes, strict=True):
        while result is not None and result.opcode == "bitcast":
            result = by_name.get(result.operands[0])
        if result is None or not shape.is_in_main_memory:
            total += _main_bytes((shape,))
        elif result.opcode == "dynamic-update-slice" and result.operands[1] in by_name:
            # In the type of the result: the update may be cast as it is written.
            update = by_name[result.operands[1]].shapes[0]
            total += Shape(shape.dtype, update.dims).num_bytes
        elif result.opcode == "fusion":
            total += _written_bytes(program, _body(program, result), result.shapes)
        else:
            total += shape.num_bytes
    return total
