"""The thread of a process that says where its main thread is, and the file that says so where it cannot.

`Sampler` is what a watched program and a run of mpishard have in common; `Watcher` is that of a watched program.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import linecache
import os
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from mpishard.io.files import open_to_append, time_of, write_note
from mpishard.io.terminal import say
from mpishard.launch.detection import Launch
from mpishard.launch.job_notes import JobNotes
from mpishard.launch.script import NOT_USERS, main_frame
from mpishard.watch.calls import call_in, loaded_mpi

REQUEST, END, PROCESSES, WHERE, STACK = "why", "end.json", "processes", ".where.json", ".stack"
RUNS, WAITS, ENDED, FAILED = "runs", "waits", "ended", "failed"
# How often the thread looks; it is also how precisely it knows how long the main thread has been in a call.
LOOK_S = 1.0
LONG_S = 15.0  # after such a wait a rank asks all by itself
# If the thread cannot look for this many seconds, the stack is written without it.
_FROZEN_S = 5.0
# With a shorter time limit this many seconds after it: MPI_Init keeps Python's lock, and is no hang.
_INIT_S = 2.0
# Within a time limit it looks at least so often.
_LOOKS = 4
# A rank that has waited so much longer than the limit ends the job itself: its guard, or the disk, does not work.
_LATE, _LATE_S = 0.1, 15.0
# Between the ranks, of which the first that can ends the job: Open MPI's launcher may not end after several aborts.
_TURN_S, _TURNS = 0.5, 5
_DEEP = 20  # frames of the program in an answer; those of libraries are among the first so many only
_FOLDER = str(Path(__file__).parent) + os.sep
_RUNNERS = (_FOLDER, str(Path(__file__).parents[1] / "launch" / "worker.py"), "<frozen runpy>")
# Calls of the system that wait for a file, by their numbers on each machine; the first argument is a descriptor if the
# name is not marked.
_FILE_CALLS = {
    "x86_64": {0: "read", 1: "write", 17: "pread", 18: "pwrite", 19: "read", 20: "write", 73: "flock", 72: "fcntl"}
    | {74: "fsync", 75: "fdatasync", 3: "close", 77: "ftruncate", 78: "readdir", 217: "readdir", 5: "fstat"}
    | {2: "open*", 257: "open*", 4: "stat*", 6: "stat*", 262: "stat*", 332: "stat*", 87: "unlink*", 82: "rename*"},
    "aarch64": {63: "read", 64: "write", 67: "pread", 68: "pwrite", 65: "read", 66: "write", 32: "flock", 25: "fcntl"}
    | {82: "fsync", 83: "fdatasync", 57: "close", 46: "ftruncate", 61: "readdir", 80: "fstat"}
    | {56: "open*", 79: "stat*", 291: "stat*", 35: "unlink*", 38: "rename*"},
}


class Sampler(threading.Thread):
    """Answers, in a file of the folder, where the main thread of this process is.

    It answers when it is asked, which is a new file ``why`` in the folder.  It asks all processes itself when this one
    has waited for `patience` seconds in a call, and after each further such time: so the late one is known even after
    the end of the job.
    """

    def __init__(self, folder: Path, patience: float = LONG_S, every: float = LOOK_S) -> None:
        super().__init__(name="mpishard-where", daemon=True)
        self.folder, self.process = folder, os.getpid()
        name = f"{os.uname().nodename}-{self.process}"
        self.path = folder / PROCESSES / f"{name}{WHERE}"
        self.stack_path = folder / PROCESSES / f"{name}{STACK}"
        self.over = threading.Event()
        self._request = folder / REQUEST
        self._patience, self._every = patience, every
        self._began = time.time()
        self._asked = time_of(self._request)

    def who(self) -> dict[str, Any]:
        """`rank`, `ranks`, and what else is to be in an answer."""
        raise NotImplementedError

    def waited(self) -> float:
        """Seconds for which the main thread may have waited; 0 if it has not."""
        raise NotImplementedError

    def call(self, frame: FrameType | None) -> dict[str, Any] | None:
        """The call that the main thread is in, as `mpishard.watch.calls` describes it; `frame` is its innermost one."""
        raise NotImplementedError

    def end(self) -> None:
        """Look and answer no more."""
        self.over.set()
        self.join()

    def run(self) -> None:
        while not self.over.is_set():
            # A shared disk may fail for a while, and a program may have what nobody has thought of.
            with contextlib.suppress(Exception):
                self.look()
            self.over.wait(self._every)

    def look(self) -> None:
        """Ask all after a long wait, and answer if asked."""
        asked = time_of(self._request)
        if min(self.waited(), time.time() - asked) > self._patience and self.waits():
            write_note(self._request, None)
            asked = time_of(self._request)
        if asked != self._asked:  # not later, either, if the clock was set back
            self._asked = asked
            self.write(self.answer())

    def waits(self) -> bool:
        """Return True if the main thread is in a call that waits for other ranks."""
        with main_frame() as frame:
            return self.call(frame) is not None

    def answer(self, state: str = "") -> dict[str, Any]:
        """Where this process is, as plain values; with a `state` that is given, only this and who it is."""
        seconds, call, stack = 0.0, None, []
        if not state:
            seconds = self.waited()
            with main_frame() as frame:
                call, stack = self.call(frame), _stack(frame)
        return {
            "time": round(time.time(), 3),
            "began": round(self._began, 3),
            "host": os.uname().nodename,
            "process": self.process,
            "thread": threading.main_thread().ident,
            "state": state or (WAITS if call is not None and seconds else RUNS),
            "seconds": round(seconds, 1),
            "call": call,
            "stack": stack,
            "file": _file_call() if call is None and seconds else "",
            **self.who(),
        }

    def write(self, answer: dict[str, Any]) -> None:
        """Write an answer, unless the disk fails."""
        with contextlib.suppress(OSError):
            write_note(self.path, answer)


class Watcher(Sampler):
    """The thread of a program that knows nothing of it: it sees how long the main thread has run no code of Python.

    A call that keeps Python's lock stops it, as MPI_Init and the first collective of pickled objects do; then the stack
    is written into a file of its own.  After `limit` seconds in a call of MPI the guard ends the job.
    """

    def __init__(self, folder: Path, launch: Launch, notes: JobNotes | None, limit: float | None) -> None:
        times = (LONG_S, LOOK_S) if limit is None else (min(LONG_S, limit / 2), min(LOOK_S, limit / _LOOKS))
        super().__init__(folder, *times)
        self.launch, self._limit = launch, limit
        self._notes = notes if launch.rank == 0 else None  # until it is noted that the program has started MPI
        self._job = notes
        self._end = folder / END
        self._stack = -1
        self._frozen_s = _FROZEN_S if limit is None else min(_FROZEN_S, limit + _INIT_S)
        self._moved = time.monotonic()  # when the main thread last ran code of Python
        self._is_pending = self._is_stuck = False
        # Python's main thread calls it as soon as it is in no call of C.
        self._note_move = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._moves)
        self._has_timer = True

    def watch(self) -> None:
        """Begin; in the main thread, before the program."""
        self._stack = open_to_append(self.stack_path)
        os.ftruncate(self._stack, 0)
        self._leave_timer_to_program()
        self.write(self.answer(RUNS))
        self.start()

    def end_with(self, code: int | None, error: str = "") -> None:
        """Note the end of the program, after which the process may still wait in MPI_Finalize."""
        self.end()
        if self._has_timer:
            faulthandler.cancel_dump_traceback_later()
        os.ftruncate(self._stack, 0)
        self.write(self.answer(FAILED if error else ENDED) | {"code": code, "error": error})

    def who(self) -> dict[str, Any]:
        mpi = running_mpi()
        if mpi is not None:  # a launcher of another MPI has made worlds of one rank
            return {"rank": mpi.COMM_WORLD.rank, "ranks": mpi.COMM_WORLD.size}
        return {"rank": self.launch.rank, "ranks": self.launch.ranks}

    def waited(self) -> float:
        return time.monotonic() - self._moved if self._is_stuck else 0.0

    def call(self, frame: FrameType | None) -> dict[str, Any] | None:
        return None if frame is None else call_in(frame)

    def look(self) -> None:
        if self._has_timer:
            faulthandler.dump_traceback_later(self._frozen_s, file=self._stack)
        self._is_stuck = self._is_pending  # the main thread has run no code of Python since the last look
        if not self._is_pending:
            self._is_pending = True  # before, since the main thread may run it at once
            if ctypes.pythonapi.Py_AddPendingCall(self._note_move, None):  # the queue is full
                self._is_pending = False
        if os.fstat(self._stack).st_size:  # it was written while the main thread kept the lock
            os.ftruncate(self._stack, 0)
        if self._limit is not None:  # before anything that a full disk refuses
            if self._end.exists():
                self._end_job()
                return  # a stopped rank, which a launcher continues to end it, has not answered
            if self.waited() > (1 + _LATE) * self._limit + _LATE_S and self.waits():
                self._end_without_guard(self._limit)
        if self._notes is not None and running_mpi() is not None:
            self._notes.note_started()
            self._notes = None
        super().look()

    def _end_job(self) -> None:
        """Abort the job, as its guard asks after its time limit; where only the main thread may, the guard kills."""
        if self._job is not None:
            with contextlib.suppress(OSError):
                self._job.note_aborted()
        mpi = running_mpi()
        if mpi is not None and mpi.Query_thread() == mpi.THREAD_MULTIPLE:
            time.sleep(_TURN_S * min(self.launch.rank, _TURNS))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPICH prints from this process that MPI_Abort was called
            mpi.COMM_WORLD.Abort(1)

    def _end_without_guard(self, limit: float) -> None:
        """End the job after the time limit, and say of this rank alone where it is: the others cannot be asked."""
        answer = self.answer()
        frame = next((each for each in answer["stack"] if each["own"]), {"file": "?", "line": 0, "text": ""})
        say(
            f"mpishard: rank {answer['rank']} has waited longer than {limit:g} s (--timeout) in {answer['call']['op']} "
            f"at {frame['file']}:{frame['line']}  {frame['text']}\n"
            f"mpishard: the other ranks cannot be asked, as {self.folder} cannot be used; the job ends"
        )
        self._end_job()
        os._exit(1)

    def _moves(self, _: object) -> int:
        self._moved = time.monotonic()
        self._is_pending = False
        return 0

    def _leave_timer_to_program(self) -> None:
        """Python has one timer for stacks: as soon as the program wants it, it is the program's."""
        dump_later = faulthandler.dump_traceback_later

        def dump(*arguments: Any, **options: Any) -> None:
            if threading.current_thread() is not self:
                self._has_timer = False
            dump_later(*arguments, **options)

        faulthandler.dump_traceback_later = dump


