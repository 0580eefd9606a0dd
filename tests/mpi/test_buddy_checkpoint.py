"""The committed state of an elastic run whose arrays are in device memory."""

from __future__ import annotations

import numpy as np
import pytest
import standin

from mpishard import ParameterSpec
from mpishard.backend import array as arrays
from mpishard.comm.deferred import DEFERRED
from mpishard.elastic.transactions import BuddyCheckpoint
from mpishard.layout.run_state import RunState, Shard
from mpishard.layout.tensors import Piece

SIZE = 7  # of each rank


def test_a_step_is_undone_and_the_state_of_a_dead_neighbour_is_given_to_others(mesh):
    axis = mesh.data
    array = standin.zeros(SIZE)
    array.fill(axis.rank + 1)  # late: nobody has waited for it when it is copied
    pieces = (Piece("x", ((SIZE * axis.rank, SIZE * (axis.rank + 1)),), 0),)
    state = RunState(
        (ParameterSpec("x", (SIZE * axis.size,)),), (Shard("optimizer/exp_avg", array, pieces, pieces),), {}
    )
    ranks = list(range(axis.size))
    committed = BuddyCheckpoint(axis, ranks, ["node"] * axis.size, state, dict)
    committed.begin({"step": 1})
    array.fill(99)
    committed.send_to_buddy()
    assert committed.rollback() == {"step": 1}
    assert (arrays.to_host(array) == axis.rank + 1).all()

    committed.begin({"step": 2})
    array *= 10.0
    committed.send_to_buddy()
    committed.commit()
    assert (arrays.to_host(committed.source(ranks).shards[0].array) == 10 * (axis.rank + 1)).all()
    if axis.size > 1:
        neighbour = (axis.rank - 1) % axis.size
        assert committed.neighbour == neighbour
        (shard,) = committed.source([rank for rank in ranks if rank != neighbour]).shards
        both = np.repeat([10.0 * (axis.rank + 1), 10.0 * (neighbour + 1)], SIZE)
        assert np.array_equal(arrays.to_host(shard.array), both)
        assert [piece.start for piece in shard.holding] == [0, SIZE]


@pytest.mark.usefixtures("without_debug")
def test_copies_of_several_arrays_leave_the_device_before_the_host_waits(mesh, monkeypatch):
    axis, waited = mesh.data, []
    pieces = (Piece("x", ((SIZE * axis.rank, SIZE * (axis.rank + 1)),), 0),)
    given = [standin.zeros(SIZE) for _ in range(3)]
    shards = [Shard(f"optimizer/{number}", array, pieces, pieces) for number, array in enumerate(given)]
    ranks = list(range(axis.size))
    state = RunState((ParameterSpec("x", (SIZE * axis.size,)),), tuple(shards), {})
    committed = BuddyCheckpoint(axis, ranks, ["node"] * axis.size, state, dict)
    monkeypatch.setattr(standin.Stream, "pass_one", lambda self: None)
    usual = type(DEFERRED).until

    def until(self, is_over):
        waited.append(len(self.waiting))
        monkeypatch.undo()
        usual(self, is_over)

    monkeypatch.setattr(type(DEFERRED), "until", until)
    monkeypatch.setattr(type(DEFERRED), "flush", lambda self: waited.append("flush"))
    committed.send_to_buddy()
    assert waited == ([3] if axis.size > 1 else [])
    committed.commit()
