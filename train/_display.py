"""What a run shows while it works: a progress bar on a terminal, one line an interval otherwise."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_FIELDS = "loss {loss:.4f}  lm {lm_loss:.4f}  mtp {mtp:.4f}  {speed:,.0f} tok/s"


class Display:
    """Progress of one run on a console; a context manager."""

    def __init__(self, console: Console, *, num_steps: int, start_step: int) -> None:
        """Shows nothing until entered.

        Args:
            num_steps: Steps of the whole run.
            start_step: Steps done before.
        """
        self._console = console
        self._num_steps = num_steps
        self._start_step = start_step
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[values]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self._console,
                expand=True,
            )
            self._task = self._bar.add_task(
                "train", total=self._num_steps, completed=self._start_step, values=""
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show_step(self, step: int) -> None:
        """Moves the bar to `step`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show_row(
        self, step: int, row: Mapping[str, float], tokens_per_second: float, seconds_left: float
    ) -> None:
        """Shows the row of an interval: loss, lm and MTP in nats, tokens/s."""
        values = _FIELDS.format(
            loss=row["learning/loss"],
            lm_loss=row["learning/lm_loss"],
            mtp=row["learning/raw_mtp_loss"],
            speed=tokens_per_second,
        )
        if self._bar is not None:
            self._bar.update(self._task, values=values)
        else:
            left = f"{int(seconds_left // 60)}:{int(seconds_left % 60):02d}"
            self.say(f"step {step}/{self._num_steps}  {values}  ETA {left}")

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
