"""The fused output layer against its peers: time, temporaries and error on this CPU; programs for TPU.

    python -m bench.xent --quick --json OUT      one shape, under two minutes on two quiet cores
    python -m bench.xent                         the table: xent.csv and xent.png
    python -m bench.xent --only tpu              its TPU part: compiled ahead of time, nothing runs
    python -m bench.xent --only cpu --shapes 2048,512,32768 8192,512,32768

The table's CPU part is T = 2048 and 8192, D = 512 and 2048, V = 32,768 and 157,184: {work:.0f} times the quick
run's arithmetic, so more than an hour. Every shape is written when it is done, and a second run with the same CSV
goes on where the first stopped. The largest shapes need some 16 GB, by count.

Every ratio comes from one process: all paths run in turn, round after round, forwards and backwards, and
the median over rounds of a round's ratio counts, so a load that changes slowly cancels. Peers far behind in
the first round run in that one alone. `cpu` columns are seconds of this process's threads, which other load
disturbs little; plain columns are wall time.
"""

import argparse
import importlib.util
import json
import math
import pathlib

from . import _xent_cpu, _xent_table

VOCAB = 157_184
QUICK = (1024, 512, VOCAB)
MEMORY_SHAPE = (8192, 512, VOCAB)
TABLE = [(t, d, v) for v in (32_768, VOCAB) for d in (512, 2048) for t in (2048, 8192)]
TOPOLOGIES = ("v5p:2x2x1", "v6e:2x2")
ROUNDS = 4
PUBLISHED = (
    "Cut-cross-entropy, published, not measured here: on an A100 at T = 8192, D = 2304, V = 256,000, loss and "
    "gradient\ntake 1.16 GB instead of 28 GB of plain torch, 0.042 of it (arXiv:2411.09009, table 1)."
)


def main():
    arguments = _arguments()
    if arguments.quick:
        rows = _xent_cpu.time_shape(QUICK, arguments.rounds)
        for row in rows:
            _show(row)
    else:
        table = _xent_table.Table(pathlib.Path(arguments.csv))
        _fill(table, arguments)
        _xent_table.draw(pathlib.Path(arguments.png), table.rows, PUBLISHED)
    print(PUBLISHED)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(summary(rows), indent=1) + "\n")


def summary(rows):
    """The four numbers of the quick run, and the shapes they belong to."""
    mine = next(row for row in rows if row["path"] == "ours")
    thriftiest = {path: _xent_cpu.temporaries(path, MEMORY_SHAPE) for path in ("ours", "plain_jax", "optax")}
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
        "published": PUBLISHED,
    }


def _fill(table, arguments):
    """Add what the table lacks: CPU shapes, then TPU topologies."""
    for tokens, width, vocab in [] if arguments.only == "tpu" else arguments.shapes:
        if not table.has(platform="cpu", T=tokens, D=width, V=vocab):
            for row in _xent_cpu.time_shape((tokens, width, vocab), arguments.rounds):
                table.add(row)
                _show(row)
    if arguments.only == "cpu":
        return
    if importlib.util.find_spec("libtpu") is None:
        print("libtpu is not installed (extra `tpu`): the table has no TPU part")
        return
    from . import _xent_tpu

    for topology in arguments.tpu:
        for name in _xent_tpu.paths_by_name():
            if not table.has(platform=topology, path=name):
                table.add(_xent_tpu.row(topology, name))
                _show(table.rows[-1])


def _show(row):
    cells = (f"{key}={_short(value)}" for key, value in row.items() if value is not None)
    print("  ".join(cells), flush=True)


def _short(value):
    return f"{value:.4g}" if isinstance(value, float) else value


def _shape(text):
    sizes = tuple(int(size) for size in text.split(","))
    if len(sizes) != 3 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"a shape is T,D,V, each at least 1, got {text}")
    return sizes


def _arguments():
    work = sum(map(math.prod, TABLE)) / math.prod(QUICK)
    parser = argparse.ArgumentParser(
        description=__doc__.format(work=work), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one CPU shape, no table")
    parser.add_argument("--only", choices=("cpu", "tpu"), help="one part of the table")
    parser.add_argument(
        "--shapes", nargs="+", type=_shape, metavar="T,D,V", default=TABLE, help="of the CPU part"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of the CPU part; fewer where time is short"
    )
    parser.add_argument("--tpu", nargs="+", metavar="TOPOLOGY", default=TOPOLOGIES, help="of the TPU part")
    parser.add_argument(
        "--csv", default="xent.csv", help="the table's file; rows it has are not measured again"
    )
    parser.add_argument("--png", default="xent.png", help="the table's picture")
    parser.add_argument("--json", help="file for the summary of the quick run")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {arguments.rounds}")
    if arguments.json and not arguments.quick:
        parser.error("--json is the summary of --quick; the table is written to --csv and --png")
    return arguments


if __name__ == "__main__":
    main()
