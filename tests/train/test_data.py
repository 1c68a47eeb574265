"""Documents, packing and batches: what a step trains on, and what decides it."""

import hashlib
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train._data import (
    DataConfig,
    TrainBatches,
    load_dataset,
    local_row_numbers,
    put_rows,
    train_batches,
    validation_batches,
)
from train._documents import Document, cut_documents, documents_fingerprint, read_documents, split_documents
from train._packing import pack_documents
from train._tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
BOS, EOD, PAD = TOKENIZER.bos_id, TOKENIZER.eod_id, TOKENIZER.pad_id
# Lengths around the row length 16: with bos and eod 3, 8, 16, 17, 42 and 34 tokens.
TEXTS = [b"a", b"bcdefg", b"h" * 14, b"i" * 15, bytes(range(40)), b"\xff\xfe" * 16]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"f{number}.py").write_bytes(text)
    return tmp_path


def pack(eod_mask_loss=True, row_length=16, texts=TEXTS):
    return pack_documents(texts, row_length, TOKENIZER, eod_mask_loss)


def segments(rows):
    """(tokens, targets, loss_mask, positions) of every segment of every row."""
    for row in rows:
        for segment in range(1, row.segment_ids.max() + 1):
            here = row.segment_ids == segment
            yield tuple(a[here].tolist() for a in (row.tokens, row.targets, row.loss_mask, row.positions))


def test_tokenizer_round_trips_every_byte():
    text = bytes(range(256))
    ids = TOKENIZER.encode(text)
    assert ids[0] == BOS
    assert ids[-1] == EOD
    assert TOKENIZER.decode(ids) == text
    assert max(BOS, EOD, PAD) < TOKENIZER.vocab_size


def test_every_token_of_every_document_is_packed_once():
    seen = sorted(tuple(tokens) for tokens, *_ in segments(pack()))
    expected = []
    for text in TEXTS:
        ids = [BOS, *text, EOD]
        expected += [tuple(ids[at : at + 16]) for at in range(0, len(ids), 16)]
    assert seen == sorted(expected)


def test_every_byte_is_predicted_exactly_once():
    predicted = []
    for _, targets, loss_mask, _ in segments(pack()):
        predicted += [t for t, scored in zip(targets, loss_mask) if scored]
    expected = [t for text in TEXTS for t in (*text, EOD)]
    assert sorted(predicted) == sorted(expected)


def test_target_is_the_next_token_of_the_same_document():
    next_tokens = {}
    for text in TEXTS:
        ids = [BOS, *text, EOD]
        for at in range(0, len(ids), 16):
            next_tokens[tuple(ids[at : at + 16])] = [*ids[at + 1 : at + 17]]
    for tokens, targets, _, _ in segments(pack()):
        expected = next_tokens[tuple(tokens)]
        assert targets[: len(expected)] == expected
        assert targets[len(expected) :] in ([], [BOS])  # after eod: the same for every document


@pytest.mark.parametrize("eod_mask_loss", [True, False])
def test_eod_mask_loss_leaves_exactly_the_eod_positions_unscored(eod_mask_loss):
    for tokens, _, loss_mask, _ in segments(pack(eod_mask_loss)):
        assert loss_mask == [not (eod_mask_loss and t == EOD) for t in tokens]


def test_rows_have_different_numbers_of_scored_tokens():
    assert len({int(row.loss_mask.sum()) for row in pack()}) > 1


def test_positions_restart_in_every_segment_and_padding_is_unscored():
    rows = pack()
    assert sum(int((row.segment_ids == 0).sum()) for row in rows) > 0
    for *_, positions in segments(rows):
        assert positions == list(range(len(positions)))
    for row in rows:
        padding = row.segment_ids == 0
        assert not row.loss_mask[padding].any()
        assert (row.tokens[padding] == PAD).all()
        assert (row.positions[padding] == 0).all()
        assert (np.diff(padding.astype(int)) >= 0).all()  # at the end of the row only


