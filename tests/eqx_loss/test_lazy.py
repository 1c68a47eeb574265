"""`eqx_loss` loads JAX with the first name that is used, not before."""

import subprocess
import sys

import pytest

import eqx_loss

# A finder that refuses JAX and what needs it: a machine where they are not installed.
WITHOUT_JAX = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "equinox", "jaxtyping", "optax"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
"""


def run(code):
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", ["eqx_loss", "eqx_loss.numpy", "eqx_loss.compare"])
def test_import_does_not_load_jax(module):
    run(f"import sys, {module}; assert 'jax' not in sys.modules, 'loaded'")


def test_numpy_weights_work_where_jax_is_not_installed():
    run(
        WITHOUT_JAX + "import numpy\n"
        "from eqx_loss.numpy import Reductions, scale_for, token_weights\n"
        "w = token_weights(numpy.array([[True, True, False]]), 'sample')\n"
        "assert w.tolist() == [[0.5, 0.5, 0.0]]\n"
        "assert scale_for(Reductions.torch_ddp(ranks=4)) == 4"
    )


def test_compare_works_where_jax_is_not_installed(tmp_path):
    log = tmp_path / "m.jsonl"
    log.write_text('{"step": 1, "learning/lm_loss": 2.5}\n{"step": 2, "learning/lm_loss": 2.25}\n')
    run(
        WITHOUT_JAX
        + f"from eqx_loss.__main__ import main\nassert main(['compare', {str(log)!r}, {str(log)!r}]) == 0"
    )


def test_star_import_gives_the_public_names():
    names: dict[str, object] = {}
    exec("from eqx_loss import *", names)
    assert {n for n in names if not n.startswith("_")} == set(dir(eqx_loss))
    assert names["token_weights"] is eqx_loss.token_weights


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'eqx_loss' has no attribute 'losses'"):
        _ = eqx_loss.losses
    assert not hasattr(eqx_loss, "_nothing")


def test_functions_are_checked_under_the_import_hook():
    """The suite's hook must reach what is loaded late."""
    with pytest.raises(Exception, match="Type-check error"):
        eqx_loss.token_weights([[True]], eqx_loss.Granularity.TOKEN)  # a list is no array
