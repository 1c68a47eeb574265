"""One of several processes with four fake devices each: prints numbers that must not depend on how many there are."""

import json
import os
import sys

from train._distributed import find_processes, is_first_process, join_processes


def main() -> None:
    """Two steps on data 2 x fsdp 4, each process holding its own rows; `small` means a model of one layer."""
    join_processes(find_processes(os.environ))
    # After joining: nothing may use jax before, and importing the cases makes arrays.
    import jax
    import numpy as np
    from jax.sharding import NamedSharding

    from tests.train import step_cases as cases
    from train._sharding import BATCH_SPEC
    from train._state import init_state, make_optimizer
    from train._step import make_train_step

    smaller = {"num_layers": 1, "first_k_dense_replace": 0, "mtp": None} if "small" in sys.argv[1:] else {}
    config, mesh = cases.tiny_config(**smaller), cases.mesh_of(data=2, fsdp=4)
    optimizer = make_optimizer(cases.OPTIMIZER, config)
    state = init_state(config, optimizer, mesh, key=jax.random.key(1))
    sharding = NamedSharding(mesh, BATCH_SPEC)

    def own_rows(array: jax.Array) -> jax.Array:
        whole = np.asarray(array)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    batches = [jax.tree.map(own_rows, cases.packed_batch(seed)) for seed in range(2)]
    step = make_train_step(config, cases.SEMANTICS, optimizer, mesh, gradient_accumulation_steps=2)
    compiled = (
        jax.jit(step, donate_argnums=1)
        .lower(batches[0], state)
        .compile(compiler_options=cases.COMPILER_OPTIONS)
    )
    # Compilation takes unequal time, and gloo gives up on a process that is 30 seconds late.
    print("ready", flush=True)
    sys.stdin.readline()
    numbers = []
    for batch in batches:
        state, output = compiled(batch, state)
        numbers.append(
            [float(output.objective.total), float(output.raw_grad_norm), float(output.logs.lm.value())]
        )
    if is_first_process():
        json.dump({"processes": jax.process_count(), "numbers": numbers}, sys.stdout)


if __name__ == "__main__":
    main()
