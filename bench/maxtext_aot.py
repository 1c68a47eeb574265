"""MaxText's training step compiled ahead of time, in MaxText's environment: what `aot_vs_maxtext` runs.

    PYTHON -P bench/maxtext_aot.py FOLDER TOPOLOGY key=value ...

Calls MaxText's own `train_compile` and keeps what it compiles: FOLDER/program.txt (the program) and FOLDER/facts.json.
"""

import json
import os
import pathlib
import sys
import time
from typing import Any

for name, value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}.items():
    os.environ.setdefault(name, value)


def main() -> None:
    """Compiles and writes both files."""
    folder, topology, settings = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    import jax
    from maxtext.trainers.pre_train import train_compile

    kept: dict[str, Any] = {}
    compile_lowered, compile_step = jax.stages.Lowered.compile, train_compile.jit_and_compile

    def timed(self: Any, *rest: Any, **options: Any) -> Any:
        kept["lower_seconds"] = time.monotonic() - kept["start"]
        wall, processor = time.monotonic(), time.process_time()
        compiled = compile_lowered(self, *rest, **options)
        kept["compile_seconds"] = time.monotonic() - wall
        kept["compile_cpu_seconds"] = time.process_time() - processor
        return compiled

    def jit_and_compile(function: Any, arguments: Any, options: Any, mesh: Any, *rest: Any) -> Any:
        kept.update(start=time.monotonic(), arguments=arguments, mesh=mesh)
        jax.stages.Lowered.compile = timed
        try:
            kept["compiled"] = compile_step(function, arguments, options, mesh, *rest)
        finally:
            jax.stages.Lowered.compile = compile_lowered
        return kept["compiled"]

    train_compile.jit_and_compile = jit_and_compile
    train_compile.main(
        [
            "train_compile",
            f"compile_topology={topology}",
            "compile_topology_num_slices=1",
            "enable_checkpointing=false",
            "log_config=false",
            "run_name=aot",
            "dataset_type=synthetic",
            "jax_cache_dir=",
            f"base_output_directory={folder}",
            *settings,
        ]
    )
    (folder / "program.txt").write_text(kept["compiled"].as_text(), encoding="utf-8")
    (folder / "facts.json").write_text(json.dumps(facts(kept)), encoding="utf-8")


def facts(kept: dict[str, Any]) -> dict[str, Any]:
    """What is known beside the program: memory by the compiler's account, mesh, parameters, seconds."""
    import jax

    memory = kept["compiled"].memory_analysis()
    state = kept["arguments"][0]
    model = state["model"] if isinstance(state, dict) or not hasattr(state, "model") else state.model
    return {
        "memory": {
            field: getattr(memory, field, 0)
            for field in (
                "argument_size_in_bytes",
                "output_size_in_bytes",
                "alias_size_in_bytes",
                "temp_size_in_bytes",
                "generated_code_size_in_bytes",
                "peak_memory_in_bytes",
            )
        },
        "mesh": dict(kept["mesh"].shape),
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(model)),
        **{name: kept[name] for name in ("lower_seconds", "compile_seconds", "compile_cpu_seconds")},
        "total_cpu_seconds": time.process_time(),
        "jax": jax.__version__,
    }


if __name__ == "__main__":
    main()
