"""Pinned memory is used again, never while a copy reads it, and no more is kept than the limit."""

from __future__ import annotations

import numpy as np
import pytest
import standin

from mpishard.backend import array as arrays
from mpishard.backend import streams
from mpishard.backend.streams import PinnedPool


@pytest.fixture
def like():
    array = standin.zeros(1000, np.uint8)
    arrays.ready(array)
    return array


def test_a_slab_is_used_again_for_what_fits_it(like):
    pool = PinnedPool()
    for small, large in ((0, 4096), (4097, 8192), (2**22, 2**21 + 1), (2**22 + 1, 5 * 2**20), (9 * 2**20, 10 * 2**20)):
        slab = pool.take(small, like)
        assert slab.bytes.size >= max(small, 1)
        pool.give(slab)
        assert pool.kept_bytes >= slab.bytes.size
        assert pool.take(large, like) is slab and slab.free is None
    assert pool.kept_bytes == 0
    assert pool.take(100, like) is not pool.take(100, like)


def test_large_slabs_have_few_sizes_and_little_of_them_is_not_used():
    wanted = range(2**22 + 1, 2**26, 2**17)
    sizes = [streams._rounded(size) for size in wanted]
    assert len(set(sizes)) == 4 * 4
    assert all(size <= found < 1.25 * size for size, found in zip(wanted, sizes, strict=True))


def test_memory_that_a_copy_reads_is_not_given_out_as_free(like, monkeypatch):
    pool, backend = PinnedPool(), arrays.backend_of(like)
    stream = backend.new_stream(like)
    slab = pool.take(1000, like)
    slab.bytes[:] = 7
    for _ in range(3):
        stream.launch(lambda: None)
    backend.start_to_device(slab.bytes[:1000], like, stream)
    copied = backend.record(like, stream)
    pool.give(slab, copied)
    other = pool.take(1000, like)
    assert other is not slab and other.free is None
    monkeypatch.setattr(streams, "KEPT_BYTES", 4096)  # no more than that: then the caller waits
    assert pool.take(1000, like) is slab and slab.free is copied
    pool.give(slab, copied)
    copied.synchronize()
    assert (arrays.to_host(like) == 7).all()
    assert pool.take(1000, like) is slab and slab.free is None


def test_no_more_is_kept_than_the_limit(like, monkeypatch):
    monkeypatch.setattr(streams, "KEPT_BYTES", 3 * 8192)
    pool, backend = PinnedPool(), arrays.backend_of(like)
    slabs = [pool.take(size, like) for size in (8000, 8000, 8000, 8000, 16000)]
    for slab in slabs[:3]:
        pool.give(slab)
    assert pool.kept_bytes == 3 * 8192
    pool.give(slabs[4])  # the largest goes first
    assert pool.kept_bytes == 3 * 8192 and not pool._kept[16384]
    stream = backend.new_stream(like)
    backend.start_to_device(slabs[3].bytes[:1000], like, stream)
    pool.give(slabs[3], backend.record(like, stream))
    assert pool.kept_bytes == 3 * 8192
    assert any(each is slabs[3] for each in pool._kept[8192])  # the copy reads it: another has gone


def test_streams_are_those_of_the_device(like):
    assert streams.copy_streams(like) is streams.copy_streams(standin.zeros(3))
    assert streams.copy_streams(like) is not streams.copy_streams(standin.zeros(3, kind=standin.AwareArray))


def test_copies_are_queued_together_and_waited_for_once(monkeypatch):
    sources = [standin.zeros(5), standin.zeros(0), standin.zeros(3)]
    targets = [np.empty(each.size) for each in sources]
    for number, source in enumerate(sources):
        source.fill(number + 1)
    waits = []
    usual = standin.Event.synchronize
    out = streams.copy_streams(sources[0]).out
    before = out.queued

    def synchronize(event):
        waits.append(out.queued - before)
        usual(event)

    monkeypatch.setattr(standin.Event, "synchronize", synchronize)
    host = np.arange(4.0), np.empty(4)
    streams.copy_together([*zip(sources, targets, strict=True), host])
    assert waits[0] == 3  # a wait for the computation and two copies are queued before the host waits for anything
    assert (targets[0] == 1).all() and (targets[2] == 3).all() and np.array_equal(*host)
