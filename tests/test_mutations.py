"""The record of deliberate breaks fits the code: `scripts/mutations.py` applies and runs them."""

import json
import pathlib

import pytest

from scripts.mutation_list import MUTATIONS
from tests.golden.test_cases import FILES

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m.bug for m in MUTATIONS])
def test_break_still_applies_and_is_in_the_record(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.bug in (ROOT / "docs" / "mutations.md").read_text()


def test_every_kind_of_case_has_a_break():
    kinds = {json.loads(path.read_text())["kind"] for path in FILES}
    assert kinds - {mutation.kind for mutation in MUTATIONS} == set()
