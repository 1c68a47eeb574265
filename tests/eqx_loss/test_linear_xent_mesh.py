"""Fused output layer on a mesh: every layout gives the same values; no device gathers foreign tokens."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import eqx_loss
from eqx_loss import XentExecution, XentRules, XentSharding, XentTiling, testing
from tests.oracles import xent as oracle

HEADS, ROWS, LENGTH, WIDTH, VOCAB, CLASSES = 2, 4, 6, 8, 48, 41
EXACT = 1e-12  # float64, sums of at most 48 terms
RULES = XentRules(z_loss_multiplier=(0.1, 0.0), logit_soft_cap=3.0, label_smoothing=0.1, vocab_size=CLASSES)
AXES = ("data", "fsdp", "expert", "context", "tensor")
TILING = XentTiling(token_tile_size=4, vocab_tile_size=8)


def _mesh(**sizes):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _sharding(mesh, residency="auto", unembed=("fsdp", "tensor")):
    return XentSharding(
        mesh=mesh,
        rows=("data", "fsdp", "expert"),
        positions=("context",),
        vocab=("tensor",),
        unembed=PartitionSpec(*unembed),
        residency=residency,
    )


def _case():
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(HEADS, ROWS, LENGTH, WIDTH))
    unembed = rng.normal(size=(WIDTH, VOCAB))
    targets = rng.integers(0, CLASSES, (HEADS, ROWS, LENGTH))
    mask = rng.random((HEADS, ROWS, LENGTH)) < 0.5
    mask[:, 1] = False  # a device may hold no scored token at all
    return hidden, unembed, targets, mask, rng.random((HEADS, ROWS, LENGTH)) * mask


def _program(execution, factors=(1.0, 1.0), rules=RULES):
    def f(hidden, unembed, targets, mask, weights):
        heads = eqx_loss.linear_cross_entropy_heads(
            hidden, unembed, targets, weights, mask=mask, rules=rules, execution=execution
        )
        total = sum(factor * (head.objective + head.z_objective) for factor, head in zip(factors, heads))
        return total, heads

    return jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))


def _placed(case, sharding):
    per_token = PartitionSpec(None, sharding.rows, sharding.positions)
    specs = (per_token, sharding.unembed, per_token, per_token, per_token)
    return [jax.device_put(part, NamedSharding(sharding.mesh, spec)) for part, spec in zip(case, specs)]


def _assert_equal(found, case, factors=(1.0, 1.0)):
    (_, heads), (d_hidden, d_unembed) = found
    total = np.zeros(case[1].shape)
    for k, head in enumerate(heads):
        hidden, targets, mask, weights = (case[i][k] for i in (0, 2, 3, 4))
        expected = oracle.head(
            hidden,
            case[1],
            targets,
            mask,
            weights,
            z=RULES.z_loss_multiplier[k],
            cap=RULES.logit_soft_cap,
            smoothing=RULES.label_smoothing,
            classes=CLASSES,
        )
        for name in ("objective", "z_objective", "xent", "z_term"):
            np.testing.assert_allclose(getattr(head, name), expected[name], rtol=EXACT, atol=EXACT)
        np.testing.assert_allclose(d_hidden[k], factors[k] * expected["d_hidden"], rtol=EXACT, atol=EXACT)
        total += factors[k] * expected["d_unembed"]
    np.testing.assert_allclose(d_unembed, total, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("residency", ["gathered", "stationary"])
@pytest.mark.parametrize(
    ("sizes", "unembed"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, ("fsdp", "tensor")),
        ({"data": 2, "fsdp": 2, "context": 2}, (("data", "fsdp"), "tensor")),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, (None, ("tensor", "fsdp"))),
        ({"context": 2, "tensor": 4}, (None, "tensor")),
    ],
    ids=["fsdp_tensor", "two_axes_on_width", "fsdp_on_vocabulary", "context_tensor"],
)
def test_every_layout_equals_the_oracle(x64, sizes, unembed, residency):
    case = _case()
    sharding = _sharding(_mesh(**sizes), residency, unembed)
    program = _program(XentExecution(sharding=sharding, tiling=TILING))
    _assert_equal(program(*_placed(case, sharding)), case)


def test_different_cotangents_on_a_mesh(x64):
    case, factors = _case(), (1.0, 0.3)
    sharding = _sharding(_mesh(data=2, fsdp=2, tensor=2))
    program = _program(XentExecution(sharding=sharding, tiling=TILING), factors)
    _assert_equal(program(*_placed(case, sharding)), case, factors)


def test_token_cotangents_on_a_mesh(x64):
    hidden, unembed, targets, mask, _ = (jnp.asarray(part) for part in _case())
    sharding = _sharding(_mesh(data=2, fsdp=2, tensor=2), "stationary")
    execution = XentExecution(sharding=sharding, tiling=TILING)

    def f(hidden, unembed, execution):
        losses = eqx_loss.linear_token_cross_entropy(
            hidden, unembed, targets[0], mask[0], execution=execution
        )
        return jnp.sum(jnp.sin(losses.xent)) + jnp.sum(jnp.cos(losses.z_term))

    gradient = jax.jit(jax.grad(f, (0, 1)), static_argnums=2)
    found = gradient(hidden[0], unembed, execution)
    expected = gradient(hidden[0], unembed, XentExecution(implementation="plain"))
    for ours, plain in zip(found, expected):
        np.testing.assert_allclose(ours, plain, rtol=EXACT, atol=EXACT)


def test_partitioned_by_the_compiler(x64):
    """No mesh given: `jit` with sharded arguments is correct too."""
    case = _case()
    sharding = _sharding(_mesh(data=2, fsdp=2, tensor=2))
    _assert_equal(_program(XentExecution(tiling=TILING))(*_placed(case, sharding)), case)


@pytest.mark.parametrize("handles_columns", [True, False])
def test_inside_a_shard_map(x64, handles_columns):
    """Over all axes of the mesh, or over the others than the vocabulary's alone."""
    case = _case()
    mesh = _mesh(data=2, tensor=4)
    columns = PartitionSpec(None, "tensor")
    sharding = XentSharding(mesh=mesh, vocab=("tensor",), unembed=columns, inside_shard_map=handles_columns)
    columns = columns if handles_columns else PartitionSpec()
    program = _program(XentExecution(sharding=sharding, tiling=TILING))
    per_token = PartitionSpec(None, "data")

    def on_device(*parts):
        (_, heads), (d_hidden, d_unembed) = program(*parts)
        objectives = jax.lax.psum([(head.objective, head.z_objective) for head in heads], "data")
        tokens = [(head.xent, head.z_term) for head in heads]
        return objectives, tokens, d_hidden, jax.lax.psum(d_unembed, "data")

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(per_token, columns, per_token, per_token, per_token),
        out_specs=(PartitionSpec(), PartitionSpec("data"), per_token, columns),
        axis_names=set(mesh.axis_names) - (set() if handles_columns else {"tensor"}),
        check_vma=False,
    )
    objectives, tokens, *gradients = jax.jit(mapped)(*case)
    heads = [eqx_loss.HeadLoss(*pair, *losses) for pair, losses in zip(objectives, tokens)]
    _assert_equal(((None, heads), gradients), case)


