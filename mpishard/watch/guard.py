"""The guard of a watched job: a process beside rank 0 that reports and ends the job after its time limit.

It runs outside of the ranks, as all of these may be in calls that keep Python's lock.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from mpishard.io.terminal import say
from mpishard.launch.job_notes import Failure, JobNotes
from mpishard.watch.diagnosis import report
from mpishard.watch.folder import Asked, ask, end_job, read_folder
from mpishard.watch.sampler import ENDED, FAILED, RUNS, WAITS

GUARD = "--guard"
# It reads the files of all ranks again after this part of the time limit, and after these least and most seconds.
_SHARE, _LOOK_S, _REST_S = 1 / 20, 0.5, 600.0
_ANSWER_S = 4.0  # for the answers of all ranks
# Beyond the time limit, for the end of the processes after their programs: longer than it takes where it ends.
_TEARDOWN_S = 60.0
# From the request to end the job until the guard kills rank 0, which ends it too.
_ABORT_S = 4.0


def start_guard(folder: Path, limit: float) -> None:
    """Start the guard of this job in rank 0, whose end closes the guard's input."""
    theirs, _ = os.pipe()  # plain numbers, since Python closes its files long before MPI_Finalize has ended
    command = [sys.executable, "-m", "mpishard.watch", GUARD, str(folder), str(limit)]
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.DEVNULL)
    process.returncode = 0  # nobody waits for it, and Python is not to warn of that
    os.close(theirs)


def guard(folder: Path, limit: float) -> int:
    """Watch the waits of all ranks until rank 0 ends, or end the job; returns an exit code."""
    parent, every = os.getppid(), max(min(_LOOK_S, limit / 2), min(_SHARE * limit, _REST_S))
    while not select.select([sys.stdin], [], [], every)[0] and os.getppid() == parent:
        try:
            before = read_folder(folder)
            if _longest_wait(before) <= limit and not _is_in_finalize(before, limit):
                continue
            asked = ask(folder, _ANSWER_S)
        except (OSError, ValueError):  # a full disk: the ranks end the job themselves
            continue
        waits = [float(answer["seconds"]) for answer in asked.answers if answer["state"] == WAITS]
        if max(waits, default=0.0) > limit:
            why = f"a rank has waited longer than {limit:g} s (--timeout)"
        elif _is_in_finalize(asked, limit):
            why = f"all programs have ended, and MPI_Finalize has not for {limit + _TEARDOWN_S:g} s (--timeout)"
        else:
            continue
        text = "\n".join(report(asked.answers, asked.absent, asked.ranks))
        say(f"mpishard: {why}; the job ends\n{text}")
        time.sleep(0.2)  # launchers drop output that is still in the pipe when the job is aborted
        with contextlib.suppress(OSError):
            if (notes := JobNotes.from_environment()) is not None:
                notes.note_failure(Failure("TimeoutError", text.splitlines()[-1], "a call of MPI", 0))
        with contextlib.suppress(OSError):
            end_job(folder, asked)
        # The ranks abort the job, unless all are in calls that keep Python's lock.
        can_abort = any(each["state"] in (RUNS, WAITS) and "is_frozen" not in each for each in asked.answers)
        wait = _ABORT_S if can_abort else 0.0
        if not select.select([sys.stdin], [], [], wait)[0] and os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
        return 1
    return 0


def _longest_wait(asked: Asked) -> float:
    """The longest wait now of a rank, if all have stayed where they were at their last answers."""
    now, answers = time.time(), asked.answers
    return max((now - each["time"] + each["seconds"] for each in answers if each["state"] == WAITS), default=0.0)


def _is_in_finalize(asked: Asked, limit: float) -> bool:
    """Return True if all ranks have ended their programs, longer ago than `limit` and what a teardown takes."""
    ended = [float(each["time"]) for each in asked.answers if each["state"] in (ENDED, FAILED)]
    return 0 < len(ended) == asked.ranks and time.time() - max(ended) > limit + _TEARDOWN_S
