"""A process that a run has spawned, until the run takes it in: it runs the script, and goes when it is not wanted.

A thread listens to the leader of the run.  If that dies or lets this process go, it ends at once, whatever the script
is doing; and a script that ends on its way ends no run.  `mpishard.elastic.spawning` is the other side.
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
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.watchdog import fail_alone
from mpishard.elastic.guarded_calls import in_time
from mpishard.elastic.spawning import CALL, COMES, FAILED, HELLO, HERE, NAP_S, WORD, meet, messages

_LEAVE_S = 5.0
# How long the script's own thread may take to hear that it is to go, unless it is in the middle of MPI.
_HEARS_S = 1.0
_LEAVE = signal.SIGRTMIN + 5
_WORDS = 300


def run_script() -> None:
    """Run the script, module or code that the arguments of this process name, as Python would."""
    newcomer = JoiningProcess()
    try:
        _run(sys.argv[1:])
    except BaseException as error:
        if newcomer.waits:
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            newcomer.fail(f"its script failed: {type(error).__name__}: {error}")
        raise
    if newcomer.waits:
        newcomer.fail("its script ended without a call of `optimize`")


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
    """This process, on its way into the run that has spawned it.

    Attributes
    ----------
    waits : bool
        Whether the run has not taken it in yet.
    """

    this: ClassVar[JoiningProcess]

    def __init__(self) -> None:
        JoiningProcess.this = self
        self.waits: bool = True
        self._leaves = self._bereaved = False
        self._leader = MPI.Comm.Get_parent()
        self._called = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="mpishard-newcomer", daemon=True)
        signal.signal(_LEAVE, lambda *_: self._leave())
        fail_alone(heals_in_place())
        # Open MPI hears of the death of a process that it has exchanged a message with.
        self._tell(HELLO)
        self._listener.start()

    def join(self) -> MPI.Intracomm:
        """Wait until the run takes this process in; returns the communicator of all.

        Collective over those who were spawned together; they are the last in it, in the order that they have.
        """
        prepare()  # or all would wait in the first step
        world = MPI.COMM_WORLD
        port = MPI.Open_port() if world.rank == 0 else ""
        self._tell(HERE, port)
        self._called.wait()
        self._tell(COMES)
        try:
            crew = in_time(lambda: meet(world, port, newcomer=True), world.Iprobe)
        except MPI.Exception:
            _vanish()
        self.waits = False
        self._listener.join()
        self._leader.Free()
        if port:
            MPI.Close_port(port)
        return crew

    def fail(self, why: str) -> NoReturn:
        """Say why this process does not come, and end once it is told to go, with all who were spawned with it."""
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
        """Tell the leader if one of those who were spawned together has died, of which it may not hear itself."""
        try:
            if not self._bereaved:
                MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE)
        except MPI.Exception:
            self._bereaved = True
            self._tell(FAILED, "one of those that were spawned with it has died")

    def _send_away(self) -> NoReturn:
        """End in order, whatever the script is doing.

        In its thread, where that is possible: a call of MPI after Finalize would end the run.
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
        # By the kernel: mpi4py keeps the interpreter's lock in Finalize, where those wait who are in the middle of MPI.
        signal.setitimer(signal.ITIMER_REAL, _LEAVE_S)
        self._leader.Free()
        MPI.Finalize()
        # By way of C, since MPICH tells its launcher in an exit handler that it has ended in order.
        ctypes.PyDLL(None).exit(0)
        raise AssertionError


def _vanish() -> NoReturn:
    """End this process: it belongs to nobody.  MPI_Finalize would wait for the dead, and a code would end the run."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
