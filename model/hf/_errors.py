"""The error of a checkpoint that cannot be read or written."""

from collections.abc import Sequence

MAX_LINES = 40


class CheckpointError(ValueError):
    """A checkpoint breaks a rule; `problems` has one line a tensor, file or field, each with its remedy."""

    def __init__(self, problems: Sequence[str]):
        """Keep every problem; the message shows the first 40."""
        self.problems = list(problems)
        shown = self.problems[:MAX_LINES]
        rest = len(self.problems) - len(shown)
        tail = [f"... and {rest} more"] if rest else []
        super().__init__("\n".join([*shown, *tail]))
