"""The factor a loss needs in a framework that averages gradients behind its back.

Plain Python: the numbers depend on sizes and counts alone.
"""

import dataclasses
from typing import Literal

Reduction = Literal["sum", "mean"]
LocalLoss = Literal["weighted_sum", "token_sum", "token_mean"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reductions:
    """What a framework does to gradients after `backward`, per axis.

    Attributes:
        data_ranks: Data-parallel ranks (data times fsdp).
        over_data: Whether their gradients are summed or averaged.
        context_ranks: Context-parallel ranks: shards of one sequence.
        over_context: The same for them.
        micro_steps: Accumulation micro-steps of one optimizer step.
        over_micro_steps: "mean" when the framework divides the loss or the gradient by their number.
        divides_by_tokens: True when the summed gradient is divided by the global token count once
            more before the optimizer (Megatron `calculate_per_token_loss=True`).
    """

    data_ranks: int = 1
    over_data: Reduction = "sum"
    context_ranks: int = 1
    over_context: Reduction = "sum"
    micro_steps: int = 1
    over_micro_steps: Reduction = "sum"
    divides_by_tokens: bool = False

    def __post_init__(self) -> None:
        for name in ("data_ranks", "context_ranks", "micro_steps"):
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        for name in ("over_data", "over_context", "over_micro_steps"):
            reduction = getattr(self, name)
            if reduction not in ("sum", "mean"):
                raise ValueError(f"{name} must be 'sum' or 'mean', got {reduction!r}")

    @property
    def divisor(self) -> int:
        """The product of the sizes of all averaged axes."""
        divisor = self.data_ranks if self.over_data == "mean" else 1
        divisor *= self.context_ranks if self.over_context == "mean" else 1
        return divisor * (self.micro_steps if self.over_micro_steps == "mean" else 1)

    @classmethod
    def torch_ddp(cls, *, ranks: int, micro_steps: int = 1) -> "Reductions":
        """PyTorch DDP or FSDP2 with its default: mean over ranks; `backward` calls add up."""
        return cls(data_ranks=ranks, over_data="mean", micro_steps=micro_steps)

    @classmethod
    def optax_multi_steps(cls, *, micro_steps: int) -> "Reductions":
        """`optax.MultiSteps` under `jit`: mean over micro-steps; device axes are global arrays."""
        return cls(micro_steps=micro_steps, over_micro_steps="mean")

    @classmethod
    def jax_pmean(cls, *, ranks: int, micro_steps: int = 1) -> "Reductions":
        """`pmap` or `shard_map` with `pmean` of gradients that were summed over micro-steps."""
        return cls(data_ranks=ranks, over_data="mean", micro_steps=micro_steps)

    @classmethod
    def hf_trainer(cls, *, ranks: int = 1, micro_steps: int = 1) -> "Reductions":
        """Hugging Face Trainer with a `compute_loss_func` that uses `num_items_in_batch`.

        DDP's mean is undone by the Trainer's factor `num_processes`
        (`average_tokens_across_devices`), and the loss is not divided by the micro-steps: all
        sums. Source: transformers 5.24 `trainer.py` (`compute_loss`, `training_step`).
        """
        return cls(data_ranks=ranks, micro_steps=micro_steps)

    @classmethod
    def torchtitan(cls, *, ranks: int = 1, micro_steps: int = 1) -> "Reductions":
        """torchtitan 0.3: FSDP's division is switched off (`set_gradient_divide_factor(1.0)`)."""
        return cls(data_ranks=ranks, micro_steps=micro_steps)

    @classmethod
    def megatron(
        cls,
        *,
        calculate_per_token_loss: bool,
        data_ranks: int = 1,
        context_ranks: int = 1,
        micro_steps: int = 1,
    ) -> "Reductions":
        """Megatron-core 0.15 and later with a `loss_func` that returns (loss, num_tokens, logs).

        =False: a micro-batch's loss is divided by its `num_tokens` (return 1) and by the
        micro-batches, gradients are averaged over data and context ranks. =True: sums everywhere,
        then one division by the global sum of `num_tokens`. Source: megatron-core 0.16.1
        `schedules.py` (`forward_step_calc_loss`), `distributed_data_parallel.py`,
        `finalize_model_grads.py`.
        """
        over: Reduction = "sum" if calculate_per_token_loss else "mean"
        return cls(
            data_ranks=data_ranks,
            over_data=over,
            context_ranks=context_ranks,
            over_context=over,
            micro_steps=micro_steps,
            over_micro_steps=over,
            divides_by_tokens=calculate_per_token_loss,
        )


def scale_for(
    reductions: Reductions,
    local_loss: LocalLoss = "weighted_sum",
    *,
    num_tokens: int | float | None = None,
    local_num_tokens: int | float | None = None,
) -> float:
    """Factor of a local loss such that the reduced gradient is that of the global objective.

    With the weights of the whole global batch, the objective is the sum of all local
    `sum(w * xent)`; each needs the factor `reductions.divisor`, which undoes every average.
    Without weights the objective is the global token mean:

    | local loss | factor |
    |---|---|
    | "weighted_sum": `sum(w * xent)` of the local rows | `divisor` |
    | "token_sum": sum over the local scored tokens | `divisor / num_tokens` |
    | "token_mean": their mean (0 when there is none) | `divisor * local_num_tokens / num_tokens` |

    times `num_tokens` when the framework divides by it itself. A step without a scored token has
    factor 0 (1 for "token_sum" where the framework divides).

    Args:
        reductions: What the framework does.
        local_loss: What the local loss is.
        num_tokens: Scored tokens of the whole global batch: all ranks and micro-steps.
        local_num_tokens: Those of this rank and micro-step; for "token_mean".

    Raises:
        ValueError: A count that the case needs is missing or negative.
    """
    if local_loss not in ("weighted_sum", "token_sum", "token_mean"):
        raise ValueError(f"local_loss must be weighted_sum, token_sum or token_mean, got {local_loss!r}")
    divisor = float(reductions.divisor)
    if local_loss == "weighted_sum":
        return divisor * (_count(num_tokens, "num_tokens") if reductions.divides_by_tokens else 1.0)
    share = 1.0 if local_loss == "token_sum" else _count(local_num_tokens, "local_num_tokens")
    if reductions.divides_by_tokens:
        return divisor * share
    total = _count(num_tokens, "num_tokens")
    return divisor * share / total if total else 0.0


def _count(value: int | float | None, name: str) -> float:
    if value is None or value < 0:
        raise ValueError(
            f"{name} must be a count >= 0 for this local loss, got {value}; sum it over all ranks"
        )
    return float(value)
