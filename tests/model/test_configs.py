"""The shipped model configurations: they load, and have the published numbers of parameters."""

import functools
import math
import pathlib

import jax
import pytest

from model import ModelConfig, init_model
from train._config_load import load_config

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
FAMILY = ("ling2", "ling3-tiny", "ling3-flash", "ling3-plus", "ling-mini-2.0", "dense-1b")


@functools.cache
def _model_config(name: str) -> ModelConfig:
    return load_config(CONFIGS / f"{name}.yaml").model


@functools.cache
def _sizes(config: ModelConfig) -> dict[str, int]:
    """Number of elements of every array, by path; nothing is allocated."""
    model = jax.eval_shape(lambda key: init_model(config, key=key), jax.random.key(0))
    paths = jax.tree_util.tree_leaves_with_path(model)
    return {jax.tree_util.keystr(p, simple=True, separator="."): math.prod(leaf.shape) for p, leaf in paths}


def _counts(config: ModelConfig) -> dict[str, float]:
    """Billions: all, all without MTP, active per token without MTP, active without the input embedding and without
    both ends."""
    sizes = _sizes(config)
    main = {path: size for path, size in sizes.items() if not path.startswith("mtp.")}
    routed = sum(size for path, size in main.items() if ".experts." in path)
    total = sum(main.values())
    share = 1.0 if config.moe is None else config.moe.num_experts_per_tok / config.moe.num_experts
    active = total - routed * (1 - share)
    ends = sizes["embed"] + sizes.get("head", 0)
    counts = {
        "with_mtp": sum(sizes.values()),
        "total": total,
        "active": active,
        "active_without_embedding": active - sizes["embed"],
        "active_without_ends": active - ends,
    }
    return {name: count / 1e9 for name, count in counts.items()}


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # published number (billions), and half of its last digit
        ("ling3-tiny", {"total": (7.9, 0.05)}),
        (
            "ling3-flash",
            {"total": (124, 0.5), "with_mtp": (127, 0.5), "active_without_embedding": (5.1, 0.05)},
        ),
        ("ling3-plus", {"active": (25, 0.5)}),
        (
            "ling-mini-2.0",
            {"total": (16.26, 0.005), "active": (1.43, 0.005), "active_without_ends": (0.789, 5e-4)},
        ),
    ],
)
def test_parameter_counts_are_the_published_ones(name, published):
    counts = _counts(_model_config(name))
    for quantity, (number, half_digit) in published.items():
        assert abs(counts[quantity] - number) <= half_digit, (quantity, counts)


def test_ling3_tiny_activates_about_the_published_1_3_billion():
    # The card does not say what it counts: 1.38 with both ends, 1.14 without the input embedding.
    counts = _counts(_model_config("ling3-tiny"))
    assert counts["active_without_embedding"] < 1.3 < counts["active"] < 1.4


def test_ling3_plus_has_about_the_published_560_billion():
    # One percent: widths of MLA and the shared expert are inferred.
    assert _counts(_model_config("ling3-plus"))["total"] == pytest.approx(560, rel=0.01)


def test_ling2_has_about_the_16_billion_of_its_class():
    # No card gives a number: "16B-class" is a reading of the public configuration.
    counts = _counts(_model_config("ling2"))
    assert 16 < counts["total"] < 17
    assert counts["with_mtp"] < 17.5


def test_dense_1b_has_about_a_billion():
    assert 1.0 < _counts(_model_config("dense-1b"))["total"] < 1.2


@pytest.mark.parametrize("name", FAMILY)
def test_toy_has_the_layer_kinds_of_its_model(name):
    real, toy = _model_config(name), _model_config(f"{name}-toy")
    assert {(layer.mixer, layer.ffn) for layer in toy.layer_plan} == {
        (layer.mixer, layer.ffn) for layer in real.layer_plan
    }
    for part in ("mla", "gqa", "kda", "lightning", "moe", "mtp"):
        assert (getattr(toy, part) is None) == (getattr(real, part) is None), part
    assert toy.layer_group_size == real.layer_group_size
    assert toy.tie_word_embeddings == real.tie_word_embeddings
    assert sum(_sizes(toy).values()) < 3e6


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("ling3-tiny", [3, 7, 11, 15, 19, 23]),
        ("ling3-flash", [5, 11, 17, 23, 29, 35, 41]),
        ("ling3-plus", [7, 15, 23, 31, 39, 47, 55, 63, 71]),
        ("ling2", [4, 9, 14, 19]),
    ],
)
def test_full_attention_is_where_the_released_models_have_it(name, layers):
    plan = _model_config(name).layer_plan
    assert [i for i, layer in enumerate(plan) if layer.mixer == "full"] == layers


def test_swiglu_limits_of_ling3_plus_start_at_layer_65_and_64():
    moe = _model_config("ling3-plus").moe
    assert moe is not None
    assert [i for i, x in enumerate(moe.expert_swiglu_limits or ()) if x == 10] == list(range(65, 72))
    assert [i for i, x in enumerate(moe.shared_swiglu_limits or ()) if x == 10] == list(range(64, 72))
