"""Reading compiled programs: which collectives stand inside loops."""

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def collectives_in_loops(hlo: str) -> list[str]:
    """Names of collective operations inside the loop bodies of a compiled program.

    Args:
        hlo: `compiled.as_text()`.

    Returns:
        One entry per operation, in the order of the text; empty when accumulation only adds.
    """
    bodies = _loop_computations(hlo)
    found: list[str] = []
    computation = ""
    for line in hlo.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            computation = line.removeprefix("ENTRY ").split()[0].lstrip("%")
        elif computation in bodies:
            found.extend(
                line.strip().split(" ")[0]
                for kind in _KINDS
                if f" {kind}(" in line or f" {kind}-start(" in line
            )
    return found


def _loop_computations(hlo: str) -> set[str]:
    """Computations reachable from the body of a while loop."""
    calls: dict[str, set[str]] = {}
    roots: set[str] = set()
    computation = ""
    for line in hlo.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            computation = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            calls[computation] = set()
            continue
        for key in ("body=", "calls=", "to_apply=", "condition="):
            for piece in line.split(key)[1:]:
                name = piece.split(",")[0].split(")")[0].split()[0].lstrip("%").rstrip("}")
                calls.setdefault(computation, set()).add(name)
                if key == "body=":
                    roots.add(name)
    reached, pending = set[str](), list(roots)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending.extend(calls.get(name, ()))
    return reached
