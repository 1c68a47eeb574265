"""A batch of masks, read from a file."""

import dataclasses
import json
import pathlib
from typing import Any, cast

import numpy as np
from jaxtyping import Bool, Float, Int

FIELDS = ("loss_mask", "segment_ids", "router_mask", "xent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskBatch:
    """Masks of a whole global batch, and how a run cuts it.

    Attributes:
        loss_mask: Weight of each token's prediction; 0 is not scored.
        segment_ids: Packed documents, or None.
        router_mask: True where routers count a position, or None.
        xent: Per-token losses (nats) to form objectives with, or None.
        num_mtp_layers: MTP depths.
        num_micro_steps: Accumulation steps.
        data_parallel_size: Data ranks.
    """

    loss_mask: Float[np.ndarray, "B S"]
    segment_ids: Int[np.ndarray, "B S"] | None = None
    router_mask: Bool[np.ndarray, "B S"] | None = None
    xent: Float[np.ndarray, "B S"] | None = None
    num_mtp_layers: int = 1
    num_micro_steps: int = 1
    data_parallel_size: int = 1


def read_masks(
    path: pathlib.Path, *, num_mtp_layers: int = 1, num_micro_steps: int = 1, data_parallel_size: int = 1
) -> MaskBatch:
    """Reads `loss_mask` and, where given, `segment_ids`, `router_mask` and `xent`, all `[B, S]`.

    Args:
        path: An `.npz` with arrays, or a `.json` object with nested lists.
        num_mtp_layers: MTP depths to compare.
        num_micro_steps: Accumulation steps of the run.
        data_parallel_size: Data ranks of the run.

    Raises:
        ValueError: No such file, another format, no `loss_mask`, or arrays of different shape.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give an .npz or .json file with loss_mask [B, S]")
    arrays = _arrays(path)
    if "loss_mask" not in arrays:
        raise ValueError(f"{path} has no loss_mask; it holds {', '.join(sorted(arrays)) or 'nothing'}")
    shape = arrays["loss_mask"].shape
    for name in FIELDS:
        if name in arrays and (arrays[name].shape != shape or len(shape) != 2):
            raise ValueError(
                f"{path}: {name} must be [B, S] like loss_mask {shape}, got {arrays[name].shape}"
            )
    router = arrays.get("router_mask")
    segments, xent = arrays.get("segment_ids"), arrays.get("xent")
    return MaskBatch(
        loss_mask=arrays["loss_mask"].astype(np.float64),
        segment_ids=None if segments is None else segments.astype(np.int32),
        router_mask=None if router is None else router.astype(bool),
        xent=None if xent is None else xent.astype(np.float64),
        num_mtp_layers=num_mtp_layers,
        num_micro_steps=num_micro_steps,
        data_parallel_size=data_parallel_size,
    )


def _arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in FIELDS if name in file.files}
        if path.suffix == ".json":
            content: Any = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError(f"{path} must hold an object with loss_mask, got {type(content).__name__}")
            entries = cast("dict[str, Any]", content)
            return {name: np.asarray(entries[name]) for name in FIELDS if name in entries}
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    raise ValueError(f"{path} must end in .npz or .json")
