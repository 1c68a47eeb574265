"""Finds the kit's folder and hands over to the runner in it."""

import importlib.util
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax

from ._answers import answer

# In an installed wheel the kit lies beside this file; in a source tree at the top.
_FOLDERS = (pathlib.Path(__file__).parent / "kit", pathlib.Path(__file__).parents[2] / "conformance")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m eqx_loss conformance`: without an adapter, eqx_loss answers for itself.

    Returns:
        0 when nothing failed, 1 when a case failed or met a known bug, 2 when nothing could run.
    """
    return int(_runner().main(argv, default=("eqx_loss", _answer_in_float64), folder=_folder()))


def cases(*, tiers: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """The kit's cases, in its order; all tiers when none is named."""
    return list(_runner().load_cases(_folder(), tuple(tiers)))


def run(
    function: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    tiers: Sequence[str] = (),
    dtype: str = "float64",
) -> Mapping[str, tuple[str, str]]:
    """Status and detail by case id of any Python function from request to outputs.

    Statuses: pass, partial, skip, fail, known bug (the detail names it), error. `dtype` chooses
    the tolerance: "float64" or "float32".
    """
    results = _runner().run_callable(function, cases(tiers=tiers), dtype)
    return {result.case: (result.status, result.detail) for result in results}


def _answer_in_float64(request: Mapping[str, Any]) -> Mapping[str, Any]:
    with jax.enable_x64(True):
        return answer(request)


def _folder() -> pathlib.Path:
    for folder in _FOLDERS:
        if (folder / "kit.json").is_file():
            return folder
    raise FileNotFoundError(
        f"the conformance kit must lie in one of {', '.join(map(str, _FOLDERS))}; reinstall eqx-loss"
    )


def _runner() -> ModuleType:
    """The runner as a module; loaded by path, for the kit is no package."""
    name = "eqx_loss_conformance_runner"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _folder() / "run.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]
