"""Which package may import which: read from the source, so that nothing is run."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("eqx_loss", "model", "train")
CORE = {"jax", "jaxtyping", "equinox", "beartype", "numpy"}
# Top-level imports of third parties that a package may have besides CORE; side rooms with their own
# command import heavier ones inside functions.
ALLOWED = {
    "eqx_loss": CORE,
    "model": CORE | {"safetensors", "ml_dtypes"},
    "train": CORE
    | {
        "eqx_loss",
        "model",
        "optax",
        "orbax",
        "grain",
        "pydantic",
        "pydantic_core",
        "yaml",
        "rich",
        "tensorboardX",
    },
}


def _imports(path: pathlib.Path, *, top_level: bool) -> set[str]:
    """Root names that a file imports absolutely; with `top_level`, outside of functions only."""
    tree = ast.parse(path.read_text())
    nodes: list[ast.AST] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        nodes.append(node)
        if top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        stack.extend(ast.iter_child_nodes(node))
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def _files(package: str) -> list[pathlib.Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no files"
    return files


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_what_it_may(package):
    allowed = ALLOWED[package] | {package} | set(sys.stdlib_module_names)
    wrong = {
        str(path.relative_to(ROOT)): _imports(path, top_level=True) - allowed for path in _files(package)
    }
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize(("package", "other"), [("eqx_loss", "model"), ("model", "eqx_loss")])
def test_loss_and_model_never_import_each_other(package, other):
    wrong = [str(path) for path in _files(package) if {other, "train"} & _imports(path, top_level=False)]
    assert wrong == []


def test_nothing_imports_configs_or_tests():
    for package in PACKAGES:
        for path in _files(package):
            assert not {"configs", "tests", "bench"} & _imports(path, top_level=False), path
