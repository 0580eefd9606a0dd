"""Processes that a run asks for while it goes on: they are spawned, run its script, and are taken in between two steps.

One process of the crew, the leader, spawns them in a thread and hears from each; nothing of this holds the others up
(under MPICH a spawn does, until the new processes have called MPI_Init, which is why that is the first they do).  Once
all are here, the crew and they meet at a port.  `mpishard.elastic.joining` is their side.

==========  ==========================================================================================================
on the way  MPI starts them, or they run the script up to `optimize`; each says hello as soon as it can
here        all have said that they are there, and wait
meeting     the leader has called them in; crew and newcomers make one communicator
failed      they could not be started, or one of them has ended: the others are told to go, and the run is as it was
==========  ==========================================================================================================

Of MPI's ways to one communicator this is the one by which Open MPI 5 tells all processes who shares memory with whom:
with `Create_intercomm` over the leader they would not agree on that, and its coll/han would wait for ever.  Nothing
wakes a process in `Connect`, `Accept` or `Merge` when another dies there, not even Revoke of ULFM; as a meeting takes
milliseconds, who is in it much longer gives it up, see `meeting`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mpi4py import MPI

from mpishard.comm.mesh import NEWCOMER
from mpishard.comm.watchdog import die

# What newcomers say to the leader, and the leader to them.
HELLO, HERE, FAILED, COMES, WORD = 1, 2, 3, 4, 5
CALL, GO = b"call", b"go"
NAP_S, _CALL_NAP_S = 0.02, 0.0005
# From asking for processes until they have called MPI_Init, which takes seconds on a busy machine.
_START_S = 60
_STARTING_S = 5.0
# Until newcomers that live have been told, and from the call until all have answered.
_SAYING_S = 2.0
_ANSWER_S = 10.0
# MPI comes first: what is imported after it, and what the script does, holds nobody up.  If the leader dies meanwhile
# (ULFM), MPI_Init may wait for ever, and no thread of Python runs in it: then the kernel ends the process.
BOOT = (
    "import os, signal; signal.alarm(20 * (os.environ.get('OMPI_MCA_mpi_ft_enable') == '1')); from mpi4py import MPI; "
    "signal.alarm(0); from mpishard.elastic.joining import run_script; run_script()"
)
_FLAGS = "[bBdEhiIOPqRsSuvVx]*"


class Message(NamedTuple):
    source: int
    tag: int
    text: bytes


def messages(inter: MPI.Intercomm, tag: int = MPI.ANY_TAG) -> Iterator[Message]:
    """What has come in by now.  Raises MPI.Exception if somebody at the other end has died (ULFM)."""
    status = MPI.Status()
    while inter.Iprobe(MPI.ANY_SOURCE, tag, status):
        buffer = bytearray(status.Get_count(MPI.BYTE))
        inter.Recv([buffer, MPI.BYTE], status.Get_source(), status.Get_tag())
        yield Message(status.Get_source(), status.Get_tag(), bytes(buffer))


def command(argv: Sequence[str], cell: tuple[int, int]) -> list[str]:
    """Arguments of Python that run the script of this process as a newcomer.

    Parameters
    ----------
    argv : sequence of str
        As ``sys.orig_argv`` of a process of the run, which may be a newcomer itself.
    cell : (int, int)
        Tensor and pipeline size of the run.

    Raises
    ------
    ValueError
        If there is no script that could be run again.
    """
    options, script = _parted(list(argv[1:]))
    if script[:2] == ["-c", BOOT]:
        script = script[2:]
    if not script or script[0] == "-":
        raise ValueError("their script was read from the standard input, and cannot be read again")
    for number in reversed(range(len(options) - 1)):
        if options[number] == "-X" and options[number + 1].startswith(NEWCOMER):
            del options[number : number + 2]
    return ["-X", f"{NEWCOMER}={cell[0]}x{cell[1]}", *options, "-c", BOOT, *script]


def _parted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Options of the interpreter, and what it runs: ``-c ...``, ``-m ...`` or a path, and arguments of that."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "-":
        runs = re.match(f"-({_FLAGS})([cm])(.*)", arguments[at], re.DOTALL)
        if runs:
            flags, kind, value = runs.groups()
            script = [f"-{kind}", *([value] if value else []), *arguments[at + 1 :]]
            return arguments[:at] + ([f"-{flags}"] if flags else []), script
        takes_value = re.fullmatch(f"-{_FLAGS}[XW]|--check-hash-based-pycs", arguments[at])
        at += 2 if takes_value else 1
    return arguments[:at], arguments[at:]


class SpawnRequest:
    """Newcomers who are on their way.  Creation is not collective and returns at once.

    Parameters
    ----------
    processes : int
        How many; they are one MPI_COMM_WORLD.
    cell : (int, int)
        Tensor and pipeline size of the run; the `Mesh` of newcomers takes them.

    Attributes
    ----------
    processes : int
    here : bool
        Whether all wait to be called in.
    problem : str
        Why none will come, in a line; empty as long as they may.
    """

    def __init__(self, processes: int, cell: tuple[int, int]) -> None:
        self.here: bool = False
        self.problem: str = ""
        self.processes = processes
        self._began = time.monotonic()
        self._inter: MPI.Intercomm | None = None
        self._port = b""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpishard-recruitment", daemon=True)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            self.problem = "this MPI was not started for several threads (MPI_THREAD_MULTIPLE), which spawning needs"
            return
        try:
            self._command = command(sys.orig_argv, cell)
        except ValueError as error:
            self.problem = str(error)
        else:
            self._thread.start()

    @property
    def is_new(self) -> bool:
        """Whether they may still be starting up, which takes the cores; afterwards they are in the user's script."""
        return time.monotonic() - self._began < _STARTING_S

    def call(self) -> str:
        """Call the newcomers in once they are `here`; returns the port where they are met from now on.

        Not collective; takes milliseconds.  The port is empty if one of them has ended since: see `problem`.
        """
        self._thread.join()
        inter, coming = self._inter, set[int]()
        assert self.here and inter is not None
        limit = time.monotonic() + _ANSWER_S
        try:
            if not self._have_failed(messages(inter)):
                self._say(inter, CALL)
                while len(coming) < self.processes and not self.problem and time.monotonic() < limit:
                    time.sleep(_CALL_NAP_S)
                    come = list(messages(inter))
                    coming |= {each.source for each in come if each.tag == COMES}
                    self._have_failed(come)
                if len(coming) < self.processes and not self.problem:
                    self._fail(f"{self.processes - len(coming)} of them do not answer")
        except MPI.Exception as error:
            self._fail(_dead(error))
        return "" if self.problem else self._port.decode()

    def check(self) -> None:
        """Raise MPI.Exception if one of them has died or failed since the call."""
        if self._inter is not None and any(message.tag == FAILED for message in messages(self._inter)):
            raise MPI.Exception(MPI.ERR_PROC_FAILED)

    def close(self) -> None:
        """The newcomers have been met.  Not collective among the crew."""
        assert self._inter is not None
        self._inter.Free()
        self._inter = None

    def give_up(self) -> None:
        """Nobody is wanted any more: who is on the way is told to go.  Not collective.

        Waits until they have been started, if they are about to be.
        """
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(_START_S)
        if self.here and not self.problem:
            self._fail("nobody is wanted any more")

    def _run(self) -> None:
        started = threading.Timer(_START_S, self._not_started)
        started.daemon = True
        started.start()
        try:
            inter = MPI.COMM_SELF.Spawn(sys.executable, self._command, self.processes, _info())
        except MPI.Exception as error:
            self.problem = f"MPI cannot start them: {error.Get_error_string()}"
            return
        finally:
            started.cancel()
        self._inter = inter
        if self.problem:
            self._fail(self.problem)
            return
        heard, here, limit = set[int](), set[int](), time.monotonic() + _START_S
        try:
            while len(here) < self.processes:
                come = list(messages(inter))
                heard |= {each.source for each in come}
                for who, tag, text in come:
                    if tag == HERE:
                        here.add(who)
                        self._port = text or self._port
                if self._have_failed(come):
                    return
                # MPI would not hear of the death of one whose first message has not come.
                if len(heard) < self.processes and time.monotonic() > limit:
                    self._fail(f"{self.processes - len(heard)} of them have not said hello within {_START_S} s")
                    return
                if self._end.wait(NAP_S):
                    self._fail("nobody is wanted any more")
                    return
        except MPI.Exception as error:
            self._fail(_dead(error))
            return
        self.here = True

    def _say(self, inter: MPI.Intercomm, word: bytes) -> None:
        """Tell all newcomers that live; Open MPI would wait for ever for one that has just died."""
        dead, sends = _dead_ranks(inter), []
        for who in range(self.processes):
            if who not in dead:
                with contextlib.suppress(MPI.Exception):
                    sends.append(inter.Isend(word, who, WORD))
        limit = time.monotonic() + _SAYING_S
        while time.monotonic() < limit:
            with contextlib.suppress(MPI.Exception):
                if MPI.Request.Testall(sends):
                    return
            time.sleep(_CALL_NAP_S)

    def _have_failed(self, come: Iterable[Message]) -> bool:
        """Whether one of them says so; then all are told to go."""
        for who, tag, text in come:
            if tag == FAILED:
                self._fail(f"number {who} of {self.processes}: {text.decode(errors='replace')}")
                return True
        return False

    def _not_started(self) -> None:
        """MPI waits for processes that have ended before they called MPI_Init, and cannot be told not to."""
        self.problem = f"they have not started within {_START_S} s"
        if MPI.get_vendor()[0] != "Open MPI":  # other threads cannot communicate meanwhile
            die(f"mpishard: spawned processes have not started within {_START_S} s; under this MPI all wait for that")

    def _fail(self, problem: str) -> None:
        """Tell all to go: those that die from it or have died do not hear it."""
        inter, self._inter = self._inter, None
        assert inter is not None
        self._say(inter, GO)
        with contextlib.suppress(MPI.Exception):
            inter.Free()
        self.problem, self.here = problem, False


