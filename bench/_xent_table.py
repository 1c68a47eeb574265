"""The table of `bench.xent`: a CSV that grows row by row and can be continued, and its picture."""

import csv

COLUMNS = (
    "platform",
    "path",
    "T",
    "D",
    "V",
    "temporaries_bytes",
    "results_bytes",
    "seconds",
    "cpu_seconds",
    "ours_vs_path",
    "cpu_ours_vs_path",
    "rounds",
    "max_rel_error",
    "flops_vs_three_matmuls",
    "moved_bytes",
    "compile_seconds",
    "compile_cpu_seconds",
)


class Table:
    """Rows of a CSV file: those it has, and those that are added and written at once."""

    def __init__(self, path):
        self.path = path
        self.rows = []
        if path.exists():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                if tuple(reader.fieldnames or ()) != COLUMNS:
                    raise SystemExit(
                        f"{path} has other columns than this version writes; choose another --csv"
                    )
                self.rows = [{key: _value(text) for key, text in row.items()} for row in reader]
        else:
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(COLUMNS)

    def has(self, **cells):
        """Whether some row holds these cells."""
        return any(all(row[key] == value for key, value in cells.items()) for row in self.rows)

    def add(self, row):
        """Append a row to the file; columns that it lacks stay empty."""
        self.rows.append({key: row.get(key) for key in COLUMNS})
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(self.rows[-1])


def draw(path, rows, note):
    """Thread seconds over those of three products, by shape; temporaries and results, by TPU topology."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in rows if row["platform"] == "cpu"]
    compiled = [row for row in rows if row["platform"] != "cpu"]
    names = list(dict.fromkeys(row["path"] for row in rows if row["path"] != "three_products"))
    figure, (left, right) = plt.subplots(2, 1, figsize=(11, 8))
    shapes = list(dict.fromkeys((row["T"], row["D"], row["V"]) for row in timed))
    heights = {}
    for row in timed:
        heights[shapes.index((row["T"], row["D"], row["V"])), row["path"]] = row["cpu_seconds"]
    heights = {(x, name): seconds / heights[x, "three_products"] for (x, name), seconds in heights.items()}
    _bars(left, [f"T={t}\nD={d}\nV={v}" for t, d, v in shapes], names, heights)
    left.axhline(1, color="black", linewidth=0.8)
    left.set_title("CPU: thread seconds / three matrix products")
    topologies = list(dict.fromkeys(row["platform"] for row in compiled))
    heights = {
        (topologies.index(row["platform"]), row["path"]): (row["temporaries_bytes"] + row["results_bytes"])
        / 1e9
        for row in compiled
    }
    sizes = {row["platform"]: f"T={row['T']} D={row['D']} V={row['V']}" for row in compiled}
    _bars(right, [f"{name}\n{sizes[name]}" for name in topologies], names, heights)
    right.set_title("TPU, compiled ahead of time: temporaries + results, GB")
    handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{k}") for k in range(len(names))]
    figure.legend(handles, names, loc="upper center", ncols=4, fontsize="small")
    figure.text(0.01, 0.01, note, fontsize="small")
    figure.tight_layout(rect=(0, 0.04, 1, 0.93))
    figure.savefig(path, dpi=120)


def _bars(axes, groups, names, heights):
    width = 0.8 / max(len(names), 1)
    for (x, name), height in heights.items():
        if name in names:
            k = names.index(name)
            bar = axes.bar(x + (k - (len(names) - 1) / 2) * width, height, width, color=f"C{k}")
            axes.bar_label(bar, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(groups)), groups)


def _value(text):
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
