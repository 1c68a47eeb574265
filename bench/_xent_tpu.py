"""Programs for TPU, compiled on a host without one: temporaries, flops, bytes, compile time. Nothing runs."""

import contextlib
import os
import time

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import eqx_loss
from train._hlo_count import count_program
from train._hlo_parse import parse_program

from . import _xent_paths as paths

SHAPE = (8192, 2048, 157_184)


def paths_by_name():
    """Ours and the peers, tokamax's TPU kernel among them where it is installed."""
    execution = eqx_loss.XentExecution(backend="tpu", implementation="tiled")
    return {"ours": lambda *a: paths.ours(*a, execution=execution), **paths.peers(("mosaic_tpu",))}


def row(topology, name, shape=SHAPE, dtype=jnp.bfloat16):
    """The program of one path for one chip; hidden and unembed are bfloat16."""
    tokens, width, vocab = shape
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices)[:1], ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())
    specs = (
        ((tokens, width), dtype),
        ((width, vocab), dtype),
        ((tokens,), jnp.int32),
        ((tokens,), jnp.float32),
    )
    arguments = [jax.ShapeDtypeStruct(size, kind, sharding=place) for size, kind in specs]
    with _kernels_for(mesh):
        start, cpu_start = time.perf_counter(), time.process_time()
        compiled = jax.jit(jax.value_and_grad(paths_by_name()[name], (0, 1))).lower(*arguments).compile()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    memory = compiled.memory_analysis()
    if name.endswith("mosaic_tpu"):
        # What a kernel does inside is in no program text; its flops are by its own account.
        flops, moved = compiled.cost_analysis()["flops"], None
    else:
        cost = count_program(parse_program(compiled.as_text()), {})
        flops, moved = cost.flops, cost.num_bytes
    return {
        "platform": topology,
        "path": name,
        "T": tokens,
        "D": width,
        "V": vocab,
        "temporaries_bytes": memory.temp_size_in_bytes,
        "results_bytes": memory.output_size_in_bytes,
        "flops_vs_three_matmuls": flops / (6 * tokens * width * vocab),
        "moved_bytes": moved,
        "compile_seconds": seconds,
        "compile_cpu_seconds": cpu,
    }


@contextlib.contextmanager
def _kernels_for(mesh):
    """What tokamax needs to choose a TPU kernel on another host; nothing where it is not installed."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):
            import tokamax

            stack.enter_context(tokamax.config.cross_compile(True))
        yield