def meet(comm: MPI.Intracomm, port: str, root: int = 0, newcomer: bool = False) -> MPI.Intracomm:
    """Make one communicator of the crew and the newcomers, who come last.  Collective over both; see `in_time`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The crew's; MPI_COMM_WORLD of the newcomers.
    port : str
        As `SpawnRequest.call` says; on rank `root`.
    """
    bridge = comm.Accept(port, root=root) if newcomer else comm.Connect(port, root=root)
    crew = bridge.Merge(high=newcomer)
    bridge.Free()
    return crew


def _dead_ranks(inter: MPI.Intercomm) -> list[int]:
    """Who has died at the other end, as far as this MPI tells."""
    with contextlib.suppress(MPI.Exception, NotImplementedError):
        return MPI.Group.Translate_ranks(inter.Get_failed(), None, inter.Get_remote_group())
    return []


def _dead(error: MPI.Exception) -> str:
    return f"one has died ({error.Get_error_string()})"


def _info() -> MPI.Info:
    """How MPI is to start newcomers."""
    if MPI.get_vendor()[0] == "Open MPI" and "OMPI_MCA_btl" not in os.environ:
        # Where btl/ofi finds no network of its own, it sleeps for a second in MPI_Init (Open MPI 5).
        return MPI.Info.Create({"PMIX_ENVAR": "OMPI_MCA_btl=^ofi"})
    return MPI.INFO_NULL
