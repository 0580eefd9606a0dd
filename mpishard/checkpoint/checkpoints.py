"""The checkpoints of a run, for training scripts and loops."""

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
from mpishard.checkpoint.pieces import COMPRESSIONS
from mpishard.checkpoint.save_interval import Pace
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

    Each checkpoint is a folder ``step-NNNNNNNN`` with one HDF5 file per rank, and an index that shows every tensor and
    every slot of the optimizer as a whole, by name.  It gets its name when all of it is on the disk: a run that dies
    at any moment leaves the last checkpoint or the new one.  ``latest`` points to the newest.

    All methods but `adopt` and `revoke`, and the creation, are collective over the mesh.  As a context manager it is
    closed at the end.

    Parameters
    ----------
    folder : path
        The same for all ranks, on a disk that all ranks see.  Made when it is needed.  Two runs may save into one
        folder, but then the newest checkpoint of both is loaded.
    mesh : Mesh
        Its ranks save and load together.
    every : int or float, optional
        For the training loop, see `due`: steps between checkpoints; or, as a number between 0 and 1, the share of the
        run's time that saves may take, measured by the time that the slowest rank waits for them.  ``every=0.02`` saves
        as often as 2 % of the time allow; with ``asynchronous=True`` ranks wait less.
    keep : int or None
        Number of checkpoints to keep: after each save the older ones are removed; None: all are kept.  Only those saved
        by this object count and, once a checkpoint was loaded from the folder, all that are there: a script that is
        started again without loading removes nothing.
    asynchronous : bool
        The default of `save`.
    compression : {None, "gzip", "lzf"}
        HDF5 filter for all values.
    on_error : {"raise", "warn"}
        If the disk fails in a save: raise OSError on all ranks, or warn on rank 0 and continue.

    Raises
    ------
    ValueError
        On every rank, if an option is invalid or not the same on all.
    TypeError
        On every rank, if `keep` is no whole number or `asynchronous` no flag.
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
        all_options = mesh.world.allgather_object({name: str(value) for name, value in options.items()})
        for name in options:
            if any(other[name] != all_options[0][name] for other in all_options):
                values = ", ".join(other[name] for other in all_options)
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
        self.folder: Path = Path(folder).absolute()  # a script may change the working directory
        self.mesh = mesh
        self.every = every
        self.keep = keep
        self.asynchronous = asynchronous
        self.compression = compression
        self.on_error = on_error
        # The thread needs communicators of its own, and a ledger that the watchdog does not read.
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
        """Whether a checkpoint is due after the step, by `every`; call it once after each step.

        If `every` is a share of the time, the first save follows the first step, to measure how long a save takes.
        Each later save is due when the last one has taken no more than its share of the time since it began.

        Parameters
        ----------
        step : int
            Steps that the run has taken.

        Returns
        -------
        bool
            The same on all ranks.
        """
        if self._pace is None:
            return self.every is not None and step > 0 and step % self.every == 0
        return self._pace.asks(step) and self._pace.decide(
            step, self.mesh.world.allgather_object(self._pace.measured(step))
        )

    def rehearse(self) -> None:
        """Write a small file where checkpoints will be written, and remove it.

        It finds a folder that some rank cannot write, or that is not the same for all ranks, before hours of training.
        Rank 0 also warns, once, of a folder into which other users may write.

        Raises
        ------
        OSError
            On every rank, as `save`; or a warning, by `on_error`.
        ValueError
            On every rank, if the folder is itself a checkpoint.
        """
        axis = self._open()
        self._finish_save()
        unfinished, fault = self._make_folder(0)
        if unfinished is not None:
            fault = saver.rehearse(unfinished, axis)
        if fault is not None:
            self._conclude(Outcome(fault), None, None)
        elif axis.rank == 0:
            warn_of_writers(self.folder)

    def save(self, state: RunState, *, asynchronous: bool | None = None) -> Path | None:
        """Write a checkpoint.

        It first waits for the last save, and raises the error of an asynchronous one.

        Parameters
        ----------
        state : RunState
            ``state.facts["step"]`` is the step in the checkpoint's name.
        asynchronous : bool, optional
            Copy the values to host memory and return; a thread then writes them.  Training may change the values at
            once, and the next call raises errors.  The memory is kept for the next copy.  If MPI does not support
            several threads, the save is synchronous.

        Returns
        -------
        Path or None
            The folder of the checkpoint, also of one that is not written yet; None if it failed with a warning.

        Raises
        ------
        OSError
            On every rank, if the disk of any rank fails and `on_error` is "raise".  Older checkpoints and the state are
            unchanged.
        ValueError
            On every rank, if the ranks are not at the same step, or the folder is itself a checkpoint.
        """
        if self._pace is None:
            return self._save(state, asynchronous)
        began = self._pace.clock()
        path = self._save(state, asynchronous)
        self._pace.note(int(state.facts["step"]), began)
        return path

    def _save(self, state: RunState, asynchronous: bool | None) -> Path | None:
        axis = self._open()
        self._finish_save()
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

        Every file is hashed before HDF5 opens any, and every compressed chunk is decoded once to check that it is
        complete.  Only then the values are read directly into the arrays, without memory for a second copy.  Rank 0
        warns of each damaged checkpoint that is skipped.

        Parameters
        ----------
        state : RunState
            Its arrays are written; its facts are ignored.
        check : callable, optional
            Called on all ranks with the facts of the checkpoint before anything is written; may raise ValueError.

        Returns
        -------
        Contents or None
            The contents of the checkpoint, among them `facts`; None if there is no checkpoint.

        Raises
        ------
        ValueError
            On every rank, if there are only damaged checkpoints, if the newest whole one has other tensors, or from
            `check`.  Nothing was written.
        OSError
            On every rank, if the folder cannot be listed; or, with arrays partly written, if the disk fails after the
            check and no older checkpoint can be read.
        """
        axis = self._open()
        self._finish_save()
        found = load_newest(self.folder, state, self.mesh.world, axis, check)
        if found is not None:
            self.adopt()
        return found

    def adopt(self) -> None:
        """Let `keep` count all checkpoints that are in the folder when the next save begins.  Not collective."""
        self._adopts = True

    @property
    def own(self) -> list[str]:
        """The ids of the checkpoints that `keep` counts, for processes that join the run."""
        return sorted(self._own)

    @own.setter
    def own(self, ids: Iterable[str]) -> None:
        self._own = set(ids)

    def wait(self) -> None:
        """Wait for the save under way; raise or warn as `save` does."""
        self._finish_save()

    def release(self) -> None:
        """`wait`, and free the communicators, to `rebind` afterwards."""
        self._finish_save()
        self._open().free()

    def rebind(self) -> None:
        """Use the communicators of the mesh after its `rebind`.  A save under way has ended or is abandoned."""
        if self._flight is not None:
            self._flight.join()
            self._flight = None
        world = self.mesh.world.comm  # all ranks have it, so that a failure below can be ended by revoking it
        self._axis = Axis("checkpoint", world.Dup(), Ledger(), later=world.Dup())
        if self._pace is not None:
            self._pace.ask_soon()

    def revoke(self) -> None:
        """Make a save under way fail on all ranks, after the death of a rank.  Not collective."""
        if self._axis is not None:
            self._axis.revoke()

    def close(self) -> None:
        """`wait`, and free the communicators; a second call does nothing."""
        if self._axis is None:
            return
        try:
            self._finish_save()
        finally:
            if self._flight is None:  # else the wait was interrupted, and the thread needs its communicator
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
            # Other ranks may not take part in a collective now, but their threads do in this save.
            self._flight.join()

    def _open(self) -> Axis:
        if self._axis is None:
            raise ValueError(f"the checkpoints in {self.folder} are closed")
        return self._axis

    def _begin(self, state: RunState) -> tuple[Unfinished | None, Fault | None, int]:
        """Make the folder of a new checkpoint; returns it, or the fault, and the step, the same on all ranks."""
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
            self._own.add(unfinished.id)  # now: after a death no rank may know that it was finished
        return unfinished, fault, int(step)

    def _make_folder(self, step: int) -> tuple[Unfinished | None, Fault | None]:
        """Make a folder on rank 0; returns it, or the fault, on all ranks."""
        axis = self._open()
        unfinished, fault, made = None, None, None
        if axis.rank == 0:
            try:
                unfinished = folder.begin(self.folder, step)
                made = (unfinished.path.name, unfinished.target.name, unfinished.id)
            except Exception as error:
                fault = Fault.of(error, 0, self.folder)
        # Rank 0 may wait for its disk, so this must not be a collective with a time limit.
        shared = polling.share(axis, {"made": made, "fault": None if fault is None else fault.plain})
        if unfinished is None and shared["made"] is not None:
            name, target, id = shared["made"]
            # Only rank 0, which writes the index, needs the generation.
            unfinished = Unfinished(self.folder / name, self.folder / target, id, 0)
        return unfinished, Fault.first([shared["fault"]])

    def _finish_save(self) -> None:
        """Wait for the save under way; raise its error or warn about it, on all ranks alike."""
        flight = self._flight
        if flight is not None:
            flight.join()  # after an interrupt it is still under way
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
        """Finish the last checkpoint of a script that ends without `close`, or print why that fails."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            fault = flight.outcome().fault
            if fault is not None:
                self._warn(str(fault.error(flight.task.step)))


class _Flight:
    """An asynchronous save, in a thread."""

    def __init__(self, task: Task, axis: Axis) -> None:
        self.task = task
        self._axis = axis
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        # Not Thread.join: up to Python 3.12 it regards the thread as ended after an interrupt.
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
        """The outcome, after the end."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome
