"""A spawned process until it has joined the run: it runs the script, and ends when the run no longer needs it.

A thread listens to the leader of the run.  If the leader dies or dismisses this process, the process ends at once,
whatever the script is doing.  If the script ends before the process has joined, the run continues.
`mpishard.elastic.spawning` is the other side.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from typing import ClassVar, NoReturn

from mpi4py import MPI

from mpishard.backend.compiled import prepare
from mpishard.comm.abort import fail_alone
from mpishard.comm.capabilities import heals_in_place
from mpishard.elastic.guarded_calls import in_time
from mpishard.elastic.spawning import CALL, COMES, FAILED, HELLO, HERE, NAP_S, WORD, meet, messages

_LEAVE_S = 5.0
# How long the script's own thread may take to notice that this process is to end, unless it is in a call of MPI.
_HEARS_S = 1.0
_LEAVE = signal.SIGRTMIN + 5
_WORDS = 300


def run_script() -> None:
    """Run the script, module or code that the arguments of this process name, as Python would."""
    joining = JoiningProcess()
    try:
        _run(sys.argv[1:])
    except BaseException as error:
        if joining.waits:
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            joining.fail(f"its script failed: {type(error).__name__}: {error}")
        raise
    if joining.waits:
        joining.fail("its script ended without a call of `optimize`")


def _run(arguments: list[str]) -> None:
    kind = arguments[0]
    sys.argv[:] = arguments if kind not in ("-c", "-m") else [kind, *arguments[2:]]
    if kind == "-c":
        exec(compile(arguments[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif kind == "-m":
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(kind))
        runpy.run_path(kind, run_name="__main__")


class JoiningProcess:
    """This process, until it has joined the run that has spawned it; `waits` is true until then."""

    this: ClassVar[JoiningProcess]

    def __init__(self) -> None:
        JoiningProcess.this = self
        self.waits: bool = True
        self._leaves = self._bereaved = False
        self._leader = MPI.Comm.Get_parent()
        self._called = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="mpishard-joining", daemon=True)
        signal.signal(_LEAVE, lambda *_: self._leave())
        fail_alone(heals_in_place())
        # Open MPI detects the death of a process only after a message has been exchanged with it.
        self._tell(HELLO)
        self._listener.start()

    def join(self) -> MPI.Intracomm:
        """Wait until this process has joined the run; returns the communicator of all processes.

        Collective over the processes that were spawned together; these are its last ranks, in their own order.
        """
        prepare()  # compile now, or all processes would wait for that in the first step
        world = MPI.COMM_WORLD
        port = MPI.Open_port() if world.rank == 0 else ""
        self._tell(HERE, port)
        self._called.wait()
        self._tell(COMES)
        try:
            merged = in_time(lambda: meet(world, port, joins=True), world.Iprobe)
        except MPI.Exception:
            _vanish()
        self.waits = False
        self._listener.join()
        self._leader.Free()
        if port:
            MPI.Close_port(port)
        return merged

    def fail(self, why: str) -> NoReturn:
        """Report why this process cannot join, and end on the leader's order, with all that were spawned with it."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._tell(FAILED, why.splitlines()[0][:_WORDS])
        while True:
            self._listener.join()

    def _tell(self, tag: int, text: str = "") -> None:
        try:
            self._leader.Send(text.encode(), 0, tag)
        except MPI.Exception:
            _vanish()

    def _listen(self) -> None:
        try:
            while self.waits:
                for _, _, word in messages(self._leader, WORD):
                    if word != CALL:
                        self._send_away()
                    self._called.set()
                self._mind_others()
                time.sleep(NAP_S)
        except MPI.Exception:
            _vanish()

    def _mind_others(self) -> None:
        """Inform the leader if a process spawned with this one has died; MPI may not inform the leader itself."""
        try:
            if not self._bereaved:
                MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE)
        except MPI.Exception:
            self._bereaved = True
            self._tell(FAILED, "one of those that were spawned with it has died")

    def _send_away(self) -> NoReturn:
        """End in order, whatever the script is doing.

        If possible in the script's thread: a call of MPI there after Finalize would end the run.
        """
        signal.pthread_kill(threading.main_thread().ident or 0, _LEAVE)
        time.sleep(_HEARS_S)
        self._leave()

    def _leave(self) -> NoReturn:
        while self._leaves:  # in another thread
            time.sleep(_LEAVE_S)
        self._leaves = True
        sys.stdout.flush()
        sys.stderr.flush()
        # A timer of the kernel: mpi4py keeps the interpreter's lock in Finalize, which waits if a peer is inside MPI.
        signal.setitimer(signal.ITIMER_REAL, _LEAVE_S)
        self._leader.Free()
        MPI.Finalize()
        fail_alone(False)
        # C's exit runs the exit handlers of C, in which MPICH informs its launcher that the process ended in order.
        ctypes.PyDLL(None).exit(0)
        raise AssertionError


def _vanish() -> NoReturn:
    """Kill this process, since it cannot join: Finalize would wait for the dead, and an exit code would end the run."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
