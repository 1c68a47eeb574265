"""What both sides compute: MaxText's settings for every work, and how to get its environment."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

VERSION = "0.2.5"
ENVIRONMENT = f"""\
MaxText needs an environment of its own (Python 3.12, about 2.4 GB):
  python3.12 -m venv ENV && ENV/bin/pip install uv
  ENV/bin/uv pip install -p ENV "maxtext[tpu]=={VERSION}" --resolution=lowest
Its lowest versions are the ones it is tested with. Then give --maxtext-python ENV/bin/python.
"""

CONFIGS = Path(__file__).parent / "configs"

_COMMON = ("opt_type=adamw", "learning_rate=3e-4", "enable_dropout=false")

# Trained on CPU.
TRAINED = {
    "a": (
        "model_name=deepseek3-tiny",
        "override_model_config=true",
        "base_emb_dim=256",
        "base_num_decoder_layers=4",
        "first_num_dense_layers=1",
        "base_num_query_heads=4",
        "base_num_kv_heads=4",
        "base_mlp_dim=512",
        "base_moe_mlp_dim=128",
        "num_experts=8",
        "num_experts_per_tok=2",
        "shared_experts=1",
        "q_lora_rank=64",
        "kv_lora_rank=64",
        "qk_nope_head_dim=32",
        "qk_rope_head_dim=16",
        "v_head_dim=32",
        "vocab_size=8192",
        "max_target_length=512",
        "per_device_batch_size=8",
        "mtp_num_layers=1",
        "mtp_loss_scaling_factor=0.1",
        "load_balance_loss_weight=0.0001",
        "routed_bias_update_rate=0.001",
        # Every expert on every token; the other path on CPU is sparse_matmul=true megablox=false.
        "sparse_matmul=false",
        "capacity_factor=-1",
        *_COMMON,
    ),
    "b": (
        "model_name=default",
        "decoder_block=llama2",
        "base_emb_dim=512",
        "base_num_decoder_layers=8",
        "base_num_query_heads=8",
        "base_num_kv_heads=8",
        "head_dim=64",
        "base_mlp_dim=1536",
        "vocab_size=32000",
        "max_target_length=1024",
        "per_device_batch_size=4",
        *_COMMON,
    ),
}

# What its own command line needs to train on synthetic tokens on a CPU, and to write nothing it need not write.
ON_CPU = (
    "dataset_type=synthetic",
    "packing=false",
    "hardware=cpu",
    "skip_jax_distributed_system=true",
    "enable_checkpointing=false",
    "attention=dot_product",
    "run_name=cpu",
    "jax_cache_dir=",
)


class CompiledCase(NamedTuple):
    """A step compiled ahead of time by both sides.

    Attributes:
        topology: Of the chips.
        their_topology: MaxText's name for it, which counts cores.
        settings: Of MaxText.
        config: Our configuration, a file of `CONFIGS` without its ending.
        changes: Settings of ours that differ from the file.
    """

    topology: str
    their_topology: str
    settings: tuple[str, ...]
    config: str
    changes: tuple[str, ...] = ()


_LLAMA = ("model_name=llama3-8b", "max_target_length=8192")

COMPILED = {
    "llama3-8b": CompiledCase("v5p:2x2x1", "v5p-8", (*_LLAMA, "per_device_batch_size=1"), "llama3-8b"),
    "llama3-8b-4-rows": CompiledCase(
        "v5p:2x2x1", "v5p-8", (*_LLAMA, "per_device_batch_size=4"), "llama3-8b", ("batch.num_rows=16",)
    ),
    "llama3-8b-32-chips": CompiledCase(
        "v5p:2x4x4", "v5p-64", (*_LLAMA, "per_device_batch_size=2"), "llama3-8b", ("batch.num_rows=64",)
    ),
    "deepseek2-16b-mtp": CompiledCase(
        "v5p:4x4x4",
        "v5p-128",
        (
            "model_name=deepseek2-16b",
            "max_target_length=4096",
            "per_device_batch_size=4",
            "mtp_num_layers=1",
        ),
        "deepseek2-16b-mtp",
    ),
}


def add_python_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--maxtext-python`."""
    parser.add_argument(
        "--maxtext-python", metavar="PYTHON", help="interpreter of MaxText's environment; without it: how to"
    )


def find_python(python: str | None) -> str:
    """`python` if it can be run; else ends the process with status 2 and says how to make the environment."""
    if python is not None and os.access(python, os.X_OK):
        return os.path.abspath(python)
    reason = "--maxtext-python is missing" if python is None else f"cannot run --maxtext-python {python!r}"
    print(f"error: {reason}\n\n{ENVIRONMENT}", end="", file=sys.stderr)
    sys.exit(2)


def replace_settings(settings: Sequence[str], changes: Sequence[str]) -> list[str]:
    """`settings` with those named in `changes` (key=value) exchanged or added."""
    names = {change.split("=", 1)[0] for change in changes}
    return [s for s in settings if s.split("=", 1)[0] not in names] + list(changes)
