"""Learning-rate schedules: constant, cosine and warm-up-stable-decay, each with a linear warm-up."""

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """A learning rate over steps.

    Attributes:
        peak: Rate at the end of the warm-up.
        kind: `constant` stays at the peak; `cosine` falls to `final` at `total_steps`; `wsd` stays at the
            peak and falls to `final` over the last `decay_steps` steps.
        warmup_steps: Steps of linear warm-up; the step done n-th (from 1) has the rate peak * n /
            warmup_steps.
        total_steps: Steps of the run; the rate stays at `final` after them. Not used by `constant`.
        decay_steps: Steps of the fall of `wsd`.
        final: Rate at the end of the fall.
        decay_shape: Of `wsd`: `linear`, or `sqrt` for 1 - sqrt(progress) (arXiv:2405.18392).
    """

    peak: float
    kind: Literal["constant", "cosine", "wsd"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    decay_steps: int = 0
    final: float = 0.0
    decay_shape: Literal["linear", "sqrt"] = "sqrt"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise ValueError(f"schedule peak must be a positive number, got {self.peak}")
        if not 0 <= self.final <= self.peak:
            raise ValueError(f"schedule final must be in [0, peak={self.peak}], got {self.final}")
        for name in ("warmup_steps", "total_steps", "decay_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"schedule {name} must not be negative, got {getattr(self, name)}")
        if self.kind == "cosine" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"a cosine schedule needs total_steps > warmup_steps={self.warmup_steps},"
                f" got {self.total_steps}"
            )
        if self.kind == "wsd":
            if self.decay_steps < 1:
                raise ValueError(f"a wsd schedule needs decay_steps of at least 1, got {self.decay_steps}")
            if self.warmup_steps + self.decay_steps > self.total_steps:
                raise ValueError(
                    f"a wsd schedule needs warmup_steps + decay_steps <= total_steps={self.total_steps},"
                    f" got {self.warmup_steps} + {self.decay_steps}"
                )


def learning_rate(schedule: ScheduleConfig, step: Int[Array, ""]) -> Float[Array, ""]:
    """Rate of the update that follows `step` steps done, float32.

    With n = step + 1: the warm-up is peak * n / warmup_steps, so no step is taken at rate 0 and step
    `warmup_steps` has the peak. The falls reach `final` at n = total_steps.
    """
    number = step.astype(jnp.float32) + 1.0
    after = _after_warmup(schedule, number)
    if schedule.warmup_steps == 0:
        return after
    rising = schedule.peak * number / schedule.warmup_steps
    return jnp.where(number <= schedule.warmup_steps, rising, after)


def _after_warmup(schedule: ScheduleConfig, number: Float[Array, ""]) -> Float[Array, ""]:
    peak, final = schedule.peak, schedule.final
    match schedule.kind:
        case "constant":
            return jnp.full((), peak, jnp.float32)
        case "cosine":
            length = schedule.total_steps - schedule.warmup_steps
            progress = jnp.clip((number - schedule.warmup_steps) / length, 0.0, 1.0)
            return final + (peak - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        case "wsd":
            start = schedule.total_steps - schedule.decay_steps
            progress = jnp.clip((number - start) / schedule.decay_steps, 0.0, 1.0)
            fall = progress if schedule.decay_shape == "linear" else jnp.sqrt(progress)
            return final + (peak - final) * (1.0 - fall)
