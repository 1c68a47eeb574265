"""Log parity: read the logs of two trainers, align them, say how far apart they are and why.

A side room of `eqx_loss`: it needs NumPy, and matplotlib for `--plot` only.
"""

from ._align import Alignment as Alignment
from ._align import Pairs as Pairs
from ._cli import main as main
from ._compare import ChannelResult as ChannelResult
from ._compare import Comparison as Comparison
from ._compare import Options as Options
from ._compare import Verdict as Verdict
from ._compare import compare_runs as compare_runs
from ._meanings import Cause as Cause
from ._meanings import Signature as Signature
from ._plot import save_plot as save_plot
from ._read import read_run as read_run
from ._report import as_json as as_json
from ._report import as_junit as as_junit
from ._report import as_text as as_text
from ._stats import Drift as Drift
from ._stats import Statistics as Statistics
from ._types import LogError as LogError
from ._types import LogFormat as LogFormat
from ._types import Run as Run
from ._types import Series as Series
