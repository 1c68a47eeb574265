"""The training loop: the only place where steps, data, metrics, evaluation and checkpoints meet.

Step n + 1 is dispatched before the output of step n is read, so the device never waits for a log.
"""

import contextlib
import math
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from ._checkpoint import CheckpointError, Checkpoints, Record
from ._clock import Clock
from ._config import Config
from ._config_load import ConfigError, dump_config
from ._data import Dataset, load_dataset
from ._display import Display
from ._distributed import is_first_process, largest_of_processes, meet
from ._evaluate import evaluation_row
from ._examples import Batch
from ._exchange import dropped_words, exchange_words
from ._manifest import make_manifest, manifest_changes, version_changes
from ._metrics import Interval, MetricFiles, interval_row
from ._program import Program, make_program
from ._report import draw_report, summary_table
from ._run_folder import CHECKPOINT_FOLDER, RunFolder
from ._signals import StopRequest
from ._state import TrainState, abstract_model
from ._step import StepOutput

# A gradient that stays NaN or infinite for so long does not recover by itself.
MAX_SKIPPED_IN_A_ROW = 20


class TrainingError(RuntimeError):
    """Training cannot go on; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        step: Steps done.
        signal: The signal that stopped it; None when all steps are done.
        folder: The run folder.
    """

    step: int
    signal: signal.Signals | None
    folder: Path


