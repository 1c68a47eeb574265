"""Runs one setting through the installed megatron-core and writes a golden file.

    python -m tests.reference.megatron_run --setting lm_n4 --flag mb --out FOLDER

Runs in an environment with torch and megatron-core (extra `reference`; 0.17 and later import triton
as well); needs no JAX. CPU, float64,
one process per rank (gloo). Megatron's own code does: the schedule and its loss scaling, DDP,
`finalize_model_grads`, the router with its losses, the MTP loss, rolls and trackers. Ours are the
toy layers, the loss function of `pretrain_gpt.py` and the lm log of `training.py`, which are not
part of megatron-core.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import socket
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from .megatron_model import shows_padding
from .megatron_step import train_step
from .setting_list import SETTINGS
from .settings import ACTIVE, EXPERTS, Setting, batch, parameters

Job = tuple[Setting, bool]
Channels = dict[str, dict[str, Any]]


def main(arguments: list[str]) -> int:
    """Writes `FOLDER/NAME.FLAG.npz` for every setting and flag asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--setting", nargs="*", help="names; all when left out")
    parser.add_argument("--flag", choices=("mb", "pt"), nargs="*", default=["mb", "pt"])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    wanted = [s for s in SETTINGS if not chosen.setting or s.name in chosen.setting]
    unknown = set(chosen.setting or ()) - {s.name for s in SETTINGS}
    if unknown:
        parser.error(
            f"unknown setting {', '.join(sorted(unknown))}; known: {', '.join(s.name for s in SETTINGS)}"
        )
    failed = 0
    for size in sorted({(s.dp, s.cp) for s in wanted}):
        jobs = [(s, flag == "pt") for s in wanted if (s.dp, s.cp) == size for flag in chosen.flag]
        for (setting, per_token), ranks in zip(jobs, _run_ranks(jobs, *size)):
            name = f"{setting.name}.{'pt' if per_token else 'mb'}"
            if isinstance(ranks[0], str):
                failed += 1
                print(f"could not run {name}: {ranks[0]}", flush=True)
                continue
            write_case(setting, per_token, ranks, chosen.out / f"{name}.npz")
            print(f"wrote {name}", flush=True)
    return 1 if failed else 0


def write_case(setting: Setting, per_token: bool, ranks: list[Channels], path: pathlib.Path) -> None:
    """Writes the golden file of one setting from what its ranks returned."""
    import megatron.core

    config = {
        **dataclasses.asdict(setting),
        "per_token": per_token,
        "seq": len(setting.masks[0]),
        "batch": len(setting.masks),
        "topk": ACTIVE,
        "experts": EXPERTS,
        "score_function": "sigmoid",
    }
    arrays = batch(setting)
    if not shows_padding():
        arrays.pop("padding_mask", None)
        config["padding"] = None
    totals = [rank["total"] for rank in ranks]
    arrays |= {f"param/{name}": value for name, value in parameters(setting).items()}
    for name in parameters(setting):
        arrays[f"grad/{name}"] = np.stack([ranks[0][c]["grads"][name] for c in setting.channels])
    arrays |= _gathered(setting, totals)
    meta = {
        "name": path.name.removesuffix(".npz"),
        "channels": list(setting.channels),
        "config": config,
        "logs": _spelled({name: [rank["logs"][name] for rank in totals] for name in totals[0]["logs"]}),
        "objective": {},
        "mcore": megatron.core.__version__,
        "label": megatron.core.__version__,
        "torch": torch.__version__,
    }
    np.savez(path, meta=json.dumps(meta), **arrays)


def _spelled(logs: dict[str, list[float]]) -> dict[str, list[float | str]]:
    return {k: [v if np.isfinite(v) else str(v) for v in values] for k, values in logs.items()}


def _gathered(setting: Setting, ranks: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Per-token cross-entropies and masks of the global batch from those of the ranks."""
    shape = setting.loss_mask().shape
    names = ranks[0]["tokens"]
    whole = {name: np.zeros(shape) for name in names}
    for rank in ranks:
        for name, pieces in rank["tokens"].items():
            for rows, places, values in pieces:
                for i, row in enumerate(rows):
                    whole[name][row, places[i]] = values[i]
    return whole


def _run_ranks(jobs: list[Job], dp: int, cp: int) -> Iterator[list[Any]]:
    """What every rank returned for each job, or what went wrong as text."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank_main, args=(jobs, cp, port, dp * cp, folder), nprocs=dp * cp)
        ranks = [torch.load(f"{folder}/{r}.pt", weights_only=False) for r in range(dp * cp)]
    return iter([list(results) for results in zip(*ranks)])


def _rank_main(rank: int, jobs: list[Job], cp: int, port: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    _pretend_cuda()
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    results: list[Any] = []
    for setting, per_token in jobs:
        try:
            results.append({c: train_step(setting, per_token, c) for c in setting.channels})
        except Exception as error:
            # A release that lacks a feature must not stop the other settings.
            where = traceback.extract_tb(error.__traceback__)[-1]
            results.append(
                f"{type(error).__name__}: {error} ({pathlib.Path(where.filename).name}:{where.lineno})"
            )
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _pretend_cuda() -> None:
    """Megatron-Core names the device `cuda` in places; here that is the CPU, and floats are float64."""
    cpu = torch.device("cpu")
    torch.set_default_dtype(torch.float64)
    torch.float = torch.float32 = torch.float64  # pyright: ignore
    stream = types.SimpleNamespace(device=cpu, wait_stream=lambda *_: None, synchronize=lambda: None)
    torch.cuda.current_stream = lambda *_: stream  # pyright: ignore
    torch.cuda.current_device = lambda: cpu  # pyright: ignore
    torch.Tensor.float = torch.Tensor.double  # pyright: ignore
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # pyright: ignore

    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
                kwargs["device"] = cpu
            return make(*args, **kwargs)

        return wrapped

    for name in ("zeros", "ones", "empty", "tensor", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
