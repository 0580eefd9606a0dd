"""``python -m mpishard.watch [--folder DIR] [--timeout SECONDS] PROGRAM ARGUMENTS...``, under any launcher.

Runs the program as Python would, and starts no MPI before it does.  The program may import mpishard, too.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType

from mpishard.launch.detection import Launch, launches
from mpishard.launch.job_notes import Ended, JobNotes
from mpishard.launch.worker import Script
from mpishard.watch.folder import FOLDER, begin
from mpishard.watch.guard import GUARD, guard, start_guard
from mpishard.watch.sampler import PROCESSES, Sampler, running_mpi

_ALONE = Launch("no launcher", "", 0, 1)


def main() -> None:
    """Watch the program that the arguments of this process name."""
    if sys.argv[1:2] == [GUARD]:
        sys.exit(guard(Path(sys.argv[2]), float(sys.argv[3])))
    parser = argparse.ArgumentParser("python -m mpishard.watch", description="Watch a program of mpi4py.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for mpishard why, seen by all ranks: {FOLDER}")
    parser.add_argument("--timeout", type=float, help="longest wait in a call of MPI; then a report, and the job ends")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="PROGRAM or -m MODULE, and its arguments")
    given = parser.parse_args()
    if not given.program or given.program == ["-m"]:
        parser.error("name the program, such as train.py, or -m and a module")
    if given.timeout is not None and not given.timeout > 0:
        parser.error(f"timeout {given.timeout:g} must be more than 0 seconds")
    folder = given.folder.absolute()
    launch = next(iter(launches(os.environ)), _ALONE)
    (folder / PROCESSES).mkdir(parents=True, exist_ok=True)
    notes = JobNotes.from_environment()
    if launch.rank == 0:
        begin(folder, launch.ranks, [sys.executable, *given.program])
        if given.timeout is not None:
            start_guard(folder, given.timeout)
        print(f"mpishard: if the job hangs: mpishard why {folder}", file=sys.stderr, flush=True)
    sampler = Sampler(folder, launch, notes, given.timeout)
    sampler.watch()
    script = Script.this = Script()
    atexit.register(_end, sampler, notes, script, os.getpid())
    sys.excepthook = _Failure(sampler)
    # The program's own import of mpishard shall do in it what it does in all ranks: start MPI, and set hooks.
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpishard"]:
        if name != Script.__module__:
            del sys.modules[name]
    script.run(given.program)


class _Failure:
    """The excepthook of a program that does not import mpishard: its traceback, and the end of the job."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = sys.__excepthook__
        self._sampler.end(1, f"{kind.__name__}: {error}"[:500])
        if running_mpi() is not None:
            import mpishard  # noqa: F401  # it makes an uncaught exception end the job

        sys.excepthook(kind, error, trace)


def _end(sampler: Sampler, notes: JobNotes | None, script: Script, process: int) -> None:
    """Note how the program has ended; the supervisor learns it from mpishard if the program has imported that."""
    if os.getpid() != process or not sampler.is_alive():  # a fork, or a failure that is noted
        return
    sampler.end(script.code)
    if notes is None or "mpishard.comm.supervisor_reports" in sys.modules or script.code is None:
        return
    with contextlib.suppress(OSError):
        if sampler.launch.rank == 0:
            notes.note_started()
            notes.note_ended(Ended(script.code))
        elif script.code:
            notes.note_given_up(Ended(script.code))


if __name__ == "__main__":
    main()
