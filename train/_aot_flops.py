"""FLOPs that a model needs, by formula: of one training step, and of kernels the counter cannot look into."""

import math

import jax

from model import ModelConfig, param_specs

from ._hlo_count import Instruction, Shape
from ._state import abstract_model

# Products of queries with keys, and of weights with values: forward, gradient of keys and values, of queries.
_ATTENTION_PRODUCTS = {"fwd": (1, 1), "dkv": (2, 2), "dq": (2, 1)}


def model_flops(config: ModelConfig, num_rows: int, num_positions: int) -> int:
    """FLOPs of one step without recomputation: forward, and backward at twice its cost.

    6 for each parameter of a matrix and token (experts: those a token is sent to; the head once for every
    depth), 12 * S / 2 for each head dimension of causal attention, and the chunk products of linear
    attention. Packing is not
    taken off. Convention: PaLM, arXiv:2204.02311, appendix B, with causal attention halved.
    """
    tokens = num_rows * num_positions
    model = abstract_model(config)
    flat, treedef = jax.tree.flatten(model)
    total = 0
    for leaf, spec in zip(flat, treedef.flatten_up_to(param_specs(model)), strict=True):
        if spec.role == "head" or (spec.role == "embedding" and config.tie_word_embeddings):
            total += leaf.size * (1 + config.num_mtp_layers)
        elif spec.role == "matrix":
            total += int(leaf.size * _active_share(config, spec.axes.split(), spec.columns.split()))
    return 6 * tokens * total + 3 * tokens * mixer_flops(config, num_positions)


def mixer_flops(config: ModelConfig, num_positions: int) -> int:
    """Forward FLOPs of one token in all mixers, projections apart."""
    full = sum(layer.mixer == "full" for layer in config.layer_plan) + config.num_mtp_layers
    linear = config.num_layers + config.num_mtp_layers - full
    if config.mla is not None:
        mla = config.mla
        width = mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    else:
        width = 2 * config.gqa.num_heads * config.gqa.head_dim if config.gqa else 0
    # Each position meets half the row: 2 * width * S / 2.
    attention = full * width * num_positions
    kind = config.kda or config.lightning
    if kind is None:
        return attention
    chunk = 64
    # In a chunk: two score matrices, the solve, the outputs; between chunks: read, write and decay of the state.
    per_head = 2 * chunk * kind.head_dim * 4 + 2 * kind.head_dim * kind.head_dim * 3
    return attention + linear * kind.num_heads * per_head


def tpu_kernel_flops(instruction: Instruction, operands: list[Shape]) -> int | None:
    """FLOPs of the kernels that the model uses on TPUs; None for others.

    Splash attention by its causal half; grouped products (`gmm`, `tgmm`, XLA's own for `ragged_dot`) by
    rows, as if every row of the buffer were in use; SwiGLU by its products, two forward and three for the slopes.
    """
    label = instruction.name + " " + instruction.attributes[:4000]
    if "swiglu_" in instruction.name:
        products = 3 if "slopes" in instruction.name else 2
        return 2 * products * operands[0].num_elements * instruction.shapes[0].dims[-1]
    if "splash_mha" in label:
        return _splash_flops(label, operands)
    if "ragged" in label or "gmm" in label:
        return _grouped_flops(instruction, operands)
    return None


def _splash_flops(label: str, operands: list[Shape]) -> int | None:
    kind = next((k for k in ("dkv", "dq", "fwd") if k in label), None)
    arrays = [s for s in operands if s.dtype in ("bf16", "f32", "f16") and len(s.dims) >= 3]
    if kind is None or len(arrays) < 3:
        return None
    q, k, v = arrays[:3]
    pairs = math.prod(q.dims[:-1]) * k.dims[-2] // 2
    scores, values = _ATTENTION_PRODUCTS[kind]
    return 2 * pairs * (scores * q.dims[-1] + values * v.dims[-1])


def _grouped_flops(instruction: Instruction, operands: list[Shape]) -> int | None:
    arrays = [s for s in operands if s.dtype in ("bf16", "f32", "f16") and len(s.dims) >= 2]
    result = instruction.shapes[0]
    if len(arrays) < 2:
        return None
    left, right = arrays[0], arrays[1]
    if len(right.dims) == 3:  # rows x matrices of every group
        return 2 * left.num_elements * result.dims[-1]
    if len(result.dims) == 3:  # gradient of the matrices: both sides have the rows
        rows = max(set(left.dims) & set(right.dims), default=0)
        return 2 * rows * result.dims[-1] * result.dims[-2]
    return None


def _active_share(config: ModelConfig, axes: list[str], columns: list[str]) -> float:
    if config.moe is None or "E" not in axes or "E" in columns:
        return 1.0
    return config.moe.num_experts_per_tok / config.moe.num_experts
