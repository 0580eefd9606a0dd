"""Failures of ranks, and the axis and the space of one process."""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI
from variants import full

import mpishard
from mpishard.backend.exact import MOST_TERMS
from mpishard.comm import abort
from mpishard.comm.agreement import DeferredError
from mpishard.comm.axis import Axis, allgather_values
from mpishard.comm.errors import ErrorForOthers
from mpishard.comm.ledger import Call, Ledger, users_level
from mpishard.comm.watchdog import TimeLimit, arrival
from mpishard.elastic.loop import ElasticLoop
from mpishard.minimizers.space import LocalSpace, Space

# Failures of ranks: exits, the death monitor, errors that all ranks raise, and the watchdog.

# A rank that exits where others go on without it dies by a signal; elsewhere it exits as ever.

OS_EXIT, C_EXIT = "os._exit(3)", "ctypes.CDLL(None).exit(3)"
IN_FORK = "if os.fork() == 0: {}\nprint(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)"


def python(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)


def run(*lines):
    return python("\n".join(["import ctypes, os, sys", "from mpishard.comm.abort import die_at_exit", *lines]))


has_signals = pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="this system has no signal for it")


@has_signals
@pytest.mark.parametrize(
    ("how", "code"),
    [
        (OS_EXIT, -signal.SIGKILL),
        (C_EXIT, -(signal.SIGRTMIN + 6)),
        pytest.param("sys.exit(3)", -(signal.SIGRTMIN + 6), marks=pytest.mark.full),
    ],
)
def test_an_exit_is_a_death_by_a_signal_while_that_is_wanted(how, code):
    assert run("die_at_exit(True)", how).returncode == code
    assert run("die_at_exit(True)", "die_at_exit(False)", how).returncode == 3
    assert run("die_at_exit(True)", "die_at_exit(False)", "die_at_exit(True)", how).returncode == code


@has_signals
def test_it_is_none_in_a_fork_and_where_it_was_never_wanted():
    forks = (IN_FORK.format(how) for how in (OS_EXIT, C_EXIT))
    assert run("die_at_exit(True)", *forks, "die_at_exit(False)").stdout == "3\n3\n"
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
            assert "rank 0 of 1 (process 77 on host) has died" in process.communicate(timeout=120)[1]


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
    codes = [python(script.format(dismissed=dismissed)).returncode for dismissed in (False, True)]
    # The launcher of Open MPI calls it a failure itself.
    assert codes == [0 if MPI.get_vendor()[0] == "Open MPI" else 1, 0]


@pytest.mark.parametrize("stderr", ["open('/dev/full', 'w')", "None"])
def test_a_rank_ends_also_where_its_error_cannot_be_printed(stderr):
    script = f"import sys; from mpishard.comm.abort import die; sys.stderr = {stderr}; die('it has failed')"
    assert python(script).returncode == -signal.SIGKILL


# Errors of the user's code that wait until all ranks can raise them; and what a run that has failed leaves.


class TwoRanks:
    """The axis of rank 0 of two, of which the other has called ``sys.exit(3)``."""

    rank, size, members = 0, 2, (0, 1)
    raise_together = Axis.raise_together

    def all_reduce(self, buffer, op, label):
        return np.maximum(buffer, 1)

    def allgather_object(self, value):
        return [value, ErrorForOthers("SystemExit", "SystemExit: 3", 3, "", 1)]


def test_an_error_waits_for_the_others_and_all_end_with_the_code_of_one(capfd):
    for error in (KeyError("no data"), SystemExit(3)):
        deferred = DeferredError(TwoRanks(), transactional=False)
        with deferred.capture():
            raise error
        assert deferred.error is error
        with pytest.raises(type(error)) as raised:
            deferred.raise_on_all()
        assert raised.value is error and deferred.error is None
    with pytest.raises(SystemExit) as raised:
        DeferredError(TwoRanks(), transactional=False).raise_on_all()
    assert raised.value.code == 3
    assert "rank 1 called sys.exit in the run; all ranks end with its code 3" in capfd.readouterr().err


def test_other_ranks_say_where_one_has_failed():
    def gathered(_):
        try:
            raise KeyError("no data")
        except KeyError as error:
            return [None, ErrorForOthers.of(error, 1)]

    other = TwoRanks()
    other.allgather_object = gathered
    with pytest.raises(RuntimeError, match="^rank 1: KeyError: 'no data'") as raised:
        DeferredError(other, transactional=False).raise_on_all()
    (note,) = raised.value.__notes__
    assert note.startswith("On rank 1:\n") and note.endswith('raise KeyError("no data")')
    assert f'File "{__file__}"' in note
    again = ErrorForOthers.of(raised.value, 0).made()  # over a second axis
    assert again.args == raised.value.args and again.__notes__ == [note]


