"""A trainer that takes turns: every step waits for the parent, and says what the last one took.

    PYTHON bench/maxtext_child.py maxtext key=value ...      in MaxText's environment
    PYTHON -m bench.maxtext_child ours CONFIG key=value ...  in ours

Both trainers run unchanged, with their own command lines. One function of each is wrapped: MaxText's
`training_loop_iteration` and `Program.step` of ours. A step is everything from one call to the next: data, step, logs.

Lines for the parent begin with `TURN ` and hold JSON; the parent answers `go` or `quit`. Imports nothing of ours at
the top: MaxText's environment has none of it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

MARK = "TURN "


def main() -> None:
    """Trains one side until the parent says `quit`."""
    side, arguments = sys.argv[1], sys.argv[2:]
    # What the trainer prints goes to standard error, so the parent reads turns alone.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    run = {"ours": run_ours, "maxtext": run_maxtext}[side]
    run(arguments, Turns(channel.write, sys.stdin.readline))


class Turns:
    """The child's side of the protocol."""

    def __init__(self, say: Callable[[str], Any], hear: Callable[[], str]) -> None:
        """Args:
        say: Sends text to the parent.
        hear: Waits for a line of it.
        """
        self._say = say
        self._hear = hear
        self._released = (time.monotonic(), time.process_time())
        self.facts: dict[str, Any] = {}

    def wait(self) -> None:
        """Says what the time since the last release took, and waits for the next one; exits on `quit`."""
        wall, processor = time.monotonic(), time.process_time()
        message = {
            "seconds": wall - self._released[0],
            "cpu_seconds": processor - self._released[1],
            "total_cpu_seconds": processor,
            "peak_bytes": peak_bytes(),
            **self.facts,
        }
        self._say(MARK + json.dumps(message) + "\n")
        if self._hear().strip() != "go":
            os._exit(0)
        self._released = (time.monotonic(), time.process_time())


def peak_bytes() -> int:
    """The largest resident memory this process has had (VmHWM)."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def run_ours(arguments: list[str], turns: Turns) -> None:
    """`python -m train`, with `Program.step` taking turns."""
    import jax

    from train import _cli, _program

    entry = _program.Program.step

    def step(self: Any, batch: Any, state: Any) -> Any:
        turns.facts.setdefault("num_parameters", sum(leaf.size for leaf in jax.tree.leaves(state.model)))
        turns.wait()
        result = entry(self, batch, state)
        turns.facts["loss"] = float(result[1].objective.total)
        return jax.block_until_ready(result)

    _program.Program.step = step
    sys.exit(_cli.main(arguments))


def run_maxtext(arguments: list[str], turns: Turns) -> None:
    """`python -m maxtext.trainers.pre_train.train`, with `training_loop_iteration` taking turns."""
    import jax
    from absl import app
    from maxtext.common import metric_logger
    from maxtext.trainers.pre_train import train

    entry = train.training_loop_iteration
    count = metric_logger.MetricLogger.write_setup_info_to_tensorboard

    def write_setup_info_to_tensorboard(self: Any, params: Any) -> Any:
        turns.facts["num_parameters"] = sum(leaf.size for leaf in jax.tree.leaves(params))
        return count(self, params)

    def training_loop_iteration(*rest: Any) -> Any:
        turns.wait()
        metrics = jax.block_until_ready(entry(*rest))
        turns.facts["loss"] = float(metrics["scalar"]["learning/loss"])
        return metrics

    metric_logger.MetricLogger.write_setup_info_to_tensorboard = write_setup_info_to_tensorboard
    train.training_loop_iteration = training_loop_iteration
    app.run(train.main, argv=["train", *arguments])


if __name__ == "__main__":
    main()
