"""Published limits of TPU chips, and what a program's counts mean against them."""

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
    """

    name: str
    peak_flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    network_bandwidth: float


GIB = 2**30
# Google Cloud TPU documentation (v5e, v5p, v6e) and the figures of ../shared/ling.md section 8 (tpu7x, per device).
CHIPS = {
    "v5e": Chip("v5e", 197e12, int(15.75 * GIB), 819e9, 200e9),
    "v5p": Chip("v5p", 459e12, int(95.74 * GIB), 2765e9, 600e9),
    "v6e": Chip("v6e", 918e12, int(31.25 * GIB), 1640e9, 448e9),
    "tpu7x": Chip("tpu7x", 1153.5e12, int(94.75 * GIB), 3690e9, 600e9),
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
    """The chip of a topology name such as `v5p:4x4x4`.

    Raises:
        ValueError: The generation is not in the table.
    """
    name = topology.split(":")[0]
    if name not in CHIPS:
        raise ValueError(f"topology must start with one of {', '.join(CHIPS)}, got {topology!r}")
    return CHIPS[name]


def roofline(cost: ProgramCost, chip: Chip, *, slice_axis: str | None = None) -> Roofline:
    """Bounds for a program of `cost`; with `slice_axis`, collectives along it use the data-centre network."""
    far = sum(use.wire_bytes for use in cost.collectives if slice_axis in use.axis.split(" x "))
    near = sum(use.wire_bytes for use in cost.collectives) - far
    return Roofline(
        compute_seconds=cost.flops / chip.peak_flops,
        memory_seconds=cost.num_bytes / chip.hbm_bandwidth,
        network_seconds=near / chip.network_bandwidth + far / DATA_CENTRE_BANDWIDTH,
    )
