"""The checkpoints of a run, as a training script sees them."""

from __future__ import annotations

import atexit
import copy
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from mpishard.arguments import flag, integer
from mpishard.backend import array as arrays
from mpishard.checkpoint import folder, polling, saver
from mpishard.checkpoint.faults import Fault
from mpishard.checkpoint.folder import Unfinished
from mpishard.checkpoint.index import Contents
from mpishard.checkpoint.loading import load_newest
from mpishard.checkpoint.pace import Pace
from mpishard.checkpoint.pieces import COMPRESSIONS
from mpishard.checkpoint.saver import Outcome, Task
from mpishard.checkpoint.snapshot import Snapshot, live_parts
from mpishard.comm.axis import Axis
from mpishard.comm.capabilities import probe
from mpishard.comm.ledger import Ledger, users_level
from mpishard.comm.mesh import Mesh
from mpishard.io.files import warn_of_writers
from mpishard.layout.run_state import RunState


class Checkpoints:
    """The checkpoints of a run in one folder.

    Each is a folder of its own, ``step-NNNNNNNN``, with one HDF5 file a rank and an index that shows every tensor and
    every slot of the optimizer whole, by name.  It appears under its name when all of it is on the disk; a run that
    dies at any moment leaves the checkpoint before or the new one.  ``latest`` points to the newest.

    All methods but `adopt` and `revoke` are collective over the mesh, creation too.  As a context manager it is closed
    at the end.

    Parameters
    ----------
    folder : path
        The same for all ranks, on a disk that all of them see.  Made when it is needed.  Two runs may save into
        one folder, each beside what the other has, but then the newest of both is loaded.
    mesh : Mesh
    every : int or float, optional
        For the loop that trains, see `due`: steps from one checkpoint to the next; or, as a number between 0 and 1, the
        share of the run's time that saves may take, by the time that they keep the slowest rank.  ``every=0.02`` with
        ``asynchronous=True``, which keeps ranks for less, saves as often as 2 % of the time allow.
    keep : int or None
        After each save the oldest ones beyond so many are removed; None: none is.  Only those that were saved here
        count, and once something was loaded from the folder those that were there: a script that is started again
        without loading takes nothing away.
    asynchronous : bool
        What `save` does if it is not told.
    compression : {None, "gzip", "lzf"}
        Filter of HDF5 for all values.
    on_error : {"raise", "warn"}
        What a save does that the disk does not allow: raise OSError on all ranks, or warn on rank 0 and go on.

    Raises
    ------
    ValueError
        On every rank, if an option has no sense or is not the same on all.
    """

    def __init__(
        self,
        folder: str | Path,
        mesh: Mesh,
        *,
        every: float | None = None,
        keep: int | None = 2,
        asynchronous: bool = False,
        compression: str | None = None,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        options = {
            "folder": str(folder),
            "every": every,
            "keep": keep,
            "asynchronous": asynchronous,
            "compression": compression,
            "on_error": on_error,
        }
        told = mesh.world.allgather_object({name: str(value) for name, value in options.items()})
        for name in options:
            if any(other[name] != told[0][name] for other in told):
                values = ", ".join(other[name] for other in told)
                raise ValueError(f"{name} must be the same on all ranks, got {values} by rank")
        if keep is not None:
            keep = integer("keep", keep, least=1)
        asynchronous = flag("asynchronous", asynchronous)
        in_steps = not isinstance(every, bool) and isinstance(every, int | np.integer)
        if every is not None and not (
            every >= 1 if in_steps else isinstance(every, float | np.floating) and 0 < every < 1
        ):
            raise ValueError(
                f"every={every!r} must be a whole number of steps of at least 1, a share of the run's time above 0 and "
                "below 1, or None"
            )
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression={compression!r} is none of {', '.join(map(str, COMPRESSIONS))}")
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error={on_error!r} must be 'raise' or 'warn'")
        self.folder: Path = Path(folder).absolute()  # a script may change its directory
        self.mesh = mesh
        self.every = every
        self.keep = keep
        self.asynchronous = asynchronous
        self.compression = compression
        self.on_error = on_error
        # A thread needs communicators that nobody else uses, and a ledger that the watchdog does not read.
        self._axis: Axis | None = Axis("checkpoint", mesh.world.comm.Dup(), Ledger())
        self._snapshot = Snapshot()
        self._pace = None if every is None or in_steps else Pace(float(every))
        self._flight: _Flight | None = None
        self._own: set[str] = set()  # ids of the checkpoints that `keep` counts
        self._adopts = False
        atexit.register(self._at_exit)

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, every={self.every}, keep={self.keep})"

    def due(self, step: int) -> bool:
        """Whether a checkpoint follows the step, by `every`; to be asked once after each step.

        Where `every` is a share of the time, the first one follows the first step, since what a save takes is measured;
        then each save is followed by so much time without one that it took no more than the share.
        """
        if self._pace is None:
            return self.every is not None and step > 0 and step % self.every == 0
        return self._pace.asks(step) and self._pace.decide(
            step, self.mesh.world.allgather_object(self._pace.measured(step))
        )

    def rehearse(self) -> None:
        """Write a little where checkpoints will be written, and remove it.

        So that a folder that some rank cannot write, or sees another one than the rest, is found before hours of
        training.  Rank 0 warns, once, of a folder that other users may write into, too.

        Raises
        ------
        OSError
            On every rank, as `save`; or a warning, as `on_error` has it.
        ValueError
            On every rank, if the folder is itself a checkpoint.
        """
        axis = self._open()
        self._settle()
        unfinished, fault = self._make_folder(0)
        if unfinished is not None:
            fault = saver.rehearse(unfinished, axis)
        if fault is not None:
            self._conclude(Outcome(fault), None, None)
        elif axis.rank == 0:
            warn_of_writers(self.folder)

    def save(self, state: RunState, *, asynchronous: bool | None = None) -> Path | None:
        """Write a checkpoint.

        The save before is waited for first, and its error raised here if it was asynchronous.

        Parameters
        ----------
        state : RunState
            ``state.facts["step"]`` is the step in the checkpoint's name.
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
            On every rank, if they are not at the same step, or the folder is itself a checkpoint.
        """
        if self._pace is None:
            return self._save(state, asynchronous)
        began = self._pace.clock()
        path = self._save(state, asynchronous)
        self._pace.note(int(state.facts["step"]), began)
        return path

    def _save(self, state: RunState, asynchronous: bool | None) -> Path | None:
        axis = self._open()
        self._settle()
        unfinished, fault, step = self._begin(state)
        if fault is not None:
            return self._conclude(Outcome(fault), step, None)
        assert unfinished is not None
        beside = (self.asynchronous if asynchronous is None else asynchronous) and probe().threads
        copied = beside or any(arrays.is_device(shard.array) for shard in state.shards)
        parts, facts, problem = [], {}, None
        try:
            facts = copy.deepcopy(dict(state.facts))
            parts = self._snapshot.take(state.shards) if copied else live_parts(state.shards)
        except Exception as error:
            problem = error
        task = Task(
            unfinished,
            step,
            tensors={spec.name: spec.shape for spec in state.specs},
            kinds={shard.kind: np.dtype(shard.array.dtype) for shard in state.shards},
            facts=facts,
            parts=parts,
            keep=self.keep,
            own=frozenset(self._own),
            compression=self.compression,
            problem=problem,
        )
        if beside:
            self._flight = _Flight(task, axis)
            return unfinished.target
        return self._conclude(saver.carry_out(task, axis), step, unfinished)

    def load(self, state: RunState, *, check: Callable[[Mapping[str, Any]], None] | None = None) -> Contents | None:
        """Read the newest whole checkpoint into the arrays of `state`, whatever layout wrote it.

        Every file is hashed before HDF5 opens any, and every chunk of compressed values is decoded once to see that it
        has them all; only then are values read, straight into place, without memory for a second copy.  Rank 0 warns of
        each damaged checkpoint that is passed over.

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
            Nothing was written.
        OSError
            On every rank, if the folder cannot be listed; or, with arrays partly written, if a disk fails that gave the
            same bytes a moment before and no older checkpoint can be read.
        """
        axis = self._open()
        self._settle()
        found = load_newest(self.folder, state, self.mesh.world, axis, check)
        if found is not None:
            self.adopt()
        return found

    def adopt(self) -> None:
        """Let `keep` count all that is in the folder when the next save begins, whoever saved it.  Not collective."""
        self._adopts = True

    @property
    def own(self) -> list[str]:
        """Ids of those that `keep` counts, for ranks that come to the run."""
        return sorted(self._own)

    @own.setter
    def own(self, ids: Iterable[str]) -> None:
        self._own = set(ids)

    def wait(self) -> None:
        """Return when the save under way has ended; raise or warn as `save` would have."""
        self._settle()

    def release(self) -> None:
        """`wait`, and free the communicators, to `rebind` afterwards."""
        self._settle()
        self._open().free()

    def rebind(self) -> None:
        """Be of the mesh as it is now, which has moved to other ranks.  A save under way has ended or is given up."""
        if self._flight is not None:
            self._flight.join()
            self._flight = None
        world = self.mesh.world.comm  # has been agreed on: what fails half-way can be revoked through it
        self._axis = Axis("checkpoint", world.Dup(), Ledger(), later=world.Dup())
        if self._pace is not None:
            self._pace.ask_soon()

    def revoke(self) -> None:
        """Make a save under way fail, on all ranks, since one has died.  Not collective."""
        if self._axis is not None:
            self._axis.revoke()

    def close(self) -> None:
        """`wait`, and free the communicators; a second call does nothing."""
        if self._axis is None:
            return
        try:
            self._settle()
        finally:
            if self._flight is None:  # else this was interrupted, and the thread needs its communicator
                atexit.unregister(self._at_exit)
                axis, self._axis = self._axis, None
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
        """The folder of a new checkpoint, or what went wrong, and the step, on which all ranks must agree."""
        step: Any = state.facts.get("step")
        sound = isinstance(step, int | np.integer) and step >= 0
        steps = self.mesh.world.allgather_object(int(step) if sound else str(step))
        if not sound or any(other != step for other in steps):
            raise ValueError(
                "facts['step'] must be one number of at least 0, the same on all ranks, got "
                f"{', '.join(map(str, steps))} by rank"
            )
        unfinished, fault = self._make_folder(int(step))
        if unfinished is not None:
            if self._adopts:
                self._own |= unfinished.others
            self._adopts = False
            self._own.add(unfinished.id)  # now: a death may leave nobody who knows that it was finished
        return unfinished, fault, int(step)

    def _make_folder(self, step: int) -> tuple[Unfinished | None, Fault | None]:
        """Rank 0 makes a folder to be filled; all ranks learn where it is, or what went wrong."""
        axis = self._open()
        unfinished, fault, made = None, None, None
        if axis.rank == 0:
            try:
                unfinished = folder.begin(self.folder, step)
                made = (unfinished.path.name, unfinished.target.name, unfinished.id)
            except Exception as error:
                fault = Fault.of(error, 0, self.folder)
        # Rank 0 may have had to wait for its disk, so that no collective with a time limit will do.
        told = polling.share(axis, {"made": made, "fault": None if fault is None else fault.plain})
        if unfinished is None and told["made"] is not None:
            name, target, id = told["made"]
            # Only rank 0, which writes the index, needs the generation.
            unfinished = Unfinished(self.folder / name, self.folder / target, id, 0)
        return unfinished, Fault.first([told["fault"]])

    def _settle(self) -> None:
        """Wait for the save under way and raise or warn about its error, on all ranks alike."""
        flight = self._flight
        if flight is not None:
            flight.join()  # an interrupt leaves it under way
            self._flight = None
            self._conclude(flight.outcome(), flight.task.step, flight.task.unfinished)

    def _conclude(self, outcome: Outcome, step: int | None, unfinished: Unfinished | None) -> Path | None:
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
            warnings.warn(text, RuntimeWarning, stacklevel=users_level())

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
        # Not Thread.join, which up to Python 3.12 takes the thread for ended once it was interrupted.
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="mpishard-checkpoint", daemon=True).start()

    def _run(self) -> None:
        try:
            self._outcome = saver.carry_out(self.task, self._axis)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def join(self) -> None:
        self._ended.wait()

    def outcome(self) -> Outcome:
        """How it ended, once it has."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome
