"""Continue a text with an imported model: `python -m model.generate FOLDER --prompt "..."`.

Greedy or sampled, with a memory of what was read (key/value latents and recurrent states), so that a token costs one
step whatever came before. The folder is a Hugging Face checkpoint or one that `python -m model.hf import` wrote.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ._cache import Cache, init_cache
from ._decode import decode
from ._transformer import Transformer
from .hf._hf_config import HfConfig
from .hf._load import load_hf, open_hf
from .hf._native import is_native, load_native, open_native

PIECE = 256  # prompt tokens read at once: bounds the attention scores held in memory
TOKENIZER_NAME = "tokenizer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is drawn.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Only the k most likely tokens may be drawn; None for all.
        top_p: Only the most likely tokens that together reach this probability may be drawn, in (0, 1]; the most
            likely one always may.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more and finite, got {self.temperature}; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}; leave it out for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1 is all tokens")


def sample_token(
    logits: Float[Array, "B V"], config: SamplingConfig, *, key: PRNGKeyArray
) -> Int[Array, " B"]:
    """One token id per row, drawn from `softmax(logits / temperature)` cut to top-k, then top-p."""
    if config.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # From the largest down: a temperature near 0 leaves it at 0 and the others at -inf.
    span = jnp.finfo(logits.dtype)
    temperature = min(max(config.temperature, float(span.tiny)), float(span.max))
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    order = jnp.argsort(logits, axis=-1, descending=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(ranked.shape[-1])
    if config.top_k is not None:
        ranked = jnp.where(rank < min(config.top_k, rank.size), ranked, -jnp.inf)
    share = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(share, axis=-1) - share  # probability of all that are more likely
    ranked = jnp.where((before < config.top_p) | (rank == 0), ranked, -jnp.inf)
    place = jax.random.categorical(key, ranked, axis=-1)
    return jnp.take_along_axis(order, place[:, None], axis=-1)[:, 0].astype(jnp.int32)


def generate_tokens(
    model: Transformer,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    num_samples: int = 1,
    key: PRNGKeyArray,
) -> Iterator[Int[np.ndarray, " B"]]:
    """New tokens, one array of `num_samples` ids a step; the caller decides when to stop.

    Args:
        model: The model.
        prompt: Token ids to continue, at least one.
        max_new_tokens: Most steps to take.
        sampling: How to draw.
        num_samples: Continuations of the prompt, drawn independently.
        key: Randomness; not used when greedy.

    Raises:
        ValueError: The prompt is empty or holds an id that the model does not have.
    """
    if not prompt:
        raise ValueError("the prompt must hold at least one token, got none; give the begin-of-text id")
    wrong = [i for i in prompt if not 0 <= i < model.config.vocab_size]
    if wrong:
        raise ValueError(f"token ids must be in [0, vocab_size={model.config.vocab_size}), got {wrong[:5]}")
    cache = init_cache(model.config, num_samples, len(prompt) + max_new_tokens)
    logits, cache = _read_prompt(model, prompt, cache, num_samples)
    for _ in range(max_new_tokens):
        key, draw_key = jax.random.split(key)
        token = _sample(logits, sampling, draw_key)
        yield np.asarray(token)
        logits, cache = _step(model, token[:, None], cache)


def _read_prompt(
    model: Transformer, prompt: Sequence[int], cache: Cache, num_samples: int
) -> tuple[Float[Array, "B V"], Cache]:
    logits: Any = None
    for start in range(0, len(prompt), PIECE):
        piece = list(prompt[start : start + PIECE])
        width = 1 << (len(piece) - 1).bit_length()  # few shapes, few compilations
        tokens = jnp.asarray([piece + [0] * (width - len(piece))] * num_samples, dtype=jnp.int32)
        count = jnp.full(num_samples, len(piece), dtype=jnp.int32)
        logits, cache = _read_piece(model, tokens, cache, count)
    return logits, cache


@eqx.filter_jit(donate="all-except-first")
def _step(model: Transformer, tokens: Int[Array, "B 1"], cache: Cache) -> tuple[Float[Array, "B V"], Cache]:
    return decode(model, tokens, cache)


@eqx.filter_jit
def _read_piece(
    model: Transformer, tokens: Int[Array, "B S"], cache: Cache, num_tokens: Int[Array, " B"]
) -> tuple[Float[Array, "B V"], Cache]:
    return decode(model, tokens, cache, num_tokens=num_tokens)


@functools.partial(jax.jit, static_argnums=1)
def _sample(logits: Float[Array, "B V"], config: SamplingConfig, key: PRNGKeyArray) -> Int[Array, " B"]:
    return sample_token(logits, config, key=key)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when text was written, 2 when the folder or an option is wrong."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except (ValueError, OSError) as error:  # CheckpointError is a ValueError
        print(error, file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"{error}; lower --max-new-tokens or --num-samples", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m model.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", type=Path, help="Hugging Face folder, or one that `python -m model.hf import` wrote"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue; needs tokenizer.json")
    source.add_argument("--ids", help="token ids to continue, such as 12,7,99")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: the one in the folder)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="most tokens to add (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, help="draw from the k most likely tokens only")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw from this share of the probability only"
    )
    parser.add_argument("--num-samples", type=int, default=1, help="independent continuations (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="compute dtype")
    parser.add_argument(
        "--param-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="dtype of the weights in memory",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    return parser


def _run(options: argparse.Namespace) -> None:
    sampling = SamplingConfig(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    for name in ("max_new_tokens", "num_samples"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed must be in [0, 2**32), got {options.seed}")
    if not options.folder.is_dir():
        raise ValueError(f"{options.folder}: no such folder")
    if options.tokenizer is not None and not options.tokenizer.is_file():
        raise ValueError(f"{options.tokenizer}: no such file")
    text = _Text(options.tokenizer or options.folder / TOKENIZER_NAME, is_needed=options.prompt is not None)
    prompt = text.encode(options.prompt) if options.prompt is not None else _parse_ids(options.ids)
    model, hf = _load(options)
    _warn_of_length(len(prompt) + options.max_new_tokens, hf)
    stops = _stops(hf)
    rows: list[list[int]] = [[] for _ in range(options.num_samples)]
    done = [False] * options.num_samples
    steps = generate_tokens(
        model,
        prompt,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        num_samples=options.num_samples,
        key=jax.random.key(options.seed),
    )
    write = functools.partial(print, end="", flush=True)
    for tokens in steps:
        for i, token in enumerate(tokens.tolist()):
            if not done[i]:
                done[i] = token in stops and not options.ignore_eos
                if not done[i]:
                    rows[i].append(token)
        if options.num_samples == 1:
            write(text.new_part(rows[0]))
        if all(done):
            break
    if options.num_samples == 1:
        print()
    else:
        for i, row in enumerate(rows):
            print(f"--- {i + 1}\n{text.decode(row)}")


def _load(options: argparse.Namespace) -> tuple[Transformer, HfConfig | None]:
    load: Callable[..., Any]
    if is_native(options.folder):
        load, hf = load_native, open_native(options.folder).hf
    else:
        load, hf = load_hf, open_hf(options.folder).hf
    _, model = load(options.folder, dtype=options.dtype, param_dtype=options.param_dtype)
    return model, hf


def _stops(hf: HfConfig | None) -> frozenset[int]:
    """Tokens that end a text."""
    eos = None if hf is None else hf.eos_token_id
    return frozenset(() if eos is None else eos if isinstance(eos, tuple) else (eos,))


def _warn_of_length(num_tokens: int, hf: HfConfig | None) -> None:
    if hf is not None and num_tokens > hf.max_position_embeddings:
        print(
            f"up to {num_tokens} tokens; config.json says the model is for {hf.max_position_embeddings}",
            file=sys.stderr,
        )


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--ids must be whole numbers with commas between them, got {text!r}") from None


class _Text:
    """Between text and ids; without a tokenizer, ids are written as numbers."""

    def __init__(self, path: Path, *, is_needed: bool):
        self._tokenizer: Any = None
        self._shown = ""
        if path.is_file():
            self._tokenizer = _read_tokenizer(path)
        elif is_needed:
            raise ValueError(f"{path}: no such file; --prompt needs a tokenizer, --ids does not")

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return " ".join(map(str, ids)) if self._tokenizer is None else self._tokenizer.decode(list(ids))

    def new_part(self, ids: Sequence[int]) -> str:
        """What the last id adds to the text shown so far; empty while it ends inside a character."""
        text = self.decode(ids)
        if text.endswith("\ufffd"):
            return ""
        added, self._shown = text[len(self._shown) :], text
        return added


def _read_tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer  # only here: the model itself needs no tokenizer
    except ImportError as error:
        raise ValueError(
            f"{path}: needs the package tokenizers; install it, or use a folder without this file and --ids"
        ) from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ValueError(f"{path}: is no tokenizer ({error}); fetch it again") from error


if __name__ == "__main__":
    sys.exit(main())
