"""Reports of a process of a supervised job to its supervisor: its step, why its script failed, and how it ended.

A script has ended in order if it ran to its end or called ``sys.exit``, not if it raised an exception or was killed.
`mpishard.launch.exit_codes` finds that out, and `mpishard.comm.abort` calls this for an exception.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from mpi4py import MPI

from mpishard.comm.abort import abort_on_exception, step_under_way
from mpishard.launch.exit_codes import ScriptEnding
from mpishard.launch.job_notes import ECHO, ON_ALL_RANKS, Ended, Failure, JobNotes, RunLost, patiently
from mpishard.launch.processes import die_with_single_threaded_parent, end_with_daemon
from mpishard.launch.script import is_refusal, place_of
from mpishard.launch.signals import Interrupts

_POLL_S = 0.25


def watch_script() -> None:
    """Report the progress and the end of this process's script to the supervisor, if any.

    Importing mpishard calls this. An atexit function registered before that runs after the end has been reported.
    """
    run = JobNotes.to_report()
    if run is not None:
        Reports.this = Reports(run)


def tell(note: Callable[..., None], *values: Any) -> None:
    """Write a note to the supervisor, by a method of `JobNotes`, if this process has one."""
    if Reports.this is not None:
        Reports.this.write(note, *values)


def leave_to_others(silent: bool = True) -> None:
    """Set whether other processes report for the job from now on, if any but the first may."""
    if Reports.this is not None:
        Reports.this.is_silent = silent


def lead(leads: bool) -> None:
    """Set whether this process is the first worker of an elastic run, who reports the steps: the first may be none."""
    if Reports.this is not None:
        Reports.this.leads = leads


def note_training(under_way: bool, tells: bool) -> None:
    """Note that training begins or has ended; `tells`: this process informs the supervisor."""
    if Reports.this is not None:
        Reports.this.has_trained = not under_way
    if tells:
        tell(JobNotes.note_training, under_way)


def note_cell(ranks: int) -> None:
    """Note that the job's mesh needs a multiple of this number of ranks, its tensor times its pipeline size."""
    if Reports.this is not None and Reports.this.is_first:
        tell(JobNotes.note_cell, ranks)


def take_restart() -> bool:
    """Return True, to one caller only, if the supervisor has started this process's job again."""
    reports = Reports.this
    restarted = reports is not None and reports.restarted
    if reports is not None:
        reports.restarted = False
    return restarted


def give_up() -> None:
    """Report the exit code of a script that has ended in the middle of a run, unless the code is 0."""
    if Reports.this is not None:
        Reports.this.give_up()


class Reports:
    """Writes the reports of this process to the folder of the run.

    Which process reports for the job, `JobNotes.is_reporter` says.
    """

    this: ClassVar[Reports | None] = None
    leads = False  # see `lead`

    def __init__(self, run: JobNotes) -> None:
        self.is_silent = False
        self.restarted: bool = run.is_restart  # until somebody has reported it
        self.has_trained = False
        self._run = run
        self._process = os.getpid()
        self.is_first = MPI.COMM_WORLD.rank == 0 and MPI.Comm.Get_parent() == MPI.COMM_NULL
        self._ending = ScriptEnding()
        self._stop = threading.Event()
        die_with_single_threaded_parent()
        if self.is_first:
            run.note_started()
        Interrupts.is_ending = lambda: run.is_ending
        abort_on_exception(note=self._note_failure, note_abort=self._note_abort)
        atexit.register(self._end)
        self._thread = threading.Thread(
            target=self._follow, args=(self._stop.wait, step_under_way), name="mpishard-progress", daemon=True
        )
        self._thread.start()

    def _speaks(self) -> bool:
        return self._run.is_reporter(self.is_first, self.is_silent)

    def _note_failure(self, error: BaseException, step: int) -> None:
        # No failures of this script: a death elsewhere causes errors of MPI, and an interrupt comes from outside.
        if os.getpid() != self._process or isinstance(error, MPI.Exception | RunLost):
            return
        if not isinstance(error, Exception):
            return
        with contextlib.suppress(OSError):  # the traceback is still to be printed
            refused = type(error) in (ValueError, TypeError) and is_refusal(error)
            failure = Failure(
                type(error).__name__,
                str(error)[:500],
                place_of(error),
                step,
                self.has_trained,
                on_all_ranks=refused and getattr(error, ON_ALL_RANKS, 0) == MPI.COMM_WORLD.size,
            )
            self._run.note_failure(failure, echo=hasattr(error, ECHO))

    def _note_abort(self) -> None:
        if os.getpid() == self._process:
            self.write(JobNotes.note_aborted)

    def _follow(self, over: Callable[[float], bool], step_now: Callable[[], int]) -> None:
        """Report the current step until `over` of some seconds is True, and end this process when its run is over.

        Another optimizer of the script may begin with step 1 again.
        """
        noted = 0
        while not over(_POLL_S):
            step = step_now()
            with contextlib.suppress(OSError):  # a shared disk may fail for a while
                if self._run.is_over:  # this host was cut off, and the supervisor could not end the process
                    end_with_daemon()
                if step != noted:
                    noted = step
                    if self.leads or self._speaks():
                        self._run.note_step(step)

    def _end(self) -> None:
        """Report the end of the script; runs after all atexit functions that were registered later."""
        if os.getpid() != self._process:  # a fork
            return
        self._stop.set()
        self._thread.join()
        if self._ending.failed:
            return
        if patiently(self._speaks):
            step = step_under_way()
            if step:
                self.write(JobNotes.note_step, step)
            patiently(lambda: self._run.note_ended(Ended(self._ending.code)))
        else:
            self.give_up()

    def write(self, note: Callable[..., None], *values: Any) -> None:
        """Write a note, by a method of `JobNotes`; a disk that fails does not end the run."""
        with contextlib.suppress(OSError):
            note(self._run, *values)

    def give_up(self) -> None:
        code = self._ending.code
        if code:
            self.write(JobNotes.note_given_up, Ended(code))
