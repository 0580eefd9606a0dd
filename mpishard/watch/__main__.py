"""``python -m mpishard.watch [--folder DIR] [--timeout SECONDS] PROGRAM ARGUMENTS...``, under any launcher.

Runs the program as Python would, and starts no MPI before it does.  The program may import mpishard, too.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
from importlib import import_module
from pathlib import Path
from types import TracebackType

from mpishard.io.terminal import say
from mpishard.launch.detection import Launch, launches, name_of_job
from mpishard.launch.job_notes import Ended, JobNotes
from mpishard.launch.worker import Script
from mpishard.watch.calls import loaded_mpi
from mpishard.watch.folder import FOLDER, begin
from mpishard.watch.guard import GUARD, guard, start_guard
from mpishard.watch.sampler import PROCESSES, Watcher, running_mpi

_ALONE = Launch("no launcher", "", 0, 1)


def main() -> None:
    """Watch the program that the arguments of this process name."""
    if sys.argv[1:2] == [GUARD]:
        sys.exit(guard(Path(sys.argv[2]), float(sys.argv[3])))
    usage = "%(prog)s [-h] [--folder FOLDER] [--timeout SECONDS] PROGRAM | -m MODULE  ARGUMENTS..."
    parser = argparse.ArgumentParser("python -m mpishard.watch", usage, description="Watch a program of mpi4py.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for mpishard why, seen by all ranks: {FOLDER}")
    parser.add_argument("--timeout", type=float, help="longest wait in a call of MPI; then a report, and the job ends")
    options, program = _split(sys.argv[1:])
    given = parser.parse_args(options)
    if not program or program == ["-m"]:
        parser.error("name the program, such as train.py, or -m and a module")
    if given.timeout is not None and not given.timeout > 0:
        parser.error(f"timeout {given.timeout:g} must be more than 0 seconds")
    found = next(iter(launches(os.environ)), None)
    folder, launch = given.folder.absolute() / name_of_job(found, os.environ), found or _ALONE
    notes = JobNotes.from_environment()
    watcher = Watcher(folder, launch, notes, given.timeout)
    try:
        (folder / PROCESSES).mkdir(parents=True, exist_ok=True)
        if launch.rank == 0:
            begin(folder, launch.ranks, [sys.executable, *program])
        watcher.watch()
    except OSError as error:
        text = f"{error.filename}: {error.strerror}; give --folder a place that all ranks can write to"
        if launch.ranks > 1:  # others may have a place, and wait in MPI_Init for this rank
            say(f"{parser.prog}: error: {text}")
            _abort()
        parser.error(text)
    if launch.rank == 0:
        if given.timeout is not None:
            start_guard(folder, given.timeout)
        say(f"mpishard: if the job hangs: mpishard why {folder}")
    script = Script.this = Script()
    atexit.register(_end, watcher, notes, script)
    sys.excepthook = _Failure(watcher)
    # The program's own import of mpishard shall do in it what it does in all ranks: start MPI, and set hooks.
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpishard"]:
        if name != Script.__module__:
            del sys.modules[name]
    script.run(program)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The options of this command, each with its value, and the program, whose first word may be ``-m``."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        at += 1 if "=" in words[at] or words[at] in ("-h", "--help") else 2
    return words[:at], words[at:]


class _Failure:
    """The excepthook of a program that does not import mpishard: its traceback, and the end of the job."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = sys.__excepthook__
        if self._watcher.process != os.getpid():  # a fork
            sys.excepthook(kind, error, trace)
            return
        self._watcher.end_with(1, f"{kind.__name__}: {error}"[:500])
        mpi, is_rank = loaded_mpi(), self._watcher.launch.ranks > 1
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            import_module("mpishard")  # in a rank this makes an uncaught exception end the job
        sys.excepthook(kind, error, trace)
        if is_rank and not (mpi is not None and mpi.Is_initialized()):
            _abort()


def _name_unreceived() -> None:
    """Name a message that nobody has received: for it MPI_Finalize may fail, which mpi4py ignores."""
    mpi = running_mpi()
    if mpi is None:
        return
    comm, status = mpi.COMM_WORLD, mpi.Status()
    if comm.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG, status):
        sent = f"what rank {status.source} has sent with tag {status.tag}"
        say(f"mpishard: rank {comm.rank} ends without receiving {sent}")


def _abort() -> None:
    """Abort the job: MPICH's launcher does not end one for a rank that ends before MPI_Init, in which others wait."""
    import_module("mpishard.comm.abort").abort("")


def _end(watcher: Watcher, notes: JobNotes | None, script: Script) -> None:
    """Note how the program has ended; the supervisor learns it from mpishard if the program has imported that."""
    if watcher.process != os.getpid() or not watcher.is_alive():  # a fork, or a failure that is noted
        return
    _name_unreceived()
    watcher.end_with(script.code)
    if notes is None or "mpishard.comm.supervisor_reports" in sys.modules or script.code is None:
        return
    with contextlib.suppress(OSError):
        if watcher.launch.rank == 0:
            notes.note_started()
            notes.note_ended(Ended(script.code))
        elif script.code:
            notes.note_given_up(Ended(script.code))


if __name__ == "__main__":
    main()