def test_without_an_error_nobody_meets():
    """In an elastic run `on_failure` sends the spares an order to fail, and a loss may be NaN without an error."""
    both_fine = TwoRanks()
    both_fine.all_reduce = lambda buffer, op, label: buffer
    deferred = DeferredError(both_fine, transactional=True)
    deferred.on_failure = lambda: pytest.fail("no rank has failed")
    deferred.raise_on_all()


def test_what_cannot_wait_is_raised_at_once(environ):
    ends_at_once = (MPI.Exception(MPI.ERR_OTHER), True), (KeyboardInterrupt(), True)
    for error, alone in ((KeyError("no data"), False), *ends_at_once):
        deferred = DeferredError(TwoRanks(), transactional=False)
        with pytest.raises(type(error)), deferred.capture(alone):
            raise error
        assert deferred.error is None
    deferred = DeferredError(Axis.single(), transactional=False)
    with pytest.raises(KeyError), deferred.capture():
        raise KeyError("no data")
    environ(OMPI_MCA_mpi_ft_enable="1")
    deferred = DeferredError(TwoRanks(), transactional=True)
    with pytest.raises(KeyError), deferred.capture():
        raise KeyError("a death")


def test_an_elastic_run_that_has_failed_is_not_kept():
    def function(parameters, samples, gradients):
        raise ArithmeticError("spoilt")

    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        problem = mpishard.OptimizationProblem(function, np.zeros(3), samples=4, batch_size=4, steps=2)
        optimizer = mpishard.ElasticOptimizer(mpishard.SGD(lr=0.1), mesh)
        before = sum(type(each) is ElasticLoop for each in gc.get_objects())
        with pytest.raises(ArithmeticError):
            optimizer.optimize(problem, progress=False)
        gc.collect()
        assert sum(type(each) is ElasticLoop for each in gc.get_objects()) == before


# The time limit of a collective, from the steps of the run so far.


SET_UP = [(0, 0.0), (0, 900.0), (1, 1000.0), (1, 1030.0)]  # it compiles in the first step, too
LONG = [(101, 0.0), (102, 30.0), (103, 32.0)]


@pytest.mark.parametrize(
    ("notes", "seconds"),
    [
        (SET_UP[:2], 1800),
        (SET_UP, 1800),
        ([*SET_UP, (2, 1003.0)], 120),
        (LONG, 300),
        ([*LONG, (103, 400.0)], 300),  # under way, or in a collective that hangs
        ([*LONG, (103, 400.0), (110, 500.0)], 4680),
        ([(1, 0.0), (9, 5.0), (1, 25.0)], 200),  # another run of an optimizer may begin anew
    ],
    ids=["set-up", "first step", "second step", "long step", "under way", "long pause", "another run"],
)
def test_the_limit_follows_the_steps(notes: list[tuple[int, float]], seconds: float) -> None:
    limit, chosen = TimeLimit(None), TimeLimit(7.5)
    for step, now in notes:
        limit.note(step, now)
        chosen.note(step, now)
    assert limit.seconds == seconds and limit.in_set_up == (seconds == 1800)
    assert ("10 times the longest step" in str(limit)) == (seconds != 1800)
    assert chosen.seconds == 7.5 and not chosen.in_set_up and "7.5 s" in str(chosen)


