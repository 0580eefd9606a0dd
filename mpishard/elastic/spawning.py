"""Spawns processes for a run while it trains; they run its script and join it between two steps.

One process of the run, the leader, spawns them in a thread and receives a message from each.  The other processes
continue to train.  Under MPICH a spawn blocks all of them until the new processes have called MPI_Init, so a new
process calls that first.  When all are ready, the run and the joining processes (`JoiningProcess`) connect at a port.

==========  ==========================================================================================================
on the way  MPI starts the processes, or they run the script up to `optimize`; each says hello as soon as it can
here        all have reported that they are ready, and wait
meeting     the leader has called them in; the run and the joining processes make one communicator
failed      they could not be started, or one has ended: the others are ordered to end, and the run stays as it was
==========  ==========================================================================================================

MPI has several ways to make one communicator.  With this one Open MPI 5 informs all processes who shares memory with
whom.  With `Create_intercomm` over the leader they would not agree on that, and its coll/han would wait forever.  If a
process dies in `Connect`, `Accept` or `Merge`, nothing wakes the others there, not even Revoke of ULFM.  A meeting
takes milliseconds; a process that is in it for much longer gives up, see `in_time`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

from mpi4py import MPI

from mpishard.backend.jit_function import prepare
from mpishard.comm.abort import die, fail_alone, killed_after
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.messages import Message, messages
from mpishard.launch.detection import CELL_OPTION
from mpishard.launch.script import parted, without_runner

# Tags of the messages from joining processes to the leader, and WORD for the leader's; then the leader's two words.
HELLO, HERE, FAILED, COMES, WORD = 1, 2, 3, 4, 5
CALL, DISMISS = b"call", b"dismiss"
_LISTEN_NAP_S, _CALL_NAP_S = 0.02, 0.0005  # between two looks for messages: while processes start, and once called
# Limit from the spawn until the processes have called MPI_Init, which takes seconds on a busy machine.
_START_S = 60
_STARTING_S = 5.0  # for which a request counts as new
# Limits: for sending a word to the joining processes that live, and from the call until all have answered.
_SAYING_S = 2.0
_ANSWER_S = 10.0
# MPI is started first, so that later imports and the script block no other process.  If the leader dies meanwhile
# (ULFM), MPI_Init may wait for ever, and no thread of Python runs in it: then the kernel ends the process.
BOOT = (
    "import os, signal; signal.alarm(20 * (os.environ.get('OMPI_MCA_mpi_ft_enable') == '1')); from mpi4py import MPI; "
    "signal.alarm(0); signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from mpishard.elastic.spawning import run_script; run_script()"
)
# What starts Python with the arguments that follow.  Signals that stop the run reach new processes, too: if one ended
# them before MPI_Init is over, the leader's spawn would not return; later, where MPI does not heal, the job would end
# before its last checkpoint.  They are ignored until `optimize` handles them, and the leader dismisses the process.
SHIELDED = ("/bin/sh", "-c", 'trap "" TERM USR1 INT; exec "$0" "$@"', sys.executable)


def command(argv: Sequence[str], cell: tuple[int, int]) -> list[str]:
    """Return the arguments with which Python runs the script of this process as a joining process.

    `argv` is ``sys.orig_argv`` of a process of the run, which may have joined it itself; `cell` has the tensor and
    pipeline size of the run.  Raises ValueError if the script cannot be run again.
    """
    options, script = parted(argv[1:])
    script = script[2:] if script[:2] == ["-c", BOOT] else without_runner(script)
    if not script or script[0] == "-":
        raise ValueError("their script was read from the standard input, and cannot be read again")
    for number in reversed(range(len(options) - 1)):
        if options[number] == "-X" and options[number + 1].startswith(CELL_OPTION):
            del options[number : number + 2]
    return ["-X", f"{CELL_OPTION}={cell[0]}x{cell[1]}", *options, "-c", BOOT, *script]


class SpawnRequest:
    """A request for processes that are spawned and will join the run; creation returns at once.

    The processes share one MPI_COMM_WORLD; their `Mesh` has the tensor and pipeline size of the run, `cell`.  `here` is
    true once all are ready and wait to be called in.  `problem` says in a line why none will join; it is empty as long
    as they may.
    """

    def __init__(self, processes: int, cell: tuple[int, int]) -> None:
        self.here: bool = False
        self.problem: str = ""
        self.processes = processes
        self._began = time.monotonic()
        self._inter: MPI.Intercomm | None = None
        self._port = b""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpishard-spawning", daemon=True)
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
        """True while the processes may still be starting, which takes the cores; later they run the user's script."""
        return time.monotonic() - self._began < _STARTING_S

    def call(self) -> str:
        """Call the joining processes in once they are `here`; returns the port where they now wait to be connected.

        Takes milliseconds.  The port is empty if one of the processes has ended since: see `problem`.
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
            self._fail(_one_lost(error))
        return "" if self.problem else self._port.decode()

    def check(self) -> None:
        """Raise MPI.Exception if one of them has died or failed since the call."""
        if self._inter is not None and any(message.tag == FAILED for message in messages(self._inter)):
            raise MPI.Exception(MPI.ERR_PROC_FAILED)

    def close(self) -> None:
        """Free the connection to the spawned processes, once they have joined."""
        assert self._inter is not None
        self._inter.Free()
        self._inter = None

    def give_up(self) -> None:
        """Cancel the request: the processes that are on the way are ordered to end.

        If a spawn is under way, this waits until it has returned.
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
            words = [*SHIELDED, *self._command]
            inter = MPI.COMM_SELF.Spawn(words[0], words[1:], self.processes, _info())
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
                # MPI does not detect the death of a process from which no message has come yet.
                if len(heard) < self.processes and time.monotonic() > limit:
                    self._fail(f"{self.processes - len(heard)} of them have not said hello within {_START_S} s")
                    return
                if self._end.wait(_LISTEN_NAP_S):
                    self._fail("nobody is wanted any more")
                    return
        except MPI.Exception as error:
            self._fail(_one_lost(error))
            return
        self.here = True

    def _say(self, inter: MPI.Intercomm, word: bytes) -> None:
        """Send a word to all joining processes that live; Open MPI would wait forever for one that has just died."""
        lost, sends = _lost_ranks(inter), []
        for who in range(self.processes):
            if who not in lost:
                with contextlib.suppress(MPI.Exception):
                    sends.append(inter.Isend(word, who, WORD))
        limit = time.monotonic() + _SAYING_S
        while time.monotonic() < limit:
            with contextlib.suppress(MPI.Exception):
                if MPI.Request.Testall(sends):
                    return
            time.sleep(_CALL_NAP_S)

    def _have_failed(self, come: Iterable[Message]) -> bool:
        """Return True if a joining process reports a failure; then all of them are ordered to end."""
        for who, tag, text in come:
            if tag == FAILED:
                self._fail(f"number {who} of {self.processes}: {text.decode(errors='replace')}")
                return True
        return False

    def _not_started(self) -> None:
        """Give up a spawn that does not return: MPI waits for processes that have ended before MPI_Init."""
        self.problem = f"they have not started within {_START_S} s"
        if MPI.get_vendor()[0] != "Open MPI":  # other threads cannot communicate meanwhile
            die(f"mpishard: spawned processes have not started within {_START_S} s; under this MPI all wait for that")

    def _fail(self, problem: str) -> None:
        """Order all joining processes to end, and keep why; lost ones do not receive the order."""
        inter, self._inter = self._inter, None
        assert inter is not None
        self._say(inter, DISMISS)
        with contextlib.suppress(MPI.Exception):
            inter.Free()
        self.problem, self.here = problem, False


