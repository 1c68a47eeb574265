"""Writes `../cases` and `../kit.json`: `python conformance/derivation/generate.py`. Needs NumPy."""

import json
import pathlib

import advanced
import auxiliary
import core

HERE = pathlib.Path(__file__).resolve().parent
KIT_VERSION = 1
PROTOCOL = 1


def documents():
    """Relative path to text of every file of the kit's data."""
    cases = [*core.build(), *auxiliary.build(), *advanced.build()]
    files = {
        f"cases/{entry['id']}.json": json.dumps(entry, indent=1, allow_nan=False) + "\n" for entry in cases
    }
    index = {"kit_version": KIT_VERSION, "protocol": PROTOCOL, "cases": [entry["id"] for entry in cases]}
    return {**files, "kit.json": json.dumps(index, indent=1) + "\n"}


if __name__ == "__main__":
    for name, text in documents().items():
        path = HERE.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{len(documents()) - 1} cases written")