def _collectives(text):
    """(kind, shape, inside a loop) of every collective of a compiled program."""
    loops = testing.collectives_in_loops(text)
    found = []
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for name, shape, kind in re.findall(
        rf"(%[\w.-]+) = \(?(\w+\[[\d,]*\])[^=]*? ({kinds})(?:-start)?\(", text
    ):
        found.append((kind, shape, name.lstrip("%") in [loop.lstrip("%") for loop in loops]))
    assert found
    return found


def _compiled(execution, sharding):
    shapes = [
        ((HEADS, 64, 32, WIDTH), jnp.float32),
        ((WIDTH, 1024), jnp.float32),
        ((HEADS, 64, 32), jnp.int32),
        ((HEADS, 64, 32), jnp.bool_),
        ((HEADS, 64, 32), jnp.float32),
    ]
    per_token = PartitionSpec(None, sharding.rows, sharding.positions)
    specs = (per_token, sharding.unembed, per_token, per_token, per_token)
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(sharding.mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs)
    ]
    return _program(execution, rules=XentRules()).lower(*arguments).compile()


def _elements(shape):
    return int(np.prod([int(size) for size in re.findall(r"\d+", shape.split("[")[1])] or [1]))


def test_no_device_gathers_foreign_tokens():
    """Gathered layout: `unembed` once before the loops; in them four numbers a token and one hidden tile."""
    sharding = _sharding(_mesh(data=2, fsdp=2, tensor=2), "gathered")
    tiling = XentTiling(token_tile_size=64, vocab_tile_size=256)
    found = _collectives(_compiled(XentExecution(sharding=sharding, tiling=tiling), sharding).as_text())
    hidden_tile, sums = 64 * WIDTH, 2 * 3 * 64
    for kind, shape, in_loop in found:
        if in_loop:
            assert (kind, _elements(shape)) in {("all-gather", sums), ("all-reduce", hidden_tile)}, (
                kind,
                shape,
            )
        else:
            # A device's columns of unembed at most. Its hidden states alone are twice as many numbers.
            assert _elements(shape) <= WIDTH * 1024 // 2, (kind, shape)