def meet(comm: MPI.Intracomm, port: str, root: int = 0, joins: bool = False) -> MPI.Intracomm:
    """Make one communicator of the run and the joining processes, which come last.  Collective over both.

    It may wait forever if a process dies meanwhile, so call it by way of `in_time`.  `comm` has all processes of the
    run; on joining processes it is their MPI_COMM_WORLD.  `port`, which `SpawnRequest.call` returned, counts on rank
    `root`.
    """
    bridge = comm.Accept(port, root=root) if joins else comm.Connect(port, root=root)
    merged = bridge.Merge(high=joins)
    bridge.Free()
    return merged


def _lost_ranks(inter: MPI.Intercomm) -> list[int]:
    """The lost ranks at the other end, as far as this MPI reports them."""
    with contextlib.suppress(MPI.Exception, NotImplementedError):
        return MPI.Group.Translate_ranks(inter.Get_failed(), None, inter.Get_remote_group())
    return []


def _one_lost(error: MPI.Exception) -> str:
    return f"one has died ({error.Get_error_string()})"


def _info() -> MPI.Info:
    """The MPI_Info with which joining processes are started."""
    if MPI.get_vendor()[0] == "Open MPI" and "OMPI_MCA_btl" not in os.environ:
        # Where btl/ofi finds no network of its kind, it sleeps for a second in MPI_Init (Open MPI 5).
        return MPI.Info.Create({"PMIX_ENVAR": "OMPI_MCA_btl=^ofi"})
    return MPI.INFO_NULL


# The operations take milliseconds.  After a death is known, those that can end will have ended within the grace time.
_MEETING_GRACE_S = 2.0
_MEETING_LIMIT_S = 20.0
_MEETING_NAP_S = 0.001
_TOO_LATE = (
    f"mpishard: the run and spawned processes have not met within {_MEETING_LIMIT_S:g} s, one may have died; "
    "start it again from its newest checkpoint, as `mpishard run --elastic` does"
)
Result = TypeVar("Result")


