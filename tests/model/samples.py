"""Small models of every family, and packed rows to run them on."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from model import (
    GqaConfig,
    KdaConfig,
    LightningConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    MtpConfig,
    ParamSpec,
    Transformer,
    init_model,
    param_specs,
)

MLA = MlaConfig(
    num_heads=2, q_lora_rank=None, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
)
GQA = GqaConfig(num_heads=4, num_kv_heads=2, head_dim=6, rope_head_dim=4, use_qk_norm=True)
KDA = KdaConfig(num_heads=2, head_dim=8)
LIGHTNING = LightningConfig(num_heads=4, head_dim=6, rope_head_dim=4, num_norm_groups=2)
MOE = MoeConfig(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
    num_routing_groups=4,
    topk_routing_group=2,
    routed_scaling_factor=2.5,
)
BASE = ModelConfig(
    vocab_size=31,
    hidden_size=16,
    num_layers=1,
    intermediate_size=12,
    mla=MLA,
    dtype="float32",
)
# Three groups that differ in their numbers of layers, the last one incomplete; two MTP depths.
LING3 = dataclasses.replace(
    BASE,
    num_layers=7,
    layer_group_size=2,
    first_k_dense_replace=1,
    kda=KDA,
    moe=MOE,
    mtp=MtpConfig(num_layers=2),
    record_max_logits=True,
)
LING2 = dataclasses.replace(
    BASE,
    num_layers=3,
    layer_group_size=3,
    mla=dataclasses.replace(MLA, q_lora_rank=7, output_gate=False),
    lightning=LIGHTNING,
)
LING_MINI = dataclasses.replace(BASE, num_layers=3, first_k_dense_replace=1, mla=None, gqa=GQA, moe=MOE)
DENSE = dataclasses.replace(BASE, num_layers=2, mla=None, gqa=GQA, tie_word_embeddings=True)
FAMILIES = {"ling3": LING3, "ling2": LING2, "ling-mini": LING_MINI, "dense": DENSE}


def make(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> Transformer:
    """A model with random arrays in place of the initial ones: norms near 1, router biases that reroute.

    Drawn by NumPy, which compiles nothing.
    """
    config = dataclasses.replace(config, dtype=dtype)
    shapes = eqx.filter_eval_shape(lambda key: init_model(config, key=key), jax.random.key(0))
    rng = np.random.default_rng(seed)
    centre = {"norm": 1.0, "decay": 0.5}
    spread = {"norm": 0.2, "decay": 0.5, "router_bias": 0.2, "conv": 0.5}

    def draw(shape: jax.ShapeDtypeStruct, spec: ParamSpec) -> Array:
        values = centre.get(spec.role, 0.0) + spread.get(spec.role, 0.3) * rng.normal(size=shape.shape)
        return jnp.asarray(values, dtype=dtype)

    return jax.tree.map(draw, shapes, param_specs(shapes))


def random_tokens(shape: tuple[int, int], seed: int = 0) -> Int[Array, "B S"]:
    """Tokens of `BASE`'s vocabulary."""
    return jax.random.randint(jax.random.key(100 + seed), shape, 0, BASE.vocab_size, dtype=jnp.int32)


def packed(lengths: list[list[int]], row_length: int) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """Segment ids 1, 2, ... of documents of these lengths, then padding; and their positions."""
    ids, positions = [], []
    for row in lengths:
        padding = row_length - sum(row)
        ids.append([i + 1 for i, n in enumerate(row) for _ in range(n)] + [0] * padding)
        positions.append([p for n in row for p in range(n)] + [0] * padding)
    return jnp.array(ids, dtype=jnp.int32), jnp.array(positions, dtype=jnp.int32)
