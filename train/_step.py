"""One optimizer step, and one evaluation, as pure functions of a batch and the state.

Weights of the whole global batch come first; then a scan over micro-steps that only adds; then one
reduction over devices, one optimizer update and one router-bias update. Every device runs the model on its
own rows inside one
`shard_map`, so what travels between devices is what this file and the model write down, nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, PyTree

from eqx_loss import LoadBalanceScope, LossLogs, LossSemantics, Objective
from model import ExpertExchange, ModelConfig, param_specs, qk_clip

from ._examples import Batch, Examples, cut_micro_steps, make_examples, micro_step_partitions
from ._gradient import GradientPlan, batch_assignments, batch_gradient
from ._layout import GradientLayout
from ._mesh import ROW_AXES
from ._optimizer import Optimizer
from ._router_bias import update_router_bias
from ._schedule import learning_rate
from ._sharding import make_parallel
from ._state import TrainState, abstract_model, model_partitions, optimizer_partitions, state_shardings


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How gradients are added up.

    Attributes:
        reduce_gradients: `step` keeps whole gradients on every device and reduces them once, after the last
            micro-step; `micro_step` sends each micro-step's gradient to the devices that keep it, which
            needs the memory of one layer's gradient only. Over the data axis both reduce once. Without
            accumulation they
            are the same.
        reduce_dtype: Dtype in which gradients are added over devices.
        accumulate_dtype: Dtype in which they are added over micro-steps.
    """

    reduce_gradients: Literal["step", "micro_step"] = "step"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    accumulate_dtype: Literal["float32", "bfloat16"] = "float32"


class StepOutput(NamedTuple):
    """What a step says.

    Attributes:
        objective: What was differentiated, of the whole global batch.
        logs: Sums and counts.
        grad_norm: Global norm after clipping.
        raw_grad_norm: Global norm before clipping.
        is_skipped: True when the gradient was not finite and nothing was updated.
        num_skipped: Skipped steps so far, this one included.
        learning_rate: Rate of this step.
        step: Steps done, this one included.
        router_counts: Assignments to each expert, per router; None without experts.
        overflow: Copies of tokens dropped for lack of room, per router; None where there is always room.
        max_logits: Largest attention logit per recorded layer and head; None when not recorded.
    """

    objective: Objective
    logs: LossLogs
    grad_norm: Float[Array, ""]
    raw_grad_norm: Float[Array, ""]
    is_skipped: Bool[Array, ""]
    num_skipped: Array
    learning_rate: Float[Array, ""]
    step: Array
    router_counts: Array | None
    overflow: Array | None
    max_logits: Array | None


TrainStep = Callable[[Batch, TrainState], tuple[TrainState, StepOutput]]


def make_train_step(
    model_config: ModelConfig,
    semantics: LossSemantics,
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    gradient_accumulation_steps: int = 1,
    config: StepConfig | None = None,
    exchange: ExpertExchange | None = None,
) -> TrainStep:
    """The pure function `train_step(batch, state) -> (state, output)`.

    The batch comes first, for donation of the state alone: `eqx.filter_jit(step, donate="all-except-first")`.

    Args:
        model_config: The model of the state.
        semantics: Normalization of the loss.
        optimizer: From `make_optimizer`.
        mesh: From `make_mesh`.
        gradient_accumulation_steps: Micro-steps; they are contiguous blocks of rows.
        config: How gradients are added up.
        exchange: How tokens meet experts; None is the default.
    """
    config = StepConfig() if config is None else config
    if optimizer.config.qk_clip_threshold is not None and not model_config.record_max_logits:
        raise ValueError(
            f"qk_clip_threshold={optimizer.config.qk_clip_threshold} needs the largest logits; set"
            " model.record_max_logits=true or qk_clip_threshold to null"
        )
    plan = make_gradient_plan(model_config, semantics, optimizer, mesh, config, exchange)
    shardings = state_shardings(model_config, optimizer, mesh)
    gradient_shardings = jax.tree.map(lambda p: NamedSharding(mesh, p), plan.layout.gradient_partitions)

    def train_step(batch: Batch, state: TrainState) -> tuple[TrainState, StepOutput]:
        check_rows(batch.tokens.shape[0], semantics, mesh, gradient_accumulation_steps)
        micro_steps = micro_steps_of(batch, plan, semantics, model_config, gradient_accumulation_steps)
        counts = None
        if _needs_assignments(semantics) and gradient_accumulation_steps > 1:
            counts = batch_assignments(plan, state.model, micro_steps)
        grads, totals = batch_gradient(plan, state.model, micro_steps, counts)
        rate = learning_rate(optimizer.config.schedule, state.step)
        update = optimizer.step(grads, state.optimizer, state.model, rate, gradient_shardings)
        model = update.params
        if totals.counts is not None:
            biased = update_router_bias(model, totals.counts, optimizer.config)
            model = _select(update.is_skipped, model, biased)
        threshold = optimizer.config.qk_clip_threshold
        if threshold is not None and totals.max_logits is not None:
            model = _select(update.is_skipped, model, qk_clip(model, totals.max_logits, threshold))
        advanced = TrainState(
            model=model,
            optimizer=update.state,
            step=state.step + 1,
            num_skipped=state.num_skipped + update.is_skipped,
        )
        output = StepOutput(
            objective=totals.output.objective,
            logs=totals.output.logs,
            grad_norm=update.grad_norm,
            raw_grad_norm=update.raw_grad_norm,
            is_skipped=update.is_skipped,
            num_skipped=advanced.num_skipped,
            learning_rate=rate,
            step=advanced.step,
            router_counts=totals.counts,
            overflow=totals.overflow,
            max_logits=totals.max_logits,
        )
        # Free output shardings would come back other than they went in: a resumed run would then compile
        # another program and differ in the last bits.
        return _pinned(advanced, shardings), output

    return train_step