def in_time(work: Callable[[], Result], check: Callable[[], object] = lambda: None) -> Result:
    """Call `work` and return its result or raise its error; end this process if the call exceeds the time limit.

    With ULFM, `check` is called meanwhile, and raises MPI.Exception if a process has died.  If `work` then does not end
    within the grace time, this function raises that error too, and leaves the thread of `work` where it waits.
    """
    if not heals_in_place():
        late = threading.Timer(_MEETING_LIMIT_S, die, [_TOO_LATE])
        late.daemon = True
        late.start()
        try:
            return work()
        finally:
            late.cancel()
    outcome: list[Any] = []

    def carry_out() -> None:
        try:
            outcome.extend((work(), None))
        except BaseException as problem:
            outcome.extend((None, problem))

    thread = threading.Thread(target=carry_out, name="mpishard-meeting", daemon=True)
    thread.start()
    limit, death = time.monotonic() + _MEETING_LIMIT_S, None
    while thread.is_alive():
        thread.join(_MEETING_NAP_S)
        if time.monotonic() > limit:
            if death is None:
                die(_TOO_LATE)
            else:
                raise death
        if death is None:
            try:
                check()
            except MPI.Exception as found:
                limit, death = time.monotonic() + _MEETING_GRACE_S, found
    result, error = outcome
    if error is not None:
        raise error
    return result


# A spawned process until it has joined: a thread listens to the leader of the run.  If the leader dies or dismisses
# this process, the process ends at once, whatever the script is doing.  If the script ends before the process has
# joined, the run continues.

_LEAVE_S = 5.0
# How long the script's own thread may take to notice that this process is to end, unless it is in a call of MPI.
_HEARS_S = 1.0
_LEAVE_SIGNAL = signal.SIGRTMIN + 5
_REASON_LENGTH = 300  # characters


def flush_output() -> None:
    """Write out what the script has printed, as far as that can be.

    Python refuses it to the handler of a signal that came in the midst of a write, such as that of a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # the last if the script has closed it
            stream.flush()


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
    """This process, until it has joined the run that has spawned it; `waits` is true until then.

    If it cannot join, it kills itself: Finalize would wait for lost processes, and an exit code would end the run.
    """

    this: ClassVar[JoiningProcess]

    def __init__(self) -> None:
        JoiningProcess.this = self
        self.waits: bool = True
        self._leaves = self._bereaved = False
        self._leader = MPI.Comm.Get_parent()
        self._called = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="mpishard-joining", daemon=True)
        signal.signal(_LEAVE_SIGNAL, lambda *_: self._leave())
        fail_alone(heals_in_place())
        # Open MPI detects the death of a process only after a message has been exchanged with it.
        self._tell(HELLO)
        self._listener.start()

    @staticmethod
    def heed_signals() -> None:
        """Let signals that stop the run end this process again, as they do after the run."""
        if threading.current_thread() is threading.main_thread():
            for each in (signal.SIGTERM, signal.SIGUSR1):
                if signal.getsignal(each) is signal.SIG_IGN:
                    signal.signal(each, signal.SIG_DFL)

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
            die("")
        self.waits = False
        self._listener.join()
        self._leader.Free()
        if port:
            MPI.Close_port(port)
        return merged

    def fail(self, why: str) -> NoReturn:
        """Report why this process cannot join, and end on the leader's order, with all that were spawned with it."""
        flush_output()
        self._tell(FAILED, why.splitlines()[0][:_REASON_LENGTH])
        while True:
            self._listener.join()

    def _tell(self, tag: int, text: str = "") -> None:
        try:
            self._leader.Send(text.encode(), 0, tag)
        except MPI.Exception:
            die("")

    def _listen(self) -> None:
        try:
            while self.waits:
                for _, _, word in messages(self._leader, WORD):
                    if word != CALL:
                        self._send_away()
                    self._called.set()
                self._mind_others()
                time.sleep(_LISTEN_NAP_S)
        except MPI.Exception:
            die("")

    def _mind_others(self) -> None:
        """Inform the leader if a process spawned with this one has died; MPI may not inform the leader itself."""
        try:
            if not self._bereaved:
                MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE)
        except MPI.Exception:
            self._bereaved = True
            self._tell(FAILED, "one of those that were spawned with it has died")

    def _send_away(self) -> NoReturn:
        """End cleanly, whatever the script is doing.

        If possible in the script's thread: a call of MPI there after Finalize would end the run.
        """
        signal.pthread_kill(threading.main_thread().ident or 0, _LEAVE_SIGNAL)
        time.sleep(_HEARS_S)
        self._leave()

    def _leave(self) -> NoReturn:
        while self._leaves:  # in another thread
            time.sleep(_LEAVE_S)
        self._leaves = True
        flush_output()
        with killed_after(_LEAVE_S):
            self._leader.Free()
            MPI.Finalize()
            fail_alone(False)
            # C's exit runs the exit handlers of C, in which MPICH informs its launcher that the process ended in order.
            ctypes.PyDLL(None).exit(0)
        raise AssertionError
