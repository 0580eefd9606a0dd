"""Pauses of garbage collection, and objects that the next collections pass over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from mpishard.backend.garbage import no_garbage_collection, objects_stay


class Ring:
    """An object that only garbage collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collection_as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()  # no collection but those of the test
    yield
    gc.unfreeze()
    if enabled:
        gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_before_after_a_pause(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(KeyError), no_garbage_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() == enabled


def test_pauses_of_several_threads_end_with_the_last() -> None:
    gc.enable()
    one, other = no_garbage_collection(), no_garbage_collection()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not gc.isenabled()
    other.__exit__(None, None, None)
    assert gc.isenabled()


def test_young_collections_pass_over_what_stays_and_a_full_one_does_not() -> None:
    ring = Ring()
    found = weakref.ref(ring)
    objects_stay()
    del ring
    gc.collect(1)
    assert found() is not None
    gc.collect()
    assert found() is None
    assert gc.get_freeze_count() == 0


def test_what_the_user_has_frozen_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    ring = Ring()
    found = weakref.ref(ring)
    objects_stay()
    assert gc.get_freeze_count() == before > 0
    del ring
    gc.collect(1)
    assert found() is None
