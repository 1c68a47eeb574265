"""A run small enough to be trained many times: the quickstart with tiny sizes on a folder of six files."""

from pathlib import Path

import jax
from rich.console import Console

from train._config import Config
from train._config_load import load_config
from train._loop import RunResult, train

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SIZES = (
    "model.hidden_size=16",
    "model.mla.num_heads=2",
    "model.mla.kv_lora_rank=8",
    "model.mla.qk_nope_head_dim=8",
    "model.mla.qk_rope_head_dim=4",
    "model.mla.v_head_dim=8",
    "model.moe.num_experts=4",
    "model.moe.moe_intermediate_size=16",
    "batch.num_rows=8",
    "batch.num_positions=16",
    "run.num_steps=6",
    # Constant: the number of steps is then no part of the program, and all these runs share one.
    "optimizer.schedule.kind=constant",
    "optimizer.schedule.warmup_steps=2",
    "logging.every_steps=2",
    "logging.use_tensorboard=false",
    "evaluation.every_steps=3",
    "evaluation.num_batches=2",
    "checkpoint.every_steps=3",
)


def write_text(folder: Path) -> Path:
    """Six files of different length; many documents end inside a row."""
    folder.mkdir()
    for number in range(6):
        lines = [f"def f{number}_{i}():\n    return {'x' * ((7 * i + number) % 23)}\n\n\n" for i in range(9)]
        (folder / f"f{number}.py").write_text("".join(lines))
    return folder


def tiny_overrides(tmp_path: Path, *overrides: str) -> list[str]:
    """Overrides of the quickstart for a run in `tmp_path`, whose text is written there."""
    text = tmp_path / "text"
    if not text.exists():
        write_text(text)
    return [*SIZES, f"data.folder={text}", f"run.folder={tmp_path / 'run'}", *overrides]


def tiny_config(tmp_path: Path, *overrides: str) -> Config:
    """The config those overrides give."""
    return load_config(QUICKSTART, tiny_overrides(tmp_path, *overrides))


def tiny_train(tmp_path: Path, *overrides: str, num_devices: int = 1, **options: bool) -> RunResult:
    """Trains it on the first devices without a word."""
    config = tiny_config(tmp_path, *overrides)
    return train(config, console=Console(quiet=True), devices=jax.devices()[:num_devices], **options)
