"""What plain `tox` leaves out or shortens is what `--left-out` selects for `tox -e full`."""

from __future__ import annotations

from pathlib import Path

import left_out
import pytest

UNIT = Path(__file__).parent
SOURCE = """
import pytest
{first}
LIBRARIES = {{"numpy": 1}}

@pytest.fixture
def reference():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    return torch.nn

def compare(found):
    return pytest.importorskip("transformers").of(found)

def test_by_a_fixture(reference): ...
@pytest.mark.usefixtures("reference")
def test_by_a_name(): ...
def test_by_a_helper(): compare(1)
def test_in_part(short): ...
def test_alone(device): LIBRARIES["numpy"]
class TestByAFixture:
    def test_one(self, reference): ...
"""


def test_what_needs_other_packages_or_is_shortened_is_found() -> None:
    peers = {"test_by_a_fixture", "test_by_a_name", "test_by_a_helper", "TestByAFixture"}
    assert left_out.tests_in(SOURCE.format(first="")) == peers | {"test_in_part"}
    assert left_out.tests_in(SOURCE.format(first=""), short=False) == peers
    assert left_out.tests_in("def test_alone(device): ...") == frozenset()


@pytest.mark.parametrize("first", ['jax = pytest.importorskip("jax")', "pytestmark = skipif(nvrtc() is None)"])
def test_a_file_that_is_skipped_as_a_whole_is_selected_as_a_whole(first: str) -> None:
    everything = left_out.tests_in(SOURCE.format(first=first))
    assert {"test_alone", "test_in_part", "test_by_a_helper"} < everything


def test_both_kinds_are_among_the_tests() -> None:
    found = {path.name: left_out.tests_of(path) for path in UNIT.glob("test_*.py")}
    assert "test_rule_follows_torch" in found["test_rules.py"]
    assert "test_moves_between_random_layouts" in found["test_layout.py"]
    assert 5 < sum(map(bool, found.values())) < len(found) / 2
