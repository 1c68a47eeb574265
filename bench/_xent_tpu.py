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


def rows(topology, shape=SHAPE, dtype=jnp.bfloat16):
    """A row for each path; hidden and unembed are bfloat16."""
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
    execution = eqx_loss.XentExecution(backend="tpu", implementation="tiled")
    todo = {"ours": lambda *a: paths.ours(*a, execution=execution), **paths.peers(("mosaic_tpu",))}
    for name, objective in todo.items():
        with _kernels_for(mesh):
            start, cpu_start = time.perf_counter(), time.process_time()
            compiled = jax.jit(jax.value_and_grad(objective, (0, 1))).lower(*arguments).compile()
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        memory, reported = compiled.memory_analysis(), compiled.cost_analysis()
        is_kernel = name.endswith("mosaic_tpu")
        flops = reported["flops"] if is_kernel else count_program(parse_program(compiled.as_text()), {}).flops
        yield {
            "topology": topology,
            "path": name,
            "T": tokens,
            "D": width,
            "V": vocab,
            "flops_vs_three_matmuls": flops / (6 * tokens * width * vocab),
            "temporaries_and_gradients_bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes,
            "temporaries_bytes": memory.temp_size_in_bytes,
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
