"""A compiled XLA program as data: computations, instructions, shapes, and how often each computation runs."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

BITS = {
    "pred": 8,
    "s2": 2,
    "u2": 2,
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "f16": 16,
    "bf16": 16,
    "s32": 32,
    "u32": 32,
    "f32": 32,
    "s64": 64,
    "u64": 64,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "token": 0,
    "opaque": 0,
}
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=\s]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{\s*$")
_CALLS = frozenset({"call", "call-start"})
_NAME = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|called_computations|true_computation"
    r"|false_computation)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_TRIPS = re.compile(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
# A loop whose trips depend on the data says by its scope how often it is expected to run: N trips, or N in M loops.
_EXPECTED_TRIPS = re.compile(r'op_name="[^"]*\btrips_(\d+)(?:_(\d+))?\)*/while"')
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Shape:
    """One array of a result.

    Attributes:
        dtype: XLA's name of the element type.
        dims: Sizes.
        is_in_main_memory: False in a faster or a foreign memory, such as a TPU's VMEM.
    """

    dtype: str
    dims: tuple[int, ...]
    is_in_main_memory: bool = True

    @property
    def num_elements(self) -> int:
        """Product of the sizes."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding to tiles."""
        bits = BITS.get(
            self.dtype, 8 if self.dtype.startswith("f8") else 4 if self.dtype.startswith("f4") else 32
        )
        return self.num_elements * bits // 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Unique in the program.
        opcode: XLA's name of the operation.
        shapes: Arrays of the result, a tuple flattened.
        operands: Names of the operands.
        attributes: Everything after the operands.
        is_root: The result of its computation.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(shape.num_bytes for shape in self.shapes)

    def called(self) -> Iterator[tuple[str, str]]:
        """(kind of call, computation) of every computation it runs."""
        for kind, many, one in _CALLED.findall(self.attributes):
            for target in (many or one).split(","):
                if target.strip():
                    yield kind, target.strip().lstrip("%")


@dataclass(frozen=True)
class Program:
    """A parsed program.

    Attributes:
        computations: Instructions of every computation, by name.
        entry: Name of the computation that runs first.
    """

    computations: dict[str, tuple[Instruction, ...]]
    entry: str


def parse_program(text: str) -> Program:
    """The program of `compiled.as_text()`.

    Raises:
        ValueError: The text has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if current is None:
            head = _HEAD.match(line)
            if head:
                current = head.group(2)
                computations[current] = []
                entry = current if head.group(1) else entry
        # A string of metadata may go on over lines that begin with a brace.
        elif line == "}" or line.startswith('}, execution_thread="'):
            current = None
        else:
            instruction = _instruction(line)
            if instruction is not None:
                computations[current].append(instruction)
    if entry is None:
        raise ValueError("the text holds no ENTRY computation; pass compiled.as_text()")
    return Program({name: tuple(body) for name, body in computations.items()}, entry)


def run_counts(program: Program) -> dict[str, int]:
    """How often each computation runs in one run of the program.

    The body of a loop runs as often as XLA says (`known_trip_count`), else as its condition's bound says,
    else as the scope `trips_N` or `trips_N_M` around it says, else once. Every branch of a conditional counts once.
    Functions applied per element (reducers, comparators) do not count. A program from the persistent
    compilation cache may carry the scopes of older code.
    """
    counts: dict[str, int] = dict.fromkeys(program.computations, 0)
    pending = [(program.entry, 1)]
    while pending:
        name, times = pending.pop()
        counts[name] += times
        for instruction in program.computations[name]:
            for kind, target in instruction.called():
                if target not in counts or (kind == "to_apply" and instruction.opcode not in _CALLS):
                    continue
                trips = trip_count(program, instruction) if instruction.opcode == "while" else 1
                trips = 1 if trips is None else trips
                pending.append((target, int(times * trips)))
    return counts


def trip_count(program: Program, loop: Instruction) -> int | Fraction | None:
    """Number of runs of the body of a `while`; None when the program does not say."""
    known = _TRIPS.search(loop.attributes)
    if known:
        return int(known.group(1))
    condition = next((target for kind, target in loop.called() if kind == "condition"), None)
    body = program.computations.get(condition or "", ())
    bounds = [
        re.search(r"constant\((\d+)\)", "constant(" + i.attributes) for i in body if i.opcode == "constant"
    ]
    values = [int(match.group(1)) for match in bounds if match]
    is_below = any(i.opcode == "compare" and "direction=LT" in i.attributes for i in body)
    if is_below and len(values) == 1:
        return values[0]
    expected = _EXPECTED_TRIPS.search(loop.attributes)
    return Fraction(int(expected.group(1)), int(expected.group(2) or 1)) if expected else None


def _instruction(line: str) -> Instruction | None:
    start = _NAME.match(line)
    if start is None:
        return None
    kind, rest = _split_type(line[start.end() :])
    opcode = re.match(r"[\w\-]+", rest)
    if opcode is None:
        return None
    operands, attributes = _split_operands(rest[opcode.end() :])
    # What is in the brackets of these two is no operand but the value, or the number of the parameter.
    if opcode.group(0) in ("constant", "parameter"):
        attributes = operands + ")" + attributes
    return Instruction(
        name=start.group(2),
        opcode=opcode.group(0),
        shapes=tuple(
            Shape(
                dtype, tuple(int(n) for n in re.findall(r"\d+", dims)), re.search(r"S\([1-9]", layout) is None
            )
            for dtype, dims, layout in _SHAPE.findall(kind)
        ),
        operands=tuple(_OPERAND.findall(operands)),
        attributes=attributes,
        is_root=bool(start.group(1)),
    )


def _split_type(text: str) -> tuple[str, str]:
    """The result type and the rest; a tuple type has nested brackets."""
    if not text.startswith("("):
        head, _, rest = text.partition(" ")
        return head, rest.lstrip()
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: i + 1], text[i + 1 :].lstrip()
    return text, ""


def _split_operands(text: str) -> tuple[str, str]:
    """What is in the first brackets, and what follows them."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and i > 0:
            return text[1:i], text[i + 1 :]
    return text, ""
