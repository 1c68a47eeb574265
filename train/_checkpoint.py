"""Checkpoints: the state of a run on disk, verified bit by bit when it is read back.

The one place that knows orbax. Writing is atomic (a killed save leaves the previous checkpoint intact)
and happens in the background; reading works on any mesh.
"""

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import orbax.checkpoint.experimental.v1 as ocp
from jaxtyping import PyTree

from ._fingerprint import leaf_fingerprints, leaf_paths

_STATE = "state"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the text says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a checkpoint holds beside the arrays, as JSON.

    Attributes:
        step: Steps done; also the position in the data.
        manifest: What decides the course of the run (config, data fingerprint, versions).
        accumulator: Sums and counts of the log interval in progress.
    """

    step: int
    manifest: Mapping[str, Any]
    accumulator: Mapping[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one folder, by step; a context manager that waits for pending writes at its end."""

    def __init__(self, folder: Path, num_kept: int) -> None:
        """Opens `folder`, created if absent; what a killed save left behind is removed soon after.

        Args:
            num_kept: Newest checkpoints that stay on disk.
        """
        self._folder = folder.absolute()
        training: Any = ocp.training  # its protocols are too narrow for its own classes
        self._orbax = training.Checkpointer(
            self._folder,
            cleanup_tmp_directories=True,
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=training.preservation_policies.LatestN(num_kept),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits until every save is on disk.

        Raises:
            CheckpointError: One could not be written.
        """
        with self._writing():
            self._orbax.close()

    def wait(self) -> None:
        """Waits until every save is on disk; the folder stays open.

        Raises:
            CheckpointError: One could not be written.
        """
        with self._writing():
            self._orbax.wait()

    @property
    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint; None when there is none."""
        latest = self._orbax.latest
        return None if latest is None else int(latest.step)

    def save(self, state: PyTree, record: Record) -> None:
        """Starts to write `state` and `record`; returns once the arrays may be overwritten.

        Nothing happens when the step is there already.

        Raises:
            CheckpointError: This one or the one before could not be written; what was on disk is whole.
        """
        if self.latest_step == record.step:
            return
        arrays = eqx.filter(state, eqx.is_array)
        metadata = asdict(record) | {"leaves": _leaves(arrays)}
        with self._writing():
            self._orbax.save_checkpointables_async(record.step, {_STATE: arrays}, custom_metadata=metadata)

    def read_record(self, step: int) -> Record:
        """The record of the checkpoint at `step`; no array is read."""
        metadata = self._metadata(step)
        return Record(
            step=metadata["step"], manifest=metadata["manifest"], accumulator=metadata["accumulator"]
        )

    def restore(self, step: int, like: PyTree) -> PyTree:
        """The state at `step`.

        Args:
            like: A state of the same structure; its arrays, or `ShapeDtypeStruct`s with a sharding, say
                where each array goes. What is no array is taken from it.
        Raises:
            CheckpointError: An array is missing, unexpected, of another shape or dtype, or its content is
                not what was saved.
        """
        abstract, static = eqx.partition(
            like, lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
        )
        saved = self._metadata(step)["leaves"]
        where = f"checkpoint {self._folder / str(step)}"
        _check_layout(saved, abstract, where)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), abstract)
        try:
            arrays = self._orbax.load_checkpointables(step, {_STATE: target})[_STATE]
        except Exception as error:  # orbax has no common base class
            # orbax reports "incompatible handler"; what happened is its cause.
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise CheckpointError(
                f"{where} cannot be read: {reason}; delete this folder to continue from an older checkpoint"
            ) from error
        _check_content(saved, arrays, where)
        return eqx.combine(arrays, static)

    @contextlib.contextmanager
    def _writing(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:  # orbax and tensorstore have no common base class
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"a checkpoint in {str(self._folder)!r} could not be written: {reason}; make room or restore access, "
                f"then run the same command again: it goes on from {self._newest()}"
            ) from error

    def _newest(self) -> str:
        done = [int(path.name) for path in self._folder.glob("*") if path.name.isdigit()]
        return f"step {max(done)}" if done else "the start"

    def _metadata(self, step: int) -> dict[str, Any]:
        metadata = self._orbax.checkpointables_metadata(step).custom_metadata
        if not isinstance(metadata, dict) or "leaves" not in metadata:
            raise CheckpointError(
                f"checkpoint {self._folder / str(step)} was not written by this program; use another run.folder"
            )
        return metadata


def _leaves(arrays: PyTree) -> dict[str, dict[str, Any]]:
    prints = leaf_fingerprints(arrays)
    return {
        path: {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "fingerprint": list(prints[path])}
        for path, leaf in zip(leaf_paths(arrays), jax.tree.leaves(arrays), strict=True)
    }


def _check_layout(saved: Mapping[str, Any], abstract: PyTree, where: str) -> None:
    """Refuse another set of arrays, shapes or dtypes: orbax would cast dtypes without a word."""
    wanted = dict(zip(leaf_paths(abstract), jax.tree.leaves(abstract), strict=True))
    problems = [f"{path} is missing" for path in wanted if path not in saved]
    problems += [f"{path} is not part of this model or optimizer" for path in saved if path not in wanted]
    for path in wanted.keys() & saved.keys():
        there, here = saved[path], wanted[path]
        if there["shape"] != list(here.shape) or there["dtype"] != str(here.dtype):
            problems.append(
                f"{path} is {there['dtype']}{there['shape']}, the config wants {here.dtype}{list(here.shape)}"
            )
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{where} does not fit the config: {'; '.join(sorted(problems)[:5])}{more}; "
            "restore the old config or use another run.folder"
        )


def _check_content(saved: Mapping[str, Any], arrays: PyTree, where: str) -> None:
    prints = leaf_fingerprints(arrays)
    broken = [path for path, pair in prints.items() if list(pair) != saved[path]["fingerprint"]]
    if broken:
        raise CheckpointError(
            f"{where} is damaged: the content of {', '.join(broken[:5])} is not what was saved; "
            "delete this folder to continue from an older checkpoint"
        )
