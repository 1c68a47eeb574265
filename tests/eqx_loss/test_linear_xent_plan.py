"""Fused output layer: the plan, its memory, what is skipped, and what is refused."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_loss
from eqx_loss import XentExecution, XentRules, XentTiling, _linear_xent_dispatch, _linear_xent_pass
from eqx_loss._linear_xent_tiling import balanced_tile, even_tile

VOCAB = 157_184
WIDTH = 512


def _shapes(num_tokens=8192, width=WIDTH, vocab=VOCAB, dtype=jnp.float32):
    hidden = jax.ShapeDtypeStruct((1, num_tokens, width), dtype)
    return hidden, jax.ShapeDtypeStruct((width, vocab), dtype)


def _compiled(num_tokens, vocab, execution, width=64):
    hidden, unembed = _shapes(num_tokens, width, vocab)
    targets = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)
    weights = jax.ShapeDtypeStruct((1, num_tokens), jnp.float32)

    def objective(hidden, unembed, targets, weights):
        return eqx_loss.linear_cross_entropy(hidden, unembed, targets, weights, execution=execution).objective

    program = jax.jit(jax.value_and_grad(objective, (0, 1)))
    return program.lower(hidden, unembed, targets, weights).compile().memory_analysis()


def _temporaries(num_tokens, vocab, execution, width=64):
    """Temporaries and the gradient of unembed, bytes."""
    memory = _compiled(num_tokens, vocab, execution, width)
    return memory.temp_size_in_bytes + 4 * width * vocab


def test_temporaries_do_not_grow_with_tokens_times_vocabulary():
    """Four times the tokens: the same tiles, so nothing but the per-token arrays grows."""
    small, large = (
        _temporaries(tokens, 8192, XentExecution(max_logits_bytes=1 << 20)) for tokens in (1024, 4096)
    )
    per_token = 4 * (64 + 8)  # hidden gradient before its cast, and a handful of numbers
    assert large - small <= 3072 * per_token
    # Four times the vocabulary: the budget of the kept logits holds, only the columns of one tile may grow.
    wide = _temporaries(1024, 32_768, XentExecution(max_logits_bytes=1 << 20))
    assert wide - 4 * 64 * (32_768 - 8192) <= small - 4 * 64 * 8192 + (2 << 20)


def test_temporaries_are_a_twentieth_of_the_plain_path():
    """T = 8192, D = 512, V = 157,184 in float32, by the compiler's own account; nothing is run."""
    ours = _temporaries(8192, VOCAB, XentExecution(), WIDTH)
    plain = _temporaries(8192, VOCAB, XentExecution(implementation="plain"), WIDTH)
    assert ours * 20 <= plain


def test_recomputed_logits_leave_no_buffer_over_the_vocabulary():
    tiling = XentTiling(token_tile_size=256, vocab_tile_size=1024, keep_logits=False)
    temporaries = _temporaries(1024, 65_536, XentExecution(tiling=tiling)) - 4 * 64 * 65_536
    assert temporaries < 4 * 256 * 65_536 // 8


def _visits(monkeypatch, case, tokens=4):
    """How often a tile's losses and its gradient are formed, counted while the program runs."""
    counts = {"losses": 0, "gradients": 0}

    def counted(name, function):
        def wrapper(*args, **kwargs):
            jax.debug.callback(lambda: counts.__setitem__(name, counts[name] + 1))
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(_linear_xent_pass, "tile_loss", counted("losses", _linear_xent_pass.tile_loss))
    monkeypatch.setattr(
        _linear_xent_pass, "tile_gradient", counted("gradients", _linear_xent_pass.tile_gradient)
    )
    hidden, unembed, targets, mask, weights = case
    tiling = XentTiling(token_tile_size=tokens, vocab_tile_size=16)

    def objective(hidden):
        return eqx_loss.linear_cross_entropy(
            hidden, unembed, targets, weights, mask=mask, execution=XentExecution(tiling=tiling)
        ).objective

    jax.block_until_ready(jax.grad(objective)(hidden))
    jax.effects_barrier()
    return counts


def _case(scored, weighted):
    hidden, unembed = jnp.ones((1, 16, 8)), jnp.ones((8, 32))
    mask = jnp.zeros((1, 16), bool).at[0, jnp.array(scored, int)].set(True)
    weights = jnp.zeros((1, 16)).at[0, jnp.array(weighted, int)].set(1.0)
    return hidden, unembed, jnp.zeros((1, 16), int), mask, weights


