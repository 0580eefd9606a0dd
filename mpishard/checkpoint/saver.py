"""Writing one checkpoint: every rank its pieces, rank 0 the rest, and one outcome on all ranks.

It runs in the thread that calls `Checkpoints.save`, or in one beside the training; so it never blocks in MPI, and
everything it needs is in its task.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.checkpoint import disk, folder, manifest, polling
from mpishard.checkpoint.faults import Fault
from mpishard.checkpoint.folder import Unfinished
from mpishard.checkpoint.index import write_index
from mpishard.checkpoint.manifest import FileEntry, Manifest
from mpishard.checkpoint.pieces import Part, StoredPiece, pieces_file, stored, write_pieces
from mpishard.comm.axis import Axis


@dataclass(frozen=True)
class Task:
    """What one rank does for one checkpoint.

    Parameters
    ----------
    unfinished : Unfinished
        Where it is written; rank 0 made the folder.
    step : int
    tensors : mapping of str to shape
        All tensors of the model.
    kinds : mapping of str to dtype
        Of parameters and slots.
    facts : mapping
        As `RunState.facts`.
    parts : sequence of Part
        What this rank writes.
    keep : int or None
        How many checkpoints to keep.
    own : frozenset of str
        Ids of those that count for `keep`, besides this one.
    compression : str or None
        Filter of HDF5.
    problem : Exception or None
        What kept this rank from making its parts, to be told to the others.
    """

    unfinished: Unfinished
    step: int
    tensors: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, np.dtype]
    facts: Mapping[str, Any]
    parts: Sequence[Part]
    keep: int | None = None
    own: frozenset[str] = frozenset()
    compression: str | None = None
    problem: Exception | None = None


@dataclass(frozen=True)
class Outcome:
    """How a save ended, the same on all ranks: with a fault, or with remarks on what is not as it should be."""

    fault: Fault | None
    remarks: tuple[str, ...] = ()


def carry_out(task: Task, axis: Axis) -> Outcome:
    """Write a checkpoint.  Collective over `axis`, which is for this alone."""
    try:
        told = polling.gather(axis, _write_own(task, axis.rank))
        heard = polling.share(axis, _complete(task, told) if axis.rank == 0 else None)
    finally:
        if task.unfinished.held is not None:
            task.unfinished.held.close()
    return Outcome(Fault.first([heard["fault"]]), tuple(heard["remarks"]))


def rehearse(unfinished: Unfinished, axis: Axis) -> Fault | None:
    """Write a little where a checkpoint would be written, and remove it.  Collective over `axis`.

    Returns
    -------
    Fault or None
        What keeps a rank from it, the same on all ranks.
    """
    told = polling.gather(axis, _write_a_little(unfinished.path / pieces_file(axis.rank), axis.rank))
    fault = Fault.first([each["fault"] for each in told])
    if axis.rank == 0:
        assert unfinished.held is not None
        if fault is None:
            try:
                _check_seen(unfinished.path, told)
            except OSError as error:
                fault = Fault.of(error, 0, unfinished.path)
        _discard(unfinished.path)
        unfinished.held.close()
    return Fault.first([polling.share(axis, None if fault is None else fault.plain)])


def _write_a_little(path: Path, rank: int) -> dict[str, Any]:
    try:
        with disk.DiskFile(path) as file:
            file.write(b"rehearsal")
            file.check()
    except OSError as error:
        return {"fault": Fault.of(error, rank, path).plain, "entry": None}
    return {"fault": None, "entry": (len(b"rehearsal"), "")}


def _write_own(task: Task, rank: int) -> dict[str, Any]:
    """Write the file of this rank; returns what rank 0 needs to know of it."""
    path = task.unfinished.path / pieces_file(rank)
    try:
        if task.problem is not None:
            raise task.problem
        if not task.parts:
            return {"fault": None, "entry": None, "pieces": []}
        write_pieces(path, task.parts, id=task.unfinished.id, writer=rank, compression=task.compression)
        entry = _to_disk(path)
    except Exception as error:
        return {"fault": Fault.of(error, rank, path).plain, "entry": None, "pieces": []}
    pieces = stored([part.where for part in task.parts], path.name)
    table = [(piece.kind, piece.name, piece.box, piece.dataset) for piece in pieces]
    return {"fault": None, "entry": (entry.size, entry.xxh3_128), "pieces": table}


def _to_disk(path: Path) -> FileEntry:
    """Sync a file, and hash it meanwhile."""
    failed: list[OSError] = []

    def sync() -> None:
        try:
            disk.sync(path)
        except OSError as error:
            failed.append(error)

    beside = threading.Thread(target=sync, name="mpishard-sync")
    try:
        beside.start()
    except RuntimeError:  # the interpreter is about to end and starts no threads any more
        sync()
        return FileEntry(*manifest.hash_file(path))
    try:
        return FileEntry(*manifest.hash_file(path))
    finally:
        beside.join()
        if failed:
            raise failed[0]


def _complete(task: Task, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank 0: write the index and the manifest and publish; or remove what was written."""
    fault = Fault.first([each["fault"] for each in told])
    remarks: list[str] = []
    path = task.unfinished.path
    if fault is None:
        try:
            entries = _check_seen(path, told)
            index = path / manifest.INDEX
            write_index(
                index,
                id=task.unfinished.id,
                generation=task.unfinished.generation,
                tensors=task.tensors,
                kinds=task.kinds,
                pieces=[
                    StoredPiece(kind, name, tuple((start, stop) for start, stop in box), pieces_file(rank), dataset)
                    for rank, each in enumerate(told)
                    for kind, name, box, dataset in each["pieces"]
                ],
                facts=task.facts,
            )
            entries[index.name] = _to_disk(index)
            folder.publish(
                task.unfinished, Manifest(task.unfinished.id, task.unfinished.generation, task.step, entries)
            )
        except Exception as error:
            fault = Fault.of(error, 0, path)
    if fault is None:
        remarks = folder.tidy(task.unfinished.target, task.keep, task.own | {task.unfinished.id})
    else:
        _discard(path)
    return {"fault": None if fault is None else fault.plain, "remarks": remarks}


def _check_seen(path: Path, told: Sequence[Mapping[str, Any]]) -> dict[str, FileEntry]:
    """The files that the ranks wrote, which rank 0 must see as they do."""
    entries = {}
    for rank, each in enumerate(told):
        if each["entry"] is None:
            continue
        file, entry = path / pieces_file(rank), FileEntry(*each["entry"])
        seen = os.stat(file).st_size
        if seen != entry.size:
            raise OSError(f"rank {rank} wrote {entry.size} bytes to {file}, and rank 0 sees {seen} of them")
        entries[file.name] = entry
    return entries


def _discard(path: Path) -> None:
    """Remove what was written; what cannot be removed now goes when the next one begins."""
    with suppress(OSError):
        disk.remove(path)
