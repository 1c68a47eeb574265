"""One line per case and quantity, and the tolerances of the reference cases."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["value", "loss", "gradient", "exact"]
Precision = Literal["float64", "float32"]

# Absolute for values and losses, relative to the norm for gradients; data/README.md, "Tolerances".
TOLERANCES: dict[tuple[Precision, Kind], float] = {
    ("float64", "value"): 1e-9,
    ("float64", "loss"): 1e-11,
    ("float64", "gradient"): 1e-7,
    ("float64", "exact"): 0.0,
    ("float32", "value"): 5e-4,
    ("float32", "loss"): 5e-6,
    ("float32", "gradient"): 5e-4,
    ("float32", "exact"): 0.0,
}


# Every program runs once, and takes longer to compile than to run.
FAST_COMPILATION = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One judged quantity. `error` is NaN when it could not be computed, with the reason in `note`."""

    case: str
    precision: Precision
    quantity: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return self.error <= self.tolerance  # False for NaN

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        note = f"  {self.note}" if self.note else ""
        return (
            f"{verdict}  {self.case:24} {self.precision}  {self.quantity:28} "
            f"error {self.error:9.2e}  tolerance {self.tolerance:7.0e}{note}"
        )


class Judge:
    """Compares arrays of one case in one precision and keeps the lines."""

    def __init__(self, case: str, precision: Precision):
        self.case = case
        self.precision: Precision = precision
        self.lines: list[Line] = []

    def add(self, quantity: str, kind: Kind, error: float, note: str = "") -> None:
        """Record an error that was computed elsewhere."""
        tolerance = TOLERANCES[self.precision, kind]
        self.lines.append(
            Line(
                case=self.case,
                precision=self.precision,
                quantity=quantity,
                error=float(error),
                tolerance=tolerance,
                note=note,
            )
        )

    def close(
        self, quantity: str, kind: Kind, ours: np.ndarray, theirs: np.ndarray, where: np.ndarray | None = None
    ) -> None:
        """Largest absolute difference over the positions `where` (leading axes); NaN anywhere fails."""
        if ours.shape != theirs.shape:
            self.add(quantity, kind, float("nan"), f"shape {ours.shape}, expected {theirs.shape}")
            return
        difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
        if where is not None:
            difference = difference[where]
        self.add(quantity, kind, difference.max() if difference.size else 0.0)

    def equal(
        self, quantity: str, ours: np.ndarray, theirs: np.ndarray, where: np.ndarray | None = None
    ) -> None:
        """Number of places that differ."""
        if ours.shape != theirs.shape:
            self.add(quantity, "exact", float("nan"), f"shape {ours.shape}, expected {theirs.shape}")
            return
        different = ours != theirs
        if where is not None:
            different = different[where]
        self.add(quantity, "exact", int(different.sum()), "places differ" if different.any() else "")

    def gradient(self, quantity: str, ours: np.ndarray, theirs: np.ndarray, noise: float = 0.0) -> None:
        """`relative_error`; an expected gradient without elements asks for one without elements, of any shape."""
        if not ours.size and not theirs.size:
            self.add(quantity, "gradient", 0.0)
            return
        if ours.shape != theirs.shape:
            self.add(quantity, "gradient", float("nan"), f"shape {ours.shape}, expected {theirs.shape}")
            return
        self.add(quantity, "gradient", relative_error(ours, theirs, noise))

    def failure(self, quantity: str, reason: str) -> None:
        """A quantity that could not be computed at all."""
        self.add(quantity, "exact", float("nan"), reason)


def rounding_noise(norms: Iterable[float]) -> float:
    """Norm below which one of the reference's float64 gradients is 0 with rounding: 1e-13 of the largest of them.

    The gradient of a router that chooses one expert and renormalizes is such a 0: its weight is s / (s + 1e-20).
    """
    return 1e-13 * max(norms, default=0.0)


def relative_error(ours: np.ndarray, theirs: np.ndarray, noise: float = 0.0) -> float:
    """`|ours - theirs| / |theirs|` in the Euclidean norm, and the largest element's likewise; the larger of both.

    Where `theirs` is 0 everywhere (an expert that no token chose), or its norm is at most `noise`, the absolute
    difference counts. Empty: 0.
    """
    if not theirs.size:
        return 0.0
    difference = ours.astype(np.float64) - theirs.astype(np.float64)
    norm, peak = np.linalg.norm(theirs), np.abs(theirs).max()
    is_zero = norm <= noise
    by_norm = np.linalg.norm(difference) / (1.0 if is_zero else norm)
    by_peak = np.abs(difference).max() / (1.0 if is_zero else peak)
    return float(max(by_norm, by_peak)) if np.isfinite(difference).all() else float("nan")


def summary_error(ours: np.ndarray, theirs: tuple[float, float], noise: float = 0.0) -> float:
    """Relative error of a gradient's norm and of its probe `sum_i g_i sin(i + 1)`, i row-major from 0.

    Both are divided by the expected norm; absolute where that is at most `noise`.
    """
    flat = ours.astype(np.float64).reshape(-1)
    norm = float(np.linalg.norm(flat))
    probe = float(flat @ np.sin(np.arange(1, flat.size + 1, dtype=np.float64)))
    scale = 1.0 if theirs[0] <= noise else theirs[0]
    return max(abs(norm - theirs[0]), abs(probe - theirs[1])) / scale


def closing_line(lines: list[Line]) -> str:
    """`N passed, N failed`."""
    failed = sum(not line.passed for line in lines)
    return f"{len(lines) - failed} passed, {failed} failed"