def test_best_fit_fills_the_fullest_row_that_has_room():
    # Pieces of 12, 9, 6, 4 tokens in rows of 16: 12 + 4 and 9 + 6, not 12, 9 + 4, 6.
    rows = pack(texts=[b"x" * 10, b"x" * 7, b"x" * 4, b"x" * 2])
    assert [np.bincount(row.segment_ids)[1:].tolist() for row in rows] == [[12, 4], [9, 6]]


def test_row_length_below_two_is_refused():
    with pytest.raises(ValueError, match="at least 2 positions, got 1"):
        pack(row_length=1)


def test_split_by_file_is_disjoint_complete_and_seeded(folder):
    documents = read_documents(folder, "**/*.py")
    train, validation = split_documents(documents, 0.4, seed=0)
    assert sorted(d.name for d in train + validation) == [d.name for d in documents]
    assert len(validation) == 2
    assert split_documents(documents, 0.4, seed=0) == (train, validation)
    others = {tuple(d.name for d in split_documents(documents, 0.4, seed=s)[1]) for s in range(8)}
    assert len(others) > 1


def test_adding_a_file_moves_at_most_one_other_across_the_split():
    documents = [Document(name=f"{i}", text=b"x") for i in range(40)]
    before = {d.name for d in split_documents(documents[:-1], 0.25, seed=1)[1]}
    after = {d.name for d in split_documents(documents, 0.25, seed=1)[1]}
    assert len((before ^ after) - {"39"}) <= 1


def test_split_of_one_document_is_refused():
    with pytest.raises(ValueError, match="at least 2 files, got 1"):
        split_documents([Document(name="a", text=b"x")], 0.1, seed=0)


def test_cut_documents_joined_again_are_the_text():
    documents = [
        Document(name="a", text=b"x\n\ny\n\n"),
        Document(name="b", text=b"\n\n\n\n\nz"),
        Document(name="c", text=b"w"),
    ]
    pieces = cut_documents(documents, "\n\n")
    assert [d.text for d in pieces] == [b"x\n\n", b"y\n\n", b"\n\n", b"\n\n", b"\nz", b"w"]
    for whole in documents:
        assert b"".join(d.text for d in pieces if d.name.startswith(whole.name)) == whole.text


def test_a_separator_cuts_after_the_split_by_file(folder):
    for number in range(6):
        (folder / f"f{number}.py").write_bytes(b"%d1--%d2--%d3" % (number, number, number))
    dataset = load_dataset(
        DataConfig(folder=str(folder), validation_fraction=0.5, document_separator="--"), 16
    )
    files = [
        {bytes(tokens[1:2]) for tokens, *_ in segments(split)}
        for split in (dataset.train, dataset.validation)
    ]
    assert files[0].isdisjoint(files[1])
    assert sum(len(list(segments(split))) for split in (dataset.train, dataset.validation)) == 18


def test_undecodable_bytes_are_read_as_they_are(folder):
    assert read_documents(folder, "**/*.py")[5].text == TEXTS[5]


