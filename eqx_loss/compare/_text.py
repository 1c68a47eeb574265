"""Training steps in the stdout of Megatron, MaxText and torchtitan.

Every reader takes the whole text and looks only inside what a step line promises, so banners,
tracebacks, validation lines, rank prefixes, timestamps and colours around it do not matter. A
field that is not closed by its separator is not trusted: a line cut short by a crash ends in a
number with missing digits.
"""

import re

from ._types import Parsed, Row

# A number as printed by C, Python or NumPy. Thousands separators are handled by `_number`.
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)"
# After the number: a unit, or the quotes and braces of a log collector's JSON wrapper.
_VALUE = re.compile(rf"\s*(?P<number>{_NUMBER})\s*(?:[A-Za-z%/()]*|(?:\\n)?[\"'}}\]]*)\s*$", re.IGNORECASE)
_ANSI = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_LINE_ENDS = ("\n", "\r")

_MEGATRON_STEP = re.compile(r"iteration\s+(?P<step>\d+)\s*/\s*\d+\s*\|")
# "eval metrics after step" and "validation loss at iteration" are other lines altogether.
_MAXTEXT_STEP = re.compile(r"completed step:\s*(?P<step>\d+)\s*,")
_TITAN_STEP = re.compile(r"(?<!validate )\bstep:\s*(?P<step>\d+)\s+(?=[\w.]*loss\w*:)")
_TITAN_FIELD = re.compile(
    rf"(?P<name>[A-Za-z_][\w./]*):\s*(?P<number>{_NUMBER})(?P<end>\s|$|[A-Za-z%(])", re.IGNORECASE
)


def strip_ansi(text: str) -> str:
    """The text without terminal colour and title sequences."""
    return _ANSI.sub("", text)


def parse_megatron(text: str) -> Parsed:
    """Rows of ` iteration N/ M | consumed samples: ... | lm loss: 2.6E+00 | ... |` lines.

    Source of the format: NVIDIA/Megatron-LM `megatron/training/training.py` (`training_log`).
    A field counts when a `|` closes it. Units in parentheses stay in the name.
    """
    rows: list[Row] = []
    num_skipped = 0
    for body, step in _bodies(text, _MEGATRON_STEP):
        fields = body.split("|")
        values = _named_values(fields[:-1])  # the last part is not closed
        num_skipped += not values
        if values:
            rows.append(Row(step, values))
    return Parsed(rows, num_skipped)


def parse_maxtext(text: str) -> Parsed:
    """Rows of `completed step: N, seconds: ..., loss: ..., lm_loss: ...` lines.

    Source of the format: MaxText `metric_logger.py`. The last field is closed by the line's
    end, so the last line of a file counts in full only if it ends in a newline.
    """
    rows: list[Row] = []
    num_skipped = 0
    for body, step in _bodies(text, _MAXTEXT_STEP):
        closed = body[-1:] in _LINE_ENDS
        fields = body.rstrip("\r\n").split(", ")
        values = _named_values(fields if closed else fields[:-1])
        num_skipped += not values
        if values:
            rows.append(Row(step, values))
    return Parsed(rows, num_skipped)


def parse_torchtitan(text: str) -> Parsed:
    """Rows of `step: N  loss: ...  grad_norm: ...  memory: ...  tps: 1,234 ...` lines.

    Source of the format: pytorch/torchtitan `torchtitan/components/metrics.py`. `validate step:`
    lines are validation and are left out.
    """
    rows: list[Row] = []
    num_skipped = 0
    for body, step in _bodies(text, _TITAN_STEP):
        closed = body[-1:] in _LINE_ENDS
        values = {
            match["name"]: _number(match["number"])
            for match in _TITAN_FIELD.finditer(body)
            if closed or match["end"]
        }
        num_skipped += not values
        if values:
            rows.append(Row(step, values))
    return Parsed(rows, num_skipped)


def _bodies(text: str, pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    """What follows each step marker up to the next marker on that line or the line's end.

    Two processes that print at once may put two steps on one line; each gets its own part.
    """
    bodies: list[tuple[str, int]] = []
    for line in text.splitlines(keepends=True):
        matches = list(pattern.finditer(line))
        for i, match in enumerate(matches):
            stop = matches[i + 1].start() if i + 1 < len(matches) else len(line)
            bodies.append((line[match.end() : stop], int(match["step"])))
    return bodies


def _named_values(fields: list[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for field in fields:
        name, colon, rest = field.rpartition(":")
        match = _VALUE.match(rest)
        if colon and match is not None:
            values[name.strip()] = _number(match["number"])
    return values


def _number(text: str) -> float:
    return float(text.replace(",", "") if "," in text else text)
