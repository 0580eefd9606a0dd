"""Saving: every rank writes a file with its pieces, rank 0 the index and the manifest, and publishes the checkpoint.

Rank 0 then reports the outcome to all ranks, so that it is the same on all of them. A save runs in the thread that
calls `Checkpoints.save`, or in a thread next to the training: it never blocks in MPI, and its task has all that it
needs.
"""

from __future__ import annotations

import atexit
import copy
import errno
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.garbage import no_garbage_collection
from mpishard.backend.kinds import backend_of
from mpishard.backend.streams import copy_together
from mpishard.checkpoint import disk, folder
from mpishard.checkpoint.folder import FileEntry, Manifest, Retained, Unfinished
from mpishard.checkpoint.index import write_index
from mpishard.checkpoint.pieces import INDEX, PieceValues, pieces_file, stored_pieces, write_pieces
from mpishard.comm.axis import Axis
from mpishard.comm.errors import CaughtError, raised_on_all
from mpishard.comm.json_exchange import gather, share
from mpishard.comm.ledger import Ledger, users_level
from mpishard.comm.mesh import Mesh
from mpishard.launch.job_notes import raised_by_all
from mpishard.layout.boxes import Box
from mpishard.layout.run_state import RunState, Shard
from mpishard.layout.tensors import LocalLayout, Piece

Array = Any

_REMEDIES = {
    (
        errno.ENOSPC,
        errno.EDQUOT,
    ): "make room there, keep fewer checkpoints (keep=...), or give a folder on another disk",
    (errno.EROFS, errno.EACCES, errno.EPERM): "give a folder that all ranks may write to",
    (errno.ENOENT, errno.ESTALE): "all ranks must see one and the same folder, and it must stay while they write",
    (errno.ENOTEMPTY,): "another run saves into it at this moment; give each run its own folder",
    (errno.ENOTDIR, errno.EEXIST, errno.EISDIR): "give the path of a folder",
}
# Errors of the caller, which keep their class.
_KNOWN = {error.__name__: error for error in (ValueError, TypeError, MemoryError)}
_OTHER_REMEDY = "see to that disk, or give a folder on another one"


# -- values of a rank -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankValues:
    """The values that a checkpoint gets from one rank, and the tables that describe those of all ranks."""

    tensors: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, np.dtype]
    facts: Mapping[str, Any]
    pieces: Sequence[PieceValues]  # that this rank writes


def live_pieces(shards: Sequence[Shard]) -> list[PieceValues]:
    """The primary pieces of this rank, as views of its NumPy arrays."""
    return [
        _with_values(shard.kind, piece, shard.array[piece.start : piece.start + piece.size])
        for shard in shards
        for piece in shard.counted
        if piece.size
    ]


