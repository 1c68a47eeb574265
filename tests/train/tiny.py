"""A run small enough to be trained many times: the quickstart with tiny sizes on a folder of six files."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import jax
from rich.console import Console

from train import _loop
from train._config import Config
from train._config_load import load_config
from train._data import Dataset
from train._loop import RunResult
from train._program import Program, make_program

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


def tiny_train(
    tmp_path: Path, *overrides: str, num_devices: int = 1, compiles: bool = False, **options: bool
) -> RunResult:
    """Trains it on the first devices without a word.

    Runs of equal sizes share one compiled step unless `compiles`: most of a tiny run is compilation.
    """
    config = tiny_config(tmp_path, *overrides)
    devices = jax.devices()[:num_devices]
    make = make_program if compiles else shared_program
    with mock.patch.object(_loop, "make_program", make):
        return _loop.train(config, console=Console(quiet=True), devices=devices, **options)


def shared_program(config: Config, dataset: Dataset, devices: Sequence[jax.Device] | None = None) -> Program:
    """`make_program`, compiled once for all runs of equal sizes; on one device when none are given."""
    devices = jax.devices()[:1] if devices is None else devices
    parts = (
        config.model,
        config.loss,
        config.batch,
        config.optimizer,
        config.step,
        config.mesh,
        len(devices),
    )
    if parts not in _PROGRAMS:
        program = _PROGRAMS[parts] = make_program(config, dataset, devices)
        program.compile(program.init_state())
    return dataclasses.replace(_PROGRAMS[parts], config=config, dataset=dataset)


_PROGRAMS: dict[object, Program] = {}
