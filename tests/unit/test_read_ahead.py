"""Micro-batches that a thread reads ahead: what is read, how much of it waits, and errors."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from mpishard.data import ReadAhead

MICRO = [np.arange(4 * n, 4 * n + 4) for n in range(10)]
BYTES = 4 * 1000


class Source:
    """Reads a kilobyte for a sample, and counts."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.threads: set[str] = set()
        self.done = threading.Condition()

    def __call__(self, samples: np.ndarray) -> tuple[Any, ...]:
        if samples[0] == 36:
            raise ValueError("sample 36 is corrupt")
        with self.done:
            self.read.append(int(samples[0]) // 4)
            self.threads.add(threading.current_thread().name)
            self.done.notify_all()
        return np.repeat(samples[:, None].astype(np.uint8), 500, 1), np.zeros((len(samples), 500), np.uint8)

    def wait_for(self, count: int) -> None:
        with self.done:
            assert self.done.wait_for(lambda: len(self.read) >= count, timeout=60)


@pytest.mark.faults
def test_what_is_expected_is_read_ahead_within_the_bound() -> None:
    source = Source()
    with ReadAhead(source, max_bytes=3 * BYTES) as batch:
        batch.expect(MICRO[:9])
        source.wait_for(3)
        limit = time.monotonic() + 60
        while batch.most_bytes < 3 * BYTES and time.monotonic() < limit:  # what was read last is not counted yet
            time.sleep(0.001)
        for number in range(9):
            assert np.array_equal(batch(MICRO[number])[0][:, 0], MICRO[number])
            source.wait_for(min(9, number + 4))
    assert source.read == list(range(9)) and source.threads == {"mpishard read ahead"}
    assert batch.most_bytes == 3 * BYTES and batch.calls == 9


def test_a_step_that_changes_its_mind_reads_what_it_asks_for() -> None:
    source = Source()
    with ReadAhead(source, max_bytes=2 * BYTES) as batch:
        batch.expect(MICRO[:4])
        source.wait_for(2)
        assert batch(MICRO[7])[0][0, 0] == 28  # nobody expected it
        batch.expect(MICRO[5:7])  # so that the others are dropped, and make room
        source.wait_for(5)
        assert [batch(MICRO[number])[0][0, 0] for number in (6, 5)] == [24, 20]
    assert source.read == [0, 1, 7, 5, 6]


def test_nothing_is_read_ahead_that_has_no_room() -> None:
    source = Source()
    with ReadAhead(source, max_bytes=BYTES - 1) as batch:
        for _ in range(3):
            for number in range(3):
                batch.expect(MICRO[number : number + 3])
                assert batch(MICRO[number])[0][0, 0] == 4 * number
    assert batch.most_bytes in (0, BYTES)  # the first is read before its size is known
    assert batch.calls == 9


def test_an_error_is_raised_where_the_samples_are_asked_for() -> None:
    source = Source()
    with ReadAhead(source) as batch:
        batch.expect([MICRO[0], MICRO[9], MICRO[1]])
        source.wait_for(2)
        assert batch(MICRO[0])[0][0, 0] == 0
        with pytest.raises(ValueError, match="sample 36 is corrupt"):
            batch(MICRO[9])
        assert batch(MICRO[1])[0][0, 0] == 4
    assert batch(MICRO[2])[0][0, 0] == 8  # closed: read at once
    assert threading.current_thread().name in source.threads


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="batch=3 must be a function of sample indices"):
        ReadAhead(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_bytes=-1 must be a whole number of at least 0"):
        ReadAhead(lambda samples: (), max_bytes=-1)
