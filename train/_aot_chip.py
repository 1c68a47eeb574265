"""Published limits of TPU chips, and what a program's counts mean against them."""

import difflib
import math
import re
from dataclasses import dataclass

from ._hlo_count import ProgramCost


@dataclass(frozen=True)
class Chip:
    """One JAX device of a TPU generation (half a chip on tpu7x).

    Attributes:
        name: As in a topology name.
        peak_flops: bfloat16 FLOP/s.
        hbm_bytes: Memory that a program may use; the compiler's own limit, a little below the published size.
        hbm_bandwidth: Bytes a second.
        network_bandwidth: Bytes a second that a device can send to its neighbours, all links together.
        num_dimensions: Of the torus of its chips.
        max_chips: Of a pod; a slice has no more.
        example: Name of a slice.
    """

    name: str
    peak_flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    network_bandwidth: float
    num_dimensions: int
    max_chips: int
    example: str


GIB = 2**30
# Google Cloud TPU documentation (v5e, v5p, v6e) and the figures of ../shared/ling.md section 8 (tpu7x, per device).
CHIPS = {
    "v5e": Chip("v5e", 197e12, int(15.75 * GIB), 819e9, 200e9, 2, 256, "v5e:4x4"),
    "v5p": Chip("v5p", 459e12, int(95.74 * GIB), 2765e9, 600e9, 3, 8960, "v5p:4x4x4"),
    "v6e": Chip("v6e", 918e12, int(31.25 * GIB), 1640e9, 448e9, 2, 256, "v6e:4x4"),
    "tpu7x": Chip("tpu7x", 1153.5e12, int(94.75 * GIB), 3690e9, 600e9, 3, 9216, "tpu7x:4x4x4"),
}
# Between slices: the host's network card, shared by the chips of a host.
DATA_CENTRE_BANDWIDTH = 6.25e9


@dataclass(frozen=True)
class Roofline:
    """Lower bounds of the seconds of a step, and the estimate made from them.

    Attributes:
        compute_seconds: FLOPs at the peak rate.
        memory_seconds: HBM bytes at the full bandwidth.
        network_seconds: Collective bytes at the full bandwidth of the interconnect.
        step_seconds: The largest of the three: everything overlaps perfectly, nothing waits.
    """

    compute_seconds: float
    memory_seconds: float
    network_seconds: float

    @property
    def step_seconds(self) -> float:
        """The estimate."""
        return max(self.compute_seconds, self.memory_seconds, self.network_seconds)


ASSUMPTIONS = (
    "matrix products run at the published bfloat16 peak",
    "HBM moves every operand and result of every fused operation once, at full bandwidth",
    "collectives use all links of a device at once, on rings",
    "computation, memory and network overlap perfectly: the step takes as long as the slowest of them",
)


def chip_of(topology: str) -> Chip:
    """The chip of a topology name such as `v5p:4x4x4`, checked here: libtpu takes more names than there are slices.

    Raises:
        ValueError: The generation is not in the table, or the shape is none of its slices.
    """
    name, _, rest = topology.partition(":")
    if name not in CHIPS:
        close = difflib.get_close_matches(name.lower().split("-")[0], CHIPS, n=1, cutoff=0.5)
        meant = f"; did you mean {close[0]}, as in {CHIPS[close[0]].example}?" if close else ""
        raise ValueError(f"topology must start with one of {', '.join(CHIPS)}, got {topology!r}{meant}")
    chip = CHIPS[name]
    match = re.fullmatch(r"([1-9]\d*(?:x[1-9]\d*)+)(?:_twisted|_untwisted)?", rest)
    sizes = [int(size) for size in match.group(1).split("x")] if match else []
    if not 2 <= len(sizes) <= chip.num_dimensions or math.prod(sizes) > chip.max_chips:
        raise ValueError(
            f"topology {topology!r}: {name}: needs the shape of a slice, at most {chip.num_dimensions} sizes"
            f" and {chip.max_chips} chips, as in {chip.example}"
        )
    return chip


def roofline(cost: ProgramCost, chip: Chip, *, slice_axis: str | None = None) -> Roofline:
    """Bounds for a program of `cost`; with `slice_axis`, collectives along it use the data-centre network."""
    far = sum(use.wire_bytes for use in cost.collectives if slice_axis in use.axis.split(" x "))
    near = sum(use.wire_bytes for use in cost.collectives) - far
    return Roofline(
        compute_seconds=cost.flops / chip.peak_flops,
        memory_seconds=cost.num_bytes / chip.hbm_bandwidth,
        network_seconds=near / chip.network_bandwidth + far / DATA_CENTRE_BANDWIDTH,
    )
