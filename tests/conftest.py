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


@pytest.fixture
def x64():
    """Float64 arithmetic for the duration of one test."""
    with jax.enable_x64(True):
        yield
