"""The configuration of a run: one frozen object per concern, each next to what it configures."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from eqx_loss import LossSemantics
from model import ModelConfig, MoeConfig

from ._data import DataConfig
from ._mesh import MeshConfig
from ._optimizer import OptimizerConfig
from ._step import StepConfig
from ._tokenizer import ByteTokenizer


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Identity and length of a run.

    Attributes:
        num_steps: Optimizer steps of the whole run, resumed parts included.
        folder: Where everything the run writes goes; None is `runs/` and the name of the config file.
        seed: Decides the initial parameters and the order of the data.
    """

    num_steps: int
    folder: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Sizes of the global batch of one optimizer step.

    Attributes:
        num_rows: Rows over all devices and micro-steps.
        num_positions: Positions of a row.
        gradient_accumulation_steps: Micro-steps of equal size, one after the other.
    """

    num_rows: int
    num_positions: int
    gradient_accumulation_steps: int = 1

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"num_rows must be at least 1, got {self.num_rows}")
        if self.num_positions < 2:
            raise ValueError(f"num_positions must be at least 2, got {self.num_positions}")
        if self.gradient_accumulation_steps < 1:
            raise ValueError(
                f"gradient_accumulation_steps must be at least 1, got {self.gradient_accumulation_steps}"
            )
        if self.num_rows % self.gradient_accumulation_steps:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} must divide "
                f"num_rows={self.num_rows}; change one of them"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is written to disk.

    Attributes:
        every_steps: Distance between checkpoints in steps; the last step always has one.
        num_kept: Newest checkpoints that stay on disk, at least 1.
    """

    every_steps: int = 100
    num_kept: int = 2

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, got {self.every_steps}")
        if self.num_kept < 1:
            raise ValueError(f"num_kept must be at least 1, got {self.num_kept}")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and on how much of the validation split the model is scored.

    Attributes:
        every_steps: Distance between evaluations in steps; None evaluates after the last step only.
        num_batches: Batches of `batch.num_rows` rows, the same ones every time; fewer if the split is smaller.
    """

    every_steps: int | None = None
    num_batches: int = 8

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"every_steps must be at least 1 or null, got {self.every_steps}")
        if self.num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, got {self.num_batches}")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """How often a row of metrics is written.

    Attributes:
        every_steps: Steps of an interval. A row holds sums over sums of counts of its whole interval.
        use_tensorboard: True also writes TensorBoard event files.
    """

    every_steps: int = 1
    use_tensorboard: bool = True

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, got {self.every_steps}")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on."""

    # Read by pydantic, which hands it on to the nested sections.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

    run: RunConfig
    model: ModelConfig
    loss: LossSemantics
    batch: BatchConfig
    data: DataConfig
    optimizer: OptimizerConfig
    step: StepConfig = field(default_factory=StepConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()


def config_problems(config: Config) -> list[str]:
    """Rules that join several sections; one line for each that is broken, empty when all hold."""
    problems: list[str] = []
    batch, loss = config.batch, config.loss
    rows = batch.num_rows // batch.gradient_accumulation_steps
    if rows % loss.micro_batch_size:
        problems.append(
            f"loss.micro_batch_size: must divide the {rows} rows of a micro-step (batch.num_rows="
            f"{batch.num_rows} / gradient_accumulation_steps={batch.gradient_accumulation_steps}), "
            f"got {loss.micro_batch_size}; change one of them"
        )
    if config.model.vocab_size < ByteTokenizer().vocab_size:
        problems.append(
            f"model.vocab_size: must be at least the {ByteTokenizer().vocab_size} ids of the byte "
            f"tokenizer, got {config.model.vocab_size}"
        )
    return problems


def config_warnings(config: Config) -> list[str]:
    """Legal but surprising choices, one line each."""
    warnings: list[str] = []
    if not config.loss.is_megatron_pair:
        warnings.append(
            "loss: calculate_per_token_loss=false with mtp_per_layer_loss_norm=false: no Megatron run does this"
        )
    return warnings + _buffer_warnings(config.mesh, config.model.moe)


def _buffer_warnings(mesh: MeshConfig, moe: MoeConfig | None) -> list[str]:
    """What a bounded buffer of the experts does to copies of tokens, if there is one and it can overflow."""
    if mesh.expert_buffer is None:
        return []
    setting = f"mesh.expert_buffer={mesh.expert_buffer:g}"
    if moe is None or mesh.expert == 1:
        return [f"{setting} has no effect: no experts are on other devices"]
    count, chosen = moe.num_experts if mesh.expert == -1 else mesh.expert, moe.num_experts_per_tok
    most = count * min(chosen, moe.num_experts // count) / chosen
    if mesh.expert_buffer >= most:
        return []
    return [
        f"{setting}: a device may be sent up to {most:g} times the even share of copies of tokens; those beyond"
        f" {mesh.expert_buffer:g} times are dropped and counted as learning/moe_overflow_copies; null drops none"
    ]
