"""Continuing a prompt: greedy equals the reference and the whole-sequence argmax; sampling draws from where it may."""

import json
import pathlib
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.generate import PIECE, SamplingConfig, generate_tokens, main, sample_token
from model.hf import load_hf
from model.hf.__main__ import main as hf_main

DATA = pathlib.Path(__file__).parents[1] / "golden" / "ling3" / "data"
# `generate(max_new_tokens=20, do_sample=False, eos_token_id=None)` of transformers 5.24.0 on g2_base, float32
REFERENCE = {
    (56, 34, 13, 31, 46, 31, 51): [
        28,
        7,
        34,
        35,
        50,
        12,
        4,
        19,
        28,
        38,
        34,
        53,
        49,
        43,
        47,
        60,
        11,
        3,
        34,
        4,
    ],
    (5,): [19, 32, 12, 55, 12, 48, 13, 37, 53, 20, 28, 55, 14, 22, 0, 23, 37, 41, 29, 21],
}


@pytest.fixture(scope="module")
def model():
    return load_hf(DATA / "g2_base", dtype="float32")[1]


def _take(model, prompt, count, **options) -> np.ndarray:
    options = {"sampling": SamplingConfig(), "key": jax.random.key(0)} | options
    return np.stack(list(generate_tokens(model, prompt, max_new_tokens=count, **options)))


@pytest.mark.parametrize("prompt", REFERENCE)
def test_greedy_continuation_is_that_of_transformers(model, prompt):
    assert _take(model, list(prompt), 20)[:, 0].tolist() == REFERENCE[prompt]


@eqx.filter_jit
def _logits(model, tokens):
    return model(tokens).hidden @ model.unembed


def test_greedy_continuation_is_the_argmax_of_the_whole_sequence(model):
    prompt = [3, 1, 4, 1, 5]
    new = _take(model, prompt, 6)[:, 0].tolist()
    tokens = jnp.asarray([prompt + new])
    best = np.asarray(jnp.argmax(_logits(model, tokens), axis=-1))[0]
    assert best[len(prompt) - 1 : -1].tolist() == new


@pytest.mark.slow
def test_prompt_longer_than_a_piece_is_read_like_the_whole(model):
    prompt = np.random.default_rng(0).integers(0, 61, PIECE + 7).tolist()
    new = _take(model, prompt, 1)[0, 0]
    assert new == int(jnp.argmax(_logits(model, jnp.asarray([prompt]))[0, -1]))


def test_samples_of_one_seed_repeat_and_differ_from_each_other(model):
    options = {"sampling": SamplingConfig(temperature=1.0), "num_samples": 3}
    first = _take(model, [5], 12, **options)
    assert np.array_equal(first, _take(model, [5], 12, **options))
    assert len({tuple(column) for column in first.T}) == 3


def test_draws_follow_the_tempered_distribution():
    logits = jnp.log(jnp.asarray([0.5, 0.25, 0.125, 0.125]))
    rows = jnp.broadcast_to(logits, (20_000, 4))
    drawn = sample_token(rows, SamplingConfig(temperature=0.5), key=jax.random.key(1))
    share = np.bincount(np.asarray(drawn), minlength=4) / 20_000
    squared = np.array([0.5, 0.25, 0.125, 0.125]) ** 2
    # standard error of a share is at most 0.0036; five of them
    assert np.abs(share - squared / squared.sum()).max() < 0.018


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {2, 0}),
        ({"top_p": 0.39}, {2}),
        ({"top_p": 0.41}, {2, 0}),
        ({"top_p": 0.71}, {2, 0, 3}),
        ({"top_p": 1e-9}, {2}),
        ({"top_k": 3, "top_p": 0.45}, {2, 0}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_only_tokens_within_top_k_and_top_p_are_drawn(options, allowed):
    logits = jnp.log(jnp.asarray([0.3, 0.1, 0.4, 0.2]))
    rows = jnp.broadcast_to(logits, (2_000, 4))
    drawn = sample_token(rows, SamplingConfig(temperature=1.0, **options), key=jax.random.key(0))
    assert set(np.asarray(drawn).tolist()) == allowed


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_sampling_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SamplingConfig(**options)


@pytest.mark.parametrize(("temperature", "allowed"), [(1e-45, {2}), (1e-300, {2}), (1e300, {0, 1, 2, 3})])
def test_extreme_temperatures_are_greedy_or_even(temperature, allowed):
    rows = jnp.broadcast_to(jnp.asarray([0.3, -9.0, 0.4, 0.2]), (2_000, 4))
    config = SamplingConfig(temperature=temperature, top_k=10**30)
    assert set(np.asarray(sample_token(rows, config, key=jax.random.key(0))).tolist()) == allowed


def test_empty_prompt_and_unknown_id_are_refused(model):
    with pytest.raises(ValueError, match="at least one token"):
        next(generate_tokens(model, [], max_new_tokens=1, sampling=SamplingConfig(), key=jax.random.key(0)))
    with pytest.raises(ValueError, match="vocab_size=61"):
        next(generate_tokens(model, [61], max_new_tokens=1, sampling=SamplingConfig(), key=jax.random.key(0)))


def test_command_writes_ids_from_either_kind_of_folder(tmp_path, capsys):
    arguments = ["--ids", "5", "--max-new-tokens", "4", "--dtype", "float32", "--param-dtype", "float32"]
    assert main([str(DATA / "g2_base"), *arguments]) == 0
    expected = " ".join(map(str, REFERENCE[(5,)][:4]))
    assert capsys.readouterr().out.strip() == expected
    hf_main(["import", str(DATA / "g2_base"), str(tmp_path / "ours"), "--quiet"])
    capsys.readouterr()
    assert main([str(tmp_path / "ours"), *arguments]) == 0
    assert capsys.readouterr().out.strip() == expected


def test_command_stops_at_the_end_of_text_token(tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / "g2_base" / name, tmp_path / name)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"eos_token_id": [12, 60], "model_max_length": 4}))
    arguments = [
        str(tmp_path),
        "--ids",
        "5",
        "--max-new-tokens",
        "4",
        "--dtype",
        "float32",
        "--param-dtype",
        "float32",
    ]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.strip() == "19 32"
    assert "up to 5 tokens; config.json says the model is for 4" in shown.err
    assert main([*arguments, "--ignore-eos"]) == 0
    assert capsys.readouterr().out.strip() == "19 32 12 55"
    assert main([*arguments, "--max-new-tokens", "1000000000000"]) == 2
    assert "lower --max-new-tokens" in capsys.readouterr().err


def test_command_reads_and_writes_text_with_a_tokenizer(tmp_path, capsys):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    arguments = [
        "--tokenizer",
        str(tmp_path / "tokenizer.json"),
        "--max-new-tokens",
        "3",
        "--dtype",
        "float32",
    ]
    assert main([str(DATA / "g2_base"), "--prompt", "w5", *arguments, "--param-dtype", "float32"]) == 0
    assert capsys.readouterr().out.strip().replace(" ", "") == "w19w32w12"


def test_text_without_a_tokenizer_is_refused(capsys):
    assert main([str(DATA / "g2_base"), "--prompt", "hello"]) == 2
    assert "--prompt needs a tokenizer" in capsys.readouterr().err
