"""Options of the XLA compiler that training programs are compiled with."""

from jax.sharding import Mesh


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """Options for programs on the devices of `mesh`, for `jax.jit(..., compiler_options=...)`.

    TPUs: the kernel for `ragged_dot`, which libtpu 0.0.52 takes on v5p by itself. On v6e and tpu7x it would multiply
    every row with the matrices of all experts.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return {}
    return {"xla_tpu_enable_ragged_dot_kernel": True}
