"""The fused output layer in words: which implementation, which tiles, which memory, for given sizes."""

from typing import Any, cast, get_args

import jax
import jax.numpy as jnp

from .._linear_xent_plan import XentPlan, explain_linear_cross_entropy
from .._linear_xent_types import Backend, XentExecution

BACKENDS: tuple[str, ...] = get_args(Backend)
DTYPES = ("bfloat16", "float32")
_GIB = 2**30


def plan_output_layer(num_tokens: int, width: int, vocab_size: int, backend: str, dtype: str) -> XentPlan:
    """The plan of `linear_cross_entropy` for one device.

    Args:
        num_tokens: Tokens of a micro-step on the device.
        width: Size of a hidden state, D.
        vocab_size: Columns of the device, V.
        backend: One of `BACKENDS`.
        dtype: Type of hidden states and of `unembed`, one of `DTYPES`.

    Raises:
        ValueError: A size below 1.
    """
    for name, size in (("T", num_tokens), ("D", width), ("V", vocab_size)):
        if size < 1:
            raise ValueError(f"--output-layer: {name} must be at least 1, got {size}")
    hidden = jax.ShapeDtypeStruct((1, num_tokens, width), jnp.dtype(dtype))
    unembed = jax.ShapeDtypeStruct((width, vocab_size), jnp.dtype(dtype))
    execution = XentExecution(backend=cast(Backend, backend))
    return explain_linear_cross_entropy(hidden, unembed, execution=execution)


def plan_facts(plan: XentPlan) -> dict[str, Any]:
    """The plan as JSON."""
    return {
        "implementation": plan.implementation,
        "reason": plan.reason,
        "estimated_seconds": dict(plan.estimated_seconds),
        "token_tile_size": plan.token_cut.tile_size,
        "num_token_tiles": plan.num_token_tiles,
        "vocab_tile_size": plan.vocab_cut.tile_size,
        "num_vocab_tiles": plan.vocab_cut.num_tiles,
        "num_products": plan.num_products,
        "logits_bytes": plan.logits_bytes,
        "gradient_bytes": plan.gradient_bytes,
        "operand_dtype": str(plan.vocab_cut.operand_dtype),
        "accumulator_dtype": str(plan.vocab_cut.accumulator_dtype),
    }


def plan_text(plan: XentPlan) -> str:
    """The plan for a person."""
    facts = plan_facts(plan)
    lines = [
        f"output layer: {plan.implementation} ({plan.reason})",
        f"  tiles                {facts['num_token_tiles']} of {facts['token_tile_size']} tokens x "
        f"{facts['num_vocab_tiles']} of {facts['vocab_tile_size']} columns",
        f"  matrix products      {plan.num_products}, loss and both gradients; operands {facts['operand_dtype']}, "
        f"sums {facts['accumulator_dtype']}",
        f"  largest logits       {plan.logits_bytes / _GIB:.3f} GiB",
        f"  gradient of unembed  {plan.gradient_bytes / _GIB:.3f} GiB",
    ]
    lines += [
        f"  roofline estimate of {name}: {1e3 * seconds:.1f} ms" for name, seconds in plan.estimated_seconds
    ]
    return "\n".join(lines)
