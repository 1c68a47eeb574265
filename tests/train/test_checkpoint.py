"""Checkpoints: exact, verified, on any mesh, intact after a kill."""

import dataclasses
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train._checkpoint import CheckpointError, Checkpoints, Record
from train._fingerprint import leaf_fingerprints

RECORD = Record(step=3, manifest={"loss": {"x": 3e-4}}, accumulator={"lm": [0.1 + 0.2, 7]})


def mesh(shape=(4, 2)):
    return Mesh(np.array(jax.devices()[:8]).reshape(shape), ("data", "fsdp"))


BY_DATA = P("data", None)


def make_state(spec=BY_DATA, shape=(4, 2)):
    arrays = {
        "weight": jax.random.normal(jax.random.key(0), (8, 6)),
        "half": jnp.arange(5, dtype=jnp.bfloat16),
        "step": jnp.int32(3),
        "flag": jnp.array([True, False]),
        "key": jax.random.key(1),
    }
    shardings = dict.fromkeys(arrays, NamedSharding(mesh(shape), P())) | {
        "weight": NamedSharding(mesh(shape), spec)
    }
    return jax.device_put(arrays, shardings) | {"name": "not an array"}


def bits(state):
    leaves = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    plain = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    return [np.asarray(x).tobytes() for x in plain]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Checkpoints(tmp_path, num_kept=2) as checkpoints:
        checkpoints.save(make_state(), RECORD)
    return tmp_path


def test_restore_on_another_mesh_is_exact_to_the_bit(saved):
    sharding = NamedSharding(mesh((2, 4)), P("fsdp", "data"))
    like = make_state(P(), (2, 4)) | {"weight": jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=sharding)}
    with Checkpoints(saved, num_kept=2) as checkpoints:
        state = checkpoints.restore(3, like)
    assert bits(state) == bits(make_state())
    assert state["weight"].sharding == sharding
    assert state["name"] == "not an array"


def test_record_returns_exactly(saved):
    with Checkpoints(saved, num_kept=2) as checkpoints:
        assert checkpoints.latest_step == 3
        assert checkpoints.read_record(3) == RECORD


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    with Checkpoints(tmp_path / "new", num_kept=1) as checkpoints:
        assert checkpoints.latest_step is None


def test_a_write_that_fails_is_one_error_that_says_what_is_left(saved, monkeypatch):
    def full(*_: object, **__: object):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device\nmore of the same")

    checkpoints = Checkpoints(saved, num_kept=2)
    monkeypatch.setattr(checkpoints._orbax, "save_checkpointables_async", full)
    with pytest.raises(CheckpointError, match="No space left on device; make room .* goes on from step 3"):
        checkpoints.save(make_state(), dataclasses.replace(RECORD, step=4))
    checkpoints.close()


def test_oldest_checkpoints_are_removed_and_saving_a_step_twice_keeps_it(tmp_path):
    with Checkpoints(tmp_path, num_kept=2) as checkpoints:
        for step in (1, 2, 2, 3):
            checkpoints.save(make_state(), dataclasses.replace(RECORD, step=step))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]


def test_a_save_cut_off_by_a_kill_leaves_the_previous_one_and_can_be_repeated(saved):
    (saved / "4.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(saved, num_kept=2) as checkpoints:
        assert checkpoints.latest_step == 3
        checkpoints.save(make_state(), dataclasses.replace(RECORD, step=4))
        checkpoints.wait()
        assert checkpoints.latest_step == 4
        assert bits(checkpoints.restore(4, make_state())) == bits(make_state())


def test_arrays_may_be_overwritten_after_save_returns(tmp_path):
    # On CPU a device array and its host copy can be one buffer; donation would then change the file.
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    with Checkpoints(tmp_path, num_kept=2) as checkpoints:
        state = {"weight": jnp.arange(2_000_000.0)}
        checkpoints.save(state, RECORD)
        for _ in range(5):
            state["weight"] = double(state["weight"])
        checkpoints.wait()
        restored = checkpoints.restore(3, {"weight": jnp.zeros(2_000_000)})
    np.testing.assert_array_equal(restored["weight"], np.arange(2_000_000.0, dtype=np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"half": jnp.zeros(5, jnp.float32)}, r"half is bfloat16\[5\], the config wants float32\[5\]"),
        ({"half": jnp.zeros(4, jnp.bfloat16)}, r"half is bfloat16\[5\], the config wants bfloat16\[4\]"),
        ({"more": jnp.zeros(1)}, "more is missing"),
        ({"flag": "no array"}, "flag is not part of this model"),
    ],
)
def test_another_layout_is_refused_by_name(saved, change, message):
    with Checkpoints(saved, num_kept=2) as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.restore(3, make_state() | change)


def test_one_flipped_bit_on_disk_is_refused(tmp_path):
    # orbax itself reads such a file without complaint. Incompressible content: no checksum of the codec helps.
    state = {"weight": jax.random.normal(jax.random.key(0), (200, 500))}
    with Checkpoints(tmp_path, num_kept=2) as checkpoints:
        checkpoints.save(state, RECORD)
    needle = np.asarray(state["weight"])[0, :2].tobytes()
    files = [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size > 100_000]
    assert files
    for path in files:
        content = bytearray(path.read_bytes())
        at = content.find(needle)
        content[at if at >= 0 else len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    with Checkpoints(tmp_path, num_kept=2) as checkpoints, pytest.raises(CheckpointError, match=r"damaged"):
        checkpoints.restore(3, {"weight": jnp.zeros((200, 500))})


# orbax drops the coroutines of a failed read without awaiting them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_truncated_file_is_refused_with_its_reason(saved):
    for path in saved.rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:10])
    with (
        Checkpoints(saved, num_kept=2) as checkpoints,
        pytest.raises(CheckpointError, match="cannot be read"),
    ):
        checkpoints.restore(3, make_state())


def test_fingerprint_is_the_same_under_any_sharding():
    prints = [leaf_fingerprints(make_state(*args)) for args in ((), (P(), (4, 2)), (P(None, "fsdp"), (4, 2)))]
    assert prints[0] == prints[1] == prints[2]
    assert set(prints[0]) == {"weight", "half", "step", "flag", "key"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.int32])
def test_fingerprint_sees_a_flipped_bit_and_swapped_values(dtype):
    # One shape and dtype a case: the fingerprint compiles once for all three.
    host = np.asarray(jnp.arange(1, 13, dtype=dtype).reshape(3, 4))
    flipped = host.copy()
    flipped.view(np.uint8)[1, 1] ^= 4
    swapped = host.copy()
    swapped[0, 0], swapped[2, 1] = host[2, 1], host[0, 0]
    plain, flip, swap = (leaf_fingerprints({"x": jnp.asarray(x)})["x"] for x in (host, flipped, swapped))
    assert plain[0] != flip[0]
    assert plain[0] == swap[0]
    assert plain[1] != swap[1]
