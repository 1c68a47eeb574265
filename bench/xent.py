"""The fused output layer against its peers: time, temporaries and error on this CPU; programs for TPU.

    python -m bench.xent --quick --json OUT      one shape, under two minutes on two quiet cores
    python -m bench.xent --csv CSV --png PNG     the table
    python -m bench.xent --tpu v5p:2x2x1 v6e:2x2 --csv CSV     compiled ahead of time, nothing runs

Every ratio comes from one process: all paths run in turn, round after round, forwards and backwards, and
the median over rounds of a round's ratio counts, so a load that changes slowly cancels. Peers far behind in
the first round run in that one alone. `cpu` columns are seconds of this process's threads, which other load
disturbs little; plain columns are wall time.
Cut-cross-entropy's published ratio, for comparison and not measured here: on an A100 at T = 8192,
D = 2304, V = 256,000, loss and gradient take 1.16 GB instead of 28 GB of plain torch (arXiv:2411.09009, table 1).
"""

import argparse
import csv
import gc
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from . import _xent_paths as paths

VOCAB = 157_184
QUICK = (1024, 512, VOCAB)
MEMORY_SHAPE = (8192, 512, VOCAB)
TABLE = [(t, d, v) for v in (32_768, VOCAB) for t in (2048, 8192) for d in (512, 2048)]
ROUNDS = 4
# A peer slower than this multiple of the fastest in the first round is not run again.
BEHIND = 1.15
# Peers that hold all logits several times are timed up to this many bytes of logits.
MAX_LOGITS_BYTES = 2 << 30
ERROR_TOKENS = 128


def main():
    arguments = _arguments()
    if arguments.tpu:
        from . import _xent_tpu

        rows = [row for topology in arguments.tpu for row in _xent_tpu.rows(topology)]
    elif arguments.quick:
        rows = time_shape(QUICK, ROUNDS)
    else:
        rows = [row for shape in TABLE for row in time_shape(shape, ROUNDS)]
    for row in rows:
        print("  ".join(f"{key}={_short(value)}" for key, value in row.items()), flush=True)
    if arguments.csv:
        _write_csv(pathlib.Path(arguments.csv), rows)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(summary(rows), indent=1) + "\n")
    if arguments.png:
        _draw(pathlib.Path(arguments.png), rows)


def summary(rows):
    """The four numbers of the quick run, and the shapes they belong to."""
    mine = next(row for row in rows if row["path"] == "ours")
    thriftiest = {path: temporaries(path, MEMORY_SHAPE) for path in ("ours", "plain_jax", "optax")}
    rivals = [row for row in rows if row["path"] not in ("ours", "three_products")]
    # One round is too noisy for a verdict, and a path that was dropped after it is not the fastest.
    lasting = [row for row in rivals if row["rounds"] == mine["rounds"]]
    fastest = max(lasting, key=lambda row: row["ours_vs_path"])
    fastest_cpu = max(lasting, key=lambda row: row["cpu_ours_vs_path"])
    products = next(row for row in rows if row["path"] == "three_products")
    return {
        "shape": {"T": mine["T"], "D": mine["D"], "V": mine["V"]},
        "time_vs_three_matmuls": products["ours_vs_path"],
        "cpu_time_vs_three_matmuls": products["cpu_ours_vs_path"],
        "time_vs_fastest_peer": fastest["ours_vs_path"],
        "fastest_peer": fastest["path"],
        "cpu_time_vs_fastest_peer": fastest_cpu["cpu_ours_vs_path"],
        "fastest_peer_by_cpu_time": fastest_cpu["path"],
        "peers": [row["path"] for row in rivals],
        "tokamax_installed": any(row["path"].startswith("tokamax") for row in rivals),
        "temporaries_vs_plain": thriftiest["ours"] / thriftiest["plain_jax"],
        "temporaries_vs_optax": thriftiest["ours"] / thriftiest["optax"],
        "temporaries_shape": dict(zip(("T", "D", "V"), MEMORY_SHAPE)),
        "max_rel_error": mine["max_rel_error"],
    }


def time_shape(shape, rounds):
    """A row for each path at this shape."""
    hidden, unembed, targets, weights = _case(shape)
    programs = {"three_products": lambda: paths.three_products(hidden, unembed)}
    memory = {"three_products": None}
    for name, objective in {"ours": paths.ours, **paths.peers()}.items():
        if name in ("plain_jax", "optax", "tokamax_xla") and 4 * shape[0] * shape[2] > MAX_LOGITS_BYTES:
            continue
        compiled = _lower(objective, hidden, unembed, targets, weights)
        programs[name] = lambda compiled=compiled: compiled(hidden, unembed, targets, weights)
        memory[name] = _bytes(compiled, shape)
    wall, cpu = _times(programs, rounds)
    errors = _errors(programs, shape)
    return [
        {
            "path": name,
            "T": shape[0],
            "D": shape[1],
            "V": shape[2],
            "seconds": statistics.median(wall[name]),
            "cpu_seconds": statistics.median(cpu[name]),
            "ours_vs_path": _paired(wall["ours"], wall[name]),
            "cpu_ours_vs_path": _paired(cpu["ours"], cpu[name]),
            "rounds": len(wall[name]),
            "temporaries_bytes": memory[name],
            "max_rel_error": errors.get(name),
        }
        for name in programs
    ]


