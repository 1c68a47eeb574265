"""Import time of eqx_loss against that of equinox: `python -m bench.import_time`.

`eqx_loss` loads with the first name that is used, so a name is imported. Fresh processes, the two in
turn, median of each and of the paired ratios. The promise is a ratio below 1.5.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time


def _seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.import_time", description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="counted pairs, after one warm-up")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    pairs = [
        (_seconds("import equinox"), _seconds("from eqx_loss import loss_weights"))
        for _ in range(options.runs + 1)
    ][1:]
    result = {
        "equinox_seconds": statistics.median(a for a, _ in pairs),
        "eqx_loss_seconds": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v:.3f}" for k, v in result.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
