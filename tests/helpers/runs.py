"""The state of a run whose every value is known from its step, for tests of checkpoints."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from mpishard.layout.boxes import split
from mpishard.layout.run_state import PARAMETERS, RunState, Shard
from mpishard.layout.tensors import WHOLE, ParameterSpec, Piece, cut_holding

KINDS = (PARAMETERS, "optimizer/exp_avg")


def specs(elements=50):
    """Tensors with a slash in the name, without elements, without dimensions, and one of so many elements."""
    return (
        ParameterSpec("a/b", (7, 3)),
        ParameterSpec("none", (0, 2)),
        ParameterSpec("scalar", ()),
        ParameterSpec("last", (elements,)),
    )


def values(step, kind, size):
    """What the whole model has at a step."""
    return np.arange(size) * (1.0 + KINDS.index(kind)) + 1e6 * step


def state(step, rank=0, size=1, elements=50, empty=False, convert=np.asarray):
    """Parameters on all ranks and a slot of which each rank has a range, with their values at a step.

    With `empty`, they hold NaN instead.  `convert` makes their arrays of NumPy's.
    """
    tensors = specs(elements)
    total = sum(spec.size for spec in tensors)
    whole = WHOLE.holding(tensors)
    cuts = split(total, size)
    own = (cuts[rank], cuts[rank + 1])
    in_place = tuple(Piece(piece.name, piece.box, piece.start + own[0]) for piece in cut_holding(whole, [own]))
    in_slot = cut_holding(whole, [own])
    parameters, slot = values(step, KINDS[0], total), values(step, KINDS[1], total)[slice(*own)].copy()
    if empty:
        parameters[:] = slot[:] = np.nan
    shards = (
        Shard(KINDS[0], convert(parameters), whole, in_place),
        Shard(KINDS[1], convert(slot), in_slot, in_slot),
    )
    facts = {"step": step, "note": f"step {step}", "history.json": [step], "loss": np.arange(step, dtype=float)}
    return RunState(tensors, shards, facts)


def assert_is_at(found, step, rank=0, size=1, elements=50):
    """`found` was loaded, and has the values of the step."""
    wanted = state(step, rank, size, elements)
    for got, expected in zip(found.shards, wanted.shards, strict=True):
        assert np.array_equal(got.array, expected.array), (got.kind, step, got.array, expected.array)


def at(step, mesh, **options):
    return state(step, mesh.rank, mesh.size, **options)


def check_load(checkpoints, step, **options):
    mesh = checkpoints.mesh
    found = at(0, mesh, empty=True, **options)
    contents = checkpoints.load(found)
    assert contents is not None and contents.facts["step"] == step
    assert_is_at(found, step, mesh.rank, mesh.size, **options)
    return contents


def check_nothing_unfinished(mesh, run):
    mesh.world.barrier()
    assert not [name for name in os.listdir(run) if name.startswith(".")]
    mesh.world.barrier()


@contextlib.contextmanager
def warns_on_rank_0(mesh, match):
    if mesh.rank:
        yield
    else:
        with pytest.warns(RuntimeWarning, match=match) as caught:
            yield
        # The line of the caller, which is a test, and not one of ours.
        assert all(Path(__file__).parents[1] in Path(each.filename).parents for each in caught)