def test_log_sum_exp_takes_one_reduction_a_tile():
    sharding = _sharding(_mesh(data=2, tensor=4), "gathered", (None, "tensor"))
    tiling = XentTiling(token_tile_size=64, vocab_tile_size=128)

    def f(hidden, unembed, targets, mask, weights):
        heads = eqx_loss.linear_cross_entropy_heads(
            hidden,
            unembed,
            targets,
            weights,
            mask=mask,
            execution=XentExecution(sharding=sharding, tiling=tiling),
        )
        return heads[0].objective

    arguments = [
        jnp.zeros((HEADS, 64, 32, WIDTH)),
        jnp.zeros((WIDTH, 1024)),
        jnp.zeros((HEADS, 64, 32), int),
        jnp.ones((HEADS, 64, 32), bool),
        jnp.ones((HEADS, 64, 32)),
    ]
    text = jax.jit(f).lower(*_placed(arguments, sharding)).compile().as_text()
    in_loops = [(kind, _elements(shape)) for kind, shape, in_loop in _collectives(text) if in_loop]
    assert in_loops == [("all-gather", 4 * 3 * 64)]


def test_stationary_unembed_is_never_gathered():
    sharding = _sharding(_mesh(data=2, fsdp=2, tensor=2), "stationary")
    tiling = XentTiling(token_tile_size=64, vocab_tile_size=256)
    compiled = _compiled(XentExecution(sharding=sharding, tiling=tiling), sharding)
    local = WIDTH * 1024 // 4
    for kind, shape, _ in _collectives(compiled.as_text()):
        assert _elements(shape) <= local, (kind, shape)


def test_rows_stay_where_they_are_when_the_compiler_partitions():
    """Without a mesh the tiles cut positions only, so no hidden state moves."""
    mesh = _mesh(data=8)
    sharding = XentSharding(mesh=mesh, rows=("data",))
    tiling = XentTiling(token_tile_size=256, vocab_tile_size=256)
    text = _compiled(XentExecution(tiling=tiling), sharding).as_text()
    assert not [kind for kind, _, _ in _collectives(text) if kind not in ("all-reduce", "reduce-scatter")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": ("data", "tensor"), "vocab": ("tensor",)}, "different mesh axes"),
        ({"rows": ("model",)}, "must be of the mesh"),
        ({"vocab": ("tensor",), "unembed": PartitionSpec(None, ("fsdp", "tensor"))}, "cut by vocab"),
        ({"rows": ("data",), "inside_shard_map": True}, "vocab alone"),
    ],
)
def test_contradictory_layouts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        XentSharding(mesh=_mesh(data=2, tensor=2), **arguments)


@pytest.mark.parametrize(
    ("shape", "vocab", "residency", "message"),
    [
        ((3, 4), 16, "auto", "B=3 must be divisible by the 4 devices"),
        ((4, 4), 15, "auto", "pad the vocabulary"),
        ((4, 4), 6, "stationary", "needs V=6 divisible by the 4 devices"),
    ],
)
def test_sizes_that_do_not_fit_the_mesh_are_refused(shape, vocab, residency, message):
    sharding = _sharding(_mesh(data=2, fsdp=2, tensor=2), residency)
    hidden = jax.ShapeDtypeStruct((*shape, WIDTH), jnp.float32)
    unembed = jax.ShapeDtypeStruct((WIDTH, vocab), jnp.float32)
    with pytest.raises(ValueError, match=message):
        eqx_loss.explain_linear_cross_entropy(hidden, unembed, execution=XentExecution(sharding=sharding))


def test_residency_follows_the_budget():
    mesh = _mesh(data=2, fsdp=2, tensor=2)
    hidden = jax.ShapeDtypeStruct((4, 4, WIDTH), jnp.float32)
    unembed = jax.ShapeDtypeStruct((WIDTH, 1024), jnp.float32)
    gathered = WIDTH * 512 * (4 + 4)  # the copy and its gradient, float32, bytes a device

    def plan(budget):
        sharding = XentSharding(
            mesh=mesh,
            rows=("data", "fsdp"),
            vocab=("tensor",),
            unembed=PartitionSpec("fsdp", "tensor"),
            max_gathered_bytes=budget,
        )
        return eqx_loss.explain_linear_cross_entropy(
            hidden, unembed, execution=XentExecution(sharding=sharding)
        )

    assert plan(gathered).residency == "gathered"
    assert plan(gathered - 1).residency == "stationary"
    assert plan(gathered - 1).gradient_bytes * 2 == plan(gathered).gradient_bytes
