"""Fills the arrays of a run, in any layout, from a whole checkpoint, written in any layout."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from mpishard.backend import array as arrays
from mpishard.checkpoint import polling
from mpishard.checkpoint.index import Contents
from mpishard.checkpoint.piece_reader import PieceReader, inside
from mpishard.checkpoint.pieces import StoredPiece
from mpishard.comm.axis import Axis
from mpishard.comm.reshard import reshard
from mpishard.io.readers import Readers
from mpishard.layout.boxes import intersect
from mpishard.layout.local_layout import LocalLayout
from mpishard.layout.run_state import RunState, Shard, check_same_tensors

_MOST_SHOWN = 3


def check_fits(contents: Contents, state: RunState) -> None:
    """Raise ValueError unless a checkpoint has all parts of a state.

    It must have the same tensors, in any order, and all required kinds of arrays (it may have more), with the same
    dtypes.
    """
    what = f"the checkpoint {contents.folder}"
    check_same_tensors(what, list(contents.tensors.items()), [(spec.name, spec.shape) for spec in state.specs])
    for shard in state.shards:
        dtype = contents.kinds.get(shard.kind)
        if dtype is None and not shard.required:
            continue
        if dtype is None:
            raise ValueError(
                f"{what} has no {shard.kind}, but {', '.join(contents.kinds)}; make the optimizer as it was when "
                "the checkpoint was saved, or load the parameters alone"
            )
        if dtype != shard.array.dtype:
            raise ValueError(
                f"{what} has {shard.kind} in {dtype}, and this run in {np.dtype(shard.array.dtype)}; make the model "
                f"with dtype {dtype}"
            )


def fill(
    contents: Contents,
    state: RunState,
    axis: Axis,
    patient: Axis,
    *,
    one_node: bool = False,
    readers: Readers | None = None,
) -> None:
    """Fill the arrays of a state from a checkpoint without `damages`.  Collective; the ranks count each element once.

    Ranks of one node share the memory in which the files are after they were hashed: each reads all that it holds,
    straight into its arrays.  Ranks of several nodes read the elements that they stand for, so that no element comes
    over the network from the disk twice; copies come from those ranks.

    Parameters
    ----------
    contents : Contents
    state : RunState
        Its arrays are written.
    axis, patient : Axis
        The ranks of the state: for moving elements, and for waiting for a disk.
    one_node : bool
        Whether all ranks are on one node.
    readers : Readers, optional
        The threads that read; default: this thread.

    Raises
    ------
    ValueError
        On all ranks: before anything is written if the checkpoint is of something else, as `check_fits` tells, or
        when a piece cannot be read, with the arrays partly filled.
    """
    problem: Exception | None = None
    try:
        check_fits(contents, state)
    except ValueError as error:
        problem = error
    axis.raise_if_any(problem)
    problems = []
    try:
        with PieceReader(contents, readers) as reader:
            for shard in state.shards:
                if shard.kind in contents.kinds:
                    _read(reader, contents, shard, shard.holding if one_node else shard.counted)
                else:
                    shard.array[...] = 0
    except ValueError as error:
        problems = [str(error)]
    problems = polling.gather_lists(patient, problems)
    if problems:
        raise ValueError("; ".join(problems[:_MOST_SHOWN]))
    if one_node:
        return
    lacking = [sum(p.size for p in shard.counted) < sum(p.size for p in shard.holding) for shard in state.shards]
    some = axis.all_reduce(np.array([*lacking, False], np.int64), op="max", label="control")
    for shard, copies in zip(state.shards, some[:-1], strict=True):
        if copies:
            reshard(axis, replace(shard, holding=shard.counted), shard)


def _read(reader: PieceReader, contents: Contents, shard: Shard, pieces: LocalLayout) -> None:
    """Read some pieces of a shard into its array."""
    stored: dict[str, list[StoredPiece]] = defaultdict(list)
    for piece in contents.pieces:
        if piece.kind == shard.kind:
            stored[piece.name].append(piece)
    staging = None
    if arrays.is_device(shard.array):
        most = max((piece.size for piece in pieces), default=0)
        staging = arrays.pinned_empty(most, shard.array.dtype, shard.array)
    for wanted in pieces:
        target = shard.array[wanted.start : wanted.start + wanted.size]
        host = target if staging is None else staging[: wanted.size]
        values = host.reshape(wanted.shape)
        for source in stored[wanted.name]:
            common = intersect(wanted.box, source.box)
            if common is not None:
                reader.read(source, common, values[inside(common, wanted.box)])
        if staging is not None:
            arrays.copy_to_device(host, target)