@pytest.mark.parametrize(
    ("scored", "weighted", "losses", "gradients"),
    [
        ([0, 5, 10, 15], [0, 5, 10, 15], 4, 4),
        ([1, 2, 3], [1, 2, 3], 1, 1),
        ([1, 13], [13], 2, 1),
        ([1, 13], [], 2, 0),
        ([], [], 0, 0),
    ],
    ids=["all", "one_tile", "one_only_logged", "all_only_logged", "none"],
)
def test_tiles_without_weight_and_log_cost_nothing(monkeypatch, scored, weighted, losses, gradients):
    assert _visits(monkeypatch, _case(scored, weighted)) == {"losses": losses, "gradients": gradients}


def test_forward_alone_forms_no_gradient(monkeypatch):
    hidden, unembed, targets, mask, weights = _case([0, 15], [0, 15])
    monkeypatch.setattr(_linear_xent_pass, "tile_gradient", None)
    loss = eqx_loss.linear_cross_entropy(hidden, unembed, targets, weights, mask=mask)
    np.testing.assert_allclose(loss.objective, 2 * np.log(32), rtol=1e-6)


def test_token_tiles_are_even_and_within_their_target():
    assert even_tile(8192, 768, 8) == 752
    assert even_tile(8192, 256, 8) == 256
    assert even_tile(100, 128, 8) == 100
    assert even_tile(1, 1, 8) == 1
    assert even_tile(10, 3, 8) == 3


