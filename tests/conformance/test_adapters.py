"""The example adapters against the real packages; each runs where its package is installed."""

import importlib.util
import sys

import pytest

from . import kit

RUN = kit.load_runner()

# What the frameworks' own loss code does, as run here; versions in docs/conformance.md.
NAN_0_OVER_0 = {"core/all_tokens_masked": "nan_from_0_over_0"}
NAN_GRADIENT = {"core/nonfinite_logits_at_masked_positions": "loss_masked_but_gradient_nan"}
ADAPTERS = {
    "numpy_adapter": ("numpy", {}, 10),
    "jax_optax": ("optax", {}, 9),
    "torch_cross_entropy": ("torch", {}, 9),
    "hf_trainer": ("transformers", {**NAN_0_OVER_0, **NAN_GRADIENT}, 8),
    "torchtitan_loss": ("torchtitan", {**NAN_0_OVER_0, **NAN_GRADIENT}, 7),
    "megatron_core": ("megatron.core", {"core/nonfinite_logits_at_masked_positions": "nan_times_zero"}, 10),
    "maxtext_loss": ("maxtext", NAN_GRADIENT, 8),
    "tunix_loss": (
        "tunix",
        {
            "core/token_mean_unequal_micro_batches": "mean_of_micro_batch_means",
            "core/token_mean_steps_and_ranks": "mean_over_steps_of_global_means",
            "core/empty_micro_batch": "local_means_with_clamped_count",
            "core/nonfinite_logits_at_masked_positions": "nan_times_zero",
        },
        5,
    ),
}


def installed(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_passes_but_for_the_bugs_its_framework_is_known_for(name):
    package, bugs, num_passed = ADAPTERS[name]
    if not installed(package) or (package == "transformers" and not installed("torch")):
        pytest.skip(f"{package} is not installed; docs/conformance.md has the results of a run with it")
    command = f"{sys.executable} {kit.KIT / 'adapters' / name}.py"
    results = RUN.run_command(command, RUN.load_cases(tiers=("core",)), timeout=120.0)
    found = {result.case: result.detail for result in results if result.status not in ("pass", "skip")}
    assert found == bugs
    assert sum(result.status == "pass" for result in results) == num_passed


def test_adapters_stay_short():
    for path in (kit.KIT / "adapters").glob("*.py"):
        assert path.stem in ADAPTERS
        assert len(path.read_text().splitlines()) <= 60, path
