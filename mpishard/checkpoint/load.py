"""Loading: finds the newest checkpoint that is whole, and fills the arrays of a run, in any layout, from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arguments import listed
from mpishard.backend import array as arrays
from mpishard.backend.garbage import no_garbage_collection
from mpishard.checkpoint import folder
from mpishard.checkpoint.folder import Candidate
from mpishard.checkpoint.pieces import CheckpointReader, Contents, PieceRange, ReadThreads, StoredPiece
from mpishard.checkpoint.verify import examine
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.comm.json_exchange import gather_lists, share
from mpishard.comm.ledger import users_level
from mpishard.comm.mesh import Mesh
from mpishard.comm.reshard import reshard
from mpishard.layout.boxes import Box, box_size, inside, intersect, run_start
from mpishard.layout.run_state import RunState, Shard, check_same_tensors
from mpishard.layout.tensors import LocalLayout, Piece

Check = Callable[[Mapping[str, Any]], None]

_MOST_NAMED = 3
# Elements that are read at once for a device, where this many lie end to end.
_LEAST_STAGING = 2**20


# -- finding the newest checkpoint that is whole ----------------------------------------------------------------------


def load_newest(run: Path, state: RunState, mesh: Mesh, patient: Axis, check: Check | None) -> Contents | None:
    """Read the newest whole checkpoint in a folder into the arrays of `state`; None without a checkpoint. Collective.

    All of it is checked before anything is written: hashes, the index, the chunks, by `check` its facts, and whether it
    fits the state. Then values are read directly into the arrays, on most file systems out of the page cache, in which
    the first pass left them: no rank needs memory for a second copy. Waits for a disk use the axis `patient`, without a
    time limit.
    """
    with ReadThreads(mesh.node.size) as threads, no_garbage_collection():
        axis = mesh.world
        known, passed_over, dangling = _find(run, patient)
        for problem in passed_over:
            _warn(axis, f"a damaged checkpoint is passed over: {problem}")
        if dangling:
            _warn(axis, dangling)
        spoilt = False
        agree = partial(gather_lists, patient)
        for candidate in known:
            found = examine(candidate, state.kinds, agree=agree, rank=patient.rank, ranks=patient.size, threads=threads)
            contents, problems = found.contents, list(found.problems)
            if contents is not None and not problems:
                try:
                    with raised_on_all(axis):
                        if check is not None:  # says of which run it is, which explains other tensors too
                            check(contents.facts)
                        check_fits(contents, state)
                except Exception as error:  # on all ranks
                    if not spoilt:
                        raise
                    problems = [str(error)]
            if contents is not None and not problems:
                try:
                    fill(contents, state, axis, patient, one_node=mesh.node.size == mesh.size, threads=threads)
                    return contents
                except ValueError as error:  # on all ranks
                    problems, spoilt = [str(error)], True
            passed_over += problems
            _warn(axis, f"the checkpoint {candidate.path} is damaged and passed over: {'; '.join(problems[:3])}")
        if spoilt:
            raise OSError(
                f"a disk failed while a checkpoint in {run} was read into place: {'; '.join(passed_over)}; parameters "
                "and optimizer state are partly overwritten: load again, or make them anew"
            )
        if passed_over:
            raise ValueError(f"no checkpoint in {run} is whole: {'; '.join(passed_over)}")
        return None


def _find(run: Path, axis: Axis) -> tuple[list[Candidate], list[str], str]:
    """The checkpoints, newest first, the problems of those whose manifest cannot be read, and that of links, if any."""
    shared: Any = None
    if axis.rank == 0:
        try:
            found = folder.candidates(run)
            listed = [
                (str(each.path.relative_to(run)), each.manifest.encode().decode()) for each in found if each.manifest
            ]
            shared = {"listed": listed, "problems": [each.problem for each in found if each.problem], "error": None}
            shared["dangling"] = folder.dangling_links(run)
        except OSError as error:
            shared = {"error": (error.errno, error.strerror or str(error))}
    shared = share(axis, shared)
    if shared["error"] is not None:
        raise OSError(shared["error"][0], f"cannot look for checkpoints in {run}: {shared['error'][1]}")
    known = [Candidate(run / name, folder.decode_manifest(text.encode())) for name, text in shared["listed"]]
    return known, shared["problems"], shared["dangling"]


def _warn(axis: Axis, text: str) -> None:
    """Warn on the first rank.  Collective: where Python makes errors of warnings, all ranks raise it."""
    with raised_on_all(axis):
        if axis.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=users_level())


# -- filling the arrays ------------------------------------------------------------------------------------------------


def check_fits(contents: Contents, state: RunState) -> None:
    """Raise ValueError unless a checkpoint has all parts of a state.

    It must have the same tensors, in any order, and all required kinds of arrays (it may have more), with the same
    dtypes.
    """
    what = f"the checkpoint {contents.folder}"
    wanted = [(spec.name, spec.shape) for spec in state.specs]
    remedy = (
        f"Make the model as it was when the checkpoint was saved (mpishard inspect {contents.folder} shows its "
        "tensors), or name another folder"
    )
    check_same_tensors(what, list(contents.tensors.items()), wanted, remedy)
    for shard in state.shards:
        dtype = contents.kinds.get(shard.kind)
        if dtype is None and not shard.required:
            continue
        if dtype is None:
            raise ValueError(
                f"{what} has no {shard.kind}, but {listed(contents.kinds)}; make the optimizer as it was when "
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
    threads: ReadThreads | None = None,
) -> None:
    """Fill the arrays of a state from a checkpoint without damage.  Collective; one rank counts each element.

    Ranks of one node share the memory in which the files are after they were hashed: each reads all that it holds,
    straight into its arrays.  Ranks of several nodes read the elements that they stand for, so that no element comes
    over the network from the disk twice; copies come from those ranks.

    ValueError on all ranks if the checkpoint does not fit, before anything is written; or if a piece cannot be read,
    with the arrays partly filled.  Another error of one rank, as where memory is short, is raised on all, too.  What
    waits for a disk is exchanged over `patient`, which has no time limit.
    """
    with raised_on_all(axis):
        check_fits(contents, state)
    problems = []
    other: Exception | None = None  # says nothing of the checkpoint
    try:
        with CheckpointReader(contents, threads) as reader:
            for shard in state.shards:
                if shard.kind in contents.kinds:
                    _read(reader, shard, shard.holding if one_node else shard.counted)
                else:
                    shard.array[...] = 0
    except ValueError as error:
        problems = [str(error)]
    except Exception as error:
        other = error
    problems = gather_lists(patient, problems)
    axis.raise_if_any(other)
    if problems:
        raise ValueError("; ".join(problems[:_MOST_NAMED]))
    if one_node:
        return
    lacking = [sum(p.size for p in shard.counted) < sum(p.size for p in shard.holding) for shard in state.shards]
    some = axis.all_reduce(np.array([*lacking, False], np.int64), op="max", label="control")
    for shard, copies in zip(state.shards, some[:-1], strict=True):
        if copies:
            reshard(axis, replace(shard, holding=shard.counted), shard)


def _read(reader: CheckpointReader, shard: Shard, pieces: LocalLayout) -> None:
    """Read some pieces of a shard into its array."""
    ranges: list[PieceRange] = []
    others = []
    for wanted in pieces:
        stored = reader.pieces[shard.kind, wanted.name]
        found = [_range(wanted, piece, common) for piece, common in _common(wanted, stored)]
        whole = [each for each in found if each is not None]
        if len(whole) < len(found):
            others.append(wanted)
        else:
            ranges += whole
    most = max((piece.size for piece in pieces), default=0)
    staging = None
    if arrays.is_device(shard.array):
        most = max(most, min(_LEAST_STAGING, sum(piece.size for piece in pieces)))
        staging = arrays.pinned_empty(most, shard.array.dtype, shard.array)
    if staging is None:
        reader.read_ranges(_joined(ranges, None), shard.array)
    else:
        for each in _joined(ranges, most):
            reader.read_ranges([each._replace(place=0)], staging)
            arrays.copy_to_device(staging[: each.size], shard.array[each.place : each.place + each.size])
    for wanted in others:
        target = shard.array[wanted.start : wanted.start + wanted.size]
        host = target if staging is None else staging[: wanted.size]
        values = host.reshape(wanted.shape)
        for piece, common in _common(wanted, reader.pieces[shard.kind, wanted.name]):
            reader.read_piece(piece, common, values[inside(common, wanted.box)])
        if staging is not None:
            arrays.copy_to_device(host, target)


def _common(wanted: Piece, stored: Iterable[StoredPiece]) -> Iterator[tuple[StoredPiece, Box]]:
    """The boxes of a piece that are in stored ones."""
    for piece in stored:
        common = wanted.box if wanted.box == piece.box else intersect(wanted.box, piece.box)
        if common is not None:
            yield piece, common


def _range(wanted: Piece, piece: StoredPiece, box: Box) -> PieceRange | None:
    """The box as a range, if it is one in both pieces."""
    start, place = run_start(box, piece.box), run_start(box, wanted.box)
    if start is None or place is None:
        return None
    return PieceRange(piece, piece.start + start, wanted.start + place, box_size(box))


def _joined(ranges: Iterable[PieceRange], most: int | None) -> Iterator[PieceRange]:
    """Ranges in the order of the files, of at most `most` elements; those that touch at both ends are one."""
    ordered = sorted([(piece.file, start, place, size, piece) for piece, start, place, size in ranges])
    number = 0
    while number < len(ordered):
        file, start, place, size, piece = ordered[number]
        number += 1
        while number < len(ordered):
            other, more_start, more_place, more, _ = ordered[number]
            if other != file or more_start != start + size or more_place != place + size:
                break
            if most is not None and size + more > most:
                break
            size += more
            number += 1
        yield PieceRange(piece, start, place, size)