def _times(programs, rounds):
    """Wall and CPU seconds of each program, one a round; the products' first run, a warm-up, is not counted."""
    jax.block_until_ready(programs["three_products"]())
    wall, cpu = {name: [] for name in programs}, {name: [] for name in programs}
    running = list(programs)
    for number in range(rounds):
        for name in running if number % 2 == 0 else reversed(running):
            gc.collect()
            start, cpu_start = time.perf_counter(), time.process_time()
            jax.block_until_ready(programs[name]())
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
        if number == 0:
            best = min(cpu[name][0] for name in programs if name not in ("ours", "three_products"))
            running = [
                name
                for name in programs
                if name in ("ours", "three_products") or cpu[name][0] <= BEHIND * best
            ]
    return wall, cpu


def _paired(mine, other):
    """Median over the rounds that both ran of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(mine, other))


def temporaries(path, shape):
    """Temporaries and the gradient of unembed by the compiler's account, bytes; nothing runs."""
    objective = {"ours": paths.ours, **paths.peers()}[path]
    tokens, width, vocab = shape
    arguments = (
        jax.ShapeDtypeStruct((tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocab), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    return _bytes(_lower(objective, *arguments), shape)


def _lower(objective, *arguments):
    return jax.jit(jax.value_and_grad(objective, (0, 1))).lower(*arguments).compile()


def _bytes(compiled, shape):
    return compiled.memory_analysis().temp_size_in_bytes + 4 * shape[1] * shape[2]


def _case(shape, seed=0):
    tokens, width, vocab = shape
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.standard_normal((tokens, width), np.float32))
    unembed = jnp.asarray(rng.standard_normal((width, vocab), np.float32) * (2 / width**0.5))
    targets = jnp.asarray(rng.integers(0, vocab, tokens))
    return hidden, unembed, targets, jnp.full((tokens,), 1 / tokens)


def _errors(programs, shape):
    """Largest error against float64, over the largest value, of both gradients and the objective."""
    from tests.oracles import xent as oracle

    case = _case((ERROR_TOKENS, *shape[1:]), seed=1)
    xent, *gradients = oracle.dense(*(np.asarray(part) for part in case))
    expected = [np.sum(xent * np.asarray(case[3], np.float64)), *gradients]
    found = {}
    for name, objective in {"ours": paths.ours, **paths.peers()}.items():
        if name in programs:
            value, slopes = _lower(objective, *case)(*case)
            pairs = zip((value, *slopes), expected)
            found[name] = max(float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in pairs)
    return found


def _short(value):
    return f"{value:.4g}" if isinstance(value, float) else value


def _write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _draw(path, rows):
    """Seconds over those of three products, by shape and path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = list(dict.fromkeys((row["T"], row["D"], row["V"]) for row in rows))
    names = list(dict.fromkeys(row["path"] for row in rows if row["path"] != "three_products"))
    figure, axes = plt.subplots(figsize=(10, 4))
    for k, name in enumerate(names):
        for x, shape in enumerate(shapes):
            at = {row["path"]: row["seconds"] for row in rows if (row["T"], row["D"], row["V"]) == shape}
            if name in at:
                axes.bar(
                    x + 0.8 * k / len(names), at[name] / at["three_products"], 0.8 / len(names), color=f"C{k}"
                )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(shapes)), [f"T={t}\nD={d}\nV={v}" for t, d, v in shapes])
    axes.set_ylabel("time / three matrix products")
    axes.legend([plt.Rectangle((0, 0), 1, 1, color=f"C{k}") for k in range(len(names))], names)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one shape")
    parser.add_argument(
        "--tpu", nargs="+", metavar="TOPOLOGY", help="compile for TPU topologies, as v5p:2x2x1"
    )
    parser.add_argument("--json", help="file for the summary")
    parser.add_argument("--csv", help="file for all rows")
    parser.add_argument("--png", help="file for the picture")
    arguments = parser.parse_args()
    if arguments.tpu and (arguments.quick or arguments.json or arguments.png):
        sys.exit("--tpu measures programs, not time: it goes with --csv only")
    return arguments


if __name__ == "__main__":
    main()
