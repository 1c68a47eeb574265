"""The installed megatron-core, run again, against our profile of its release.

Runs where an interpreter with torch and megatron-core (extra `reference`) is at hand: this one, or
the one that EQX_LOSS_REFERENCE_PYTHON names.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from tests.golden.megatron._case import read_case
from tests.golden.megatron._check import check_case

ROOT = pathlib.Path(__file__).parents[2]
# lm, MTP, z and load balance on one rank; both real data and context ranks.
SETTINGS = ("lm_fraction_n2", "mtp1_zero_n2", "all_mbs2_n2", "pad_seqaux_mbs2_n2", "all_n2_dp2", "all_n2_cp2")


def _interpreter() -> str | None:
    named = os.environ.get("EQX_LOSS_REFERENCE_PYTHON")
    if named:
        return named
    has_both = all(importlib.util.find_spec(name) is not None for name in ("torch", "megatron"))
    return sys.executable if has_both else None


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folder with golden files made now."""
    python = _interpreter()
    if python is None:
        pytest.skip("needs torch and megatron-core (extra `reference`), or EQX_LOSS_REFERENCE_PYTHON")
    folder = tmp_path_factory.mktemp("reference")
    command = [python, "-W", "ignore", "-m", "tests.reference.megatron_run"]
    subprocess.run([*command, "--setting", *SETTINGS, "--out", str(folder)], check=True, cwd=ROOT)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["mb", "pt"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_installed_release_is_reproduced(written, name, flag):
    verdict = check_case(read_case(written / f"{name}.{flag}.npz"), with_default=False)
    assert verdict.passed, verdict.worst
