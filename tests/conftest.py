"""One set-up for every test: eight fake CPU devices, checked types, a shared compilation cache."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
_CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import jaxtyping

# Must precede the first import of the packages: every annotated function is then checked.
_HOOK = jaxtyping.install_import_hook(["eqx_loss", "model", "train"], "beartype.beartype")

import jax
import pytest

# Files whose tests compile whole models or run whole trainings; `make test-fast` leaves them out.
SLOW_FILES = frozenset(
    {
        "conformance/test_ours.py",
        "golden/test_ling3.py",
        "model/test_decode.py",
        "model/test_generate.py",
        "model/test_partitioned.py",
        "train/test_evaluate.py",
        "train/test_loop.py",
        "train/test_resume.py",
        "train/test_step.py",
        "train/test_step_hlo.py",
        "train/test_step_meshes.py",
    }
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks every test of a slow file, and puts files with slow tests first: workers then end together."""
    for item in items:
        if "/".join(item.path.parts[-2:]) in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def x64():
    """Float64 arithmetic for the duration of one test."""
    with jax.enable_x64(True):
        yield
