"""Files are read whole, by several threads where there are many bytes."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from mpishard.checkpoint.pieces import Readers, read_into
from mpishard.io import readers


@pytest.mark.parametrize("cores", [1, 3, 100])
def test_many_bytes_are_shared_by_the_threads(monkeypatch, cores):
    monkeypatch.setattr(readers, "own_cores", lambda: set(range(2 * cores)))
    monkeypatch.setattr(readers, "cpu_quota", lambda: 1000.0)
    monkeypatch.setattr(readers, "_LEAST_SHARE", 100)
    names: dict[int, str] = {}

    def note(item):
        assert item not in names
        names[item] = threading.current_thread().name

    with Readers(processes=2) as reading:
        for sizes in ([50] * 40, [1] * 99, [10**6, 1, 1], [1, 1, 10**6], [0, 0], []):
            names.clear()
            reading.share(note, range(len(sizes)), sizes)
            assert sorted(names) == list(range(len(sizes)))
            if len(sizes) != 40:
                continue
            assert len(set(names.values())) <= min(cores, 8)
        assert reading.map(abs, [-1, 2, -3]) == [1, 2, 3]
        with pytest.raises(ZeroDivisionError):
            reading.share(lambda item: 1 // item, range(40), [50] * 40)


def two_threads(monkeypatch):
    monkeypatch.setattr(readers, "own_cores", lambda: {0, 1})
    monkeypatch.setattr(readers, "cpu_quota", lambda: 2.0)
    monkeypatch.setattr(readers, "_LEAST_SHARE", 1)
    return Readers()


@pytest.mark.faults
def test_no_thread_goes_on_when_another_has_failed(monkeypatch):
    failed, ended = threading.Event(), threading.Event()

    def read(item):
        if item == 0:
            failed.set()
            raise OSError("the disk")
        failed.wait(20)
        time.sleep(0.1)  # in which a map that did not wait would have raised
        ended.set()

    with two_threads(monkeypatch) as reading:
        with pytest.raises(OSError, match="the disk"):
            reading.map(read, [0, 1])
        assert ended.is_set()


@pytest.mark.parametrize("count", [2, 8])
def test_equal_items_are_shared_evenly(monkeypatch, count):
    names = []
    both = threading.Barrier(2)

    def note(item):
        if item in (0, count // 2):  # the first of each thread
            both.wait(20)
        names.append(threading.current_thread().name)

    with two_threads(monkeypatch) as reading:
        reading.share(note, range(count), [10] * count)
    assert sorted(map(names.count, set(names))) == [count // 2, count // 2]


def test_a_file_that_ends_too_early_is_told_of(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    file = os.open(tmp_path / "file", os.O_RDONLY)
    out = np.zeros(60, np.uint8)
    read_into(file, 40, out)
    assert out.tolist() == list(range(40, 100))
    with pytest.raises(OSError, match="ends at byte 100, 2 bytes too early"):
        read_into(file, 42, out)
    os.close(file)
