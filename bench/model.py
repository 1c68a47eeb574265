"""The model beside its peers on the CPU: Hugging Face torch, tokamax KDA, `ragged_dot` and a loop over experts.

    python -m bench.model --quick --json OUT [--reference-python PYTHON]

Forward plus backward of the same tiny Ling-3, same weights, float32, same tokens, both sides in turns so that a busy
machine slows both. Our loss is the library's `linear_cross_entropy`, the reference's is its own. The reference is
transformers' `BailingHybridForCausalLM` in a process of its own: PYTHON is an interpreter with torch and transformers
5.24 (the `reference` extra), by default this one if it has them; else that number is null. tokamax (the `bench` extra,
Python 3.12 or later) too.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_loss import linear_cross_entropy
from model import KdaConfig, MlaConfig, ModelConfig, MoeConfig, Transformer, init_model
from model._grouped import blocked_matmul, ragged_matmul
from model.hf import save_hf

# Two groups of three KDA layers and one MLA layer, 5.4 million parameters; no MTP, which transformers does not run.
TINY = ModelConfig(
    vocab_size=2048,
    hidden_size=256,
    num_layers=8,
    layer_group_size=4,
    first_k_dense_replace=1,
    intermediate_size=512,
    mla=MlaConfig(
        num_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
    ),
    kda=KdaConfig(num_heads=4, head_dim=32),
    moe=MoeConfig(
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        num_routing_groups=4,
        topk_routing_group=2,
    ),
    dtype="float32",
)
# Rows and positions, the last the length that Ling-3-tiny is trained at. Without CUDA kernels transformers runs KDA as
# a loop over chunks; the gradient of a chunk's slice is a whole array: time grows with the square of a row's length.
SHAPES = ((2, 512), (1, 2048), (1, 4096))
MORE_SHAPES = ((8, 128), (1, 8192))
MOE_SHAPE = (2048, 8, 64, 256, 128)  # tokens, experts of a token, experts, width, width of an expert


def main() -> int:
    """Measure, print, and write `--json`."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="3 rounds instead of 9, three shapes instead of five"
    )
    parser.add_argument("--json", metavar="OUT", help="file for the numbers")
    parser.add_argument(
        "--reference-python",
        metavar="PYTHON",
        default=_own_python(),
        help="interpreter with torch and transformers (default: this one, where it has them)",
    )
    options = parser.parse_args()
    rounds = 3 if options.quick else 9
    report: dict[str, Any] = {"jax": jax.__version__, "cpus": os.cpu_count()}
    shapes = SHAPES if options.quick else SHAPES + MORE_SHAPES
    report |= measure_model(options.reference_python, rounds, shapes)
    report |= measure_moe(rounds)
    report |= measure_kda()
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        pathlib.Path(options.json).write_text(text + "\n", encoding="utf-8")
    return 0


def _own_python() -> str | None:
    """This interpreter, where it has the reference."""
    needed = ("torch", "transformers", "transformers.models.bailing_hybrid")  # in this order
    return sys.executable if all(map(importlib.util.find_spec, needed)) else None


def measure_model(
    reference_python: str | None, rounds: int, shapes: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Both sides' tokens per second for every shape. `tokens_per_s_vs_hf` is the ratio for `SHAPES[-1]`."""
    model = init_model(TINY, key=jax.random.key(0))
    results = [_measure_shape(model, reference_python, rounds, shape) for shape in shapes]
    headline = results[shapes.index(SHAPES[-1])]
    return {"tokens_per_s_vs_hf": headline["tokens_per_s_vs_hf"], "model": results}


def _measure_shape(
    model: Transformer, reference_python: str | None, rounds: int, shape: tuple[int, int]
) -> dict[str, Any]:
    """Tokens per second of both, their ratio (ours over theirs), and the difference of the losses."""
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, shape)
    run, compile_seconds = _ours(model, jnp.asarray(tokens, dtype=jnp.int32))
    result: dict[str, Any] = {"shape": shape, "compile_seconds": compile_seconds}
    if reference_python is None:
        ours = statistics.median(_seconds(run)[0] for _ in range(rounds))
        return result | {
            "tokens_per_s": tokens.size / ours,
            "tokens_per_s_vs_hf": None,
            "hf": "no torch and transformers here, and no --reference-python given",
        }
    with tempfile.TemporaryDirectory() as folder:
        save_hf(folder, model, dtype="float32")
        np.save(pathlib.Path(folder) / "tokens.npy", tokens)
        pairs, loss, facts = _in_turns(reference_python, folder, run, rounds)
    ours, theirs = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    return result | {
        "tokens_per_s": tokens.size / ours,
        "hf_tokens_per_s": tokens.size / theirs,
        "tokens_per_s_vs_hf": statistics.median(b / a for a, b in pairs),
        "loss_difference": abs(loss - facts["loss"]),
        "hf": facts,
    }


