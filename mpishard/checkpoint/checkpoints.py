"""The checkpoints of a run, as a training script sees them."""

from __future__ import annotations

import atexit
import copy
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from mpishard import array as arrays
from mpishard.capabilities import probe
from mpishard.checkpoint import folder, saver
from mpishard.checkpoint.faults import Fault
from mpishard.checkpoint.folder import Unfinished
from mpishard.checkpoint.index import Contents
from mpishard.checkpoint.loading import load_newest
from mpishard.checkpoint.pieces import COMPRESSIONS
from mpishard.checkpoint.saver import Outcome, Task
from mpishard.checkpoint.snapshot import Snapshot, live_parts
from mpishard.collectives import Axis
from mpishard.ledger import Ledger
from mpishard.mesh import Mesh
from mpishard.state import RunState


class Checkpoints:
    """The checkpoints of a run in one folder.

    Each is a folder of its own, ``step-NNNNNNNN``, with one HDF5 file a rank and an index that shows every tensor and
    every slot of the optimizer whole, by name.  It appears under its name when all of it is on the disk; a run that
    dies at any moment leaves the checkpoint before or the new one.  ``latest`` points to the newest.

    All methods but `due` are collective over the mesh, creation too.  As a context manager it is closed at the end.

    Parameters
    ----------
    folder : path
        The same for all ranks, on a disk that all of them see.  Made with the first checkpoint.
    mesh : Mesh
    every : int, optional
        Steps from one checkpoint to the next, for the loop that trains, see `due`.
    keep : int or None
        After each save the oldest ones beyond so many are removed; None: none is.
    asynchronous : bool
        What `save` does if it is not told.
    compression : {None, "gzip", "lzf"}
        Filter of HDF5 for all values.
    on_error : {"raise", "warn"}
        What a save does that the disk does not allow: raise OSError on all ranks, or warn on rank 0 and go on.

    Raises
    ------
    ValueError
        If an option has no sense.
    """

    def __init__(
        self,
        folder: str | Path,
        mesh: Mesh,
        *,
        every: int | None = None,
        keep: int | None = 2,
        asynchronous: bool = False,
        compression: str | None = None,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and (not isinstance(value, int | np.integer) or value < 1):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1, or None")
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression={compression!r} is none of {', '.join(map(str, COMPRESSIONS))}")
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error={on_error!r} must be 'raise' or 'warn'")
        self.folder = Path(folder)
        self.mesh = mesh
        self.every = every
        self.keep = keep
        self.asynchronous = asynchronous
        self.compression = compression
        self.on_error = on_error
        # A thread needs communicators that nobody else uses, and a ledger that the watchdog does not read.
        self._axis: Axis | None = Axis("checkpoint", mesh.world.comm.Dup(), Ledger())
        self._snapshot = Snapshot()
        self._flight: _Flight | None = None
        atexit.register(self._at_exit)

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, every={self.every}, keep={self.keep})"

    def due(self, step: int) -> bool:
        """Whether a checkpoint follows the step, by `every`.  Not collective."""
        return self.every is not None and step > 0 and step % self.every == 0

    def save(self, state: RunState, *, asynchronous: bool | None = None) -> Path | None:
        """Write a checkpoint.

        The save before is waited for first, and its error raised here if it was asynchronous.

        Parameters
        ----------
        state : RunState
            ``state.facts["steps"]`` is the step in the checkpoint's name.
        asynchronous : bool, optional
            Copy the values to host memory and return; a thread writes them meanwhile.  Training may change them at
            once, and errors come with the next call.  The memory is kept for the next copy.  Where MPI does not serve
            several threads, all is done at once.

        Returns
        -------
        Path or None
            The folder of the checkpoint, in which it will be if the save is asynchronous; None if it failed with a
            warning.

        Raises
        ------
        OSError
            On every rank, if the disk of any does not allow it and `on_error` is "raise".  Checkpoints that were there
            are untouched, and so is the state.
        ValueError
            On every rank, if they are not at the same step.
        """
        axis = self._open()
        self._settle()
        unfinished, fault, step = self._begin(state)
        if fault is not None:
            return self._conclude(Outcome(fault), step, None)
        assert unfinished is not None
        beside = (self.asynchronous if asynchronous is None else asynchronous) and probe().threads
        copied = beside or any(arrays.is_device(shard.array) for shard in state.shards)
        parts, problem = [], None
        try:
            parts = self._snapshot.take(state.shards) if copied else live_parts(state.shards)
        except Exception as error:
            problem = error
        task = Task(
            unfinished,
            step,
            tensors={spec.name: spec.shape for spec in state.specs},
            kinds={shard.kind: np.dtype(shard.array.dtype) for shard in state.shards},
            facts=copy.deepcopy(dict(state.facts)),
            parts=parts,
            keep=self.keep,
            compression=self.compression,
            problem=problem,
        )
        if beside:
            self._flight = _Flight(task, axis)
            return unfinished.target
        return self._conclude(saver.carry_out(task, axis), step, unfinished)

    def load(self, state: RunState, *, check: Callable[[Mapping[str, Any]], None] | None = None) -> Contents | None:
        """Read the newest whole checkpoint into the arrays of `state`, whatever layout wrote it.

        Every file is hashed before HDF5 opens any.  Rank 0 warns of each damaged checkpoint that is passed over.

        Parameters
        ----------
        state : RunState
            Its arrays are written; its facts are not looked at.
        check : callable, optional
            Called on all ranks with the facts of the checkpoint before anything is written; may raise ValueError.

        Returns
        -------
        Contents or None
            What the checkpoint says, `facts` first of all; None if there is no checkpoint.

        Raises
        ------
        ValueError
            On every rank: there are only damaged ones, or the newest whole one is of other tensors, or `check` says so.
        OSError
            On every rank, if the folder cannot be listed.
        """
        axis = self._open()
        self._settle()
        return load_newest(self.folder, state, self.mesh.world, axis, check)

    def wait(self) -> None:
        """Return when the save under way has ended; raise or warn as `save` would have."""
        self._settle()

    def close(self) -> None:
        """`wait`, and free the communicators; a second call does nothing."""
        if self._axis is None:
            return
        atexit.unregister(self._at_exit)
        axis, self._axis = self._axis, None
        try:
            self._settle()
        finally:
            axis.free()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._flight is not None:
            # Other ranks may not be in a collective now, but their threads are in this save.
            self._flight.join()

    def _open(self) -> Axis:
        if self._axis is None:
            raise ValueError(f"the checkpoints in {self.folder} are closed")
        return self._axis

    def _begin(self, state: RunState) -> tuple[Unfinished | None, Fault | None, int]:
        """Rank 0 makes the folder; all ranks learn where it is, or what went wrong."""
        world, unfinished, fault = self.mesh.world, None, None
        step: Any = state.facts.get("steps")
        sound = isinstance(step, int | np.integer) and step >= 0
        if world.rank == 0 and sound:
            try:
                unfinished = folder.begin(self.folder, int(step))
            except Exception as error:
                fault = Fault.of(error, 0, self.folder)
        made = None if unfinished is None else (unfinished.path.name, unfinished.target.name, unfinished.id)
        told = world.exchange((step, made, None if fault is None else fault.plain))
        steps = [other for other, _, _ in told]
        if not isinstance(step, int | np.integer) or steps != [step] * world.size:
            if unfinished is not None:
                saver.discard(unfinished)
            raise ValueError(
                f"facts['steps'] must be one number on all ranks, got {', '.join(map(str, steps))} by rank"
            )
        if unfinished is None and told[0][1] is not None:
            name, target, id = told[0][1]
            # Only rank 0, which writes the index, needs the generation.
            unfinished = Unfinished(self.folder / name, self.folder / target, id, 0)
        return unfinished, Fault.first([told[0][2]]), int(step)

    def _settle(self) -> None:
        """Wait for the save under way and raise or warn about its error, on all ranks alike."""
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        self._conclude(flight.outcome(), flight.task.step, flight.task.unfinished)

    def _conclude(self, outcome: Outcome, step: int, unfinished: Unfinished | None) -> Path | None:
        if outcome.fault is None:
            assert unfinished is not None
            for remark in outcome.remarks:
                self._warn(remark)
            return unfinished.target
        error = outcome.fault.error(step)
        if self.on_error == "raise" or not isinstance(error, OSError):
            raise error
        self._warn(str(error))
        return None

    def _warn(self, text: str) -> None:
        if self.mesh.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _at_exit(self) -> None:
        """A script that ends without `close` still gets its last checkpoint, or hears why not."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            fault = flight.outcome().fault
            if fault is not None:
                self._warn(str(fault.error(flight.task.step)))


class _Flight:
    """A save under way in a thread."""

    def __init__(self, task: Task, axis: Axis) -> None:
        self.task = task
        self._axis = axis
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mpishard-checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = saver.carry_out(self.task, self._axis)
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        self._thread.join()

    def outcome(self) -> Outcome:
        """How it ended, once it has."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome
