"""A run as compiled functions on its mesh: the step, the evaluation, and batches on the devices."""

import contextlib
import ctypes
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding

from ._compiler import compiled_for
from ._config import Config
from ._data import (
    Dataset,
    TrainBatches,
    local_row_numbers,
    put_rows,
    train_batches,
    validation_batches,
)
from ._evaluate import Evaluate, EvaluationSums, make_evaluate
from ._examples import Batch
from ._exchange import expert_exchange, without_drops
from ._mesh import check_mesh, make_mesh
from ._mesh_work import mesh_work
from ._optimizer import Optimizer
from ._packing import Rows, empty_rows
from ._sharding import BATCH_SPEC
from ._state import TrainState, abstract_state, init_state, make_optimizer, state_shardings
from ._step import StepOutput, TrainStep, check_rows, make_gradient_plan, make_train_step


@dataclass(kw_only=True)
class Program:
    """Everything that runs on the devices; `compile` comes before `step`.

    Attributes:
        config: The run.
        dataset: Its text.
        mesh: Its devices.
        optimizer: Its optimizer.
    """

    config: Config
    dataset: Dataset
    mesh: Mesh
    optimizer: Optimizer
    _train_step: TrainStep
    _evaluate: Evaluate
    _compiled: Any = None

    def init_state(self) -> TrainState:
        """The state before the first step, in its shards."""
        key = jax.random.key(self.config.run.seed)
        return init_state(self.config.model, self.optimizer, self.mesh, key=key)

    def state_like(self) -> TrainState:
        """The state as shapes with shardings: where a checkpoint goes."""
        shapes = abstract_state(self.config.model, self.optimizer)
        shardings = state_shardings(self.config.model, self.optimizer, self.mesh)
        arrays, static = eqx.partition(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        placed = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), arrays, shardings
        )
        return eqx.combine(placed, static)

    def compile(self, state: TrainState) -> float:
        """Compiles the step for `state`, once; returns the seconds it took."""
        start = time.monotonic()
        if self._compiled is not None:
            return 0.0
        step = compiled_for(self.mesh, self._train_step, donate="all-except-first")
        # Compiled once and called directly: filter_jit waits for the result at every call.
        self._compiled = step.lower(self._padding_batch(), state).compile()
        _return_freed_memory()
        return time.monotonic() - start

    def step(self, batch: Batch, state: TrainState) -> tuple[TrainState, StepOutput]:
        """One optimizer step; returns before it is done. The arrays of `state` are given up."""
        return self._compiled(batch, state)

    def batches(self, step: int) -> Iterator[Batch]:
        """Global batches of the steps from `step` on."""
        source = TrainBatches(
            self.dataset.train, self._num_rows, self.config.run.seed, self._local_rows(self._num_rows)
        )
        return (self._put(rows, self._num_rows) for rows in train_batches(source, step))

    def evaluate(self, state: TrainState) -> list[EvaluationSums]:
        """Sums over every batch of the validation rows."""
        batch = self.config.batch
        num_rows = batch.num_rows // batch.gradient_accumulation_steps
        num_batches = self.config.evaluation.num_batches * batch.gradient_accumulation_steps
        local = self._local_rows(num_rows)
        return [
            self._evaluate(self._put(Rows(*(array[local] for array in rows)), num_rows), state.model)
            for rows in validation_batches(self.dataset, num_rows, num_batches)
        ]

    @property
    def _num_rows(self) -> int:
        return self.config.batch.num_rows

    @property
    def _sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, BATCH_SPEC)

    def _local_rows(self, num_rows: int) -> Any:
        return local_row_numbers(self._sharding, num_rows, self.config.batch.num_positions)

    def _put(self, rows: Rows, num_rows: int) -> Batch:
        tokens, targets, loss_mask, segment_ids, positions = put_rows(
            rows, self._local_rows(num_rows), num_rows, self._sharding
        )
        return Batch(
            tokens=tokens, targets=targets, loss_mask=loss_mask, segment_ids=segment_ids, positions=positions
        )

    def _padding_batch(self) -> Batch:
        num_local = len(self._local_rows(self._num_rows))
        rows = empty_rows(num_local, self.config.batch.num_positions, self.dataset.tokenizer)
        return self._put(rows, self._num_rows)


def _return_freed_memory() -> None:
    """Gives the memory that the compiler has freed back to the system, where the C library can be asked to.

    glibc keeps it otherwise, hundreds of megabytes beside the arrays of the run.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def make_program(
    config: Config,
    dataset: Dataset,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Program:
    """The program of a run on `devices`; None is all devices of all processes.

    Raises:
        ValueError: The mesh does not fit the devices or does not divide the work.
    """
    mesh = make_mesh(config.mesh, devices=devices)
    check_mesh(mesh, mesh_work(config))
    check_rows(config.batch.num_rows, config.loss, mesh, config.batch.gradient_accumulation_steps)
    optimizer = make_optimizer(config.optimizer, config.model)
    exchange = expert_exchange(config.mesh, config.model, mesh)
    scored = make_gradient_plan(
        config.model, config.loss, optimizer, mesh, config.step, without_drops(exchange)
    )
    step = make_train_step(
        config.model,
        config.loss,
        optimizer,
        mesh,
        gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        config=config.step,
        exchange=exchange,
    )
    return Program(
        config=config,
        dataset=dataset,
        mesh=mesh,
        optimizer=optimizer,
        _train_step=step,
        _evaluate=compiled_for(mesh, make_evaluate(scored)),
    )