def _ours(model: Transformer, tokens: Any) -> tuple[Callable[[], float], float]:
    """A function that runs forward and backward once and gives the loss; seconds of its compilation."""

    def loss(model: Transformer, tokens: Any) -> Any:
        hidden = model(tokens).hidden[:, :-1]
        weights = jnp.full(hidden.shape[:2], 1 / (hidden.shape[0] * hidden.shape[1]))
        return linear_cross_entropy(hidden, model.unembed, tokens[:, 1:], weights).objective

    start = time.perf_counter()
    step = eqx.filter_jit(eqx.filter_value_and_grad(loss)).lower(model, tokens).compile()
    seconds = time.perf_counter() - start

    def run() -> float:
        value, gradient = step(model, tokens)
        jax.block_until_ready(gradient)
        return float(value)

    run()
    return run, seconds


def _in_turns(
    python: str, folder: str, run: Callable[[], float], rounds: int
) -> tuple[list[tuple[float, float]], float, dict[str, Any]]:
    """Seconds of (ours, theirs) of every round, our loss, and what the reference says of itself."""
    script = pathlib.Path(__file__).with_name("model_reference.py")
    with subprocess.Popen(
        [python, str(script), folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        facts = json.loads(child.stdout.readline())
        pairs, loss = [], float("nan")
        for _ in range(rounds):
            seconds, loss = _seconds(run)
            child.stdin.write("run\n")
            child.stdin.flush()
            pairs.append((seconds, float(child.stdout.readline())))
        child.stdin.close()
    return pairs, loss, facts


def _seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    value = run()
    return time.perf_counter() - start, value


def measure_moe(rounds: int) -> dict[str, Any]:
    """Seconds of three grouped SwiGLUs, forward and backward; ratios are ours over the other's."""
    num_tokens, chosen, num_experts, width, inner = MOE_SHAPE
    rng = np.random.default_rng(0)
    experts = np.sort(rng.integers(0, num_experts, num_tokens * chosen))
    sizes = jnp.asarray(np.bincount(experts, minlength=num_experts), dtype=jnp.int32)
    x = jnp.asarray(rng.standard_normal((num_tokens * chosen, width), np.float32))
    weights = [
        jnp.asarray(rng.standard_normal((num_experts, *shape), np.float32) * shape[0] ** -0.5)
        for shape in ((width, inner), (width, inner), (inner, width))
    ]
    sides = {"ours": blocked_matmul, "ragged_dot": ragged_matmul, "loop": _dense_loop}
    runs: dict[str, Callable[[], Any]] = {}
    for name, matmul in sides.items():
        step = (
            jax.jit(jax.value_and_grad(_swiglu_sum(matmul), argnums=(0, 1)))
            .lower(x, weights, sizes)
            .compile()
        )
        runs[name] = lambda step=step: jax.block_until_ready(step(x, weights, sizes))
        runs[name]()
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_seconds(run)[0])
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "moe_seconds": medians,
        "moe_time_vs_ragged_dot": medians["ours"] / medians["ragged_dot"],
        "moe_time_vs_loop_over_experts": medians["ours"] / medians["loop"],
    }


def _swiglu_sum(matmul: Callable[..., Any]) -> Callable[..., Any]:
    from model._grouped import grouped_matmul  # has the backward pass of the blocked form

    product = grouped_matmul if matmul is blocked_matmul else matmul

    def objective(x: Any, weights: list[Any], sizes: Any) -> Any:
        gate, up, down = weights
        hidden = jax.nn.silu(product(x, gate, sizes)) * product(x, up, sizes)
        return jnp.sum(jnp.sin(product(hidden, down, sizes)))

    return objective


def _dense_loop(x: Any, weight: Any, group_sizes: Any) -> Any:
    """Every expert on every row, masked: what a plain loop over experts costs."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])[:, None]

    def one(total: Any, expert: Any) -> tuple[Any, None]:
        matrix, end, size = expert
        return total + jnp.where((row < end) & (row >= end - size), x @ matrix, 0), None

    start = jnp.zeros((x.shape[0], weight.shape[2]), x.dtype)
    return jax.lax.scan(one, start, (weight, ends, group_sizes))[0]


def measure_kda() -> dict[str, Any]:
    """What `bench.kda` measures on its quick shape."""
    from . import kda

    try:
        result = kda.measure_cpu(kda.QUICK_SHAPE)
    except ImportError as error:
        return {"kda_time_vs_tokamax_xla_chunked": None, "kda": f"tokamax is not installed ({error})"}
    return {"kda_time_vs_tokamax_xla_chunked": result["time_ratio"], "kda": result}


if __name__ == "__main__":
    sys.exit(main())
