"""Training on CPU beside MaxText: time to first step, step time, CPU seconds, memory; both real trainers, in turns.

    python -m bench.train_vs_maxtext --maxtext-python PYTHON --quick --json OUT --csv OUT

Work a: DeepSeek-V3-like MoE, MLA, MTP; work b: dense. Each in bfloat16 and float32.

Both start cold (no compilation cache), one after the other. From then on they take turns: a step of one, a step of the
other, a matrix product of this process; a busy machine slows all three. A step is what lies between two steps of the
training loop: data, step, logs. Neither evaluates nor writes checkpoints. MaxText trains on its synthetic tokens; ours
reads, packs and shuffles generated text, whose tokens are bytes. Peak memory is VmHWM of the process at the last step.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from ._maxtext_table import summary, table, write
from ._maxtext_works import CONFIGS, ON_CPU, TRAINED, add_python_argument, find_python, replace_settings
from .maxtext_child import MARK

ROOT = pathlib.Path(__file__).parents[1]
PRODUCT_SIZE = 1024
PRODUCTS = 10


def main() -> None:
    """Measures and prints; writes `--json` and `--csv` after every case."""
    options = _parser().parse_args()
    python = find_python(options.maxtext_python)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    cases = []
    for work in options.works:
        for dtype in options.dtypes:
            cases.append(measure_case(work, dtype, python, options))
            print(table(cases), flush=True)
            write(cases, options.json, options.csv)


def measure_case(work: str, dtype: str, python: str, options: argparse.Namespace) -> dict[str, Any]:
    """One work in one dtype: medians of both sides, their ratios (ours over MaxText's), parameters, shares."""
    num_steps = options.steps or (4 if options.quick else 12)
    config = load_work(work, dtype)
    with tempfile.TemporaryDirectory(prefix="train_vs_maxtext_") as folder:
        write_text(pathlib.Path(folder) / "text", num_tokens=200_000)
        sides = {
            "maxtext": Side(maxtext_command(work, dtype, python, folder, options.set), folder, "maxtext"),
            "ours": Side(our_command(work, dtype, folder, options.ours), folder, "ours"),
        }
        try:
            first = {name: side.first_step() for name, side in sides.items()}
            steps: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            rates = []
            for _ in range(num_steps):
                for name, side in sides.items():
                    steps[name].append(side.step())
                rates.append(product_rate(dtype))
        finally:
            for side in sides.values():
                side.close()
    return summary(work, dtype, first, steps, rates, work_size(config))


class Side:
    """One trainer as a child process that waits before every step."""

    def __init__(self, command: Sequence[str], folder: str, name: str) -> None:
        """Args:
        command: Of a child of `maxtext_child`.
        folder: Its working folder; what it prints goes to `NAME.log` there.
        name: Its name.
        """
        self._command = command
        self._folder = folder
        self._log = pathlib.Path(folder) / f"{name}.log"
        self._child: subprocess.Popen[str] | None = None

    def first_step(self) -> dict[str, float]:
        """Starts it; seconds from the start of the process to its first step done, and what it says of itself."""
        environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        environment |= {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
        if self._command[1] == "-m":
            environment["PYTHONPATH"] = str(ROOT)
        with open(self._log, "w", encoding="utf-8") as log:
            start = time.monotonic()
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self._folder,
                env=environment,
            )
        before = self._turn()
        ready = time.monotonic() - start
        self._say("go")
        turn = self._turn()
        return {
            **turn,
            "ready_seconds": ready,
            "seconds_to_first_step": time.monotonic() - start,
            "ready_cpu_seconds": before["total_cpu_seconds"],
            "cpu_seconds_to_first_step": turn["total_cpu_seconds"],
        }

    def step(self) -> dict[str, float]:
        """Lets it do one step."""
        self._say("go")
        return self._turn()

    def close(self) -> None:
        """Ends it."""
        if self._child is None:
            return
        if self._child.poll() is None:
            self._say("quit")
        self._child.wait(timeout=60)

    def _say(self, word: str) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        self._child.stdin.write(word + "\n")
        self._child.stdin.flush()

    def _turn(self) -> dict[str, float]:
        assert self._child is not None
        assert self._child.stdout is not None
        turn = read_turn(self._child.stdout.readline())
        if turn is None:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(
                f"{' '.join(self._command[:4])} ended before its turn; its last words:\n{tail}"
            )
        return turn


def read_turn(line: str) -> dict[str, float] | None:
    """What a child says before a step; None when the line is no turn (an ended child gives an empty one)."""
    return json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else None


def maxtext_command(work: str, dtype: str, python: str, folder: str, changes: Sequence[str]) -> list[str]:
    """The command of MaxText's side."""
    settings = [
        *TRAINED[work],
        *ON_CPU,
        "steps=100000",
        f"dtype={dtype}",
        f"base_output_directory={folder}/maxtext",
    ]
    child = str(pathlib.Path(__file__).with_name("maxtext_child.py"))
    # -P: this folder's files must not hide modules of its environment.
    return [python, "-P", child, "maxtext", *replace_settings(settings, changes)]


def our_command(work: str, dtype: str, folder: str, changes: Sequence[str]) -> list[str]:
    """The command of our side."""
    overrides = [
        f"model.dtype={dtype}",
        "run.num_steps=100000",
        f"run.folder={folder}/ours",
        f"data.folder={folder}/text",
        'data.pattern="*.txt"',
    ]
    command = [sys.executable, "-m", "bench.maxtext_child", "ours", str(CONFIGS / f"work-{work}.yaml")]
    return [*command, *replace_settings(overrides, changes)]


def load_work(work: str, dtype: str) -> Any:
    """Our configuration of a work."""
    from train._config_load import load_config

    return load_config(CONFIGS / f"work-{work}.yaml", [f"model.dtype={dtype}"])


def work_size(config: Any) -> dict[str, float]:
    """Tokens and model FLOPs of a step."""
    from train._aot_flops import model_flops

    batch = config.batch
    return {
        "tokens": batch.num_rows * batch.num_positions,
        "model_flops": model_flops(config.model, batch.num_rows, batch.num_positions),
    }


def write_text(folder: pathlib.Path, num_tokens: int) -> None:
    """Files of random letters, at least `num_tokens` bytes in all."""
    draw = random.Random(0)
    folder.mkdir()
    for i in range(10):
        text = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz \n", k=num_tokens // 10 + 1))
        (folder / f"{i}.txt").write_text(text, encoding="ascii")


def product_rate(dtype: str) -> float:
    """FLOPs a second of a square matrix product of this machine, by JAX."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((PRODUCT_SIZE, PRODUCT_SIZE), dtype)
    product = jax.jit(lambda a, b: a @ b)
    jax.block_until_ready(product(x, x))
    start = time.monotonic()
    for _ in range(PRODUCTS):
        jax.block_until_ready(product(x, x))
    return 2 * PRODUCT_SIZE**3 * PRODUCTS / (time.monotonic() - start)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_python_argument(parser)
    parser.add_argument("--quick", action="store_true", help="4 steps instead of 12")
    parser.add_argument("--steps", type=int, help="steps of each side after the first")
    parser.add_argument("--works", nargs="+", choices=sorted(TRAINED), default=sorted(TRAINED))
    parser.add_argument(
        "--dtypes", nargs="+", choices=("bfloat16", "float32"), default=("bfloat16", "float32")
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of MaxText"
    )
    parser.add_argument("--ours", action="append", default=[], metavar="KEY=VALUE", help="a setting of ours")
    parser.add_argument("--json", metavar="OUT", help="file for the numbers")
    parser.add_argument("--csv", metavar="OUT", help="file for the table")
    return parser


if __name__ == "__main__":
    main()
