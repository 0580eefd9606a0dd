"""The checkpoints of a run, for training scripts and loops: `Checkpoints`, its options, and when it saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np

from mpishard.arguments import flag, integer, path, shown
from mpishard.checkpoint.folder import Retention, best_step
from mpishard.checkpoint.load import load_newest
from mpishard.checkpoint.pieces import COMPRESSIONS, Contents
from mpishard.checkpoint.save import SaveOutcome, Snapshot, Task, Writer, begin_save, rehearse
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis
from mpishard.comm.capabilities import probe
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.io.files import warn_of_writers
from mpishard.launch.lease import FolderLease
from mpishard.layout.run_state import RunState, check_state


@dataclass(frozen=True)
class CheckpointOptions:
    """The options of `Checkpoints`, whose docstring explains each; TypeError or ValueError if one is invalid."""

    folder: str | Path
    every: float | None = None
    keep: int | None = 2
    asynchronous: bool = False
    compression: str | None = None
    virtual: bool = False
    on_error: Literal["raise", "warn"] = "raise"
    best: Literal["validation loss"] | None = None

    def __post_init__(self) -> None:
        if self.keep is not None:
            object.__setattr__(self, "keep", integer("keep", self.keep, least=1))
        object.__setattr__(self, "asynchronous", flag("asynchronous", self.asynchronous))
        object.__setattr__(self, "virtual", flag("virtual", self.virtual))
        check_every(self.every)
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression={self.compression!r} is none of {', '.join(map(str, COMPRESSIONS))}")
        if self.on_error not in ("raise", "warn"):
            raise ValueError(f"on_error={self.on_error!r} must be 'raise' or 'warn'")
        if self.best not in (None, "validation loss"):
            raise ValueError(f"best={self.best!r} must be 'validation loss', or None")
        # A script may change the working directory.
        object.__setattr__(self, "folder", path("folder", self.folder).absolute())


class Checkpoints:
    """The checkpoints of a run in one folder.

    Each checkpoint is a folder ``step-NNNNNNNN`` with one HDF5 file per rank, and an index.  It gets its name when all
    of it is on the disk: a run that dies at any moment leaves the last checkpoint or the new one.  ``latest`` points to
    the newest.

    All methods but `adopt` and `revoke`, and the creation, are collective over the mesh.  As a context manager it is
    closed at the end.

    Parameters
    ----------
    folder : path
        The same for all ranks, on a disk that all ranks see.  Made when it is needed.  A run that begins refuses the
        folder of another run that lives, and names its host and job: the newest checkpoint of both would be loaded.
    mesh : Mesh
        Its ranks save and load together.
    every : int or float, optional
        For the training loop, see `due`: steps between checkpoints; or, as a number between 0 and 1, the share of the
        run's time that saves may take, measured by the time that the slowest rank waits for them.  ``every=0.02`` saves
        as often as 2 % of the time allow; with ``asynchronous=True`` ranks wait less.
    keep : int or None
        Number of checkpoints to keep: after each save the older ones are removed; None: all are kept.  Only those saved
        by this object count and, once a checkpoint was loaded from the folder, all that exist: a script that is
        started again without loading removes nothing.
    asynchronous : bool
        The default of `save`.
    compression : {None, "gzip"}
        HDF5 filter for all values.
    virtual : bool
        The index also shows every tensor, and every slot of the optimizer, whole and by name, as virtual data sets for
        other HDF5 programs: about 0.3 ms each on rank 0.  ``mpishard convert`` makes them later.
    on_error : {"raise", "warn"}
        If the disk fails in a save: raise OSError on all ranks, or warn on rank 0 and continue.
    best : {None, "validation loss"}
        Also save whenever the validation loss of `optimize` is lower than ever before, and keep that checkpoint in
        addition to the newest: the link ``best`` points to it, and ``load_checkpoint(folder / "best", ...)`` reads it.

    Raises
    ------
    ValueError
        On every rank, if an option is invalid or not the same on all.
    TypeError
        On every rank, if `folder` is no path, `keep` no whole number, or `asynchronous` or `virtual` no flag; on this
        rank, if `mesh` is no Mesh.
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
        virtual: bool = False,
        on_error: Literal["raise", "warn"] = "raise",
        best: Literal["validation loss"] | None = None,
    ) -> None:
        with opening(checked_mesh(mesh).world, "Checkpoints") as same:
            options = CheckpointOptions(folder, every, keep, asynchronous, compression, virtual, on_error, best)
            same |= {**asdict(options), "folder": str(folder)}
        self.folder: Path = Path(options.folder)
        self.mesh = mesh
        self.asynchronous = options.asynchronous
        self.compression = options.compression
        self.virtual = options.virtual
        self._options = options
        self._interval = save_interval(options.every)
        self._retention = Retention(options.keep)
        self._snapshot = Snapshot()
        self._writer = Writer(self.folder, mesh, options.on_error)
        self._lease: FolderLease | None = None
        self._has_holder = False  # the first rank has taken the lease, if it could

    def __repr__(self) -> str:
        return f"Checkpoints({str(self.folder)!r}, every={self.every}, keep={self.keep})"

    @property
    def every(self) -> float | None:
        """As given; read-only, as `keep` and `on_error` are, since all ranks have agreed on it.  Not collective."""
        return self._options.every

    @property
    def keep(self) -> int | None:
        """As given.  Not collective."""
        return self._options.keep

    @property
    def on_error(self) -> Literal["raise", "warn"]:
        """As given.  Not collective."""
        return self._options.on_error

    @property
    def best(self) -> Literal["validation loss"] | None:
        """As given.  Not collective."""
        return self._options.best

    @property
    def best_step(self) -> int:
        """The step of the checkpoint that ``best`` points to, as the first rank sees it; 0 without one."""
        axis = self._writer.axis
        return int(axis.allgather_object(best_step(self.folder) if axis.rank == 0 else 0)[0])

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
        return self._interval.due(step, self.mesh.world)

    def rehearse(self) -> None:
        """Write a small file where checkpoints will be written, and remove it; the folder is this run's until `close`.

        It finds a folder that some rank cannot write, or that is not the same for all ranks, before hours of training.
        Rank 0 also warns, once, of a folder into which other users may write.

        Raises
        ------
        OSError
            On every rank, as `save`; or a warning, by `on_error`.
        ValueError
            On every rank, if the folder is itself a checkpoint, or another run that lives uses it.
        """
        axis = self._writer.axis
        self.wait()
        unfinished, fault = begin_save(self.folder, 0, axis)
        if unfinished is not None:
            fault = rehearse(unfinished, axis)
        if fault is not None:
            self._writer.conclude(SaveOutcome(fault), None, None)
            return
        with raised_on_all(axis):
            if axis.rank == 0:
                warn_of_writers(self.folder)
                self._lease = self._lease or FolderLease.take(self.folder)
        self._has_holder = True

    def save(self, state: RunState, *, asynchronous: bool | None = None, best: bool = False) -> Path | None:
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
        best : bool
            Whether the link ``best`` shall point to it, too.

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
        began = self._interval.clock()
        saved = self._save(state, asynchronous, best)
        self._interval.note(int(state.facts["step"]), began)
        return saved

    def _save(self, state: RunState, asynchronous: bool | None, best: bool) -> Path | None:
        axis = self._writer.axis
        self.wait()
        with opening(self.mesh.world, "Checkpoints.save") as same:
            step = _step_of(state)
            same |= {f"facts[{name!r}]": "there" for name in state.facts}
            same |= {"facts['step']": step, "asynchronous": asynchronous, "best": best}
        unfinished, fault = begin_save(self.folder, step, axis)
        if fault is not None:
            return self._writer.conclude(SaveOutcome(fault), step, None)
        assert unfinished is not None
        self._retention.begin(unfinished)
        in_background = (self.asynchronous if asynchronous is None else asynchronous) and probe().threads
        values, problem = self._snapshot.values(state, copied=in_background)
        retained = self._retention.retained(best)
        task = Task(unfinished, step, values, retained, self.compression, self.virtual, problem)
        return self._writer.write(task, in_background=in_background)

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
        axis = self._writer.axis
        self.wait()
        with opening(self.mesh.world, "Checkpoints.load") as same:
            check_state("state", state)
            same["check"] = check is not None
        found = load_newest(self.folder, state, self.mesh, axis, check)
        if found is not None:
            self.adopt()
        return found

    def adopt(self) -> None:
        """Let `keep` count all checkpoints that are in the folder when the next save begins.  Not collective."""
        self._retention.adopt()

    @property
    def own(self) -> list[str]:
        """The ids of the checkpoints that `keep` counts, for processes that join the run."""
        return sorted(self._retention.ids)

    @own.setter
    def own(self, ids: Iterable[str]) -> None:
        self._retention.ids = set(ids)

    def wait(self) -> None:
        """Wait for the save under way; raise or warn as `save` does."""
        self._writer.finish()

    def release(self) -> None:
        """`wait`, and free the communicators, to `rebind` afterwards."""
        self._writer.release()

    def rebind(self) -> None:
        """Use the communicators of the mesh after its `rebind`.  A save under way has ended or is abandoned."""
        self._writer.rebind()
        self._interval.ranks_changed()
        if self._has_holder and self.mesh.rank == 0 and self._lease is None:  # the first rank so far has left, or died
            self._lease = FolderLease.take(self.folder, succeeds=True)

    def revoke(self) -> None:
        """Make a save under way fail on all ranks, after the death of a rank.  Not collective."""
        self._writer.revoke()

    def close(self) -> None:
        """`wait`, and free the communicators; a second call does nothing."""
        try:
            self._writer.close()
        except Exception:  # not after an interrupt, where the last save goes on
            self._end_lease()
            raise
        self._end_lease()

    def _end_lease(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            # Other ranks may not take part in a collective now, but their threads do in this save.
            self._writer.join()
            self._end_lease()


def _step_of(state: RunState) -> int:
    """The step of the state; TypeError or ValueError unless it is a state with a step."""
    check_state("state", state)
    step: Any = state.facts.get("step")
    if not isinstance(step, int | np.integer) or step < 0:
        raise ValueError(f"facts['step']={shown(step)} must be a whole number of at least 0")
    return int(step)


# When to save: every given number of steps, or such that saves take no more than a share of a run's time.
#
# If a save has kept the slowest rank for s seconds, the next one is due s / share seconds after that save began.  All
# saves but the last together then take at most the share of the run.  The first save follows the first step.
#
# All ranks must decide equally, but without communication after every step.  So they exchange their measurements at
# some steps only: after half of the estimated steps until the next save, then after half of the remaining ones, and so
# on; at the latest after a hundred steps, since steps may become slower.

_MOST_STEPS = 100


@dataclass(frozen=True)
class Measured:
    """One rank's seconds: in the last save, since that save began, and per step since it ended."""

    stall: float
    elapsed: float
    step: float


class Pace:
    """Saves so often that they take no more than a share of the run's time, between 0 and 1."""

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.share = share
        self.clock = clock
        self._began = self._ended = 0.0
        self._saved: int | None = None
        self._next = 1
        self._asked = 0

    def note(self, step: int, began: float) -> None:
        """Note that a save after `step`, which began at the time `began`, is over."""
        self._began, self._ended = began, self.clock()
        self._saved, self._next = step, step + 1

    def ranks_changed(self) -> None:
        """Exchange measurements after the next step: other ranks take part from now on."""
        self._next = 1

    def due(self, step: int, world: Axis) -> bool:
        """Return True if a save is due after the step. Collective."""
        return self.asks(step) and self.decide(step, world.allgather_object(self.measured(step)))

    def asks(self, step: int) -> bool:
        """Return True if the ranks exchange measurements after this step; the same on all ranks."""
        if step < self._asked:  # another run begins
            self._next = 1
        self._asked = step
        return step >= self._next

    def measured(self, step: int) -> Measured | None:
        """The measurements of this rank; None if it has taken part in no save."""
        if self._saved is None:
            return None
        now = self.clock()
        return Measured(self._ended - self._began, now - self._began, (now - self._ended) / max(1, step - self._saved))

    def decide(self, step: int, measurements: Sequence[Measured | None]) -> bool:
        """Return True to save after this step, from the measurements of all ranks."""
        known = [each for each in measurements if each is not None]
        if not known:
            return True
        left = max(each.stall for each in known) / self.share - min(each.elapsed for each in known)
        if left <= 0:
            return True
        a_step = max(each.step for each in known)
        self._next = step + (max(1, int(min(left / a_step / 2, _MOST_STEPS))) if a_step > 0 else 1)
        return False


class InSteps:
    """Saves after every `every` steps, or never; the interface of `Pace`."""

    def __init__(self, every: int | None) -> None:
        self.every = every

    def due(self, step: int, world: Axis) -> bool:
        return self.every is not None and step > 0 and step % self.every == 0

    def clock(self) -> float:
        """Seconds since any fixed moment."""
        return 0.0

    def note(self, step: int, began: float) -> None:
        """Note that a save after `step`, which began at the time `began`, is over."""

    def ranks_changed(self) -> None:
        """Note that other ranks take part from now on."""


def save_interval(every: float | None) -> InSteps | Pace:
    """The object that decides when to save, by `Checkpoints`' option `every`."""
    check_every(every)
    return InSteps(every) if every is None or _in_steps(every) else Pace(float(every))


def check_every(every: float | None) -> None:
    """Raise ValueError unless `every` is a number of steps, a share of the time, or None."""
    sound = every is None or (
        every >= 1 if _in_steps(every) else isinstance(every, float | np.floating) and 0 < every < 1
    )
    if not sound:
        raise ValueError(
            f"every={every!r} must be a whole number of steps of at least 1, a share of the run's time above 0 and "
            "below 1, or None"
        )


def _in_steps(every: object) -> TypeGuard[int]:
    return not isinstance(every, bool) and isinstance(every, int | np.integer)
