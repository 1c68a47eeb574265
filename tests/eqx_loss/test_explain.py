"""explain: what it prints, that its claims hold in numbers, and how it refuses."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_loss import (
    MEGATRON_RELEASES,
    BatchLayout,
    LossSemantics,
    XentExecution,
    explain_linear_cross_entropy,
    loss_weights,
)
from eqx_loss.explain import diff_semantics, explain_semantics, main, parse_profile
from eqx_loss.explain._explanation import NOTHING

MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 0, 0]])
PROFILES = [
    *(f"megatron:{r},calculate_per_token_loss={f}" for r in MEGATRON_RELEASES for f in ("true", "false")),
    "ours,calculate_per_token_loss=true",
    "ours",
    "rfc-0032",
    "maxtext:0.2.4",
    "maxtext:0.2.5",
    "hf-trainer",
    "hf-trainer,num_items_in_batch=false",
    "torchtitan",
    "levanter",
]


def _terms(semantics):
    return {term.name: term for term in explain_semantics(semantics).terms}


@pytest.mark.parametrize("text", PROFILES)
def test_every_profile_explains_every_term(text):
    terms = _terms(parse_profile(text))
    assert list(terms) == ["lm", "lm_z", "mtp", "router_z", "load_balance"]
    for term in terms.values():
        assert all(getattr(term, field.name) is not None for field in dataclasses.fields(term))
        assert term.objective
        assert term.log


@pytest.mark.parametrize("text", ["maxtext:0.2.4", "maxtext:0.2.5", "hf-trainer", "levanter"])
def test_what_accumulation_is_said_to_change_it_changes(text):
    semantics = dataclasses.replace(parse_profile(text), mtp_loss_scaling_factor=0.1)
    one, two = (
        loss_weights(
            jnp.asarray(MASK != 0), semantics, num_mtp_layers=1, layout=BatchLayout(num_micro_batches=n)
        )
        for n in (1, 2)
    )
    terms = _terms(semantics)
    # 1e-6: float32 quotients of small counts.
    for name in ("lm", "mtp"):
        same = np.allclose(getattr(one, f"{name}_objective"), getattr(two, f"{name}_objective"), rtol=1e-6)
        assert same == (terms[name].accumulation == NOTHING), name


@pytest.mark.parametrize("release", MEGATRON_RELEASES)
@pytest.mark.parametrize("per_token", [False, True])
def test_what_the_micro_batch_size_is_said_to_change_it_changes(release, per_token):
    weights, terms = [], {}
    for size in (1, 2):
        semantics = LossSemantics.megatron(release, calculate_per_token_loss=per_token, micro_batch_size=size)
        weights.append(loss_weights(jnp.asarray(MASK != 0), semantics, num_mtp_layers=1))
        terms = _terms(semantics)
    for name in ("lm", "mtp"):
        field = f"{name}_objective"
        # 1e-6: float32 quotients of small counts.
        same = np.allclose(getattr(weights[0], field), getattr(weights[1], field), rtol=1e-6)
        assert same == (terms[name].micro_batch_size == NOTHING), name


def test_effective_coefficient_includes_depths_and_context_ranks():
    semantics = dataclasses.replace(
        LossSemantics.megatron("0.16", calculate_per_token_loss=True, context_parallel_size=4),
        moe_z_loss_weight=0.8,
    )
    terms = {term.name: term for term in explain_semantics(semantics, num_mtp_layers=2).terms}
    assert terms["mtp"].coefficient == pytest.approx(0.05)
    assert terms["router_z"].coefficient == pytest.approx(0.2)


def test_a_profile_does_not_differ_from_itself_and_releases_do():
    first = LossSemantics.megatron("0.16", calculate_per_token_loss=True)
    assert diff_semantics(first, first) == ()
    second = LossSemantics.megatron("0.17", calculate_per_token_loss=True)
    assert ("mtp", "objective") in {(d.term, d.aspect) for d in diff_semantics(first, second)}


def test_json_holds_every_term(capsys):
    assert main(["--profile", "megatron", "--release", "0.16", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [term["name"] for term in content["terms"]] == ["lm", "lm_z", "mtp", "router_z", "load_balance"]


def test_a_run_configuration_is_read(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("loss:\n  calculate_per_token_loss: true\n  moe_z_loss_weight: 1.0e-4\n")
    assert main(["--config", str(path)]) == 0
    assert "calculate_per_token_loss=true" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_difference_on_masks_is_that_of_the_weights(tmp_path, capsys, suffix):
    path = tmp_path / f"masks{suffix}"
    if suffix == ".npz":
        np.savez(path, loss_mask=MASK, xent=np.ones(MASK.shape))
    else:
        path.write_text(json.dumps({"loss_mask": MASK.tolist(), "xent": np.ones(MASK.shape).tolist()}))
    arguments = ["--diff", "ours,calculate_per_token_loss=true", "ours", "--masks", str(path), "--json"]
    assert main(arguments) == 0
    lm = json.loads(capsys.readouterr().out)["measured"][0]
    token = MASK / MASK.sum()
    row = MASK / MASK.sum(1, keepdims=True) / 4
    expected = np.linalg.norm(row - token) / np.linalg.norm(token)
    assert lm["relative"] == pytest.approx(expected, rel=1e-12)
    assert lm["first_objective"] == pytest.approx(1.0)


def test_difference_on_a_run_reads_its_gaps(tmp_path, capsys):
    rows = [
        {"step": s, "learning/lm_estimator_gap": -0.001 - s * 1e-5, "learning/lm_loss": 2.0} for s in range(4)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    both = ["--diff", "ours,calculate_per_token_loss=true", "ours"]
    assert main([*both, "--run", str(tmp_path)]) == 0
    assert "-1.015e-03" in capsys.readouterr().out


def test_difference_of_coefficients_is_shown(capsys):
    assert main(["--diff", "ours", "ours,moe_z_loss_weight=0.25"]) == 0
    assert "router_z, coefficient\n  A  0\n  B  0.25\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "megatron", "--release", "0.11"], "must be one of 0.12"),
        (["--config", "absent.yaml"], "does not exist"),
        (["--config", "absent.yaml", "--profile", "ours"], "not both"),
        (["--masks", "m.npz"], "give --diff A B"),
        (["--diff", "ours", "nobody"], "a profile is one of"),
        (["--diff", "ours", "ours,moe_z_loss=1"], "unknown option 'moe_z_loss'"),
        (["--diff", "ours", "ours,moe_z_loss_weight=x"], "must be a number"),
        (["--diff", "ours", "torchtitan:1"], "has one release only"),
        (["--diff", "ours", "ours", "--masks", "absent.npz"], "does not exist"),
        (["--profile", "nobody"], "invalid choice"),
    ],
)
def test_wrong_use_is_exit_code_two_with_the_reason(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_help_is_exit_code_zero(capsys):
    assert main(["--help"]) == 0
    assert "--diff" in capsys.readouterr().out


def test_output_layer_shows_the_choice_and_its_memory(capsys):
    assert main(["--output-layer", "8192", "2048", "157184", "--backend", "tpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    hidden = jax.ShapeDtypeStruct((1, 8192, 2048), jnp.bfloat16)
    unembed = jax.ShapeDtypeStruct((2048, 157184), jnp.bfloat16)
    plan = explain_linear_cross_entropy(hidden, unembed, execution=XentExecution(backend="tpu"))
    assert facts["implementation"] == plan.implementation
    assert facts["gradient_bytes"] == 2048 * 157184 * 3  # bfloat16 and a byte of what it lacks
    assert facts["num_token_tiles"] == -(-8192 // facts["token_tile_size"])
    assert main(["--output-layer", "64", "32", "100", "--backend", "cpu", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.startswith("output layer: tiled (")


def test_output_layer_refuses_a_size_of_zero(capsys):
    assert main(["--output-layer", "0", "32", "100"]) == 2
    assert "T must be at least 1, got 0" in capsys.readouterr().err
