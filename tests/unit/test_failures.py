"""Failures of ranks: exits, the death monitor, errors that all ranks raise, and the watchdog."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard.comm import abort
from mpishard.comm import axis as axis_module
from mpishard.comm.agreement import DeferredError
from mpishard.comm.axis import Axis
from mpishard.comm.ledger import Ledger
from mpishard.comm.watchdog import TimeLimit
from mpishard.elastic.loop import ElasticLoop

# A rank that exits where others go on without it dies by a signal; elsewhere it exits as ever.

OS_EXIT, C_EXIT = "os._exit(3)", "ctypes.CDLL(None).exit(3)"
IN_FORK = "if os.fork() == 0: {}\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"


def run(*lines):
    script = "\n".join(["import ctypes, os, sys", "from mpishard.comm.abort import die_at_exit", *lines])
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.faults
@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="this system has no signal for it")
@pytest.mark.parametrize(
    ("how", "code"),
    [(OS_EXIT, -signal.SIGKILL), (C_EXIT, -(signal.SIGRTMIN + 6)), ("sys.exit(3)", -(signal.SIGRTMIN + 6))],
)
def test_an_exit_is_a_death_by_a_signal_while_that_is_wanted(how, code):
    assert run("die_at_exit(True)", how).returncode == code
    assert run("die_at_exit(True)", "die_at_exit(False)", how).returncode == 3
    assert run("die_at_exit(True)", "die_at_exit(False)", "die_at_exit(True)", how).returncode == code


@pytest.mark.faults
@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="this system has no signal for it")
@pytest.mark.parametrize("how", [OS_EXIT, C_EXIT])
def test_it_is_none_in_a_fork(how):
    assert run("die_at_exit(True)", IN_FORK.format(how), "die_at_exit(False)").stdout == "3\n"


@pytest.mark.faults
@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="this system has no signal for it")
def test_nothing_is_changed_where_it_was_never_wanted():
    assert run("before = os._exit", "die_at_exit(False)", "assert os._exit is before", C_EXIT).returncode == 3


# The death monitor beside the ranks of a node: which processes it accepts.

CONNECT = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
there = socket.socket(socket.AF_UNIX)
there.settimeout(20)
there.connect(bytes.fromhex(sys.argv[1]))
try:
    there.send(b"1 666")
    print(there.recv(1))
except OSError:  # closed with what was sent unread
    print(b"")
"""


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_no_rank():
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as rank:
        listener.bind("")
        listener.listen(2)
        address = listener.getsockname()
        command = [sys.executable, "-I", "-S", "-c", abort._SCRIPT, "host", "1", "1", "20"]
        with subprocess.Popen(command, stdin=listener.fileno(), stderr=subprocess.PIPE, text=True) as process:
            other = [sys.executable, "-I", "-S", "-c", CONNECT, address.hex()]
            assert subprocess.run(other, capture_output=True, text=True).stdout == "b''\n"
            rank.settimeout(20)
            rank.connect(address)
            rank.send(b"0 77")
            assert rank.recv(1) == b"."
            rank.close()
            assert "rank 0 of 1 (process 77 on host) has died" in process.communicate(timeout=20)[1]


@pytest.mark.faults
def test_a_rank_that_leaves_by_itself_has_not_succeeded():
    script = """
import os
from mpi4py import MPI
from mpishard.comm.abort import DeathMonitor
first, second = DeathMonitor.over(MPI.COMM_SELF), DeathMonitor.over(MPI.COMM_SELF)
first.dismiss()
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
if {dismissed}:
    second.dismiss()
os._exit(0)
"""
    codes = [
        subprocess.run([sys.executable, "-c", script.format(dismissed=dismissed)], timeout=60).returncode
        for dismissed in (False, True)
    ]
    # The launcher of Open MPI calls it a failure itself.
    assert codes == [0 if MPI.get_vendor()[0] == "Open MPI" else 1, 0]


# Errors of the user's code that wait until all ranks can raise them; and what a run that has failed leaves.


class TwoRanks:
    """The axis of rank 0 of two, of which the other has called ``sys.exit(3)``."""

    rank, size = 0, 2
    raise_together = Axis.raise_together

    def all_reduce(self, buffer, op, label):
        return np.maximum(buffer, 1)

    def allgather_object(self, value):
        return [value, ("SystemExit", "SystemExit: 3", 3, "")]


@pytest.mark.parametrize("error", [KeyError("no data"), SystemExit(3)], ids=["error", "exit"])
def test_an_error_waits_for_the_others(error):
    deferred = DeferredError(TwoRanks(), transactional=False)
    with deferred.capture():
        raise error
    assert deferred.error is error
    with pytest.raises(type(error)) as raised:
        deferred.raise_on_all()
    assert raised.value is error and deferred.error is None


def test_all_ranks_end_with_the_code_of_one(capfd):
    with pytest.raises(SystemExit) as raised:
        DeferredError(TwoRanks(), transactional=False).raise_on_all()
    assert raised.value.code == 3
    assert "rank 1 called sys.exit in the run; all ranks end with its code 3" in capfd.readouterr().err


