"""Every recipe runs where its packages are installed; each checks its own gradient."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NEEDS = {
    "plain_jax": ("jax",),
    "optax_microbatching": ("optax",),
    "flax_nnx": ("flax",),
    "maxtext_loss_fn": ("maxtext",),
    "megatron_loss_func": ("torch", "megatron.core"),
    "torchtitan_loss": ("torch", "torchtitan"),
    "hf_compute_loss_func": ("torch", "transformers", "accelerate"),
}


def missing(packages):
    absent = []
    for package in packages:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:  # the parent package is missing
            found = None
        if found is None:
            absent.append(package)
    return absent


@pytest.mark.parametrize("name", NEEDS)
def test_recipe_runs_and_checks_its_own_gradient(name, tmp_path):
    absent = missing(NEEDS[name])
    if absent:
        pytest.skip(f"{', '.join(absent)} not installed; docs/porting.md has the versions it ran with")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / f"{name}.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_every_recipe_is_listed_and_tested():
    recipes = {path.stem for path in (ROOT / "examples").glob("*.py")}
    readme = (ROOT / "examples" / "README.md").read_text()
    assert recipes == set(NEEDS)
    assert all(f"`{name}.py`" in readme for name in recipes)


def test_a_recipe_notices_a_gradient_that_depends_on_the_cut(monkeypatch):
    """The recipes' own checks are not vacuous: local means instead of global weights fail."""
    spec = importlib.util.spec_from_file_location("plain_jax_example", ROOT / "examples" / "plain_jax.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def local_mean(table, batch):
        from eqx_loss import cross_entropy

        losses = cross_entropy(table[batch["tokens"]], batch["targets"], batch["mask"]).xent
        return losses.sum() / batch["mask"].sum().clip(1)

    monkeypatch.setattr(example, "loss_of", local_mean)
    with pytest.raises(AssertionError):
        example.main()