def running_mpi() -> Any:
    """The module mpi4py.MPI between MPI_Init and MPI_Finalize; else None."""
    mpi = loaded_mpi()
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def is_runner(file: str) -> bool:
    """Return True for files that run the program, whose frames say nothing about it."""
    return file.startswith(_RUNNERS)


def _stack(frame: FrameType | None) -> list[dict[str, Any]]:
    """The innermost frames of the program, outwards, each with its line; `own`: it is no library's.

    Where these are all of libraries, as in a collective of mpishard, the innermost own ones follow.
    """
    found: list[dict[str, Any]] = []
    owns = 0
    while frame is not None and owns < _DEEP:
        code, line = frame.f_code, frame.f_lineno
        own = not code.co_filename.startswith(NOT_USERS)
        if not is_runner(code.co_filename) and (own or len(found) < _DEEP):
            text = linecache.getline(code.co_filename, line or 0, frame.f_globals).strip()
            owns += own
            found.append({"file": code.co_filename, "line": line, "name": code.co_name, "text": text, "own": own})
        frame = frame.f_back
    return found


def _file_call() -> str:
    """The call of the system in which the main thread waits for a file, with its path; "" if it is in none."""
    calls = _FILE_CALLS.get(os.uname().machine, {})
    with contextlib.suppress(OSError, ValueError, IndexError):  # not every system tells
        task = Path(f"/proc/self/task/{threading.main_thread().native_id}")
        words = (task / "syscall").read_text().split()
        name = calls.get(int(words[0]), "")
        if name.endswith("*"):
            return name[:-1]
        if name:
            path = os.readlink(f"/proc/self/fd/{int(words[1], 16)}")
            return "" if path.startswith(("pipe:", "socket:", "anon_inode:")) else f"{name} of {path}"
    return ""
