"""Carries out the saves of a run one after the other: in the calling thread, or in a thread beside the training."""

from __future__ import annotations

import atexit
import threading
import warnings
from pathlib import Path

from mpishard.checkpoint import saver
from mpishard.checkpoint.folder import Unfinished
from mpishard.checkpoint.saver import SaveOutcome, Task
from mpishard.comm.axis import Axis
from mpishard.comm.ledger import Ledger, users_level
from mpishard.comm.mesh import Mesh


class Writer:
    """Owns the communicators of saves, the save under way in a thread, and what is made of an error.

    Parameters
    ----------
    folder : Path
        For messages.
    mesh : Mesh
        Its communicator is duplicated: the thread needs communicators of its own, and a ledger that the watchdog does
        not read.  Collective.
    on_error : {"raise", "warn"}
        As for `Checkpoints`.
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

    def write(self, task: Task, *, beside: bool) -> Path | None:
        """Write a checkpoint now, or begin to write it beside the training.  Collective.

        Returns its folder; None if it failed with a warning.
        """
        if not beside:
            return self.conclude(saver.carry_out(task, self.axis), task.step, task.unfinished)
        self._under_way = _BackgroundSave(task, self.axis)
        atexit.register(self._at_exit)  # not before: it keeps this object, and so the mesh
        return task.unfinished.target

    def finish(self) -> None:
        """Wait for the save under way, and raise its error or warn about it, on all ranks alike."""
        save = self._under_way
        if save is not None:
            save.join()  # after an interrupt it is still under way
            self._forget()
            self.conclude(save.outcome(), save.task.step, save.task.unfinished)

    def conclude(self, outcome: SaveOutcome, step: int | None, unfinished: Unfinished | None) -> Path | None:
        """Raise or warn as an outcome asks for, the same on all ranks; returns the folder of what was written."""
        if outcome.fault is None:
            assert unfinished is not None
            for remark in outcome.remarks:
                self._warn(remark)
            return unfinished.target
        error = outcome.fault.error(step)
        if self._on_error == "raise" or not isinstance(error, OSError):
            raise error
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
        """Make a save under way fail on all ranks.  Not collective."""
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
            self._outcome = saver.carry_out(self.task, self._axis)
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
