"""The toy model of the golden files in JAX: position-wise layers, a router each, MTP by rolling."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class ToyOutput(NamedTuple):
    """What the model says: heads (lm, then MTP depths) and routers (decoder, then MTP depths)."""

    logits: list[Float[Array, "B S V"]]
    router_logits: list[Float[Array, "B S E"]]


class RouterScores(NamedTuple):
    """Per position: scores normalized over experts, and one-hot assignments."""

    scores: Float[Array, "L B S E"]
    assigned: Float[Array, "L B S E"]


def toy_model(
    params: dict[str, Array], tokens: list[Int[Array, "B S"]], num_layers: int, num_active: int
) -> ToyOutput:
    """Runs the model; `tokens[k]` are the inputs rolled k times."""
    routers: list[Array] = []
    hidden = params["embed"][tokens[0]]
    for layer in range(num_layers):
        hidden = _layer(params, f"dec{layer}", hidden, num_active, routers)
    heads = [hidden]
    for depth in range(1, len(tokens)):
        both = jnp.concatenate([params["embed"][tokens[depth]], hidden], axis=-1)
        hidden = jnp.einsum("bsd,fd->bsf", both, params[f"mtp{depth - 1}.proj"])
        hidden = _layer(params, f"mtp{depth - 1}", hidden, num_active, routers)
        heads.append(hidden)
    return ToyOutput([jnp.einsum("bsd,vd->bsv", h, params["out"]) for h in heads], routers)


def router_scores(
    router_logits: list[Array], masks: list[Bool[Array, "B S"]], num_active: int
) -> RouterScores:
    """Scores and plain top-k assignments, times each router's mask.

    A product, not a selection: where Megatron's weight is NaN, NaN * 0 must stay NaN.
    """
    scores, assigned = [], []
    for logits, mask in zip(router_logits, masks):
        score = jax.nn.sigmoid(logits)
        score = score / (jnp.sum(score, axis=-1, keepdims=True) + 1e-20)
        chosen = jax.lax.top_k(score, num_active)[1]
        one_hot = jnp.sum(jax.nn.one_hot(chosen, score.shape[-1], dtype=score.dtype), axis=-2)
        counted = mask[..., None].astype(score.dtype)
        scores.append(score * counted)
        assigned.append(jax.lax.stop_gradient(one_hot * counted))
    return RouterScores(jnp.stack(scores), jnp.stack(assigned))


def _layer(
    params: dict[str, Array], name: str, hidden: Float[Array, "B S D"], num_active: int, routers: list[Array]
) -> Float[Array, "B S D"]:
    hidden = hidden + jnp.tanh(jnp.einsum("bsd,fd->bsf", hidden, params[f"{name}.w"]))
    if f"{name}.router" not in params:
        return hidden
    logits = jnp.einsum("bsd,ed->bse", hidden, params[f"{name}.router"])
    routers.append(logits)
    gates = jax.nn.sigmoid(logits)
    kept, chosen = jax.lax.top_k(gates, num_active)
    one_hot = jax.nn.one_hot(chosen, gates.shape[-1], dtype=gates.dtype)
    # All experts, with share 0 where not chosen: a NaN gradient must reach them as in `p @ X`.
    shares = jnp.einsum("bsa,bsae->bse", kept / jnp.sum(kept, axis=-1, keepdims=True), one_hot)
    return hidden + jnp.einsum("bse,ed->bsd", shares, params[f"{name}.experts"])
