"""Wall time of the steps of a log interval, pauses left out."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple


class Lap(NamedTuple):
    """What the clock saw since its last restart.

    Attributes:
        num_steps: Steps counted, at least 1.
        seconds: Wall time without pauses, above 0.
        waited: Seconds of it spent waiting for data.
    """

    num_steps: int
    seconds: float
    waited: float


class Clock:
    """Counts steps and seconds from one restart to the next."""

    def __init__(self) -> None:
        """Starts at once."""
        self._reset()

    def count_step(self) -> None:
        """One more step is done."""
        self._num_steps += 1

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Time inside does not count."""
        start = time.monotonic()
        yield
        self._start += time.monotonic() - start

    @contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """Time inside counts as waiting for data too."""
        start = time.monotonic()
        yield
        self._waited += time.monotonic() - start

    def restart(self) -> Lap:
        """The lap that ends here; a new one begins."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        lap = Lap(max(self._num_steps, 1), seconds, self._waited)
        self._reset()
        return lap

    def _reset(self) -> None:
        self._start = time.monotonic()
        self._num_steps = 0
        self._waited = 0.0