def test_installed_packages_tests_and_empty_files_are_left_out(folder):
    for name in ("site-packages/a.py", "pkg/test/b.py", "pkg/c.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    (folder / "empty.py").write_bytes(b"")
    names = {d.name for d in read_documents(folder, "**/*.py")}
    assert names == {f"f{i}.py" for i in range(6)} | {"pkg/c.py"}


@pytest.mark.parametrize(
    ("name", "pattern", "message"), [("absent", "*", "existing folder"), (".", "*.c", "at least one")]
)
def test_a_folder_without_text_is_refused(folder, name, pattern, message):
    with pytest.raises(ValueError, match=message):
        read_documents(folder / name, pattern)


def test_fingerprint_changes_with_any_byte_name_and_border():
    base = [Document(name="a", text=b"xy"), Document(name="b", text=b"z")]
    changed = [
        [Document(name="a", text=b"xz"), base[1]],
        [Document(name="c", text=b"xy"), base[1]],
        [Document(name="a", text=b"x"), Document(name="b", text=b"yz")],
        base[:1],
    ]
    assert len({documents_fingerprint(d) for d in [base, *changed]}) == 5


def test_dataset_fingerprint_covers_row_length_and_mask(folder):
    def fingerprint(num_positions=16, **changes):
        return load_dataset(DataConfig(folder=str(folder), **changes), num_positions).fingerprint

    assert fingerprint() == fingerprint()
    variants = {
        fingerprint(),
        fingerprint(8),
        fingerprint(eod_mask_loss=False),
        fingerprint(validation_fraction=0.5),
    }
    assert len(variants) == 4


def digest(rows):
    return hashlib.sha256(b"".join(array.tobytes() for array in rows)).hexdigest()


def test_batches_depend_on_seed_and_step_alone():
    first, again = TrainBatches(pack(), 4, seed=3), TrainBatches(pack(), 4, seed=3)
    assert [digest(first[n]) for n in (5, 0, 5)] == [digest(again[n]) for n in (5, 0, 5)]
    assert digest(TrainBatches(pack(), 4, seed=4)[0]) != digest(first[0])


@pytest.mark.parametrize("num_rows", [1, 3])
def test_every_pass_holds_every_row_once_in_a_new_order(num_rows):
    rows = pack()
    source = TrainBatches(rows, num_rows, seed=0)
    batches = (source[step] for step in range(3 * len(rows)))
    drawn = [digest([array[i] for array in batch]) for batch in batches for i in range(num_rows)]
    passes = [drawn[p * len(rows) : (p + 1) * len(rows)] for p in range(3)]
    everything = sorted(digest(row) for row in rows)
    assert all(sorted(one) == everything for one in passes)
    assert passes[0] != passes[1]


def test_starting_at_a_step_gives_the_batches_of_an_uninterrupted_run():
    source = TrainBatches(pack(), 4, seed=0)
    whole = train_batches(source, 0)
    straight = [digest(next(whole)) for _ in range(7)]
    late = train_batches(source, 4)
    assert [digest(next(late)) for _ in range(3)] == straight[4:]


def test_processes_together_load_the_rows_of_one_process():
    whole = TrainBatches(pack(), 4, seed=0)[9]
    parts = [TrainBatches(pack(), 4, seed=0, local_rows=np.array(r))[9] for r in ([0, 1], [2, 3])]
    for array, *halves in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate(halves), array)


@pytest.mark.parametrize("spec", [P(("data", "fsdp"), "context"), P(None, "context"), P("fsdp", None), P()])
def test_put_rows_gives_the_same_global_array_under_any_sharding(spec):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "context"))
    sharding = NamedSharding(mesh, spec)
    rows = TrainBatches(pack(), 4, seed=0)[0]
    local = local_row_numbers(sharding, 4, 16)
    np.testing.assert_array_equal(local, np.arange(4))
    for array, expected in zip(put_rows(rows, local, 4, sharding), rows, strict=True):
        np.testing.assert_array_equal(array, expected)
        assert array.sharding == sharding


def test_validation_batches_are_fixed_and_padded(folder):
    dataset = load_dataset(DataConfig(folder=str(folder), validation_fraction=0.5), 16)
    batches = validation_batches(dataset, 4, 100)
    again = validation_batches(dataset, 4, 100)
    assert [digest(b) for b in batches] == [digest(b) for b in again]
    assert all(b.tokens.shape == (4, 16) for b in batches)
    num_scored = sum(int(b.loss_mask.sum()) for b in batches)
    assert num_scored == sum(int(row.loss_mask.sum()) for row in dataset.validation)
    assert len(validation_batches(dataset, 1, 2)) == 2


def test_default_text_is_the_standard_library_of_the_running_python():
    dataset = load_dataset(DataConfig(), 512)
    names = [d.name for d in read_documents(Path(hashlib.__file__).parent, "**/*.py")]
    assert "hashlib.py" in names
    assert dataset.num_train_tokens > 5_000_000
    assert isinstance(grain.MapDataset.source(dataset.train)[0].tokens, np.ndarray)
    fill = dataset.num_train_tokens / (len(dataset.train) * 512)
    assert fill > 0.99
