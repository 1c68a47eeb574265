"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import signal
from types import FrameType


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is noted and a second one acts as usual.

    Attributes:
        signal: The signal that came; None as long as none did.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        """Notes nothing yet."""
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in self._SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  # what signal() returned

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for each, handler in self._previous.items():
            signal.signal(each, handler)  # pyright: ignore[reportArgumentType]
