"""One picture of a comparison: the curves, and the relative difference in its tolerance band."""

from ._compare import Comparison, Verdict
from ._stats import relative
from ._types import LogError


def save_plot(comparison: Comparison, path: str) -> None:
    """Writes the picture of all judged channels; the suffix of `path` chooses the file type.

    Raises:
        LogError: matplotlib is not installed, or the file cannot be written in that type.
    """
    try:
        # Only pictures need it; a bare Figure leaves pyplot's global state alone.
        import matplotlib.figure as figures
    except ImportError as error:
        raise LogError("--plot needs matplotlib, which is not installed; `pip install matplotlib`") from error
    judged = [result for result in comparison.channels if result.verdict is not Verdict.INFO]
    figure = figures.Figure(figsize=(6.4 * len(judged), 6.4), layout="constrained")
    axes = figure.subplots(2, len(judged), sharex="col", squeeze=False, height_ratios=(3, 2))
    for column, result in enumerate(judged):
        pairs = result.pairs
        above, below = axes[0][column], axes[1][column]
        above.plot(pairs.steps, pairs.reference, label=f"reference {result.reference_name}")
        above.plot(pairs.steps, pairs.candidate, "--", label=f"candidate {result.candidate_name}")
        above.set_title(f"{result.channel}: {result.verdict.value}")
        above.set_ylabel(f"{result.channel} (nats)")
        above.legend()
        below.plot(pairs.steps, 100 * relative(pairs), ".-", markersize=3, linewidth=0.8)
        if result.tolerance is not None:
            percent = 100 * result.tolerance
            below.axhspan(-percent, percent, alpha=0.15, color="tab:green", label=f"+- {percent:g} %")
            below.legend()
        below.axhline(0, linewidth=0.6, color="black")
        below.set_ylabel("(candidate - reference) / reference (%)")
        below.set_xlabel("step")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise LogError(f"{path}: the picture cannot be written ({error}); use .png, .svg or .pdf") from error
