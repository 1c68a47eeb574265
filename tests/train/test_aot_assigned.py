"""Programs read from what the compiler writes down before it makes code."""

import importlib.util
import json

import pytest

from train._aot_assigned import name_elements, read_program
from train._hlo_count import count_program
from train._hlo_parse import parse_program
from train.aot import main

from .tiny import QUICKSTART, tiny_overrides

DUMPED = """HloModule m

%body (p: (f32[4], (f32[8], s32[]))) -> (f32[4], (f32[8], s32[])) {
  %p = (f32[4]{0}, /*index=1*/(f32[8]{0:T(8)}, s32[])) parameter(0)
  %more = f32[4]{0} add(%p#0, %p#0)
  ROOT %r = (f32[4]{0}, (f32[8]{0:T(8)}, s32[])) tuple(%more, %p#1)
}

ENTRY %main (x: (f32[4], (f32[8], s32[]))) -> f32[4] {
  %x = (f32[4]{0}, (f32[8]{0:T(8)}, s32[])) parameter(0)
  %w = (f32[4]{0}, (f32[8]{0:T(8)}, s32[])) call(%x), to_apply=%body
  ROOT %out = f32[4]{0} negate(%w#0)
}
"""
BUFFERS = """BufferAssignment:
allocation 0: size 100, page 0, parameter 0, shape |f32[25]| at ShapeIndex {}, maybe-live-out:
 value: <1 x @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 4000, page 0, thread-local:
allocation 2: size 30, page 0, preallocated-temp:
allocation 3: size 7, color 1, page 0, preallocated-temp:
"""


def test_elements_of_tuples_get_instructions_of_their_own():
    text = name_elements(DUMPED)
    assert "#" not in text
    assert "  %p.element_0 = f32[4]{0} get-tuple-element(%p), index=0\n" in text
    assert "  %p.element_1 = (f32[8]{0:T(8)}, s32[]) get-tuple-element(%p), index=1\n" in text
    # The sum reads four numbers twice and writes them, the negation reads and writes them.
    assert count_program(parse_program(text), {"data": 1}).num_bytes == (3 + 2) * 4 * 4


@pytest.mark.parametrize("end", [len(DUMPED) - 3, DUMPED.index("ENTRY")])
def test_a_program_is_there_when_it_is_written_in_full(tmp_path, end):
    text = tmp_path / "module_0000.jit_train_step.after_optimizations_after_buffer_assignment.txt"
    assert read_program(tmp_path) is None
    text.write_text(DUMPED)
    assert read_program(tmp_path) is None  # no buffers yet
    (tmp_path / "module_0000.jit_train_step.after_optimizations-buffer-assignment.txt").write_text(BUFFERS)
    text.write_text(DUMPED[:end])
    assert read_program(tmp_path) is None
    text.write_text(DUMPED)
    program = read_program(tmp_path)
    assert program is not None
    assert program.hbm_bytes == 100 + 30
    assert program.as_text() == name_elements(DUMPED)


def test_a_program_without_code_cannot_be_saved(tmp_path, capsys):
    command = [str(QUICKSTART), "--topology", "v5p:2x2x1", "--no-code", "--save", str(tmp_path / "step")]
    assert main(command) == 2
    assert "--save needs the code that --no-code leaves out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the tpu extra")
def test_counts_without_code_are_those_of_the_executable(tmp_path):
    command = [str(QUICKSTART), "--topology", "v5p:2x2x1", *tiny_overrides(tmp_path)]
    reports = []
    for name, extra in (("whole", []), ("assigned", ["--no-code"])):
        path = tmp_path / f"{name}.json"
        assert main([*command, "--json", str(path), *extra]) == 0
        reports.append(json.loads(path.read_text()))
    whole, assigned = reports
    assert (whole["has_code"], assigned["has_code"]) == (True, False)
    for name in ("flops_per_device", "bytes_per_device", "collectives", "unknown_kernels"):
        assert assigned[name] == whole[name], name
    # Without the code, which is a few MB.
    assert 0.5 < assigned["hbm_bytes_per_device"] / whole["hbm_bytes_per_device"] < 1
