"""What a save copies of device arrays: all of it after their computation, to memory that is kept."""

from __future__ import annotations

import numpy as np
import standin

from mpishard.backend import array as arrays
from mpishard.checkpoint.save import Snapshot
from mpishard.layout.run_state import Shard
from mpishard.layout.tensors import Piece


def shards(place, factor):
    pieces = [Piece("a", ((0, 4),), 0), Piece("b", ((0, 3),), 6)]  # with a gap between them
    made = [place(np.arange(9.0)), place(np.arange(9, dtype=np.float32))]
    for each in made:
        each *= each.dtype.type(factor)  # on a device it is computed late
    return [Shard(f"kind {number}", each, tuple(pieces), tuple(pieces)) for number, each in enumerate(made)]


def content(parts):
    return {(part.kind, part.name): part.values.tolist() for part in parts}


def test_pinned_memory_of_another_size_goes_back_to_the_system(monkeypatch):
    released = []
    monkeypatch.setattr(standin.StandIn, "release_pinned", lambda self: released.append(True))
    snapshot, piece = Snapshot(), (Piece("a", ((0, 5),), 0),)
    for _ in range(2):
        snapshot.take(shards(standin.on_device, 2))
    assert not released
    snapshot.take([Shard("kind 0", standin.on_device(np.arange(5.0)), piece, piece)])
    assert released and list(snapshot._buffers) == ["kind 0"]


def test_device_arrays_are_saved_as_host_arrays_are():
    snapshot = Snapshot()
    kept = None
    for factor in (2, 3):
        given = shards(standin.on_device, factor)
        parts = snapshot.take(given)
        found = content(parts)
        for shard in given:
            shard.array.fill(0)
            arrays.ready(shard.array)
        assert content(parts) == found == content(Snapshot().take(shards(np.copy, factor)))
        addresses = {name: buffer.ctypes.data for name, buffer in snapshot._buffers.items()}
        assert kept in (None, addresses)
        kept = addresses