def make_gradient_plan(
    model_config: ModelConfig,
    semantics: LossSemantics,
    optimizer: Optimizer,
    mesh: Mesh,
    config: StepConfig,
    exchange: ExpertExchange | None = None,
) -> GradientPlan:
    """Where parameters and gradients live and how they are added, for `batch_gradient`."""
    model = abstract_model(model_config)
    partitions = model_partitions(model_config, mesh)
    parallel = make_parallel(
        mesh,
        moe=model_config.moe,
        gather_dtype="bfloat16" if model_config.dtype == "bfloat16" else "float32",
        reduce_dtype=config.reduce_dtype,
        exchange=exchange,
    )
    layout = GradientLayout(
        mesh=mesh,
        parallel=parallel,
        specs=param_specs(model),
        partitions=partitions,
        gradient_partitions=optimizer_partitions(optimizer, model, partitions, mesh),
        is_tied=model_config.tie_word_embeddings,
    )
    return GradientPlan(
        layout=layout,
        semantics=semantics,
        reduce_gradients=config.reduce_gradients,
        reduce_dtype=config.reduce_dtype,
        accumulate_dtype=config.accumulate_dtype,
    )


def micro_steps_of(
    batch: Batch,
    plan: GradientPlan,
    semantics: LossSemantics,
    model_config: ModelConfig,
    num_micro_steps: int,
) -> Examples:
    """`batch` with targets and weights, cut into micro-steps and over the devices."""
    examples = make_examples(batch, semantics, model_config.num_mtp_layers)
    micro_steps = cut_micro_steps(examples, num_micro_steps)
    return jax.tree.map(
        lambda x, p: jax.lax.with_sharding_constraint(x, NamedSharding(plan.layout.mesh, p)),
        micro_steps,
        micro_step_partitions(micro_steps),
    )


def check_rows(num_rows: int, semantics: LossSemantics, mesh: Mesh, num_micro_steps: int) -> None:
    """Refuses a number of rows that the micro-steps and the mesh do not cut into whole micro-batches.

    Raises:
        ValueError: With the numbers.
    """
    shards = 1
    for name in ROW_AXES:
        shards *= mesh.shape[name]
    if num_rows % (num_micro_steps * shards):
        raise ValueError(
            f"{num_rows} rows do not divide into gradient_accumulation_steps={num_micro_steps} micro-steps on"
            f" {shards} row shards (data x fsdp x expert); use a multiple of {num_micro_steps * shards} rows"
        )
    rows = num_rows // (num_micro_steps * shards)
    is_cut = (
        semantics.load_balance_scope is LoadBalanceScope.MICRO_BATCH and rows % semantics.micro_batch_size
    )
    if semantics.load_balance_loss_weight > 0 and is_cut:
        raise ValueError(
            f"the load balance of a micro-batch needs its micro_batch_size={semantics.micro_batch_size} rows"
            f" on one device, which holds {rows} rows of a micro-step; use load_balance_scope=sequence or"
            " more rows"
        )


def _needs_assignments(semantics: LossSemantics) -> bool:
    is_global = semantics.load_balance_scope is LoadBalanceScope.GLOBAL_BATCH
    return is_global and semantics.load_balance_loss_weight > 0


def _select(take_first: Bool[Array, ""], first: PyTree, second: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a if a is b else jnp.where(take_first, a, b), first, second)


def _pinned(state: TrainState, shardings: PyTree) -> TrainState:
    return jax.tree.map(jax.lax.with_sharding_constraint, state, shardings)
