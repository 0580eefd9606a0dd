"""Writes one checkpoint: every rank writes a file with its pieces, rank 0 the index and the manifest.

Rank 0 publishes the checkpoint, and then tells all ranks the outcome, which is therefore the same on all of them.

It runs in the thread that calls `Checkpoints.save`, or in a thread beside the training.  So it never blocks in MPI, and
its task has all that it needs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpishard.backend.garbage import no_garbage_collection
from mpishard.checkpoint import disk, folder, manifest, polling
from mpishard.checkpoint.faults import Fault
from mpishard.checkpoint.folder import Retained, Unfinished
from mpishard.checkpoint.index import write_index
from mpishard.checkpoint.manifest import FileEntry, Manifest
from mpishard.checkpoint.pieces import INDEX, pieces_file, stored, write_pieces
from mpishard.checkpoint.snapshot import Saved
from mpishard.comm.axis import Axis
from mpishard.layout.boxes import Box


@dataclass(frozen=True)
class Task:
    """The part of one rank in writing a checkpoint.

    Parameters
    ----------
    unfinished : Unfinished
        The unfinished checkpoint, whose folder rank 0 has made.
    step : int
    saved : Saved
        The values of this rank.
    retained : Retained
        The checkpoints that stay in the folder.
    compression : str or None
        Filter of HDF5.
    problem : Exception or None
        The error that kept this rank from having its values; all ranks will raise it.
    """

    unfinished: Unfinished
    step: int
    saved: Saved
    retained: Retained = Retained()
    compression: str | None = None
    problem: Exception | None = None


@dataclass(frozen=True)
class SaveOutcome:
    """The outcome of a save, the same on all ranks: a fault, or remarks on smaller problems."""

    fault: Fault | None
    remarks: tuple[str, ...] = ()


def begin(run: Path, step: int, axis: Axis) -> tuple[Unfinished | None, Fault | None]:
    """Make the folder of a checkpoint on rank 0; returns it, or the fault, on all ranks.  Collective over `axis`."""
    unfinished, fault, made = None, None, None
    if axis.rank == 0:
        try:
            unfinished = folder.begin(run, step)
            made = (unfinished.path.name, unfinished.target.name, unfinished.id)
        except Exception as error:
            fault = Fault.of(error, 0, run)
    # Rank 0 may wait for its disk, so this must not be a collective with a time limit.
    shared = polling.share(axis, {"made": made, "fault": None if fault is None else fault.plain})
    if unfinished is None and shared["made"] is not None:
        name, target, id = shared["made"]
        # Only rank 0, which writes the index, needs the generation.
        unfinished = Unfinished(run / name, run / target, id, 0)
    return unfinished, Fault.first([shared["fault"]])


def carry_out(task: Task, axis: Axis) -> SaveOutcome:
    """Write a checkpoint.  Collective over `axis`, which must have no other use."""
    try:
        reports = polling.gather(axis, _write_own(task, axis.rank))
        result = polling.share(axis, _complete(task, reports) if axis.rank == 0 else None)
    finally:
        if task.unfinished.held is not None:
            task.unfinished.held.close()
    return SaveOutcome(Fault.first([result["fault"]]), tuple(result["remarks"]))


def rehearse(unfinished: Unfinished, axis: Axis) -> Fault | None:
    """Write small files where a checkpoint would be written, and remove them.  Collective over `axis`.

    Returns
    -------
    Fault or None
        The fault of a rank that could not do this, the same on all ranks.
    """
    reports = polling.gather(axis, _write_a_little(unfinished.path / pieces_file(axis.rank), axis.rank))
    fault = Fault.first([each["fault"] for each in reports])
    if axis.rank == 0:
        assert unfinished.held is not None
        if fault is None:
            try:
                _check_seen(unfinished.path, reports)
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
    """Write the file of this rank; returns the facts about it that rank 0 needs."""
    path = task.unfinished.path / pieces_file(rank)
    try:
        if task.problem is not None:
            raise task.problem
        if not task.saved.parts:
            return {"fault": None, "entry": None, "pieces": []}
        write_pieces(path, task.saved.parts, id=task.unfinished.id, writer=rank, compression=task.compression)
        entry = _to_disk(path)
    except Exception as error:
        return {"fault": Fault.of(error, rank, path).plain, "entry": None, "pieces": []}
    return {
        "fault": None,
        "entry": (entry.size, entry.xxh3_128),
        "pieces": [part.where for part in task.saved.parts],
    }


def _to_disk(path: Path) -> FileEntry:
    """Sync a file, and hash it at the same time."""
    failed: list[OSError] = []

    def sync() -> None:
        try:
            disk.sync(path)
        except OSError as error:
            failed.append(error)

    beside = threading.Thread(target=sync, name="mpishard-sync")
    try:
        beside.start()
    except RuntimeError:  # the interpreter is about to end and starts no more threads
        sync()
        return FileEntry(*manifest.hash_file(path))
    try:
        return FileEntry(*manifest.hash_file(path))
    finally:
        beside.join()
        if failed:
            raise failed[0]


def _complete(task: Task, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """On rank 0: write the index and the manifest, and publish the checkpoint; or remove all files."""
    fault = Fault.first([each["fault"] for each in reports])
    remarks: list[str] = []
    path = task.unfinished.path
    if fault is None:
        try:
            entries = _check_seen(path, reports)
            index = path / INDEX
            with no_garbage_collection():
                write_index(
                    index,
                    id=task.unfinished.id,
                    generation=task.unfinished.generation,
                    tensors=task.saved.tensors,
                    kinds=task.saved.kinds,
                    pieces=[
                        piece
                        for rank, each in enumerate(reports)
                        for piece in stored(map(_where, each["pieces"]), pieces_file(rank))
                    ],
                    facts=task.saved.facts,
                )
            entries[index.name] = _to_disk(index)
            folder.publish(
                task.unfinished, Manifest(task.unfinished.id, task.unfinished.generation, task.step, entries)
            )
        except Exception as error:
            fault = Fault.of(error, 0, path)
    if fault is None:
        remarks = folder.tidy(task.unfinished.target, task.retained.keep, task.retained.ids, task.retained.best)
    else:
        _discard(path)
    return {"fault": None if fault is None else fault.plain, "remarks": remarks}


def _where(plain: Sequence[Any]) -> tuple[str, str, Box]:
    """Kind, name and box of a piece, from JSON."""
    kind, name, box = plain
    return kind, name, tuple((start, stop) for start, stop in box)


def _check_seen(path: Path, reports: Sequence[Mapping[str, Any]]) -> dict[str, FileEntry]:
    """The files of all ranks; rank 0 must see them with the same sizes as their writers."""
    entries = {}
    for rank, each in enumerate(reports):
        if each["entry"] is None:
            continue
        file, entry = path / pieces_file(rank), FileEntry(*each["entry"])
        seen = os.stat(file).st_size
        if seen != entry.size:
            raise OSError(f"rank {rank} wrote {entry.size} bytes to {file}, and rank 0 sees {seen} of them")
        entries[file.name] = entry
    return entries


def _discard(path: Path) -> None:
    """Remove the written files; the next save removes those that cannot be removed now."""
    with suppress(OSError):
        disk.remove(path)
