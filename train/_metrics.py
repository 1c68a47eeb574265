"""Metrics: sums over a log interval, the row made of them, and the files rows are written to.

`metrics.jsonl` holds what the mathematics decides and is equal, to the bit, however often a run was interrupted;
what the clock decides goes to `perf.jsonl`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from eqx_loss import (
    LossLogs,
    LossOutput,
    LossSemantics,
    Objective,
    estimator_gap,
    perplexity,
    reported_loss,
)

from ._step import StepOutput

METRICS_FILE = "metrics.jsonl"
PERF_FILE = "perf.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class StepSums(NamedTuple):
    """What adds over the steps of an interval.

    Attributes:
        objective: Sum over steps of the objective and its terms.
        logs: Sums and counts, pooled.
        grad_norm: Sum over steps of the clipped norm.
        raw_grad_norm: Sum over steps of the norm before clipping.
        num_skipped: Steps without an update.
    """

    objective: Objective
    logs: LossLogs
    grad_norm: Any
    raw_grad_norm: Any
    num_skipped: Any


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The log interval in progress; part of every checkpoint.

    Attributes:
        num_steps: Steps added so far.
        leaves: Arrays of their `StepSums`, float64 on the host, in tree order; empty before the first step.
        learning_rate: Rate of the last step.
        max_logits: Largest attention logit of the interval over steps, layers and heads; None when not recorded.
        overflow: Copies of tokens dropped for lack of room in all steps and layers; None when there is always room.
    """

    num_steps: int = 0
    leaves: tuple[np.ndarray, ...] = ()
    learning_rate: float = 0.0
    max_logits: float | None = None
    overflow: int | None = None

    def add(self, output: StepOutput) -> "Interval":
        """This interval and one more step. Waits for the step and copies its output to the host."""
        output = jax.device_get(output)
        sums = StepSums(
            output.objective, output.logs, output.grad_norm, output.raw_grad_norm, output.is_skipped
        )
        # float64: the sum does not depend on where an interruption cut it, and counts stay exact.
        new = [np.asarray(leaf, dtype=np.float64) for leaf in jax.tree.leaves(sums)]
        total = [np.asarray(a + b) for a, b in zip(self.leaves, new, strict=True)] if self.leaves else new
        return Interval(
            num_steps=self.num_steps + 1,
            leaves=tuple(total),
            learning_rate=float(output.learning_rate),
            max_logits=_largest(self.max_logits, output.max_logits),
            overflow=_added(self.overflow, output.overflow),
        )

    def to_json(self) -> dict[str, Any]:
        """Exact JSON of this interval."""
        return {
            "num_steps": self.num_steps,
            "leaves": [leaf.tolist() for leaf in self.leaves],
            "learning_rate": self.learning_rate,
            "max_logits": self.max_logits,
            "overflow": self.overflow,
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "Interval":
        """Inverse of `to_json`."""
        leaves = tuple(np.asarray(leaf, dtype=np.float64) for leaf in tree["leaves"])
        return cls(
            num_steps=tree["num_steps"],
            leaves=leaves,
            learning_rate=tree["learning_rate"],
            # Not in checkpoints made before they were logged.
            max_logits=tree.get("max_logits"),
            overflow=tree.get("overflow"),
        )


def interval_row(
    interval: Interval, like: StepOutput, semantics: LossSemantics, gradient_accumulation_steps: int
) -> dict[str, float]:
    """The metrics of an interval under MaxText's names and ours, losses in nats.

    Losses are pooled sums over pooled counts. `loss` is MaxText's reported loss; the objective, its lm term and
    the gradient norms are means over steps; `total_weights` is the mean number of scored tokens of a step; the
    learning rate is that of the last step, `max_logits` (where recorded) the largest of all, `moe_overflow_copies`
    (where the buffer of the experts is bounded) the number of copies of tokens dropped in all steps. Router terms and
    MTP losses are means over layers and depths, without coefficient but for `mtp_loss` and `z_loss`, whose
    MaxText namesakes carry theirs.

    Args:
        interval: At least one step.
        like: Output of any step of the run: gives the structure.
        semantics: Normalization of the run.
        gradient_accumulation_steps: Decides what `loss` is.
    """
    structure = jax.tree.structure(
        StepSums(like.objective, like.logs, like.grad_norm, like.raw_grad_norm, like.is_skipped)
    )
    sums = jax.tree.unflatten(structure, [jnp.asarray(leaf, jnp.float32) for leaf in interval.leaves])
    values = _values(sums, jnp.float32(interval.num_steps), semantics, gradient_accumulation_steps)
    row = {f"learning/{name}": float(value) for name, value in jax.device_get(values).items()}
    row["learning/num_skipped_steps"] = float(sums.num_skipped)
    row["learning/current_learning_rate"] = interval.learning_rate
    if interval.max_logits is not None:
        row["learning/max_logits"] = interval.max_logits
    if interval.overflow is not None:
        row["learning/moe_overflow_copies"] = float(interval.overflow)
    return row


def _largest(before: float | None, max_logits: Array | np.ndarray | None) -> float | None:
    """The largest of both; NaN when any logit is."""
    if max_logits is None:
        return before
    top = np.max(np.asarray(max_logits), initial=-np.inf)
    return float(np.max([-np.inf if before is None else before, top]))


def _added(before: int | None, overflow: Array | np.ndarray | None) -> int | None:
    """Both counts together, exact."""
    if overflow is None:
        return before
    return (before or 0) + int(np.sum(overflow, dtype=np.int64))


@eqx.filter_jit
def _values(
    sums: StepSums, num_steps: Float[Array, ""], semantics: LossSemantics, gradient_accumulation_steps: int
) -> dict[str, Float[Array, ""]]:
    logs = sums.logs
    objective: Objective = jax.tree.map(lambda x: x / num_steps, sums.objective)
    output = LossOutput(objective=objective, logs=logs)
    raw_mtp = _layer_mean(logs.mtp.value())
    return {
        "loss": reported_loss(output, semantics, gradient_accumulation_steps=gradient_accumulation_steps),
        "objective": objective.total,
        "objective_lm": objective.lm,
        "lm_loss": logs.lm.value(),
        "perplexity": perplexity(logs.lm),
        "mtp_loss": semantics.mtp_loss_scaling_factor * raw_mtp,
        "raw_mtp_loss": raw_mtp,
        "moe_z_loss": _layer_mean(logs.router_z.value()),
        "moe_lb_loss": _layer_mean(logs.load_balance.value()),
        "z_loss": semantics.z_loss_multiplier * logs.lm_z.value(),
        "lm_estimator_gap": estimator_gap(logs.lm_group, logs.lm),
        "moe_z_estimator_gap": _layer_mean(estimator_gap(logs.router_z, logs.router_z_global)),
        "grad_norm": sums.grad_norm / num_steps,
        "raw_grad_norm": sums.raw_grad_norm / num_steps,
        "total_weights": logs.lm.count / num_steps,
    }


def _layer_mean(values: Float[Array, " L"]) -> Float[Array, ""]:
    """Mean over layers or depths, each counted once; 0 when there is none."""
    return jnp.mean(values) if values.size else jnp.zeros((), values.dtype)


class MetricFiles:
    """The metric files of a run folder; rows are on disk when a call returns."""

    def __init__(self, folder: Path | None, *, start_step: int, use_tensorboard: bool) -> None:
        """Opens the files; rows beyond `start_step` are cut off, they will be written again.

        Args:
            folder: The run folder; None writes nothing (all processes but the first).
            start_step: Steps done when the run goes on; 0 begins afresh.
            use_tensorboard: True also writes event files.
        """
        self._files: dict[str, IO[str]] = {}
        self._tensorboard = None
        if folder is None:
            return
        for name in (METRICS_FILE, PERF_FILE):
            _cut_rows(folder / name, start_step)
            self._files[name] = (folder / name).open("a", encoding="utf-8")
        if use_tensorboard:
            self._tensorboard = _event_writer(folder / TENSORBOARD_FOLDER, start_step)

    def write_metrics(self, step: int, row: Mapping[str, float]) -> None:
        """Appends a row that the mathematics decides."""
        self._write(METRICS_FILE, step, row)

    def write_perf(self, step: int, row: Mapping[str, float]) -> None:
        """Appends a row that the clock decides."""
        self._write(PERF_FILE, step, row)

    def close(self) -> None:
        """Closes every file."""
        for file in self._files.values():
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write(self, name: str, step: int, row: Mapping[str, float]) -> None:
        if not self._files:
            return
        file = self._files[name]
        file.write(json.dumps({"step": step, **row}) + "\n")
        file.flush()
        if self._tensorboard is not None:
            for metric, value in row.items():
                self._tensorboard.add_scalar(metric, value, step)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metric file in order; an incomplete last line (a killed run) is left out."""
    return list(_rows(path))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _cut_rows(path: Path, last_step: int) -> None:
    rows = [row for row in _rows(path) if row["step"] <= last_step]
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)


def _event_writer(folder: Path, start_step: int) -> Any:
    # 0.1 s to import: only for runs that want event files.
    from tensorboardX import SummaryWriter

    # purge_step hides what an interrupted run wrote beyond its checkpoint.
    return SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)
