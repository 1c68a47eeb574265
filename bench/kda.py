"""Kimi Delta Attention forward and backward beside tokamax's `xla_chunked`: time, temporaries, error, TPU compilation.

Both take raw queries, keys and gate inputs (normalization and gate inside), float32, one document a row, in the same
process, in turns. The reference for errors is our step-by-step form in float64.

    python -m bench.kda --quick --json OUT     CPU
    python -m bench.kda --tpu --json OUT       also ahead of time for one TPU v5p (tokamax alone takes minutes)

Needs the `bench` extra: tokamax needs Python 3.12 or later.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

TPU_SHAPE = (1, 8192, 32, 128)
QUICK_SHAPE = (1, 1024, 4, 128)
FULL_SHAPES = ((1, 1024, 4, 128), (1, 4096, 4, 128), (2, 512, 16, 128), (1, 4096, 16, 64))
ERROR_SHAPE = (1, 256, 2, 128)
LOWER_BOUND = -5.0
ROUNDS = 7


def main() -> None:
    """Measures and prints; writes `--json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one CPU shape")
    parser.add_argument("--tpu", action="store_true", help="also compile for a TPU v5p")
    parser.add_argument("--json", metavar="OUT", help="file for the numbers")
    arguments = parser.parse_args()
    _set_environment(arguments.tpu)
    report: dict[str, Any] = {
        "cpu": [measure_cpu(s) for s in ((QUICK_SHAPE,) if arguments.quick else FULL_SHAPES)]
    }
    report["max_rel_error"] = measure_errors()
    first = report["cpu"][0]
    report["kda_time_vs_tokamax_xla_chunked"] = first["time_ratio"]
    report["kda_temporaries_vs_tokamax_xla_chunked"] = first["temporaries_ratio"]
    if arguments.tpu:
        report["tpu"] = measure_tpu()
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


def measure_cpu(shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """Median seconds of forward + backward and temporaries of both; ratios are ours over tokamax's.

    Rounds alternate, so a busy machine slows both; CPU seconds count all threads and do not see other processes.
    """
    import jax

    programs = {name: jax.jit(make(shape)) for name, make in _SIDES.items()}
    arrays = {name: _draw(shape, heads_first=name == "tokamax") for name in programs}
    compiled, result = {}, {"shape": shape}
    for name, program in programs.items():
        start = time.perf_counter()
        compiled[name] = program.lower(*arrays[name]).compile()
        result[f"{name}_compile_seconds"] = time.perf_counter() - start
        result[f"{name}_temporary_bytes"] = compiled[name].memory_analysis().temp_size_in_bytes
        jax.block_until_ready(compiled[name](*arrays[name]))
    wall: dict[str, list[float]] = {name: [] for name in programs}
    cpu: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, run in compiled.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(*arrays[name]))
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
    for name in programs:
        result[f"{name}_seconds"] = statistics.median(wall[name])
        result[f"{name}_cpu_seconds"] = statistics.median(cpu[name])
    result["time_ratio"] = result["ours_seconds"] / result["tokamax_seconds"]
    result["cpu_time_ratio"] = result["ours_cpu_seconds"] / result["tokamax_cpu_seconds"]
    result["temporaries_ratio"] = result["ours_temporary_bytes"] / result["tokamax_temporary_bytes"]
    return result


def measure_errors() -> dict[str, float]:
    """Largest error of objective and gradients against float64, over the largest value of each; per side."""
    import jax
    import numpy as np

    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in _draw(ERROR_SHAPE, heads_first=False)]
        expected = jax.tree.leaves(jax.jit(_ours(ERROR_SHAPE, recurrent=True))(*wide))
    errors = {}
    for name, make in _SIDES.items():
        first = name == "tokamax"
        got = jax.tree.leaves(jax.jit(make(ERROR_SHAPE))(*_draw(ERROR_SHAPE, heads_first=first)))
        pairs = zip((_rows_first(x) if first else np.asarray(x) for x in got), expected, strict=True)
        errors[name] = max(float(np.max(np.abs(x - y)) / np.max(np.abs(y))) for x, y in pairs)
    return errors


def measure_tpu() -> dict[str, Any]:
    """Seconds to compile forward + backward for one TPU v5p, and its temporaries; ratios are ours over tokamax's."""
    import jax
    import numpy as np
    import tokamax
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
    mesh = Mesh(np.array(topology.devices)[:1], ("d",), axis_types=(AxisType.Auto,))
    result: dict[str, Any] = {"shape": TPU_SHAPE}
    for name, make in _SIDES.items():
        sharding = NamedSharding(mesh, PartitionSpec())
        shapes = jax.eval_shape(lambda first=name == "tokamax": _draw(TPU_SHAPE, heads_first=first))
        arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), tokamax.config.cross_compile(True):
            lowered = jax.jit(make(TPU_SHAPE)).lower(*arguments)
            start, cpu_start = time.perf_counter(), time.process_time()
            compiled = lowered.compile()
        result[f"{name}_compile_seconds"] = time.perf_counter() - start
        result[f"{name}_compile_cpu_seconds"] = time.process_time() - cpu_start
        result[f"{name}_temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    result["compile_ratio"] = result["ours_compile_seconds"] / result["tokamax_compile_seconds"]
    result["temporaries_ratio"] = result["ours_temporary_bytes"] / result["tokamax_temporary_bytes"]
    return result


def _ours(shape: tuple[int, int, int, int], recurrent: bool = False) -> Any:
    import jax
    import jax.numpy as jnp

    from model._kda import DecayGate, kda_gated_chunked, kda_recurrent, l2_normalize

    def objective(q, k, v, f, beta, a_log, dt_bias, probe):
        gate = DecayGate(a_log, dt_bias.reshape(shape[2:]), LOWER_BOUND)
        if recurrent:
            q, k = l2_normalize(q) / shape[3] ** 0.5, l2_normalize(k)
            return jnp.sum(kda_recurrent(q, k, v, gate(f), beta)[0] * probe)
        return jnp.sum(kda_gated_chunked(q, k, v, f, beta, gate)[0] * probe)

    return jax.value_and_grad(objective, argnums=tuple(range(7)))


def _tokamax(shape: tuple[int, int, int, int]) -> Any:
    del shape
    import jax
    import jax.numpy as jnp
    from tokamax._src.ops.kda.api import kimi_delta_attention

    def objective(q, k, v, f, beta, a_log, dt_bias, probe):
        options = {"use_qk_l2norm": True, "use_gate_in_kernel": True, "lower_bound": LOWER_BOUND}
        o, _ = kimi_delta_attention(
            q, k, v, f, beta, a_log=a_log, delta_time_bias=dt_bias, implementation="xla_chunked", **options
        )
        return jnp.sum(o * probe)

    return jax.value_and_grad(objective, argnums=tuple(range(7)))


_SIDES = {"ours": _ours, "tokamax": _tokamax}


def _draw(shape: tuple[int, int, int, int], *, heads_first: bool) -> list[Any]:
    """q, k, v, gate input, beta, a_log, dt_bias and a probe of the output; tokamax wants [H, B, S, K]."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    rows = [rng.standard_normal(shape, np.float32) for _ in range(4)]
    beta = 1 / (1 + np.exp(-rng.standard_normal(shape[:3], np.float32)))
    params = [0.1 * rng.standard_normal(n, np.float32) for n in (shape[2], shape[2] * shape[3])]
    arrays = [*rows, beta, *params, rng.standard_normal(shape, np.float32)]
    if heads_first:
        arrays = [np.ascontiguousarray(np.moveaxis(x, 2, 0)) if x.ndim > 2 else x for x in arrays]
    return [jnp.asarray(x) for x in arrays]


def _rows_first(x: Any) -> Any:
    import numpy as np

    return np.moveaxis(np.asarray(x), 0, 2) if x.ndim > 2 else np.asarray(x)


def _set_environment(tpu: bool) -> None:
    """Must run before jax is imported."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if tpu:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")


if __name__ == "__main__":
    main()
