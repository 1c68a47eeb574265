"""Every golden file of the real Megatron-Core, gradients and logs, through our public functions."""

import pathlib

import numpy as np
import pytest

from tests.golden.megatron.__main__ import main
from tests.golden.megatron._case import find_cases, read_case
from tests.golden.megatron._check import RTOL, check_case, relative_error

FOLDER = pathlib.Path(__file__).parent / "megatron"
FILES = find_cases(FOLDER)


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name.removesuffix('.npz')}")
def test_gradients_and_logs_are_megatrons(path):
    verdict = check_case(read_case(path), with_default=False)
    assert verdict.passed, verdict.worst


def test_all_files_are_there():
    names = [path.parent.name for path in FILES]
    assert names.count("mcore-0.16.1") == 68
    assert names.count("mcore-main-d98e8a64") == 19


def test_a_wrong_release_is_noticed(tmp_path, capsys):
    source = FOLDER / "mcore-0.16.1" / "mtp1_n3.pt.npz"
    with np.load(source) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["meta"] = np.array(str(arrays["meta"]).replace('"label": "0.16.1"', '"label": "0.17.0"'))
    np.savez(tmp_path / "mtp1_n3.pt.npz", **arrays)
    assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "fail" in printed
    assert printed.endswith("0 passed, 1 failed\n")


def test_an_empty_folder_does_not_pass(tmp_path):
    assert main([str(tmp_path)]) == 2


@pytest.mark.parametrize("content", [b"garbage", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_named_and_fails(tmp_path, capsys, content):
    (tmp_path / "mtp1_n3.pt.npz").write_bytes(content)
    assert main([str(tmp_path)]) == 1
    assert "mtp1_n3.pt.npz: cannot be run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1.0, np.nan], [1.0, np.nan], 0.0),
        ([1.0, 0.0], [1.0, np.nan], np.inf),
        ([np.nan, 0.0], [1.0, 0.0], np.inf),
        ([np.inf], [-np.inf], np.inf),
        ([1.0, 2.0 + 2 * RTOL], [1.0, 2.0], RTOL),
        ([1e-30], [0.0], np.inf),
    ],
)
def test_nan_must_be_where_megatron_has_it(found, expected, error):
    assert relative_error(np.array(found), np.array(expected)) == pytest.approx(error, rel=1e-3)
