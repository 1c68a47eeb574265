"""Which logged name is which quantity."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from ._types import LogError, LogFormat, Run, Series

# Canonical channels and the names they have in logs, best first. Names are compared after
# `_canonical`. Sources: Megatron-LM training.py and its tensorboard tags, MaxText
# metric_logger.py, torchtitan metrics.py, transformers trainer.py.
KNOWN_NAMES: Mapping[str, tuple[str, ...]] = {
    "lm": ("lm_loss", "learning/lm_loss", "train/lm_loss", "lm"),
    "loss": (
        "loss",
        "learning/loss",
        "train/loss",
        "loss_metrics/global_avg_loss",
        "global_avg_loss",
        "train/total_loss",
        "total_loss",
        "reduced_train_loss",
    ),
    "objective": ("learning/objective", "objective"),
    "objective_lm": ("learning/objective_lm", "objective_lm"),
    "mtp": ("raw_mtp_loss", "learning/raw_mtp_loss", "train/mtp_loss", "mtp"),
    "mtp_weighted": ("mtp_loss", "learning/mtp_loss"),
    "router_z": ("moe_z_loss", "learning/moe_z_loss", "router_z_loss", "router_z"),
    "load_balance": (
        "moe_lb_loss",
        "learning/moe_lb_loss",
        "load_balancing_loss",
        "seq_load_balancing_loss",
        "global_load_balancing_loss",
        "load_balance",
    ),
    "lm_z": ("z_loss", "learning/z_loss", "lm_z"),
    "lm_gap": ("learning/lm_estimator_gap", "lm_estimator_gap"),
    "raw_grad_norm": ("raw_grad_norm", "learning/raw_grad_norm"),
    "grad_norm": ("grad_norm", "learning/grad_norm", "train/grad_norm"),
    "learning_rate": (
        "learning_rate",
        "learning/current_learning_rate",
        "train/learning_rate",
        "lr",
        "optim/lr",
        "train/lr",
    ),
    "num_tokens": ("total_weights", "learning/total_weights"),
}

# What a name means where a format departs from the table above.
_MEGATRON_NAMES: Mapping[str, tuple[str, ...]] = {
    "router_z": ("z_loss", *KNOWN_NAMES["router_z"]),  # un-weighted, averaged over MoE layers
    "lm_z": (),
    "raw_grad_norm": ("grad_norm",),  # Megatron prints the norm before clipping
    "grad_norm": (),
}
_BEFORE_CLIPPING: Mapping[str, tuple[str, ...]] = {
    "raw_grad_norm": ("grad_norm", "train/grad_norm", *KNOWN_NAMES["raw_grad_norm"]),
    "grad_norm": (),
}
_REFERENCE_NAMES: Mapping[str, tuple[str, ...]] = {
    "mtp": ("mtp_loss", *KNOWN_NAMES["mtp"]),  # a reference JSON holds the unweighted loss
    "mtp_weighted": (),
}
_FORMAT_NAMES: Mapping[LogFormat, Mapping[str, tuple[str, ...]]] = {
    LogFormat.MEGATRON: _MEGATRON_NAMES,
    LogFormat.GOLDEN: _MEGATRON_NAMES,
    LogFormat.TORCHTITAN: _BEFORE_CLIPPING,
    LogFormat.TRAINER_STATE: _BEFORE_CLIPPING,
    LogFormat.REFERENCE: _REFERENCE_NAMES,
}

# Number of a run's first step. Others (CSV, TensorBoard, other JSON Lines) have no rule.
_FIRST_STEP: Mapping[LogFormat, int] = {
    LogFormat.MEGATRON: 1,
    LogFormat.GOLDEN: 1,
    LogFormat.TORCHTITAN: 1,
    LogFormat.TRAINER_STATE: 1,
    LogFormat.MAXTEXT: 0,
    LogFormat.REFERENCE: 0,
}
_MAX_DEPTH = 16
_MEGATRON_LOSS = re.compile(r"(?:lm|mtp_\d+) loss")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Channels:
    """A run's series by channel.

    Attributes:
        series: Channel to series.
        notes: Where a stand-in was taken ("lm read from `loss`").
    """

    series: Mapping[str, Series]
    notes: Mapping[str, str]


def find_channels(run: Run, names: Mapping[str, str]) -> Channels:
    """The channels of a run: given names first, then known ones, then stand-ins.

    `mtp` is the mean of `mtp_1, mtp_2, ...` where only depths are logged. Stand-ins, with a
    note: `loss` for a missing `lm`, weighted `mtp_weighted` for a missing `mtp`.

    Args:
        run: The run.
        names: Channel to name in the log, as the user maps them.

    Raises:
        LogError: A mapped name is not in the log.
    """
    by_name = {_canonical(series.name): series for series in reversed(run.series)}
    naming = _MEGATRON_NAMES if _named_by_megatron(run) else _FORMAT_NAMES.get(run.format, {})
    found: dict[str, Series] = {}
    for channel, default in KNOWN_NAMES.items():
        for name in naming.get(channel, default):
            if name in by_name:
                found[channel] = by_name[name]
                break
    depths = {
        f"mtp_{k}": by_name[f"mtp_{k}_loss"] for k in range(1, _MAX_DEPTH + 1) if f"mtp_{k}_loss" in by_name
    }
    found.update(depths)
    if depths and "mtp" not in found:
        found["mtp"] = _mean_series(list(depths.values()))
    notes: dict[str, str] = {}
    for channel, stand_in in (("lm", "loss"), ("mtp", "mtp_weighted")):
        if channel not in found and stand_in in found:
            found[channel] = found[stand_in]
            notes[channel] = f"{channel} read from {found[stand_in].name!r} ({_STAND_IN[channel]})"
    for channel, name in names.items():
        series = run.find(name)
        if series is None:
            raise LogError(
                f"{run.path}: --map names {name!r} for channel {channel!r}, but the log has only: "
                f"{', '.join(run.names)}"
            )
        found[channel] = series
        notes.pop(channel, None)
    return Channels(series=found, notes=notes)


_STAND_IN = {
    "lm": "may include further loss terms",
    "mtp": "may carry the coefficient mtp_loss_scaling_factor",
}


def first_step_rule(run: Run) -> int | None:
    """The number that the run's trainer gives its first step, or None where there is no rule."""
    if "learning/objective" in run.names:
        return 1  # our trainer counts steps done
    if any(name.startswith("learning/") for name in run.names):
        return 0  # MaxText
    if _named_by_megatron(run):
        return _FIRST_STEP[LogFormat.MEGATRON]
    return _FIRST_STEP.get(run.format)


def _named_by_megatron(run: Run) -> bool:
    """True for the names that Megatron gives TensorBoard and W&B too."""
    return any(_MEGATRON_LOSS.fullmatch(name) for name in run.names)


def _canonical(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def _mean_series(depths: list[Series]) -> Series:
    """The mean over depths at the steps that all of them have."""
    if len(depths) == 1:
        return depths[0]
    steps = depths[0].steps
    for series in depths[1:]:
        steps = np.intersect1d(steps, series.steps)
    values = [series.values[np.searchsorted(series.steps, steps)] for series in depths]
    name = "mean of " + ", ".join(series.name for series in depths)
    return Series(name=name, steps=steps, values=np.mean(values, axis=0))
