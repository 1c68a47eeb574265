"""The fused output layer and its peers on this CPU: paired times, temporaries, error against float64."""

import gc
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from . import _xent_paths as paths

# A peer slower than this multiple of the fastest in the first round is not run again.
BEHIND = 1.15
# Peers that hold all logits several times are timed up to this many bytes of logits.
MAX_LOGITS_BYTES = 2 << 30
ERROR_TOKENS = 128


def time_shape(shape, rounds):
    """A row for each path at this shape."""
    hidden, unembed, targets, weights = _case(shape)
    programs = {"three_products": lambda: paths.three_products(hidden, unembed)}
    memory = {"three_products": (None, None)}
    for name, objective in {"ours": paths.ours, **paths.peers()}.items():
        if name in ("plain_jax", "optax", "tokamax_xla") and 4 * shape[0] * shape[2] > MAX_LOGITS_BYTES:
            continue
        compiled = _lower(objective, hidden, unembed, targets, weights)
        programs[name] = lambda compiled=compiled: compiled(hidden, unembed, targets, weights)
        account = compiled.memory_analysis()
        memory[name] = account.temp_size_in_bytes, account.output_size_in_bytes
    wall, cpu = _times(programs, rounds)
    errors = _errors(programs, shape)
    return [
        {
            "platform": "cpu",
            "path": name,
            "T": shape[0],
            "D": shape[1],
            "V": shape[2],
            "temporaries_bytes": memory[name][0],
            "results_bytes": memory[name][1],
            "seconds": statistics.median(wall[name]),
            "cpu_seconds": statistics.median(cpu[name]),
            "ours_vs_path": _paired(wall["ours"], wall[name]),
            "cpu_ours_vs_path": _paired(cpu["ours"], cpu[name]),
            "rounds": len(wall[name]),
            "max_rel_error": errors.get(name),
        }
        for name in programs
    ]


def temporaries(path, shape):
    """Temporaries and the gradient of unembed by the compiler's account, bytes; nothing runs."""
    objective = {"ours": paths.ours, **paths.peers()}[path]
    tokens, width, vocab = shape
    arguments = (
        jax.ShapeDtypeStruct((tokens, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocab), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    return _lower(objective, *arguments).memory_analysis().temp_size_in_bytes + 4 * width * vocab


def _times(programs, rounds):
    """Wall and CPU seconds of each program, one a round; the products' first run, a warm-up, is not counted."""
    jax.block_until_ready(programs["three_products"]())
    wall, cpu = {name: [] for name in programs}, {name: [] for name in programs}
    running = list(programs)
    for number in range(rounds):
        for name in running if number % 2 == 0 else reversed(running):
            gc.collect()
            start, cpu_start = time.perf_counter(), time.process_time()
            jax.block_until_ready(programs[name]())
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
        if number == 0:
            best = min(cpu[name][0] for name in programs if name not in ("ours", "three_products"))
            running = [
                name
                for name in programs
                if name in ("ours", "three_products") or cpu[name][0] <= BEHIND * best
            ]
    return wall, cpu


def _paired(mine, other):
    """Median over the rounds that both ran of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(mine, other))


def _lower(objective, *arguments):
    return jax.jit(jax.value_and_grad(objective, (0, 1))).lower(*arguments).compile()


def _case(shape, seed=0):
    tokens, width, vocab = shape
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.standard_normal((tokens, width), np.float32))
    unembed = jnp.asarray(rng.standard_normal((width, vocab), np.float32) * (2 / width**0.5))
    targets = jnp.asarray(rng.integers(0, vocab, tokens))
    return hidden, unembed, targets, jnp.full((tokens,), 1 / tokens)


def _errors(programs, shape):
    """Largest error against float64, over the largest value, of both gradients and the objective."""
    from tests.oracles import xent as oracle

    case = _case((ERROR_TOKENS, *shape[1:]), seed=1)
    xent, *gradients = oracle.dense(*(np.asarray(part) for part in case))
    expected = [np.sum(xent * np.asarray(case[3], np.float64)), *gradients]
    found = {}
    for name, objective in {"ours": paths.ours, **paths.peers()}.items():
        if name in programs:
            value, slopes = _lower(objective, *case)(*case)
            pairs = zip((value, *slopes), expected)
            found[name] = max(float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in pairs)
    return found
