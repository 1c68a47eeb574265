"""The kit's folder, its runner and its two derivations, loaded by path as a copying project would."""

import importlib
import importlib.util
import json
import pathlib
import sys

KIT = pathlib.Path(__file__).parents[2] / "conformance"


def load_runner():
    spec = importlib.util.spec_from_file_location("conformance_run", KIT / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["conformance_run"] = module
    spec.loader.exec_module(module)
    return module


def load_derivation(name, monkeypatch):
    """A module of `derivation/`; its siblings are importable while the test runs."""
    monkeypatch.syspath_prepend(str(KIT / "derivation"))
    return importlib.import_module(name)


def stored_cases():
    return [json.loads(path.read_text()) for path in sorted((KIT / "cases").rglob("*.json"))]