def test_overhang_is_below_half_a_percent():
    for grain in (16, 128):
        tile = balanced_tile(VOCAB, 4096, grain)
        assert -(-VOCAB // tile) * tile <= 1.005 * VOCAB


def test_plan_shows_the_tiles_and_their_memory():
    plan = eqx_loss.explain_linear_cross_entropy(*_shapes())
    assert plan.implementation == "tiled"
    assert plan.num_products == 3
    assert plan.token_cut.tile_size * plan.num_token_tiles >= 8192
    assert plan.gradient_bytes == 4 * WIDTH * VOCAB
    assert plan.logits_bytes <= 308 << 20
    assert "tokamax_mosaic_tpu: it runs on TPU" in plan.reason


def test_tiling_is_followed():
    tiling = XentTiling(token_tile_size=64, vocab_tile_size=1000, keep_logits=False)
    plan = eqx_loss.explain_linear_cross_entropy(*_shapes(), execution=XentExecution(tiling=tiling))
    assert (plan.token_cut.tile_size, plan.vocab_cut.tile_size, plan.num_products) == (64, 1000, 4)


@pytest.mark.parametrize(
    ("backend", "dtype", "cap", "tokens", "score_bytes", "sum_bytes"),
    [
        ("tpu", jnp.bfloat16, None, 1024, 2, 3),
        ("tpu", jnp.bfloat16, 30.0, 752, 4, 3),
        ("tpu", jnp.float32, None, 752, 4, 4),
        ("gpu", jnp.bfloat16, None, 752, 4, 4),
    ],
    ids=["narrow", "soft_cap", "float32", "gpu"],
)
def test_accelerators_keep_fewer_logits_than_the_gradient(
    backend, dtype, cap, tokens, score_bytes, sum_bytes
):
    """In narrow form on TPUs, where the results are bfloat16; the soft cap's slope needs whole scores."""
    plan = eqx_loss.explain_linear_cross_entropy(
        *_shapes(width=2048, dtype=dtype),
        rules=XentRules(logit_soft_cap=cap),
        execution=XentExecution(backend=backend),
    )
    columns = plan.vocab_cut.num_tiles * plan.vocab_cut.tile_size
    assert plan.token_cut.tile_size == tokens
    assert plan.logits_bytes == score_bytes * tokens * columns
    assert plan.gradient_bytes == sum_bytes * 2048 * VOCAB
    assert plan.logits_bytes < plan.gradient_bytes / 1.9
    assert plan.vocab_cut.operand_dtype == dtype
    assert plan.vocab_cut.accumulator_dtype == jnp.float32


def test_a_budget_on_an_accelerator_makes_tiles_wider_too():
    """A third of it for a tile's scores in float32, so 1/6 of the columns where the kept ones have 16 bits."""
    shapes = _shapes(width=2048, dtype=jnp.bfloat16)
    execution = XentExecution(backend="tpu", max_logits_bytes=2 * 2048 * VOCAB)
    plan = eqx_loss.explain_linear_cross_entropy(*shapes, execution=execution)
    assert plan.token_cut.tile_size == 2048
    assert VOCAB / 9 < plan.vocab_cut.tile_size <= VOCAB / 4
    assert plan.logits_bytes == pytest.approx(2 * 2048 * VOCAB, rel=0.01)


@pytest.mark.parametrize("name", ["tokamax_chunked_xla", "tokamax_xla", "maxtext_vocab_tiling"])
def test_an_implementation_without_right_per_token_losses_is_refused(name):
    with pytest.raises(ValueError, match=f"must give correct per-token losses; '{name}' cannot"):
        eqx_loss.explain_linear_cross_entropy(*_shapes(), execution=XentExecution(implementation=name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"z_loss_multiplier": -1.0}, "z_loss_multiplier must be >= 0"),
        ({"z_loss_multiplier": (0.0, -1.0)}, "z_loss_multiplier must be >= 0"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap must be positive"),
        ({"label_smoothing": 1.0}, "label_smoothing must be in"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
    ],
)
def test_rules_outside_their_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        XentRules(**arguments)


@pytest.mark.parametrize(
    ("hidden", "unembed", "rules", "message"),
    [
        ((2, 3, 4), (5, 6), XentRules(), "same D"),
        ((3, 4), (4, 6), XentRules(), "same D"),
        ((2, 3, 4), (4, 6), XentRules(vocab_size=7), "at most V=6"),
        ((2, 3, 4), (4, 6), XentRules(z_loss_multiplier=(0.1, 0.2)), "one number a head"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(hidden, unembed, rules, message):
    shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (hidden, unembed))
    with pytest.raises(ValueError, match=message):
        eqx_loss.explain_linear_cross_entropy(*shapes, rules=rules)


def test_the_tpu_kernel_is_refused_on_cpu():
    execution = XentExecution(implementation="tokamax_mosaic_tpu")
    with pytest.raises(ValueError, match="it runs on TPU"):
        eqx_loss.explain_linear_cross_entropy(*_shapes(), execution=execution)


WORK = _linear_xent_dispatch.Workload(
    num_tokens=8192,
    width=2048,
    num_columns=VOCAB,
    num_token_tiles=11,
    operand_bytes=2,
    sum_bytes=4,
    score_bytes=4,
    num_products=3,
    cuts_vocabulary=False,
    wide_floats=False,
)


@pytest.fixture
def with_tokamax(monkeypatch):
    """As if tokamax were installed; nothing of it is called."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        _linear_xent_dispatch.importlib.util,
        "find_spec",
        lambda name: object() if name == "tokamax" else real(name),
    )


@pytest.mark.usefixtures("with_tokamax")
def test_choice_follows_the_roofline():
    """TPU v5p is bound by its products, of which the kernel makes one more; v6e by memory in wide form."""
    v5p = _linear_xent_dispatch.choose("auto", WORK, XentRules(), "tpu", "TPU v5")
    v6e = _linear_xent_dispatch.choose("auto", WORK, XentRules(), "tpu", "TPU v6 lite")
    assert (v5p.implementation, v6e.implementation) == ("tiled", "tokamax_mosaic_tpu")
    assert {name for name, _ in v6e.estimated_seconds} == {"tiled", "tokamax_mosaic_tpu"}
    products = 6 * 8192 * 2048 * VOCAB
    assert dict(v5p.estimated_seconds)["tiled"] == pytest.approx(products / 459e12)
    # 16-bit scores and 24-bit sums in 8 token tiles: less traffic than the kernel has arithmetic.
    narrow = dataclasses.replace(WORK, num_token_tiles=8, sum_bytes=3, score_bytes=2)
    v6e = _linear_xent_dispatch.choose("auto", narrow, XentRules(), "tpu", "TPU v6 lite")
    assert v6e.implementation == "tiled"
    traffic = 8 * 2048 * VOCAB * (2 * 2 + 2 * 3) + 3 * 2 * 8192 * VOCAB
    assert dict(v6e.estimated_seconds)["tiled"] == pytest.approx(traffic / 1.64e12)


@pytest.mark.usefixtures("with_tokamax")
@pytest.mark.parametrize(
    ("work", "rules", "message"),
    [
        ({}, {"z_loss_multiplier": 0.1}, "z term"),
        ({}, {"logit_soft_cap": 30.0}, "soft cap"),
        ({}, {"label_smoothing": 0.1}, "label smoothing"),
        ({}, {"vocab_size": 1000}, "every column for a class"),
        ({"cuts_vocabulary": True}, {}, "whole vocabulary"),
        ({"width": 2047}, {}, "multiple of 8"),
        ({"wide_floats": True}, {}, "float64"),
    ],
)
def test_the_kernel_serves_only_what_it_can(work, rules, message):
    work, rules = dataclasses.replace(WORK, **work), XentRules(**rules)
    assert _linear_xent_dispatch.choose("auto", work, rules, "tpu", "TPU v6 lite").implementation == "tiled"
    with pytest.raises(ValueError, match=message):
        _linear_xent_dispatch.choose("tokamax_mosaic_tpu", work, rules, "tpu", "TPU v6 lite")