class Snapshot:
    """Copies of the primary pieces of a rank, in host memory that is kept for the next copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def values(self, state: RunState, *, copied: bool) -> tuple[RankValues, Exception | None]:
        """The values of a state that this rank saves; or none, and the error that prevented it.

        With `copied` the arrays may change before they are written. Device arrays are copied in any case.
        """
        facts: dict[str, Any] = {}
        pieces: list[PieceValues] = []
        with CaughtError() as caught:
            facts = copy.deepcopy(dict(state.facts))
            copied = copied or any(arrays.is_device(shard.array) for shard in state.shards)
            with no_garbage_collection():
                pieces = self.take(state.shards) if copied else live_pieces(state.shards)
        tensors = {spec.name: spec.shape for spec in state.specs}
        kinds = {shard.kind: np.dtype(shard.array.dtype) for shard in state.shards}
        return RankValues(tensors, kinds, facts, pieces), caught.error

    def take(self, shards: Sequence[Shard]) -> list[PieceValues]:
        """Copy the primary pieces; complete on return.  The last copies are overwritten.

        Contiguous pieces are copied together.  Device arrays are copied to pinned memory, by a stream of their device
        that waits for their computation; the host waits once, for all of them.
        """
        # Buffers that no longer fit are freed before others are made.
        fitting = {shard.kind: self._buffers[shard.kind] for shard in shards if self._fits(shard)}
        gone, self._buffers = len(self._buffers) > len(fitting), fitting
        for backend in {backend_of(shard.array) for shard in shards} if gone else ():
            backend.release_pinned()
        pieces: list[PieceValues] = []
        copies: list[tuple[Array, np.ndarray]] = []
        for shard in shards:
            if shard.kind not in fitting:
                size = sum(piece.size for piece in shard.counted)
                fitting[shard.kind] = arrays.pinned_empty(size, shard.array.dtype, like=shard.array)
            buffer, offset = fitting[shard.kind], 0
            for group in _contiguous(shard.counted):
                start, size = group[0].start, sum(piece.size for piece in group)
                copies.append((shard.array[start : start + size], buffer[offset : offset + size]))
                for piece in group:
                    pieces.append(_with_values(shard.kind, piece, buffer[offset : offset + piece.size]))
                    offset += piece.size
        copy_together(copies)
        return pieces

    def _fits(self, shard: Shard) -> bool:
        kept = self._buffers.get(shard.kind)
        size = sum(piece.size for piece in shard.counted)
        return kept is not None and kept.size == size and kept.dtype == shard.array.dtype


def _with_values(kind: str, piece: Piece, values: np.ndarray) -> PieceValues:
    return PieceValues(kind, piece.name, piece.box, values.reshape(piece.shape))


def _contiguous(pieces: LocalLayout) -> Iterator[list[Piece]]:
    """Pieces with elements, by start, in contiguous groups."""
    ordered = sorted((piece for piece in pieces if piece.size), key=lambda piece: piece.start)
    before = 0  # elements of earlier pieces: start minus this number is constant in a contiguous group
    distances = []
    for piece in ordered:
        distances.append(piece.start - before)
        before += piece.size
    for _, group in groupby(zip(distances, ordered, strict=True), key=lambda pair: pair[0]):
        yield [piece for _, piece in group]


# -- errors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """An error of one rank, in a form in which every rank can raise it."""

    rank: int
    path: str
    text: str
    kind: str  # name of its class; "OSError" for all its subclasses
    errno: int | None = None
    others: int = 0  # how many other ranks have an error

    @classmethod
    def of(cls, error: Exception, rank: int, path: Path) -> Fault:
        """The fault of an exception; `path` is used if the exception has none."""
        if not isinstance(error, OSError):
            return cls(rank, str(path), str(error), type(error).__name__)
        named = path if error.filename is None else Path(str(error.filename))
        text = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = disk.free_bytes(named)
            text += "" if free is None else f" ({free / 1e6:.1f} MB are free)"
        return cls(rank, str(named), text, OSError.__name__, error.errno)

    @classmethod
    def first(cls, plain_faults: Sequence[Any]) -> Fault | None:
        """The fault of the lowest rank, from the `plain` values of all ranks; None without a fault."""
        faults = [cls(**fault) for fault in plain_faults if fault is not None]
        return cls(**{**asdict(faults[0]), "others": len(faults) - 1}) if faults else None

    @property
    def plain(self) -> dict[str, Any]:
        """The fault as a value for JSON."""
        return asdict(self)

    def error(self, step: int | None) -> Exception:
        """The exception to raise on every rank; without a step, of a run that has not saved any yet."""
        more = f", and {self.others} more failed" if self.others else ""
        what = "checkpoints cannot be saved" if step is None else f"the checkpoint of step {step} was not saved"
        what += f": rank {self.rank} failed at {self.path}: {self.text}{more}"
        if self.kind != OSError.__name__:
            return _KNOWN.get(self.kind, RuntimeError)(what)
        remedy = next((each for numbers, each in _REMEDIES.items() if self.errno in numbers), _OTHER_REMEDY)
        message = f"{what}; {remedy}"
        if step is not None:
            message += ". Checkpoints before it are untouched"
        return OSError(message) if self.errno is None else OSError(self.errno, message)


# -- one checkpoint ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """The part of one rank in writing a checkpoint."""

    unfinished: Unfinished
    step: int
    values: RankValues
    retained: Retained = Retained()
    compression: str | None = None
    virtual: bool = False
    problem: Exception | None = None  # what kept this rank from having its values; all ranks will raise it


@dataclass(frozen=True)
class SaveOutcome:
    """The outcome of a save, the same on all ranks: a fault, or remarks on smaller problems."""

    fault: Fault | None
    remarks: tuple[str, ...] = ()


def begin_save(run: Path, step: int, axis: Axis) -> tuple[Unfinished | None, Fault | None]:
    """Make the folder of a checkpoint on rank 0; returns it, or the fault, on all ranks.  Collective over `axis`."""
    unfinished, fault, made = None, None, None
    if axis.rank == 0:
        try:
            unfinished = folder.begin(run, step)
            made = (unfinished.path.name, unfinished.target.name, unfinished.id, sorted(unfinished.others))
        except Exception as error:
            fault = Fault.of(error, 0, run)
    # Rank 0 may wait for its disk, so this must not be a collective with a time limit.
    shared = share(axis, {"made": made, "fault": None if fault is None else fault.plain})
    if unfinished is None and shared["made"] is not None:
        name, target, id, others = shared["made"]
        # Only rank 0, which writes the index, needs the generation.
        unfinished = Unfinished(run / name, run / target, id, 0, others=frozenset(others))
    return unfinished, Fault.first([shared["fault"]])


def carry_out(task: Task, axis: Axis) -> SaveOutcome:
    """Write a checkpoint.  Collective over `axis`, which must have no other use."""
    try:
        reports = gather(axis, _write_own(task, axis.rank))
        result = share(axis, _complete(task, reports) if axis.rank == 0 else None)
    finally:
        if task.unfinished.held is not None:
            task.unfinished.held.close()
    return SaveOutcome(Fault.first([result["fault"]]), tuple(result["remarks"]))


def rehearse(unfinished: Unfinished, axis: Axis) -> Fault | None:
    """Write small files where a checkpoint would be, and remove them; the fault, if any, on all ranks.  Collective."""
    reports = gather(axis, _write_a_little(unfinished.path / pieces_file(axis.rank), axis.rank))
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
    return Fault.first([share(axis, None if fault is None else fault.plain)])


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
        if not task.values.pieces:
            return {"fault": None, "entry": None, "pieces": []}
        write_pieces(path, task.values.pieces, id=task.unfinished.id, writer=rank, compression=task.compression)
        entry = _to_disk(path)
    except Exception as error:
        return {"fault": Fault.of(error, rank, path).plain, "entry": None, "pieces": []}
    return {
        "fault": None,
        "entry": (entry.size, entry.xxh3_128),
        "pieces": [piece.where for piece in task.values.pieces],
    }


def _to_disk(path: Path) -> FileEntry:
    """Sync a file, and hash it at the same time."""
    failed: list[OSError] = []

    def sync() -> None:
        try:
            disk.sync(path)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=sync, name="mpishard-sync")
    try:
        thread.start()
    except RuntimeError:  # the interpreter is about to end and starts no more threads
        sync()
        return FileEntry(*folder.hash_file(path))
    try:
        return FileEntry(*folder.hash_file(path))
    finally:
        thread.join()
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
                    tensors=task.values.tensors,
                    kinds=task.values.kinds,
                    pieces=[
                        piece
                        for rank, each in enumerate(reports)
                        for piece in stored_pieces(map(_where, each["pieces"]), pieces_file(rank))
                    ],
                    facts=task.values.facts,
                    virtual=task.virtual,
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


# -- one after the other ----------------------------------------------------------------------------------------------


class Writer:
    """Carries out the saves of a run one after the other: in the calling thread, or in a thread next to the training.

    Owns the communicators of saves: the thread needs separate ones, and a ledger that the watchdog does not read.
    Collective.
    """

    def __init__(self, folder: Path, mesh: Mesh, on_error: str) -> None:
        self._folder = folder
        self._mesh = mesh
        self._on_error = on_error
        world = mesh.world.comm
        self._family = mesh.family.dependent(world)
        with self._family.creating():
            self._axis: Axis | None = Axis("checkpoint", world.Dup(), Ledger(), family=self._family)
        self._under_way: _BackgroundSave | None = None

    @property
    def axis(self) -> Axis:
        """The axis of saves; ValueError after `close`."""
        if self._axis is None:
            raise ValueError(f"the checkpoints in {self._folder} are closed")
        return self._axis

    def write(self, task: Task, *, in_background: bool) -> Path | None:
        """Write a checkpoint now, or begin to write it next to the training; return its folder. Collective.

        None if it failed with a warning.
        """
        if not in_background:
            return self.conclude(carry_out(task, self.axis), task.step, task.unfinished)
        self._under_way = _BackgroundSave(task, self.axis)
        atexit.register(self._at_exit)  # not before: it keeps this object, and so the mesh
        return task.unfinished.target

    def finish(self) -> None:
        """Wait for the save under way, and raise its error or warn about it, identically on all ranks."""
        save = self._under_way
        if save is not None:
            save.join()  # after an interrupt it is still under way
            self._forget()
            self.conclude(save.outcome(), save.task.step, save.task.unfinished)

    def conclude(self, outcome: SaveOutcome, step: int | None, unfinished: Unfinished | None) -> Path | None:
        """Raise or warn as an outcome asks for, the same on all ranks; returns the folder of what was written."""
        if outcome.fault is None:
            assert unfinished is not None
            if outcome.remarks:
                with raised_on_all(self.axis):  # Python may make errors of warnings
                    for remark in outcome.remarks:
                        self._warn(remark)
            return unfinished.target
        error = outcome.fault.error(step)
        if self._on_error == "raise" or not isinstance(error, OSError):
            raise raised_by_all(error, self._mesh.size)
        with raised_on_all(self.axis):
            self._warn(str(error))
        return None

    def join(self) -> None:
        """Wait for the save under way, without its outcome and without a part in any collective."""
        if self._under_way is not None:
            self._under_way.join()

    def release(self) -> None:
        """Free the communicators, to `rebind` afterwards."""
        self.finish()
        self.axis.free()

    def rebind(self) -> None:
        """Use the communicators of the mesh after its `rebind`.  A save under way has ended or is abandoned."""
        self.join()
        self._forget()
        self._family.close()
        world = self._mesh.world.comm  # all ranks have it, so that a failure below can be ended by revoking it
        self._axis = Axis("checkpoint", world.Dup(), Ledger(), later=world.Dup())

    def revoke(self) -> None:
        """Make a save under way fail on all ranks."""
        if self._axis is not None:
            self._axis.revoke()

    def close(self) -> None:
        """`finish`, and free the communicators; a second call does nothing."""
        if self._axis is None:
            return
        try:
            self.finish()
        finally:
            if self._under_way is None:  # else the wait was interrupted, and the thread needs its communicator
                axis, self._axis = self._axis, None
                axis.free()
                self._family.close()

    def _forget(self) -> None:
        """Hold a save that has ended no longer."""
        self._under_way = None
        atexit.unregister(self._at_exit)

    def _warn(self, text: str) -> None:
        if self._mesh.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=users_level())

    def _at_exit(self) -> None:
        """Finish the last checkpoint of a script that ends without `close`, or print why that fails."""
        if self._under_way is not None:
            save, self._under_way = self._under_way, None
            fault = save.outcome().fault
            if fault is not None:
                self._warn(str(fault.error(save.task.step)))


class _BackgroundSave:
    """One save in a thread."""

    def __init__(self, task: Task, axis: Axis) -> None:
        self.task = task
        self._axis = axis
        self._outcome: SaveOutcome | None = None
        self._error: BaseException | None = None
        # Not Thread.join: up to Python 3.12 it regards the thread as ended after an interrupt.
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="mpishard-checkpoint", daemon=True).start()

    def _run(self) -> None:
        try:
            self._outcome = carry_out(self.task, self._axis)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def join(self) -> None:
        self._ended.wait()

    def outcome(self) -> SaveOutcome:
        """The outcome, after the end."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome
