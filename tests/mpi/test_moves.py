"""A run goes on in any layout: a part of the pairs in `tests/helpers/moves.py`, the same one on every run."""

from __future__ import annotations

import moves
import pytest
from mpi4py import MPI
from variants import full

pytestmark = pytest.mark.pairs(1)

SIZE = MPI.COMM_WORLD.size
POSSIBLE = [layout for layout in moves.LAYOUTS if layout.ranks <= SIZE]
LARGEST = max(POSSIBLE, key=lambda layout: (layout.ranks, layout.pipeline))


@pytest.mark.parametrize("after", [6, *full(20)])
@pytest.mark.parametrize("how", ["memory", "disk"])
@pytest.mark.parametrize(
    ("source", "targets"),
    [(LARGEST, [LARGEST, POSSIBLE[0], POSSIBLE[len(POSSIBLE) // 2]]), (POSSIBLE[0], moves.tied([LARGEST]))],
    ids=["from most ranks", "from one rank, tied"],
)
@pytest.mark.quick
def test_a_run_goes_on_in_another_layout(mesh, source, targets, how, after):
    source = moves.tied([source])[0] if targets[0].tied else source
    for name, found in moves.moves_from(mesh, source, targets, [how], after):
        assert moves.passes(found), (name, found)


def test_a_move_that_loses_something_is_noticed(mesh, monkeypatch):
    """A little of one element of one slot."""
    true_move = moves.move

    def lossy(how, world, folder, source, target):
        true_move(how, world, folder, source, target)
        if target is not None:
            for shard in target.state.shards:
                if shard.kind == "optimizer/exp_avg":
                    shard.array[:1] += 1e-9

    monkeypatch.setattr(moves, "move", lossy)
    ((_, found),) = moves.moves_from(mesh, LARGEST, [LARGEST], ["memory"], 3)
    assert found["bits"] == 1
    assert found["parameter"] > 1e-13
    assert not moves.passes(found)