def test_other_ranks_say_where_one_has_failed():
    def gathered(_):
        try:
            raise KeyError("no data")
        except KeyError as error:
            return [None, ("KeyError", "KeyError: 'no data'", None, axis_module._place(error, 1))]

    other = TwoRanks()
    other.name, other.allgather_object = "world", gathered
    with pytest.raises(RuntimeError, match="^rank 1 of axis 'world': KeyError: 'no data'") as raised:
        DeferredError(other, transactional=False).raise_on_all()
    (note,) = raised.value.__notes__
    assert (
        note.startswith("On rank 1:\n") and f'File "{__file__}"' in note and note.endswith('raise KeyError("no data")')
    )
    # Over a second axis the same place.
    assert axis_module._place(raised.value, 0) == note


def test_without_an_error_nobody_meets():
    """In an elastic run `meet` sends the spares an order to fail, and a loss may be NaN without an error."""
    both_fine = TwoRanks()
    both_fine.all_reduce = lambda buffer, op, label: buffer
    deferred = DeferredError(both_fine, transactional=True)
    deferred.meet = lambda: pytest.fail("no rank has failed")
    deferred.raise_on_all()


def test_what_cannot_wait_is_raised_at_once(monkeypatch):
    for error, alone in (
        (KeyError("no data"), False),
        (MPI.Exception(MPI.ERR_OTHER), True),
        (KeyboardInterrupt(), True),
    ):
        deferred = DeferredError(TwoRanks(), transactional=False)
        with pytest.raises(type(error)), deferred.capture(alone):
            raise error
        assert deferred.error is None
    deferred = DeferredError(Axis.single(), transactional=False)
    with pytest.raises(KeyError), deferred.capture():
        raise KeyError("no data")
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    deferred = DeferredError(TwoRanks(), transactional=True)
    with pytest.raises(KeyError), deferred.capture():
        raise KeyError("a death")


def test_an_elastic_run_that_has_failed_is_not_kept():
    def function(parameters, samples, gradients):
        raise ArithmeticError("spoilt")

    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        problem = mpishard.OptimizationProblem(function, np.zeros(3), samples=4, batch_size=4, steps=2)
        optimizer = mpishard.ElasticOptimizer(mpishard.SGD(lr=0.1), mesh)
        before = sum(isinstance(each, ElasticLoop) for each in gc.get_objects())
        with pytest.raises(ArithmeticError):
            optimizer.optimize(problem, progress=False)
        gc.collect()
        assert sum(isinstance(each, ElasticLoop) for each in gc.get_objects()) == before


# The time limit of a collective, from the steps of the run so far.


def test_a_choice_of_the_users_stands() -> None:
    limit = TimeLimit(7.5)
    for step, now in ((0, 0.0), (1, 10.0), (2, 500.0)):
        limit.note(step, now)
    assert limit.seconds == 7.5 and not limit.in_set_up and "7.5 s" in str(limit)


def test_the_set_up_ends_with_the_first_step_that_is_over() -> None:
    limit = TimeLimit(None)
    for step, now in ((0, 0.0), (0, 900.0), (1, 1000.0), (1, 1030.0)):  # it compiles in the first step, too
        limit.note(step, now)
        assert limit.in_set_up and limit.seconds == 1800
    limit.note(2, 1003.0)
    assert not limit.in_set_up and limit.seconds == 120


def test_steps_that_were_over_before_the_first_look_end_the_set_up() -> None:
    ledger, limit = Ledger(), TimeLimit(None)
    ledger.step = 1001
    limit.note(ledger.step, 0.0, ledger.any_over)
    assert limit.in_set_up
    ledger, limit = Ledger(), TimeLimit(None)
    for ledger.step in (1001, 1002, 1003):
        pass
    limit.note(ledger.step, 0.0, ledger.any_over)
    assert not limit.in_set_up and limit.seconds == 120


def test_long_steps_and_what_comes_between_them_lengthen_it() -> None:
    limit = TimeLimit(None)
    for step, now in ((101, 0.0), (102, 30.0), (103, 32.0)):
        limit.note(step, now)
    assert limit.seconds == 300
    limit.note(103, 400.0)  # under way, or in a collective that hangs
    assert limit.seconds == 300
    limit.note(110, 500.0)
    assert limit.seconds == 4680 and "10 times the longest step" in str(limit)


def test_another_run_of_an_optimizer_may_begin_anew() -> None:
    limit = TimeLimit(None)
    for step, now in ((1, 0.0), (9, 5.0), (1, 25.0)):
        limit.note(step, now)
    assert limit.seconds == 200


READING = """
import gc, sys, threading, time
import numpy as np
from mpishard.comm import ledger as module

ledger = module.Ledger()
ledger.active = (0.0, "data", 1, "all_reduce", np.dtype(float), 1, "", None, 0, (0, 1), False)
inside = {}
exec(compile("def deep(n): return n and deep(n - 1)", module._PACKAGE + "deep.py", "exec"), inside)
read = 0

def look():
    global read
    while read < 300:
        assert ledger.waiting_with_site.line
        read += 1

# While the reader collects garbage, the main thread runs on.
reader = threading.Thread(target=look, daemon=True)
sys.setswitchinterval(1e-4)
gc.set_threshold(1)
gc.callbacks.append(lambda *_: threading.current_thread() is reader and time.sleep(0.0001))
reader.start()
while reader.is_alive():
    inside["deep"](50)
print(read)
"""


def test_the_stack_of_a_main_thread_that_runs_on_is_read() -> None:
    ended = subprocess.run([sys.executable, "-c", READING], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "300\n"), ended
