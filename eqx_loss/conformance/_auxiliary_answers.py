"""Answers to the MTP, router and linear-head tasks of the conformance kit."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eqx_loss import (
    LossSemantics,
    RouterTerms,
    TokenLosses,
    expert_counts,
    head_loss,
    linear_cross_entropy,
    load_balance,
    loss_output,
    loss_weights,
)

Inputs = Mapping[str, Any]
Outputs = dict[str, Any]


def mtp(inputs: Inputs) -> Outputs:
    """The given per-token losses as heads; MTP masks are the shifted lm mask, as in the cases."""
    mask = jnp.asarray(inputs["loss_mask"]) > 0
    losses = jnp.asarray(inputs["mtp_xent"])
    semantics = LossSemantics(
        calculate_per_token_loss=inputs["calculate_per_token_loss"],
        micro_batch_size=_micro_batch_size(inputs),
        mtp_loss_scaling_factor=inputs["mtp_loss_scaling_factor"],
    )
    weights = loss_weights(mask, semantics, num_mtp_layers=losses.shape[0])
    lm = head_loss(_given(jnp.asarray(inputs["xent"]) * mask), weights.lm_objective)
    heads = tuple(
        head_loss(_given(jnp.where(weights.mtp_mask[k], losses[k], 0)), weights.mtp_objective[k])
        for k in range(losses.shape[0])
    )
    output = loss_output(lm, heads, None, weights, semantics)
    return {
        "objective_lm": float(output.objective.lm),
        "objective_mtp": float(output.objective.mtp),
        "objective_total": float(output.objective.total),
        "log_lm": float(output.logs.lm.value()),
        "log_mtp": output.logs.mtp.value().tolist(),
    }


def router_z(inputs: Inputs) -> Outputs:
    mask = jnp.asarray(inputs["loss_mask"]) > 0
    logits = jnp.asarray(inputs["router_logits"])
    semantics = LossSemantics(
        calculate_per_token_loss=inputs["calculate_per_token_loss"],
        micro_batch_size=_micro_batch_size(inputs),
        moe_z_loss_weight=inputs["coefficient"],
        mask_padding_in_router_losses=inputs.get("padding_masked", False),
    )
    weights = loss_weights(mask, semantics, router_mask=mask if inputs.get("padding_masked") else None)
    lm = head_loss(_given(jnp.zeros(mask.shape)), weights.lm_objective)
    even = jnp.ones((*logits.shape[:2], logits.shape[-1]))
    terms = RouterTerms(logsumexp=jax.nn.logsumexp(logits, axis=-1), score_sums=even, counts=even)
    output = loss_output(lm, (), terms, weights, semantics)
    return {
        "objective": float(output.objective.router_z),
        "log": output.logs.router_z.value().tolist(),
    }


def load_balance_of_shards(inputs: Inputs) -> Outputs:
    """Counts and scores are summed over the shards of the micro-batch before they are multiplied."""
    logits = jnp.asarray(inputs["router_logits"])
    num_experts = logits.shape[-1]
    shards = [jnp.asarray(rows) for rows in inputs["shards"]]
    _, selected = jax.lax.top_k(logits, inputs["top_k"])

    def counts() -> Int[Array, " E"]:
        parts = [
            expert_counts(selected[rows][None], jnp.ones((1, len(rows)), bool), num_experts)[0]
            for rows in shards
        ]
        return jnp.sum(jnp.stack(parts), axis=0)

    def value(logits: Float[Array, "S E"]) -> Float[Array, ""]:
        scores = jax.nn.softmax(logits, axis=-1)
        score_sums = jnp.sum(jnp.stack([jnp.sum(scores[rows], axis=0) for rows in shards]), axis=0)
        return load_balance(score_sums, counts(), jnp.asarray(float(logits.shape[0])))

    aux, gradient = jax.value_and_grad(value)(logits)
    return {
        "aux": float(aux),
        "f": (counts() / jnp.sum(counts())).tolist(),
        "P": jnp.mean(jax.nn.softmax(logits, axis=-1), axis=0).tolist(),
        "grad_router_logits": gradient.tolist(),
    }


def linear_head(inputs: Inputs) -> Outputs:
    """The fused head on each part with its cut of the weights; parts only add."""
    hidden, head = jnp.asarray(inputs["hidden"]), jnp.asarray(inputs["head"])
    targets = jnp.asarray(inputs["targets"])
    if "weights" in inputs:
        weights = jnp.asarray(inputs["weights"])
    else:
        mask = jnp.asarray(inputs["loss_mask"])
        weights = mask / jnp.sum(mask)

    def total(hidden: Float[Array, "S D"], head: Float[Array, "D V"]) -> Float[Array, ""]:
        parts = [
            linear_cross_entropy(hidden[rows][None], head, targets[rows][None], weights[rows][None]).objective
            for rows in (jnp.asarray(part) for part in inputs["parts"])
        ]
        return jnp.sum(jnp.stack(parts))

    loss, (grad_hidden, grad_head) = cast(
        "tuple[Array, tuple[Array, Array]]",
        jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(hidden, head),
    )
    return {"loss": float(loss), "grad_hidden": grad_hidden.tolist(), "grad_head": grad_head.tolist()}


def _given(xent: Float[Array, "B S"]) -> TokenLosses:
    return TokenLosses(xent=xent, z_term=jnp.zeros(xent.shape))


def _micro_batch_size(inputs: Inputs) -> int:
    """Rows of a cell; the cases have cells of one size."""
    return len(inputs["schedule"][0][0])


AUXILIARY: Mapping[str, Callable[[Inputs], Outputs]] = {
    "mtp": mtp,
    "router_z": router_z,
    "load_balance": load_balance_of_shards,
    "linear_head": linear_head,
}