@pytest.mark.parametrize("limit", [math.inf, 1e12])
def test_a_limit_may_be_longer_than_a_timer_can_wait(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Mock()
    monkeypatch.setattr(threading, "Timer", timer)
    with arrival(SimpleNamespace(size=2, rank=1), limit):
        assert [call.args[0] for call in timer.call_args_list] == [threading.TIMEOUT_MAX, 15.0]


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


@pytest.mark.parametrize("library", [contextlib.__file__, pytest.__file__, mpishard.__file__])
def test_calls_and_warnings_are_placed_at_the_users_line(library):
    """Past the frames of Python's own modules, installed packages and mpishard."""
    between: dict = {}
    exec(compile("def call(function, *arguments): return function(*arguments)", library, "exec"), between)
    ledger, call = Ledger(), between["call"]
    fields = call(ledger.begin, "data", 1, "all_reduce", np.dtype(float), 1, "", (0, 1))
    assert Call(*fields).code is inspect.currentframe().f_code
    deep = call(call, call, call, call, call, ledger.begin, "data", 1, "all_reduce", np.dtype(float), 1, "", (0, 1))
    assert Call(*deep).code is None
    placed = call(Call(*deep).placed, inspect.currentframe())
    assert placed.code is inspect.currentframe().f_code
    assert call(users_level) == 2


READING = """
import gc, sys, threading, time
import numpy as np
from mpishard.comm import ledger as module

ledger = module.Ledger()
ledger.active = (0.0, "data", 1, "all_reduce", np.dtype(float), 1, "", None, 0, (0, 1), False)
inside = {}
exec(compile("def deep(n): return n and deep(n - 1)", module.PACKAGE + "deep.py", "exec"), inside)
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
    ended = python(READING)
    assert (ended.returncode, ended.stdout) == (0, "300\n"), ended


# The axis of one rank alone.

# A model of its own, in a process where a call of MPI would abort.
WITHOUT_MPI = """
import mpi4py
mpi4py.rc.initialize = False
import numpy as np
import mpishard
from mpi4py import MPI

sizes = dict(vocabulary_size=9, context_length=8, width=8, layers=2, heads=2)
model = mpishard.nn.GPT(**sizes, stage_costs="measured", dtype="float64")
tokens = np.arange(16).reshape(2, 8) % 9
loss = model.loss_and_gradient(tokens, tokens)
assert np.isfinite(loss) and abs(model.loss(tokens, tokens) - loss) < 1e-9
axis = mpishard.Axis.single()
assert (axis.rank, axis.size, axis.members) == (0, 1, [0])
parts = [axis.subgroup("part", [0]), axis.split("half", 0)]
assert all((part.rank, part.size, part.members) == (0, 1, [0]) for part in parts)
axis.revoke()
axis.free()
assert not MPI.Is_initialized()
"""


NOT_STARTED = """
import mpi4py
mpi4py.rc.initialize = False  # as Devito has it
import numpy as np
from mpi4py import MPI
import mpishard

def function(x):
    return float(x @ x), 2 * x

def wrong(x):
    raise ArithmeticError

assert mpishard.check_gradient(function, np.ones(3), disp=False)
assert mpishard.check_adjoint(lambda x: 2 * x, lambda y: 2 * y, np.ones(3), np.ones(3), disp=False)
assert mpishard.minimize(function, np.ones(3)).success
try:
    mpishard.check_gradient(wrong, np.ones(3))
except ArithmeticError:
    pass
assert not MPI.Is_initialized()
with mpishard.Mesh() as mesh:
    assert mpishard.minimize(function, np.ones(3), mesh=mesh).success
"""


STARTED_BY_OTHERS = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
import numpy as np
from mpi4py import MPI
import mpishard

MPI.Init_thread(MPI.THREAD_SINGLE)
with mpishard.Mesh() as mesh:
    assert mpishard.minimize(lambda x: (float(x @ x), 2 * x), np.ones(3), mesh=mesh).success
    assert mpishard.map_runs(lambda case, group: 2 * case, range(3), mesh) == [0, 2, 4]
assert not MPI.Is_finalized()
MPI.Finalize()
"""


@pytest.mark.parametrize(
    "script", [NOT_STARTED, *full(WITHOUT_MPI, STARTED_BY_OTHERS)], ids=["a function", "a model", "started by others"]
)
def test_what_has_no_mesh_makes_no_mpi_call_and_a_mesh_starts_mpi(script: str) -> None:
    done = python(script)
    said = [line for line in done.stderr.splitlines() if "compiling kernels" not in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_it_has_every_collective() -> None:
    axis = mpishard.Axis.single("alone")
    values, other = np.arange(3.0), np.zeros(3)
    assert axis.all_reduce(values) is values and axis.start_all_reduce(values, other).wait() is other
    assert np.array_equal(other, values)
    assert np.array_equal(axis.reduce_scatter(values), values) and np.array_equal(axis.all_gather(values), values)
    assert np.array_equal(axis.all_to_all(values, np.zeros(3)), values) and axis.broadcast(values) is values
    sent = axis.start_send(values, 0)
    assert np.array_equal(axis.recv(np.zeros(3), 0), values)
    sent.wait()
    axis.barrier()
    assert axis.allgather_object("x") == ["x"]
    assert axis.ledger.totals["alone", "all_reduce", ""].calls == 2
    with pytest.raises(ValueError, match="wrong"):
        axis.raise_if_any(ValueError("wrong"))
    part = axis.subgroup("part", [0])
    assert part is not None and part.all_reduce(values) is values
    axis.revoke()  # of a rank alone: nothing to do, also for its parts and under an MPI without ULFM
    assert part.all_reduce(values) is values and part.start_all_reduce(values).wait() is values
    axis.free()
    for _ in range(2):  # the communicator stays
        another = mpishard.Axis.single()
        assert another.all_reduce(np.ones(2))[0] == 1 and another.ledger is not axis.ledger
        another.revoke()
        another.free()
    assert MPI.COMM_SELF.size == 1


@pytest.mark.parametrize(("heals", "kind"), [(True, MPI.Exception), (False, pickle.UnpicklingError)])
def test_values_that_cannot_be_read_are_those_of_the_dead(environ, heals, kind):
    """Open MPI 5 may return from an allgather in which a rank dies, with values that nobody has sent."""

    class Dying:
        def allgather(self, value):
            return [value, pickle.loads(b"\xe4")]

    environ(OMPI_MCA_mpi_ft_enable="1" if heals else None)
    with pytest.raises(kind) as raised:
        allgather_values(Dying(), 1)
    assert not heals or raised.value.Get_error_class() == MPI.ERR_PROC_FAILED


# The space of one process, and what all spaces share.


class SpaceTwoRanks(LocalSpace):
    """The first of two ranks; the other has the same elements."""

    def __init__(self, size, total, like, spans):
        Space.__init__(self, size, total, like, spans)

    def add(self, numbers):
        numbers *= 2

    def maximize(self, numbers):
        self.tops = numbers.copy()


def test_sums_of_one_process():
    one, other = np.array([3.0, -4.0, 0.5]), np.array([1.0, 2.0, -2.0])
    space = LocalSpace(3, one)
    assert (space.size, space.total, space.like.size, space.spans) == (3, 3, 0, ((0, 3),))
    tops = space.largest(one, other)
    assert tops == [4.0, 2.0]
    assert space.dots([(one, other), (one, one)], [8.0, 16.0]) == [-6.0, 25.25]
    assert space.count(3, 0, -1) == [3, 0, -1]
    assert space.whole(one) is one and space.own(one) is one
    assert space.largest() == space.dots([], []) == space.count() == []
    for value in (math.nan, math.inf, -math.inf):  # infinite for a maximum
        assert LocalSpace(3, one).largest(np.array([1, value, 2], np.float32), one) == [math.inf, 4.0]


def test_only_what_counts_here_is_summed():
    vector = np.array([1.0, 10.0, 2.0, math.nan])
    space = SpaceTwoRanks(4, 4, vector[:0], [(0, 1), (1, 1), (2, 3)])
    assert space.spans == ((0, 1), (2, 3))
    assert space.largest(vector) == [2.0] and np.array_equal(space.tops, [2.0])
    assert space.dots([(vector, vector)], [4.0]) == [10.0]
    assert space.count(2) == [4]
    space = SpaceTwoRanks(4, 2, vector, [])
    assert space.largest(vector) == space.dots([(vector, vector)], [0.0]) == [0.0]


def test_device_memory_and_vectors_that_are_too_long(device):
    vector = device.empty(5, np.float32)
    vector.fill(-2.0)
    space = LocalSpace(5, vector)
    assert space.largest(vector) == [2.0] and space.dots([(vector, vector)], [4.0]) == [20.0]
    with pytest.raises(ValueError, match=f"at most {MOST_TERMS} .*{MOST_TERMS + 1}"):
        SpaceTwoRanks(5, MOST_TERMS + 1, vector, [(0, 5)])


class Counting(LocalSpace):
    """Counts the all-reduces, and the words in them."""

    sent = ()

    def add(self, numbers):
        self.sent += (numbers.size,)

    def maximize(self, numbers):
        self.sent += (numbers.size,)


@pytest.mark.parametrize("decades", [14, 160])
def test_sums_whose_largest_elements_do_not_meet_are_made_again(decades):
    one = np.geomspace(10.0**-decades, 10.0**decades, 1000)
    other, plain = 3 / one, np.linspace(-1, 2, 1000)
    space = Counting(1000, one)
    tops = space.largest(one, other, plain)
    pairs = [(plain, plain), (one, other), (one, -other)]
    found = space.dots(pairs, [tops[2] ** 2, tops[0] * tops[1], tops[0] * tops[1]])
    assert found == pytest.approx([math.fsum(plain * plain), 3000, -3000], rel=1e-14)
    assert space.sent == (3, 6, 2, 4)


def test_sums_that_cancel_are_made_once():
    one = np.array([1.0, -1.0, 2.0, 0.0])
    space = Counting(4, one)
    assert space.dots([(one, np.ones(4) - (np.arange(4) > 1))], [2.0]) == [0.0]
    assert space.sent == (2, 1)
    assert math.isnan(space.dots([(np.full(4, math.inf), one)], [math.inf])[0])
