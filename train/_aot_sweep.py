"""Mesh shapes and rematerialization policies, tried one after the other and ranked."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ._aot_assigned import assign_buffers
from ._aot_chip import Chip
from ._aot_compile import compile_step
from ._aot_report import AotReport, make_report
from ._config import Config
from ._mesh import check_mesh, make_mesh
from ._mesh_work import mesh_work

POLICIES = ("none", "dots", "block")


def candidates(config: Config, devices: Sequence[Any]) -> Iterator[Config]:
    """Configs whose mesh divides the work: fsdp with up to 16 expert and 8 context devices, each with every policy.

    Those with the fewest expert and context devices come first.
    """
    count = len(devices)
    num_experts = config.model.moe.num_experts if config.model.moe else 1
    experts = [n for n in (1, 2, 4, 8, 16) if num_experts % n == 0]
    shapes = sorted(itertools.product(experts, (1, 2, 4, 8)), key=lambda shape: shape[0] * shape[1])
    for (expert, context), remat in itertools.product(shapes, POLICIES):
        if count % (expert * context) or count < expert * context:
            continue
        mesh = dataclasses.replace(
            config.mesh,
            data=config.mesh.num_slices if config.mesh.slice_axis == "data" else 1,
            fsdp=-1,
            expert=expert,
            context=context,
            tensor=1,
        )
        changed = dataclasses.replace(config, mesh=mesh, model=dataclasses.replace(config.model, remat=remat))
        try:
            check_mesh(make_mesh(mesh, devices=devices), mesh_work(changed))
        except ValueError:
            continue
        yield changed


def sweep(
    config: Config, topology: str, chip: Chip, devices: Sequence[Any], limit: int, make_code: bool = True
) -> Iterator[AotReport | str]:
    """Reports of the first `limit` candidates; the reason in words for one that the compiler refuses.

    Without `make_code` the compiler stops at the assignment of buffers.
    """
    for changed in itertools.islice(candidates(config, devices), limit):
        try:
            step = compile_step(changed, devices) if make_code else assign_buffers(changed, topology, devices)
            yield make_report(changed, topology, chip, step)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            yield f"{changed.mesh.sizes} {changed.model.remat}: {str(error).splitlines()[0][:300]}"


def ranked(reports: Sequence[AotReport]) -> list[AotReport]:
    """Those that fit, the fastest first, then those that do not, the smallest first."""

    def place(report: AotReport) -> tuple[bool, float]:
        if report.fits and report.counts is not None:
            return False, report.counts.estimated_step_seconds
        return True, float(report.hbm_bytes_per_device)

    return sorted(reports, key=place)
