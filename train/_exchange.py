"""What a run's mesh does with tokens and experts, from its configuration."""

import dataclasses
import math

import jax.numpy as jnp
from jax.sharding import Mesh

from model import ExchangeWork, ExpertExchange, ModelConfig

from ._config import Config
from ._mesh import CONTEXT, EXPERT, ROW_AXES, TENSOR, MeshConfig


def expert_exchange(config: MeshConfig, model: ModelConfig, mesh: Mesh) -> ExpertExchange:
    """What a model is told to send along the expert axis of `mesh`."""
    return ExpertExchange(
        kind=config.expert_exchange,
        buffer=config.expert_buffer,
        token_trips=4 if model.remat == "none" else 5,
        expert_cuts=mesh.shape[TENSOR],
    )


def without_drops(exchange: ExpertExchange) -> ExpertExchange:
    """`exchange` for scores that must not depend on the buffer: experts travel where it is bounded."""
    if exchange.buffer is None:
        return exchange
    return dataclasses.replace(exchange, kind="weights", buffer=None)


def exchange_words(config: Config, mesh: Mesh) -> str:
    """What travels between experts and tokens and why; empty where no experts are apart."""
    work = exchange_work(config, mesh)
    return "" if work is None else work.describe(expert_exchange(config.mesh, config.model, mesh))


def dropped_words(config: Config, num_steps: int, overflow: int) -> str:
    """That `overflow` copies of tokens were dropped in `num_steps` steps, of how many, and what to do."""
    model, batch, moe = config.model, config.batch, config.model.moe
    assert moe is not None  # dense models drop nothing
    routers = [*(plan.ffn for plan in model.layer_plan), *[model.mtp_plan.ffn] * model.num_mtp_layers].count(
        "moe"
    )
    copies = num_steps * batch.num_rows * batch.num_positions * moe.num_experts_per_tok * routers
    return (
        f"{overflow:,} copies of tokens had no place and were dropped ({overflow / copies:.2%});"
        " raise mesh.expert_buffer, or set it to null"
    )


def exchange_work(config: Config, mesh: Mesh) -> ExchangeWork | None:
    """Sizes of the exchange of one layer in one micro-step; None where no experts are apart."""
    model, batch, moe = config.model, config.batch, config.model.moe
    if moe is None or mesh.shape[EXPERT] == 1:
        return None
    shards = math.prod(mesh.shape[name] for name in (*ROW_AXES, CONTEXT))
    width = jnp.dtype(model.dtype).itemsize
    return ExchangeWork(
        num_tokens=batch.num_rows * batch.num_positions // batch.gradient_accumulation_steps // shards,
        num_chosen=moe.num_experts_per_tok,
        num_experts=moe.num_experts,
        num_devices=mesh.shape[EXPERT],
        model_size=model.hidden_size,
        expert_size=moe.moe_intermediate_size,
        compute_bytes=width,
        gather_bytes=min(width, 4),
        reduce_bytes=jnp.dtype(config.step.reduce_dtype).itemsize,
    )
