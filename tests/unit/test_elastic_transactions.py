"""Elastic runs: phases, steps that are transactions, buddies, membership, roles and spawned processes."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import mpishard
from mpishard.comm.axis import Axis
from mpishard.comm.ledger import Ledger
from mpishard.elastic import transactions as agreements
from mpishard.elastic.membership import Membership
from mpishard.elastic.phases import TRANSITIONS, Phase, PhaseEvent, next_phase
from mpishard.elastic.roles import Member, Peer, Roles
from mpishard.elastic.spawning import BOOT, SHIELDED, command, flush_output
from mpishard.elastic.transactions import ResizeMetadata, RunStatus, Transactions, buddies, needs_copy
from mpishard.launch.detection import CELL_OPTION
from mpishard.launch.script import RUNNER
from mpishard.training.checkpoints import RunProgress
from mpishard.training.run import StepOutcome

# The phases of an elastic run, as a table: every event in every phase leads somewhere, or is refused.

# A row for each phase, a column for each event: the phase that it leads to, "-" where it cannot come.
TABLE = """
           WORKS     SPARE    ORDERED   STOPPED   FINISHED  CLOSED  DIED
STARTING   TRAINING  -        RESIZING  -         ENDING    -       -
TRAINING   TRAINING  -        RESIZING  STOPPING  -         -       HEALING
WAITING    -         -        RESIZING  -         -         -       HEALING
RESIZING   TRAINING  WAITING  -         STOPPING  ENDING    -       HEALING
HEALING    -         -        RESIZING  -         -         -       HEALING
STOPPING   -         -        RESIZING  -         ENDING    -       HEALING
ENDING     -         -        -         -         -         ENDED   HEALING
ENDED      -         -        -         -         -         -       -
"""


def rows():
    events, *lines = (line.split() for line in TABLE.strip().splitlines())
    return {
        (Phase[phase], PhaseEvent[event]): None if cell == "-" else Phase[cell]
        for phase, *cells in lines
        for event, cell in zip(events, cells, strict=True)
    }


def test_the_table_has_every_phase_and_event():
    assert rows().keys() == set(itertools.product(Phase, PhaseEvent))


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, PhaseEvent)), ids=lambda each: each.name)
def test_every_event_in_every_phase(phase, event):
    following = rows()[phase, event]
    if following is None:
        with pytest.raises(AssertionError, match=f"{event.name} .*{phase.name}"):
            next_phase(phase, event)
    else:
        assert next_phase(phase, event) is following


def test_no_phase_is_a_trap():
    """Whatever has happened, a run can still end, and all phases can be reached."""

    def reached(phase, seen=()):
        new = set(TRANSITIONS[phase].values()) - {phase, *seen}
        return {phase}.union(*(reached(each, {phase, *seen}) for each in new))

    assert reached(Phase.STARTING) == set(Phase)
    assert all(Phase.ENDED in reached(phase) for phase in Phase)


# What a worker takes part in and goes back to when a step fails; no other process is here.


@pytest.fixture
def failing():
    """The communicators whose agreements fail."""
    return set()


@pytest.fixture
def calls(monkeypatch, failing):
    """The agreements that this process took part in, as (communicator, sound)."""
    calls = []

    def agree(comm, sound):
        calls.append((comm, sound))
        if comm in failing or not sound:
            raise MPI.Exception(MPI.ERR_PROC_FAILED)

    monkeypatch.setattr(agreements, "agree", agree)
    return calls


@pytest.fixture
def agreed(calls):
    mesh = SimpleNamespace(world=SimpleNamespace(comm="workers"))
    membership = SimpleNamespace(axis=SimpleNamespace(comm="membership"))
    return agreements.Agreements(mesh, membership)


def test_a_process_that_fails_says_no_wherever_others_may_wait(agreed, calls):
    agreed.agree_as_workers()
    agreed.agree_on_membership()
    assert agreed.workers_may_wait
    agreed.refuse_all()
    assert calls == [("workers", True), ("membership", True), ("workers", False), ("membership", False)]
    assert not agreed.workers_may_wait
    calls.clear()
    agreed.end_steps()  # between steps no worker waits
    agreed.refuse_all()
    agreed.begin_steps()
    agreed.refuse_all()
    assert calls == [("membership", False), ("workers", False), ("membership", False)]


def test_no_agreement_is_answered_twice(agreed, calls, failing):
    """The one that has failed here has failed on the others too."""
    failing.add("workers")
    with pytest.raises(MPI.Exception):
        agreed.agree_as_workers()
    agreed.refuse_all()
    assert calls == [("workers", True), ("membership", False)]


class Training:
    """In place of a `TrainingRun`: counts its steps."""

    def __init__(self):
        self.steps, self.facts, self.report = [], {"steps": 3}, self
        state = SimpleNamespace(facts=self.facts, restore=self.facts.update)
        self.optimizer = SimpleNamespace(state=state)

    def phase(self, name):
        assert name == "commit"
        return nullcontext()

    def take_step(self, step):
        self.facts["steps"] = step
        return StepOutcome(1 / step, 0.1, True)

    def finish_step(self, outcome):
        self.steps.append(outcome.loss)


class State:
    """In place of a `BuddyCheckpoint`."""

    def __init__(self):
        self.facts = None

    def begin(self, facts):
        self.facts = dict(facts)

    def send_to_buddy(self):
        pass

    def commit(self):
        self.facts = None

    def rollback(self):
        facts, self.facts = self.facts, None
        return facts


@pytest.fixture
def training():
    return Training()


@pytest.fixture
def transactions(training, agreed):
    made = Transactions(training, None, agreed, RunStatus(3, 3, "", False))
    assert not made.has_state
    made.install(State())
    return made


def test_a_step_that_is_agreed_on(transactions, training):
    transactions.rollback()  # without a step
    assert training.facts == {"steps": 3}
    assert transactions.take_step().loss == 0.25
    assert transactions.status == (4, 3, "", False)
    assert training.steps == [0.25]
    transactions.decide("steps")
    transactions.note_saved()
    assert transactions.status == (4, 4, "steps", True)


@pytest.mark.parametrize(("committed", "steps", "losses"), [(3, 3, []), (4, 4, [0.25])])
def test_a_step_that_fails_is_what_it_is_to_the_others(transactions, training, failing, committed, steps, losses):
    failing.add("workers")
    with pytest.raises(MPI.Exception):
        transactions.take_step()
    assert transactions.status == (3, 3, "", False)
    newest = RunStatus(committed, 3, "", False)
    transactions.adopt(newest)
    assert transactions.status == newest
    assert (training.steps, training.facts["steps"]) == (losses, steps)


# What processes of an elastic run tell each other: after a death, and when the workers change.


@pytest.mark.parametrize(
    ("survivors", "newest"),
    [
        ([(4, 4, "", False), (4, 4, "", False)], (4, 4, "", False)),
        # The agreement on step 5 has come to one of them only.
        ([(4, 4, "", False), (5, 4, "", False)], (5, 4, "", False)),
        # The decision after step 5 has.
        ([(5, 4, "", False), (5, 5, "", False)], (5, 5, "", False)),
        ([(5, 5, "steps", False), (5, 4, "", False)], (5, 5, "steps", False)),
        # The last checkpoint counts as saved where all know that it is.
        ([(5, 5, "steps", True), (5, 5, "steps", False)], (5, 5, "steps", False)),
        ([(5, 5, "steps", True)], (5, 5, "steps", True)),
    ],
)
def test_what_one_survivor_knows_counts_for_all(survivors, newest):
    assert RunStatus.newest(RunStatus(*each) for each in survivors) == newest


@pytest.mark.parametrize(("committed", "decided", "is_decided"), [(3, 3, True), (4, 3, False), (0, 0, True)])
def test_a_death_between_commit_and_decision(committed, decided, is_decided):
    assert RunStatus(committed, decided, "", False).is_decided is is_decided


def test_the_metadata_of_a_resize_come_as_they_were_sent():
    progress = RunProgress(np.array([0.5, 0.25]), 32, 4, 3, 1, 2, 12)
    facts = {"steps": 5, "skipped_steps": 0, "rule.json": {"lr": 0.1}}
    sent = ResizeMetadata(facts, progress, RunStatus(5, 4, "signal", True), 2**25 + 3, -1, ["a", "b"])
    wire = sent.to_wire()
    assert [name for name, value in wire.items() if isinstance(value, np.ndarray)] == ["losses"]  # one broadcast
    assert wire | facts == wire  # the optimizer restores itself from it
    came = ResizeMetadata.from_wire(wire)
    assert came.progress.losses.tolist() == [0.5, 0.25]
    assert (came.optimizer, came.status, came.request) == (facts, sent.status, sent.request)
    assert (came.discovered, came.checkpoints) == (-1, ["a", "b"])
    numbers = ("samples_consumed", "first_workers", "steps_before", "skipped_before", "resumed_steps")
    assert came.progress.samples_before == 12
    assert [getattr(came.progress, name) for name in numbers] == [32, 4, 3, 1, 2]


# Copies of state are on other nodes where they can be.


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("", []),
        ("a", [0]),
        ("aaaa", [1, 2, 3, 0]),
        ("abab", [1, 0, 3, 2]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("abb", [2, 0, 1]),
    ],
)
def test_nodes(nodes, expected):
    assert buddies(nodes) == expected


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=24))
def test_as_few_as_can_be_are_on_the_same_node(nodes):
    found = buddies(nodes)
    assert sorted(found) == list(range(len(nodes)))
    assert all(to != rank for rank, to in enumerate(found))
    largest = max(Counter(nodes).values())
    assert sum(nodes[to] == nodes[rank] for rank, to in enumerate(found)) == max(0, 2 * largest - len(nodes))


@pytest.mark.parametrize(
    ("holdings", "nodes", "expected"),
    [
        ("aaaa", "xxxx", []),
        ("abab", "xxxx", []),
        ("abac", "xxxx", [1, 3]),
        ("aabb", "xxyy", [0, 1, 2, 3]),  # the loss of a node would lose both
        ("abab", "xxyy", []),
        (["a", "", "b", ""], "xxyy", [0, 2]),  # nothing needs no copy
        ("a", "x", [0]),
    ],
)
def test_what_needs_a_copy(holdings, nodes, expected):
    assert [rank for rank in range(len(nodes)) if needs_copy(holdings, nodes, rank)] == expected


# A process dies while survivors of another death make their communicator.


class Survivors(MPI.Intracomm):
    """The communicator that a shrink has given; `hears` is what other ranks say in an agreement."""

    calls: list[str]
    hears: bool
    dies: bool

    def Agree(self, flag):
        self.calls.append(f"agree {flag}")
        return int(flag and self.hears)

    def Dup(self, info=MPI.INFO_NULL):
        self.calls.append("dup")
        if self.dies:
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
        self.hears = False  # another rank has noticed the death
        return MPI.COMM_SELF.Dup()

    def Revoke(self):
        self.calls.append("revoke")


class Broken(MPI.Intracomm):
    survivors: Survivors

    def Shrink(self):
        return self.survivors


@pytest.mark.parametrize("dies", [True, False])
def test_survivors_make_their_communicator_together_or_not_at_all(environ, monkeypatch, dies):
    environ(OMPI_MCA_mpi_ft_enable="1")
    monkeypatch.setattr(Membership, "lost", False)
    broken, survivors = Broken(MPI.COMM_SELF), Survivors(MPI.COMM_SELF)
    survivors.calls, survivors.hears, survivors.dies = [], True, dies
    broken.survivors = survivors
    membership = object.__new__(Membership)
    membership.axis = Axis("membership", broken, Ledger(), later=MPI.COMM_SELF)
    with pytest.raises(MPI.Exception) as raised:
        membership.shrink()
    assert raised.value.Get_error_class() == MPI.ERR_PROC_FAILED
    # A rank that gives up wakes those that wait in the duplicate, and all learn that one has given up.
    assert survivors.calls == ["agree 1", "dup", *(["revoke", "agree 0"] if dies else ["agree 1"])]
    assert membership.axis.comm is broken


def test_an_axis_that_cannot_be_made_again_stays_as_it_was():
    survivors = Survivors(MPI.COMM_SELF)
    survivors.calls, survivors.dies = [], True
    axis = mpishard.Axis.single()
    before = axis.comm
    with pytest.raises(MPI.Exception):
        axis.rebind(cast(MPI.Intracomm, survivors))
    assert axis.comm is before


# Who works and who is a spare, from the facts of all processes.


def members(posts, workers, *, leaves=(), ends=(), identities=None):
    return [
        Member(
            identity=rank if identities is None else identities[rank],
            free=len(posts) if identities is None else 1 + max(each or 0 for each in identities),
            post=post,
            workers=workers,
            leaves=rank in leaves,
            ends=rank in ends,
            lost=False,
            peer=Peer("host", 100 + rank, ""),
        )
        for rank, post in enumerate(posts)
    ]


@pytest.mark.parametrize(
    ("workers", "leaves", "ends", "ranks", "working", "able", "most"),
    [
        (3, (), (), [0, 1, 2, 3], 3, 4, 4),
        (9, (), (), [0, 1, 2, 3], 4, 4, 4),
        (4, (1,), (), [0, 2, 3, 1], 3, 3, 4),
        (2, (0, 1), (), [2, 3, 0, 1], 2, 2, 4),
        # At the end of the run those who leave work once more, to have the result; one process that knows it is enough.
        (4, (1,), (3,), [0, 2, 3, 1], 4, 3, 4),
    ],
)
def test_workers_of_one_process(workers, leaves, ends, ranks, working, able, most):
    roles = Roles.assign(members([0] * 4, workers, leaves=leaves, ends=ends), 1, 1)
    assert list(roles.ranks) == list(roles.identities) == ranks
    assert (roles.workers, roles.working, roles.able, roles.most, roles.size) == (working, working, able, most, 4)
    assert [each.pid - 100 for each in roles.peers] == ranks
    assert roles.is_settled == (not any(rank in leaves for rank in ranks[:working]))


@pytest.mark.parametrize(
    ("posts", "tensor", "pipeline", "ranks", "workers"),
    [
        ([0, 1, 0, 1, 0], 2, 1, [0, 1, 2, 3, 4], 2),
        ([1, 1, 0, 0, 0], 2, 1, [2, 0, 3, 1, 4], 2),  # each process keeps its tensor rank
        ([0, 0, 1, 1], 1, 2, [0, 1, 2, 3], 2),  # the stages of all workers lie apart
        ([0, 0, 0, 1], 1, 2, [0, 3, 1, 2], 1),
        ([0, 0, 0], 1, 2, [0, 1, 2], 0),
        ([0, 1, 2, 3, 0, 1, 2, 3], 2, 2, [0, 1, 4, 5, 2, 3, 6, 7], 2),
    ],
)
def test_workers_of_several_processes(posts, tensor, pipeline, ranks, workers):
    roles = Roles.assign(members(posts, 9), tensor, pipeline)
    assert (list(roles.ranks), roles.workers) == (ranks, workers)
    assert list(roles.posts) == [posts[rank] for rank in ranks]
    assert roles.working == workers * tensor * pipeline


def test_joining_processes_get_identities_that_nobody_had():
    roles = Roles.assign(members([0] * 4, 4, identities=[5, 2, None, None]), 1, 1)
    assert roles.identities == (5, 2, 6, 7)


def test_workers_that_are_about_to_leave():
    roles = Roles.assign(members([0] * 4, 3), 1, 1)
    leaving = roles.with_leaving([False, True, False])
    assert (leaving.left, leaving.able, leaving.is_settled) == ((False, True, False, False), 3, False)
    assert leaving.with_leaving([True, False, False]).left == (True, True, False, False)
    assert (roles.able, roles.is_settled) == (4, True)


# A spawned process that is sent away by a signal, at any moment.


class SentAwayInAWrite(io.RawIOBase):
    """A file whose writes are interrupted by the handler of a signal, which flushes all output."""

    def __init__(self):
        self.written = b""

    def writable(self):
        return True

    def write(self, data):
        flush_output()
        self.written += bytes(data)
        return len(data)


def test_output_is_flushed_also_in_the_midst_of_a_write(monkeypatch):
    file = SentAwayInAWrite()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(file)))
    print("Traceback", file=sys.stderr)
    flush_output()
    assert file.written == b"Traceback\n"
    sys.stderr.close()
    flush_output()


# The command line with which a joining process runs the script of the run.


@pytest.mark.parametrize(
    ("arguments", "options", "script"),
    [
        (["train.py", "-m", "x"], [], ["train.py", "-m", "x"]),
        (["-O", "-X", "dev", "train.py"], ["-O", "-X", "dev"], ["train.py"]),
        (["-Xdev", "-Werror", "train.py", "--", "-c"], ["-Xdev", "-Werror"], ["train.py", "--", "-c"]),
        (["-uW", "error", "-m", "package.train", "--steps", "3"], ["-uW", "error"], None),
        (["-um", "package.train", "--steps", "3"], ["-u"], ["-m", "package.train", "--steps", "3"]),
        (["-mpackage.train"], [], ["-m", "package.train"]),
        (["-c", "import mpishard\nrun()", "a"], [], ["-c", "import mpishard\nrun()", "a"]),
        (["--check-hash-based-pycs", "never", "train.py"], ["--check-hash-based-pycs", "never"], ["train.py"]),
    ],
)
def test_the_script_runs_with_its_options(arguments, options, script):
    script = script or ["-m", "package.train", "--steps", "3"]
    expected = ["-X", f"{CELL_OPTION}=2x1", *options, "-c", BOOT, *script]
    assert command(["python", *arguments], (2, 1)) == expected
    assert command(["python", *expected], (2, 1)) == expected, "a spawned process spawns others"
    for runner in ([RUNNER], ["-m", "mpishard.launch.worker"]):  # the runner of `mpishard run`; spawning has its own
        assert command(["python", *options, *runner, *script], (2, 1)) == expected


@pytest.mark.parametrize("arguments", [[], ["-"], ["-u", "-"], ["-i"]])
def test_no_script_is_refused(arguments):
    with pytest.raises(ValueError, match="standard input"):
        command(["python", *arguments], (1, 1))


def test_signals_that_stop_the_run_do_not_end_a_spawned_process_before_it_joins(tmp_path):
    """The spawn would not return, or a job that does not heal would end without its last checkpoint."""
    send = "import os, signal; MPI = [os.kill(os.getpid(), getattr(signal, name)) for name in {}]"
    names = "SIGTERM", "SIGUSR1", "SIGINT"
    ignored = f"[name for name in {names} if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN]"
    for folder, text in (("mpishard", ""), ("mpishard/elastic", ""), ("mpi4py", send.format(names))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(text)
    (tmp_path / "sitecustomize.py").write_text(send.format(names))
    (tmp_path / "mpishard/elastic/spawning.py").write_text(f"import signal\nrun_script = lambda: print({ignored})")
    environment, words = {**os.environ, "PYTHONPATH": str(tmp_path)}, [*SHIELDED, "-c", BOOT]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "['SIGTERM', 'SIGUSR1']\n"), done
