"""Alike layers are stacked and scanned: the plan, and that it changes nothing but the compile time."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import LayerPlan, ModelConfig, MtpConfig
from model._block import Block
from model._constants import layer_constants
from model._layer_plan import plan_stack
from model._norm import rms_norm
from model._rows import make_rows
from model.hf._load import abstract_model

from . import samples

RTOL = 1e-12  # float64; the same operations in another program
KINDS = {letter: LayerPlan(mixer=mixer, ffn=ffn) for letter, mixer, ffn in (
    ("K", "linear", "dense"), ("k", "linear", "moe"), ("M", "full", "dense"), ("m", "full", "moe")
)}  # fmt: skip
# (layers, group size, dense layers): the order of the layers
MODELS = {
    "no dense layer": ((6, 3, 0), "2 x (2 linear+moe, full+moe)"),
    "one dense layer": ((9, 3, 1), "linear+dense, linear+moe, full+moe, 2 x (2 linear+moe, full+moe)"),
    "two dense layers": (
        (9, 3, 2),
        "2 linear+dense, full+moe, 2 linear+moe, full+moe, 2 linear+moe, full+moe",
    ),
    "incomplete last group": ((8, 3, 0), "2 linear+moe, full+moe, 2 linear+moe, 3 full+moe"),
    "groups of one layer": ((4, 1, 1), "full+dense, 3 full+moe"),
    "all layers alike": ((3, 1, 0), "3 full+moe"),
    "one group": ((4, 4, 1), "linear+dense, 2 linear+moe, full+moe"),
}


def _config(num_layers: int, size: int, dense: int) -> ModelConfig:
    """Lightning, MLA and experts; every layer has clamps and a decay rate of its own."""
    limits = tuple(0.05 * (i + 1) for i in range(num_layers - 1))
    return dataclasses.replace(
        samples.BASE,
        num_layers=num_layers,
        layer_group_size=size,
        first_k_dense_replace=dense,
        lightning=samples.LIGHTNING,
        moe=dataclasses.replace(
            samples.MOE,
            expert_swiglu_limits=(*limits, float("inf")),
            shared_swiglu_limits=(float("inf"), *reversed(limits)),
        ),
        record_max_logits=True,
    )


def test_constants_of_a_float64_model_are_not_rounded(x64):
    config = dataclasses.replace(_config(*MODELS["no dense layer"][0]), dtype="float64")
    constants = layer_constants(config, 2)
    assert float(constants.routed_limit) == 0.05 * 3
    assert float(constants.slopes[0]) == 2.0**-2 * (1 - 1 / 5 + 1e-5)  # of four heads
    assert layer_constants(dataclasses.replace(config, dtype="bfloat16"), 2).routed_limit.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "stack"), MODELS.values(), ids=MODELS)
def test_stacked_layers_equal_the_layers_one_by_one(layers, stack, x64):
    config = _config(*layers)
    assert str(config.stack) == stack
    model = samples.make(config, dtype="float64")
    tokens = samples.random_tokens((2, 9))

    @eqx.filter_jit
    def one_by_one(model):
        rows = make_rows(tokens, None, None, None, None)
        x, states, counts, tops = model.embed_tokens(tokens), [], [], []
        for layer, block in enumerate(_blocks(model)):
            states.append(x)
            x, facts = block(x, rows, layer_constants(model.config, layer))
            counts += [] if facts.router is None else [facts.router.counts]
            tops += [] if facts.max_logits is None else [facts.max_logits]
        return rms_norm(x, model.final_norm, 1e-6), jnp.stack(states), jnp.stack(counts), jnp.stack(tops)

    hidden, states, counts, tops = one_by_one(model)
    out = eqx.filter_jit(lambda m: m(tokens, return_hidden_states=True))(model)
    np.testing.assert_allclose(out.hidden, hidden, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(out.hidden_states, states, rtol=RTOL, atol=RTOL)
    np.testing.assert_array_equal(out.router.counts, counts)
    np.testing.assert_allclose(out.max_logits, tops, rtol=RTOL)


def test_swiglu_limits_change_the_output():
    """Guards the test above: limits that clamp nothing would prove nothing."""
    config = _config(4, 2, 0)
    tokens = samples.random_tokens((2, 9))
    run = eqx.filter_jit(lambda m: m(tokens).hidden)
    free = dataclasses.replace(config, moe=samples.MOE)
    assert jnp.abs(run(samples.make(config)) - run(samples.make(free))).max() > 1e-2


@pytest.mark.parametrize("num_groups", [1, 3, 7])
def test_a_program_has_one_layer_body_for_each_kind(num_groups, monkeypatch):
    """Dense, 2 linear, full, groups of (3 linear, full), and an MTP block, whatever the number of groups."""
    config = dataclasses.replace(_config(4 * num_groups, 4, 1), mtp=MtpConfig(num_layers=1))
    traced = []
    call = Block.__call__

    def marked(self, x, *args):
        traced.append(type(self.mixer).__name__)
        return call(self, jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23), *args)

    monkeypatch.setattr(Block, "__call__", marked)
    arrays, static = eqx.partition(abstract_model(config), lambda x: isinstance(x, jax.ShapeDtypeStruct))
    run = jax.jit(lambda arrays: eqx.combine(arrays, static)(samples.random_tokens((2, 9))))
    program = run.lower(arrays).as_text()
    assert len(config.stack.alike) + 1 == program.count("stablehlo.reduce_precision") == 4
    assert traced == ["Lightning", "Lightning", "Mla", "Mla"]


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        pytest.param("Kkkm" + 5 * "kkkm", "Kkkm" + 5 * " kkkm", id="ling3-tiny"),
        pytest.param("KKkkkm" + 6 * "kkkkkm", "KKkkkm" + 6 * " kkkkkm", id="ling3-flash"),
        pytest.param("KKKKkkkm" + 8 * "kkkkkkkm", "KKKKkkkm" + 8 * " kkkkkkkm", id="ling3-plus"),
        pytest.param("mmmm", "mmmm", id="all-alike"),
        pytest.param("m", "m", id="one-layer"),
        pytest.param("Kmkmkmm", "Kmk mk mm", id="kinds-in-another-order"),
        pytest.param("kkmkkmkk", "kkm kkm kk", id="part-of-a-group-left-over"),
        pytest.param("kmKMkmKM", "kmKM kmKM", id="every-kind"),
    ],
)
def test_plan_has_one_stack_a_kind_and_the_fewest_groups(layers, groups):
    plan = plan_stack([KINDS[letter] for letter in layers])
    kinds = [next(letter for letter in KINDS if KINDS[letter] == own.kind) for own in plan.alike]
    assert " ".join("".join(k * n for k, n in zip(kinds, group)) for group in plan.lengths) == groups
    assert {letter: [i for i, x in enumerate(layers) if x == letter] for letter in kinds} == {
        letter: list(own.layers) for letter, own in zip(kinds, plan.alike)
    }


def _blocks(model):
    """The layers of a model, each by itself."""
    found = {}
    for alike, block in zip(model.config.stack.alike, model.layers, strict=True):
        for layer, index in zip(alike.layers, np.ndindex(alike.stack_shape), strict=True):
            found[layer] = jax.tree.map(lambda y, index=index: y[index], block)
    return [found[i] for i in range(len(found))]
