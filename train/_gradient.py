"""Gradient and logs of a global batch: every device adds up its own rows, then all devices add up once."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from eqx_loss import (
    LoadBalanceScope,
    LossOutput,
    LossSemantics,
    LossWeights,
    RouterTerms,
    XentExecution,
    XentRules,
    linear_cross_entropy_heads,
    loss_output,
)
from model import ModelOutput, Parallel, RouterStats, Transformer

from ._examples import Examples, micro_step_partitions
from ._layout import GradientLayout, make_sinks, manual_part, on_own_cuts, reduce_gradient, with_shards

# Bytes of kept logits on a TPU: as many as the output head has in bfloat16, or these. The less often the gradient of
# `unembed` is read and written, the better, and a layer's activations take more.
KEPT_LOGITS = 2**30


class Totals(NamedTuple):
    """What is added over micro-steps and devices beside the gradient; `max_logits` takes the largest instead.

    Attributes:
        output: Objective and logs.
        counts: Assignments to each expert, per router; None without experts.
        overflow: Copies of tokens dropped for lack of room, per router; None where there is always room.
        max_logits: Largest attention logit per recorded layer and head; None when not recorded.
    """

    output: LossOutput
    counts: Int[Array, "L E"] | None
    overflow: Int[Array, " L"] | None
    max_logits: Float[Array, "N H"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientPlan:
    """How the gradient of a model is computed on a mesh.

    Attributes:
        layout: Where parameters and gradients live.
        semantics: Normalization of the loss.
        reduce_gradients: `step` or `micro_step`, see `StepConfig`.
        reduce_dtype: Dtype of sums over devices.
        accumulate_dtype: Dtype of sums over micro-steps.
    """

    layout: GradientLayout
    semantics: LossSemantics
    reduce_gradients: Literal["step", "micro_step"]
    reduce_dtype: Literal["float32", "bfloat16"]
    accumulate_dtype: Literal["float32", "bfloat16"]

    @property
    def parallel(self) -> Parallel:
        """What the model is told of the mesh."""
        return self.layout.parallel


def batch_gradient(
    plan: GradientPlan, model: Transformer, micro_steps: Examples, batch_counts: Int[Array, "L E"] | None
) -> tuple[PyTree, Totals]:
    """Gradient of the objective of the whole batch, float32, and its totals.

    Args:
        plan: The mesh and the loss.
        model: Parameters.
        micro_steps: Examples with a leading axis of micro-steps.
        batch_counts: Assignments of the whole batch, for a load balance over it.
    """

    def body(params: Transformer, micro_steps: Examples, batch_counts: Array | None) -> tuple[PyTree, Totals]:
        def objective(trained: PyTree, example: Examples) -> tuple[Float[Array, ""], Totals]:
            weights = with_shards(plan.layout, trained, params) if sinks else trained
            totals = micro_totals(plan, weights, example, batch_counts)
            return totals.output.objective.total, totals

        sinks = plan.reduce_gradients == "step" and micro_steps.tokens.shape[0] > 1
        trained = make_sinks(plan.layout, params, plan.accumulate_dtype) if sinks else params

        def differentiate(trained: PyTree, example: Examples) -> tuple[PyTree, Totals]:
            grads, totals = jax.grad(objective, has_aux=True)(trained, example)
            return on_own_cuts(plan.layout, grads), totals

        grads, totals = _sum_micro_steps(plan, differentiate, trained, micro_steps)
        return reduce_gradient(plan.layout, grads, plan.reduce_dtype, is_whole=sinks), reduce_totals(
            plan, totals
        )

    return _on_devices(plan, body, plan.layout.gradient_partitions)(model, micro_steps, batch_counts)


def batch_assignments(plan: GradientPlan, model: Transformer, micro_steps: Examples) -> Int[Array, "L E"]:
    """Assignments to each expert of the whole batch: a forward pass over all micro-steps and nothing else.

    It costs about a third of a step. Only a load balance over the global batch with several micro-steps
    needs it.
    """

    def body(params: Transformer, micro_steps: Examples, _: None) -> tuple[None, Array]:
        def count(example: Examples) -> Array:
            return jnp.sum(_router(_forward(plan, params, example)).counts, axis=1)

        first = jax.tree.map(lambda x: x[0], micro_steps)
        shape = jax.eval_shape(count, first)
        zero = jnp.zeros(shape.shape, shape.dtype)
        total, _ = jax.lax.scan(lambda carry, e: (carry + count(e), None), zero, micro_steps)
        return None, jax.lax.psum(total, plan.layout.summed_axes)

    return _on_devices(plan, body, None)(model, micro_steps, None)[1]


def micro_totals(
    plan: GradientPlan, model: Transformer, example: Examples, batch_counts: Int[Array, "L E"] | None
) -> Totals:
    """Objective, logs and counts of the rows of one device in one micro-step."""
    facts = _forward(plan, model, example)
    weights = _own_groups(plan, example.weights)
    num_depths = example.mtp_targets.shape[0]
    hidden, model = _after_layers(plan, jnp.concatenate([facts.hidden[None], facts.mtp_hidden]), model)
    unembed = model.whole_unembed(plan.parallel)
    lm, *mtp = linear_cross_entropy_heads(
        hidden,
        unembed,
        jnp.concatenate([example.targets[None], example.mtp_targets]),
        jnp.concatenate([weights.lm_objective[None], weights.mtp_objective]),
        mask=jnp.concatenate([weights.lm_mask[None], weights.mtp_mask]),
        rules=XentRules(z_loss_multiplier=(plan.semantics.z_loss_multiplier, *[0.0] * num_depths)),
        execution=XentExecution(
            sharding=plan.layout.output_sharding,
            backend=plan.layout.backend,
            compute_dtype=hidden.dtype,
            max_logits_bytes=_kept_logits(plan, unembed),
        ),
    )
    terms, counts, overflow = None, None, None
    if facts.router is not None:
        counts, overflow = jnp.sum(facts.router.counts, axis=1), facts.router.overflow
        terms = RouterTerms(
            logsumexp=facts.router.logsumexp,
            score_sums=facts.router.score_sums,
            counts=_sum_positions(plan, facts.router.counts),
            batch_counts=_batch_counts(plan, counts, batch_counts),
        )
    output = loss_output(lm, tuple(mtp), terms, weights, plan.semantics)
    return Totals(output, counts, overflow, facts.max_logits)


def reduce_totals(plan: GradientPlan, totals: Totals) -> Totals:
    """`totals` of all devices together."""
    names = plan.layout.summed_axes
    output, counts, overflow = jax.lax.psum((totals.output, totals.counts, totals.overflow), names)
    top = None if totals.max_logits is None else jax.lax.pmax(totals.max_logits, names)
    return Totals(output, counts, overflow, top)


def _on_devices(plan: GradientPlan, body: Callable, gradient_partitions: PyTree | None) -> Callable:
    """`body(params, micro_steps, batch_counts) -> (gradient, totals)` on the cuts of every device."""

    def run(params: PyTree, micro_steps: Examples, batch_counts: Array | None) -> tuple[PyTree, PyTree]:
        return jax.shard_map(
            body,
            mesh=plan.layout.mesh,
            in_specs=(
                manual_part(plan.layout.partitions),
                micro_step_partitions(micro_steps),
                PartitionSpec(),
            ),
            out_specs=(manual_part(gradient_partitions), PartitionSpec()),
            axis_names=plan.layout.manual_axes,
            # The checker would add sums over devices wherever a whole weight meets cut data, once per use.
            check_vma=False,
        )(params, micro_steps, batch_counts)

    return run


def _forward(plan: GradientPlan, model: Transformer, example: Examples) -> ModelOutput:
    return model(
        example.tokens,
        segment_ids=example.segment_ids,
        positions=example.positions,
        router_mask=example.weights.router_mask,
        parallel=plan.parallel,
    )


def _kept_logits(plan: GradientPlan, unembed: Float[Array, "D V"]) -> int | None:
    if plan.layout.backend != "tpu":
        return None
    return max(KEPT_LOGITS, 2 * unembed.size // plan.parallel.size(plan.parallel.tensor_axis))


def _batch_counts(plan: GradientPlan, counts: Int[Array, "L E"], known: Array | None) -> Array | None:
    """Assignments of the whole batch, for a load balance over it: counted before, or of the one step."""
    if plan.semantics.load_balance_scope is not LoadBalanceScope.GLOBAL_BATCH or known is not None:
        return known
    return jax.lax.psum(counts, plan.layout.summed_axes)


def _after_layers(
    plan: GradientPlan, hidden: Float[Array, "M B S D"], model: Transformer
) -> tuple[Float[Array, "M B S D"], Transformer]:
    """Both, the output head behind the layers, and its gradient before those of the layers.

    The TPU compiler would else gather the head before the layers and keep its whole gradient until after them.
    """
    if plan.parallel.platform != "tpu":
        return hidden, model
    name = "embed" if model.head is None else "head"
    hidden, head = jax.lax.optimization_barrier((hidden, getattr(model, name)))
    return hidden, eqx.tree_at(lambda tree: getattr(tree, name), model, head)


def _router(facts: ModelOutput) -> RouterStats:
    if facts.router is None:
        raise ValueError(
            "a load balance over the global batch needs a model with experts; set its weight to 0"
        )
    return facts.router


def _sum_micro_steps(
    plan: GradientPlan,
    differentiate: Callable[[PyTree, Examples], tuple[PyTree, Totals]],
    params: PyTree,
    steps: Examples,
) -> tuple[PyTree, Totals]:
    """Gradients and totals of all micro-steps, added one after the other."""
    first = jax.tree.map(lambda x: x[0], steps)
    if jax.tree.leaves(steps)[0].shape[0] == 1:
        return differentiate(params, first)
    grads, totals = jax.eval_shape(differentiate, params, first)
    zero_grads = jax.tree.map(lambda g: jnp.zeros(g.shape, plan.accumulate_dtype), grads)
    zero_totals = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), totals)
    if zero_totals.max_logits is not None:
        zero_totals = zero_totals._replace(max_logits=jnp.full_like(zero_totals.max_logits, -jnp.inf))

    def add(carry: tuple[PyTree, Totals], example: Examples) -> tuple[tuple[PyTree, Totals], None]:
        grads, totals = differentiate(params, example)
        summed = jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[0], grads)
        return (summed, _joined(carry[1], totals)), None

    return jax.lax.scan(add, (zero_grads, zero_totals), steps)[0]


def _joined(first: Totals, second: Totals) -> Totals:
    one, other = first.max_logits, second.max_logits
    added = jax.tree.map(jnp.add, first._replace(max_logits=None), second._replace(max_logits=None))
    return added._replace(max_logits=None if one is None or other is None else jnp.maximum(one, other))


def _own_groups(plan: GradientPlan, weights: LossWeights) -> LossWeights:
    """`weights` with groups counted on the first context shard only: all shards hold the same rows."""
    if plan.parallel.context_axis is None:
        return weights
    is_first = jax.lax.axis_index(plan.parallel.context_axis) == 0

    names = ("lm_groups", "mtp_groups", "router_groups", "load_balance_groups")
    return dataclasses.replace(
        weights, **{name: jnp.where(is_first, getattr(weights, name), 0) for name in names}
    )


def _sum_positions(plan: GradientPlan, counts: Int[Array, "L B E"]) -> Int[Array, "L B E"]:
    """Counts of whole rows from those of the positions at hand."""
    if plan.parallel.context_axis is None:
        return counts
    return jax.lax.psum(counts, plan.parallel.context_axis)
