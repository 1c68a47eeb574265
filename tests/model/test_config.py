"""Which layers a configuration describes, and which configurations are refused."""

import dataclasses
import math

import pytest

from model import (
    GqaConfig,
    KdaConfig,
    LightningConfig,
    MlaConfig,
    MoeConfig,
    MtpConfig,
    RopeConfig,
    YarnConfig,
)

from . import samples


def _mixers(**changes):
    config = dataclasses.replace(samples.BASE, kda=samples.KDA, **changes)
    return "".join(layer.mixer[0] for layer in config.layer_plan)


def test_last_layer_of_a_group_has_full_attention():
    assert _mixers(num_layers=8, layer_group_size=4) == "lllflllf"


def test_incomplete_last_group_has_full_attention_only():
    assert _mixers(num_layers=11, layer_group_size=4) == "lllflllffff"


def test_explicit_layer_types_win():
    kinds = ("linear", "full", "linear", "full", "linear")
    assert _mixers(num_layers=5, layer_group_size=2, layer_types=kinds) == "lflfl"


def test_dense_layers_come_first_and_mtp_has_experts():
    assert [layer.ffn for layer in samples.LING3.layer_plan] == ["dense"] + ["moe"] * 6
    assert samples.LING3.mtp_plan.ffn == "moe"
    assert samples.DENSE.mtp_plan.ffn == "dense"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"gqa": samples.GQA}, "exactly one of mla and gqa"),
        ({"layer_group_size": 2, "num_layers": 2}, "exactly one of kda and lightning"),
        ({"intermediate_size": None}, "intermediate_size must be set"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be 0 or more"),
        ({"layer_types": ("full", "full")}, "must name num_layers=1 layers, got 2"),
        ({"ffn_types": ("moe",)}, "moe is not set"),
        ({"moe": dataclasses.replace(samples.MOE, expert_swiglu_limits=(1.0, 2.0))}, "one number per layer"),
    ],
)
def test_impossible_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(samples.BASE, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataclasses.replace(samples.MOE, num_routing_groups=3), "must divide num_experts=8, got 3"),
        (
            lambda: dataclasses.replace(samples.MOE, topk_routing_group=5),
            r"in \[1, num_routing_groups=4\], got 5",
        ),
        (lambda: dataclasses.replace(samples.MOE, num_experts_per_tok=5), r"in \[1, 4\].*got 5"),
        (
            lambda: dataclasses.replace(samples.MOE, num_shared_experts=-1),
            "num_shared_experts must be 0 or more",
        ),
        (lambda: dataclasses.replace(samples.MOE, shared_swiglu_limits=(0.0,)), "must be positive"),
        (lambda: dataclasses.replace(samples.MOE, shared_swiglu_limits=(math.nan,)), "must be positive"),
        (lambda: dataclasses.replace(samples.MLA, qk_rope_head_dim=3), "qk_rope_head_dim must be even"),
        (lambda: dataclasses.replace(samples.GQA, num_kv_heads=3), "must divide num_heads=4, got 3"),
        (lambda: dataclasses.replace(samples.GQA, rope_head_dim=8), "at most head_dim=6, got 8"),
        (lambda: dataclasses.replace(samples.KDA, lower_bound=1.0), "lower_bound must be negative"),
        (lambda: dataclasses.replace(samples.KDA, lower_bound=math.nan), "lower_bound must be negative"),
        (lambda: dataclasses.replace(samples.MLA, latent_norm_eps=-1.0), "latent_norm_eps must be finite"),
        (lambda: dataclasses.replace(samples.MOE, routed_scaling_factor=math.inf), "at least 0, got inf"),
        (lambda: dataclasses.replace(samples.BASE, rms_norm_eps=math.nan), "rms_norm_eps must be finite"),
        (lambda: RopeConfig(theta=math.nan), "theta must be positive"),
        (lambda: YarnConfig(factor=math.nan, original_max_positions=8), "factor must be at least 1"),
        (lambda: dataclasses.replace(samples.LIGHTNING, num_norm_groups=3), "must divide num_heads=4, got 3"),
        (lambda: MtpConfig(num_layers=0), "num_layers must be at least 1"),
        (lambda: RopeConfig(theta=0.0), "theta must be positive"),
        (lambda: YarnConfig(factor=0.5, original_max_positions=8), "factor must be at least 1"),
        (
            lambda: YarnConfig(factor=2.0, original_max_positions=8, beta_fast=1.0),
            "beta_fast > beta_slow > 0, got 1.0 and 1.0",
        ),
    ],
)
def test_impossible_parts_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configs_are_hashable_and_keyword_only():
    for part in (GqaConfig, KdaConfig, LightningConfig, MlaConfig, MoeConfig):
        with pytest.raises(TypeError, match="positional"):
            part(1)
    assert hash(samples.LING3) == hash(dataclasses.replace(samples.LING3))
