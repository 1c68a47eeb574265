"""What a run asks of its mesh."""

import math

from model import ModelConfig

from ._config import Config
from ._mesh import MeshWork


def mesh_work(config: Config) -> MeshWork:
    """What the mesh of a run has to divide, for `check_mesh`."""
    model, moe = config.model, config.model.moe
    ffn_sizes = (
        model.intermediate_size,
        *((moe.moe_intermediate_size, moe.shared_intermediate_size) if moe else ()),
    )
    return MeshWork(
        num_rows=config.batch.num_rows,
        num_positions=config.batch.num_positions,
        gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        num_heads=_common_heads(model),
        num_kv_heads=0 if model.gqa is None else model.gqa.num_kv_heads,
        num_experts=0 if moe is None else moe.num_experts,
        vocab_size=model.vocab_size,
        ffn_sizes=tuple(size for size in ffn_sizes if size),
        fused_ffn_size=model.intermediate_size or 0 if model.fused_swiglu else 0,
        model_size=model.hidden_size,
    )


def _common_heads(model: ModelConfig) -> int:
    """What divides these heads divides those of every mixer."""
    mixers = (model.mla, model.gqa, model.kda, model.lightning)
    return math.gcd(*(mixer.num_heads for mixer in mixers if mixer is not None))