def train(
    config: Config,
    *,
    console: Console,
    is_fresh: bool = False,
    is_forced: bool = False,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> RunResult:
    """Trains as `config` says, from the newest checkpoint of its run folder if there is one.

    Args:
        config: The run.
        console: Where progress is shown; with several processes the first one alone shows and writes.
        is_fresh: True first deletes what the run folder holds.
        is_forced: True continues although configuration or data are not those of the checkpoint.
        devices: Where to train; None is all devices of all processes.
    Raises:
        ConfigError: The data, the devices or an earlier run in the folder do not suit the configuration.
        RunFolderError: The folder cannot be used.
        CheckpointError: The newest checkpoint cannot be used.
        TrainingError: The gradient was not finite for many steps in a row.
    """
    folder = Path(config.run.folder or "runs/run")
    try:
        dataset = load_dataset(config.data, config.batch.num_positions)
        program = make_program(config, dataset, devices)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not is_first_process():
        console = Console(quiet=True)
    with (
        RunFolder(folder, is_fresh=is_fresh) if is_first_process() else contextlib.nullcontext() as run_folder
    ):
        meet("run folder")  # it is ready before the others read it
        with Checkpoints(folder / CHECKPOINT_FOLDER, config.checkpoint.num_kept) as checkpoints:
            manifest = make_manifest(config, dataset)
            start = _begin(config, program, checkpoints, manifest, console, is_forced)
            if run_folder is not None:
                run_folder.write_config(dump_config(config))
            console.print(
                _headline(config, dataset, program, start.record.step), highlight=False, soft_wrap=True
            )
            with StopRequest() as stop:
                result = _Run(config, program, checkpoints, start, folder, console, stop).run()
        if run_folder is not None:
            _finish(result, console)
        return result


@dataclass(frozen=True)
class _Start:
    """Where a run begins: the state and what was saved with it."""

    state: TrainState
    record: Record


def _begin(
    config: Config,
    program: Program,
    checkpoints: Checkpoints,
    manifest: dict[str, Any],
    console: Console,
    is_forced: bool,
) -> _Start:
    step = checkpoints.latest_step
    if step is None:
        record = Record(step=0, manifest=manifest, accumulator=Interval().to_json())
        return _Start(program.init_state(), record)
    record = checkpoints.read_record(step)
    changes = manifest_changes(record.manifest, manifest)
    if changes and not is_forced:
        raise ConfigError(
            "\n".join(
                [
                    f"run folder {config.run.folder!r} was trained to step {step} with another configuration or data; "
                    "restore it, set run.folder, begin again with --fresh, or continue with --force",
                    *(f"  {line}" for line in changes),
                ]
            )
        )
    for line in changes:
        console.print(f"forced: {line}", highlight=False, markup=False)
    for line in version_changes(record.manifest, manifest):
        console.print(f"note: {line}: the last bits may differ", highlight=False, markup=False)
    state = checkpoints.restore(step, program.state_like())
    if int(state.step) != step:
        raise CheckpointError(
            f"checkpoint {step} holds the state of step {int(state.step)}; delete its folder"
        )
    return _Start(state, Record(step=step, manifest=manifest, accumulator=record.accumulator))


class _Run:
    """One call of `train` from its start step on. Mutable, and nothing outlives it but files."""

    def __init__(
        self,
        config: Config,
        program: Program,
        checkpoints: Checkpoints,
        start: _Start,
        folder: Path,
        console: Console,
        stop: StopRequest,
    ) -> None:
        self._config = config
        self._program = program
        self._checkpoints = checkpoints
        self._folder = folder
        self._stop = stop
        self._state = start.state
        self._manifest = start.record.manifest
        self._step = start.record.step
        self._interval = Interval.from_json(start.record.accumulator)
        self._pending: tuple[int, StepOutput] | None = None
        self._saved_step = self._step
        self._num_skipped_in_a_row = 0
        self._stopped_by: signal.Signals | None = None
        self._clock = Clock()
        self._display = Display(console, num_steps=config.run.num_steps, start_step=self._step)

    def run(self) -> RunResult:
        num_steps = self._config.run.num_steps
        if self._step < num_steps:
            seconds = self._program.compile(self._state)
            meet("compiled")
            self._display.say(f"compiled the step in {seconds:.1f} s")
            self._files = MetricFiles(
                self._folder if is_first_process() else None,
                start_step=self._step,
                use_tensorboard=self._config.logging.use_tensorboard,
            )
            try:
                with self._display:
                    self._steps(self._program.batches(self._step), num_steps)
            finally:
                self._files.close()
        else:
            self._display.say("nothing left to do: all steps are done; raise run.num_steps to train on")
        return RunResult(
            step=self._step, signal=self._stopped_by if self._step < num_steps else None, folder=self._folder
        )

    def _steps(self, batches: Iterator[Batch], num_steps: int) -> None:
        self._clock.restart()
        while self._step < num_steps and not self._is_stopped():
            with self._clock.waiting():
                batch = next(batches)
            self._state, output = self._program.step(batch, self._state)
            self._step += 1
            self._read_pending()
            self._pending = (self._step, output)
            if self._evaluates(self._step):
                self._read_pending()
                with self._clock.paused():
                    self._evaluate()
            if self._step % self._config.checkpoint.every_steps == 0:
                self._save()
        self._save()

    def _is_stopped(self) -> bool:
        """Whether a signal came, the same answer in all processes; several agree at log steps only."""
        if jax.process_count() == 1 or self._step % self._config.logging.every_steps == 0:
            number = largest_of_processes(self._stop.signal or 0)
            self._stopped_by = signal.Signals(number) if number else None
        return self._stopped_by is not None

    def _evaluates(self, step: int) -> bool:
        every = self._config.evaluation.every_steps
        return step == self._config.run.num_steps or (every is not None and step % every == 0)

    def _read_pending(self) -> None:
        """Waits for the last dispatched step and takes in its output."""
        if self._pending is None:
            return
        step, output = self._pending
        self._pending = None
        self._interval = self._interval.add(output)
        self._clock.count_step()
        self._check_skipped(step, bool(output.is_skipped))
        self._display.show_step(step)
        if step % self._config.logging.every_steps == 0 or step == self._config.run.num_steps:
            self._write_row(step, output)

    def _write_row(self, step: int, output: StepOutput) -> None:
        batch = self._config.batch
        row = interval_row(self._interval, output, self._config.loss, batch.gradient_accumulation_steps)
        self._files.write_metrics(step, row)
        if self._interval.overflow:
            words = dropped_words(self._config, self._interval.num_steps, self._interval.overflow)
            self._display.say(f"step {step}: {words}")
        self._interval = Interval()
        lap = self._clock.restart()
        speed = lap.num_steps * batch.num_rows * batch.num_positions / lap.seconds
        self._files.write_perf(
            step,
            {
                "perf/step_time_seconds": lap.seconds / lap.num_steps,
                "perf/tokens_per_second": speed,
                "perf/scored_tokens_per_second": lap.num_steps * row["learning/total_weights"] / lap.seconds,
                "perf/per_device_tokens_per_sec": speed / jax.device_count(),
                "perf/data_wait_seconds": lap.waited / lap.num_steps,
            },
        )
        left = (self._config.run.num_steps - step) * lap.seconds / lap.num_steps
        self._display.show_row(step, row, speed, left)

    def _check_skipped(self, step: int, is_skipped: bool) -> None:
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if is_skipped else 0
        if is_skipped:
            self._display.say(f"step {step}: the gradient is not finite; nothing was updated")
        if self._num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"the gradient was not finite for {MAX_SKIPPED_IN_A_ROW} steps in a row, to step {step}; "
                "lower optimizer.schedule.peak, or continue from an older checkpoint"
            )

    def _evaluate(self) -> None:
        row = evaluation_row(self._program.evaluate(self._state))
        self._files.write_metrics(self._step, row)
        text = f"step {self._step}  validation lm {row['eval/lm_loss']:.4f}  bits/byte {row['eval/bits_per_byte']:.4f}"
        if "eval/mtp_acceptance_rate_percent" in row:
            text += f"  MTP acceptance {row['eval/mtp_acceptance_rate_percent']:.1f} %"
        self._display.say(text)

    def _save(self) -> None:
        self._read_pending()
        if self._step == self._saved_step:
            return
        with self._clock.paused():
            record = Record(step=self._step, manifest=self._manifest, accumulator=self._interval.to_json())
            self._checkpoints.save(self._state, record)
        self._saved_step = self._step


def _headline(config: Config, dataset: Dataset, program: Program, step: int) -> str:
    by_label: dict[str, int] = {}
    for _, label, _, shape in program.optimizer.table(abstract_model(config.model)):
        by_label[label] = by_label.get(label, 0) + math.prod(shape)
    labels = ", ".join(f"{count:,} by {label}" for label, count in sorted(by_label.items()))
    mesh = " x ".join(f"{name} {size}" for name, size in program.mesh.shape.items() if size > 1) or "1 device"
    exchange = exchange_words(config, program.mesh)
    mesh += f", {exchange}" if exchange else ""
    start = f"continuing from step {step}" if step else "from step 0"
    return (
        f"{sum(by_label.values()):,} parameters ({labels}); {dataset.num_train_tokens:,} training tokens in "
        f"{len(dataset.train):,} rows; {mesh}; {start} to {config.run.num_steps} in {config.run.folder}"
    )


def _finish(result: RunResult, console: Console) -> None:
    if result.signal is not None:
        return
    console.print(summary_table(result.folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    console.print(
        f"done: step {result.step}; peak memory of this process {peak / 2**30:.2f} GiB; "
        f"report {draw_report(result.folder)}",
        highlight=False,
        soft_wrap=True,
    )
