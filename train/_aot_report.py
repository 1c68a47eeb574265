"""What a compiled step costs, as one record."""

from dataclasses import dataclass

from jax.sharding import Mesh

from ._aot_assigned import AssignedProgram
from ._aot_chip import ASSUMPTIONS, Chip, roofline
from ._aot_compile import CompiledStep, state_bytes
from ._aot_flops import model_flops, tpu_kernel_flops
from ._config import Config
from ._exchange import exchange_work, expert_exchange
from ._hlo_count import CollectiveUse, count_program
from ._hlo_parse import parse_program

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ExchangeFacts:
    """What meets between the experts of several devices, of one layer in one micro-step.

    Attributes:
        kind: `tokens` or `weights` travel.
        token_bytes: A device sends when tokens travel, all experts chosen equally often.
        weight_bytes: A device sends when experts travel.
        buffer_rows: Copies of tokens that a device has room for; None when experts travel.
        words: All of it in words.
    """

    kind: str
    token_bytes: int
    weight_bytes: int
    buffer_rows: int | None
    words: str


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What is read off a program, of one device in one step.

    Attributes:
        flops_per_device: Counted in the program, loops by trips and kernels by formula.
        model_flops_ratio: FLOPs that the model needs, over those counted on all devices.
        bytes_per_device: HBM bytes read and written.
        collectives: By kind and mesh axis.
        unknown_kernels: Kernels without a formula: their FLOPs are missing.
        compute_seconds: Bound of the step by FLOPs.
        memory_seconds: Bound by HBM.
        network_seconds: Bound by the interconnect.
        estimated_step_seconds: The largest bound.
        estimated_mfu: Model FLOPs over what the devices could do in the estimated step.
    """

    flops_per_device: int
    model_flops_ratio: float
    bytes_per_device: int
    collectives: tuple[CollectiveUse, ...]
    unknown_kernels: dict[str, int]
    compute_seconds: float
    memory_seconds: float
    network_seconds: float
    estimated_step_seconds: float
    estimated_mfu: float


@dataclass(frozen=True, kw_only=True)
class AotReport:
    """One compiled step. Bytes are those of one device.

    Attributes:
        topology: Name of the devices.
        num_devices: JAX devices.
        mesh: Axis sizes.
        remat: Rematerialization policy.
        num_rows: Rows of the global batch.
        num_positions: Positions of a row.
        num_parameters: Of the whole model.
        fits: The program needs no more than `hbm_limit_bytes`.
        has_code: Machine code was made. Else memory is without it, and compilation ended with the buffers assigned.
        hbm_bytes_per_device: What it needs, by the compiler's account.
        hbm_limit_bytes: What a device has.
        parameter_bytes: Parameters, float32.
        optimizer_bytes: Optimizer state.
        activation_bytes: Residual stream of every layer, kept for the backward pass (by formula).
        temporary_bytes: The rest: gradients, gathered weights, buffers.
        counts: None where the compiler gave up for lack of memory: there is no program to count.
        failure: The compiler's words then, else None.
        expert_exchange: What travels along the expert axis and why; None where no experts are apart.
        lower_seconds: Wall seconds of tracing.
        compile_seconds: Wall seconds of XLA.
        compile_cpu_seconds: Processor seconds of XLA.
        assumptions: Of the estimate.
        advice: What to change when it does not fit.
    """

    topology: str
    num_devices: int
    mesh: dict[str, int]
    remat: str
    num_rows: int
    num_positions: int
    num_parameters: int
    fits: bool
    has_code: bool
    hbm_bytes_per_device: int
    hbm_limit_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    temporary_bytes: int
    counts: Counts | None
    failure: str | None
    expert_exchange: ExchangeFacts | None
    lower_seconds: float
    compile_seconds: float
    compile_cpu_seconds: float
    assumptions: tuple[str, ...]
    advice: tuple[str, ...]


def make_report(config: Config, topology: str, chip: Chip, step: CompiledStep) -> AotReport:
    """The record of `step`; without a program nothing is counted and `advice` says what to change."""
    mesh = step.mesh
    parameters, moments = state_bytes(config, mesh)
    activations = activation_bytes(config, dict(mesh.shape))
    needed = _needed(step)
    fits = step.compiled is not None and needed <= chip.hbm_bytes
    return AotReport(
        topology=topology,
        num_devices=mesh.size,
        mesh=dict(mesh.shape),
        remat=config.model.remat,
        num_rows=config.batch.num_rows,
        num_positions=config.batch.num_positions,
        num_parameters=num_parameters(config),
        fits=fits,
        has_code=step.compiled is not None and not isinstance(step.compiled, AssignedProgram),
        hbm_bytes_per_device=needed,
        hbm_limit_bytes=chip.hbm_bytes,
        parameter_bytes=parameters,
        optimizer_bytes=moments,
        activation_bytes=activations,
        temporary_bytes=max(needed - parameters - moments - activations, 0),
        counts=None if step.compiled is None else count_step(config, chip, mesh, step.compiled.as_text()),
        failure=step.failure or None,
        expert_exchange=exchange_facts(config, mesh),
        lower_seconds=step.lower_seconds,
        compile_seconds=step.compile_seconds,
        compile_cpu_seconds=step.compile_cpu_seconds,
        assumptions=ASSUMPTIONS,
        advice=() if fits else advice(config, dict(mesh.shape), parameters + moments, activations, chip),
    )


def count_step(config: Config, chip: Chip, mesh: Mesh, text: str) -> Counts:
    """What the program `text` of the step of `config` costs a device, and how long that takes at least."""
    cost = count_program(parse_program(text), dict(mesh.shape), tpu_kernel_flops)
    far_axis = config.mesh.slice_axis if config.mesh.num_slices > 1 else None
    bound = roofline(cost, chip, slice_axis=far_axis)
    seconds = bound.step_seconds
    useful = model_flops(config.model, config.batch.num_rows, config.batch.num_positions)
    return Counts(
        flops_per_device=cost.flops,
        model_flops_ratio=useful / (cost.flops * mesh.size) if cost.flops else 0.0,
        bytes_per_device=cost.num_bytes,
        collectives=cost.collectives,
        unknown_kernels=dict(cost.unknown_kernels),
        compute_seconds=bound.compute_seconds,
        memory_seconds=bound.memory_seconds,
        network_seconds=bound.network_seconds,
        estimated_step_seconds=seconds,
        estimated_mfu=useful / (seconds * mesh.size * chip.peak_flops) if seconds else 0.0,
    )


def exchange_facts(config: Config, mesh: Mesh) -> ExchangeFacts | None:
    """What travels along the expert axis of `mesh`; None where no experts are apart."""
    work, exchange = exchange_work(config, mesh), expert_exchange(config.mesh, config.model, mesh)
    if work is None:
        return None
    kind = work.choose(exchange)
    return ExchangeFacts(
        kind=kind,
        token_bytes=work.token_bytes(exchange),
        weight_bytes=work.weight_bytes(exchange),
        buffer_rows=work.buffer_rows(exchange.buffer) if kind == "tokens" else None,
        words=work.describe(exchange),
    )


def num_parameters(config: Config) -> int:
    """Entries of all parameters of the model."""
    import jax

    from ._state import abstract_model

    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model(config.model)))


def activation_bytes(config: Config, mesh: dict[str, int]) -> int:
    """Bytes of the residual stream before every layer, on one device in one micro-step."""
    model, batch = config.model, config.batch
    rows = (
        batch.num_rows // batch.gradient_accumulation_steps // (mesh["data"] * mesh["fsdp"] * mesh["expert"])
    )
    width = {"bfloat16": 2, "float32": 4, "float64": 8}[model.dtype]
    layers = model.num_layers + model.num_mtp_layers
    return layers * rows * batch.num_positions // mesh["context"] * model.hidden_size * width


def advice(config: Config, mesh: dict[str, int], state: int, activations: int, chip: Chip) -> tuple[str, ...]:
    """What to change so that a step takes less memory, the most effective first."""
    ways: list[str] = []
    if config.model.remat != "block":
        ways.append(f"model.remat=block keeps only the input of each layer (now {config.model.remat})")
    if config.step.reduce_gradients == "step" and config.batch.gradient_accumulation_steps > 1:
        ways.append("step.reduce_gradients=micro_step keeps no whole gradients between micro-steps")
    if mesh["data"] > 1:
        ways.append(
            f"move devices from mesh.data={mesh['data']} to mesh.fsdp, or set optimizer.shard_state_over_data=true"
        )
    if activations > chip.hbm_bytes // 4:
        ways.append("more batch.gradient_accumulation_steps, or a mesh.context axis: fewer tokens at a time")
    if state > chip.hbm_bytes // 2:
        ways.append(f"more devices: parameters and optimizer state alone take {state / GIB:.1f} GiB on each")
    return (*ways, "fewer rows a device")


def _needed(step: CompiledStep) -> int:
    if step.compiled is None:
        assert step.needed_bytes is not None  # or the compiler's failure would have been another one
        return step.needed_bytes
    if isinstance(step.compiled, AssignedProgram):
        return step.compiled.hbm_bytes
    memory = step.compiled.memory_analysis()
    peak = getattr(memory, "peak_memory_in_bytes", 0)
    live = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return int(max(peak, live)) + int(memory.generated_code_size_in_bytes)
