"""A golden case file, as read."""

import dataclasses
import itertools
import json
import pathlib
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """One file: a batch, parameters, and what Megatron made of them.

    Attributes:
        name: File name without its ending, with its folder.
        release: Release that was run.
        config: Settings of the run.
        channels: Names of the gradient's channels, "total" first.
        logs: Printed values by name, one per rank (context rank fastest).
        objective: Value of each channel but the total.
        params: Parameters by name, `[out, in]`.
        grads: Gradients by parameter, `[channels, ...]`.
        batch: tokens, labels, loss_mask, order, and padding_mask, ce0, mask1, ... where given.
    """

    name: str
    release: str
    config: dict[str, Any]
    channels: tuple[str, ...]
    logs: dict[str, list[float]]
    objective: dict[str, float]
    params: Arrays
    grads: Arrays
    batch: Arrays

    @property
    def num_mtp_layers(self) -> int:
        return int(self.config["mtp_layers"])

    @property
    def segment_ids(self) -> np.ndarray | None:
        """Documents of each row from cu_seqlens, numbered from 1; None when not packed."""
        if self.config.get("cu_seqlens") is None:
            return None
        ids = np.zeros(self.batch["tokens"].shape, np.int32)
        for row, bounds in enumerate(self.config["cu_seqlens"]):
            for document, (start, end) in enumerate(itertools.pairwise(bounds)):
                ids[row, start:end] = document + 1
        return ids


def find_cases(path: pathlib.Path) -> list[pathlib.Path]:
    """All case files below `path`, or `path` itself."""
    return [path] if path.is_file() else sorted(path.rglob("*.npz"))


def read_case(path: pathlib.Path) -> Case:
    """Reads one file; "nan" and "inf" in its JSON become numbers."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    meta = json.loads(str(arrays.pop("meta")))
    return Case(
        name=f"{path.parent.name}/{path.name.removesuffix('.npz')}",
        release=str(meta.get("label") or meta["mcore"]),
        config=meta["config"],
        channels=tuple(meta["channels"]),
        logs={name: [float(v) for v in values] for name, values in meta["logs"].items()},
        objective={name: float(v) for name, v in meta["objective"].items()},
        params=_below(arrays, "param/"),
        grads=_below(arrays, "grad/"),
        batch={name: value for name, value in arrays.items() if "/" not in name},
    )


def _below(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
