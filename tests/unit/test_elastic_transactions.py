"""What a worker takes part in and goes back to when a step fails; no other process is here."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from mpishard.elastic import transactions as agreements
from mpishard.elastic.transactions import RunStatus, Transactions
from mpishard.training.run import StepOutcome


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
    membership = SimpleNamespace(axis=SimpleNamespace(comm="crew"), agree=lambda: agreements.agree("crew", True))
    return agreements.Agreements(mesh, membership)


def test_a_process_that_fails_says_no_wherever_others_may_wait(agreed, calls):
    agreed.agree_as_workers()
    agreed.agree_on_membership()
    assert agreed.workers_may_wait
    agreed.refuse_all()
    assert calls == [("workers", True), ("crew", True), ("workers", False), ("crew", False)]
    assert not agreed.workers_may_wait


def test_no_agreement_is_answered_twice(agreed, calls, failing):
    """The one that has failed here has failed on the others too."""
    failing.add("workers")
    with pytest.raises(MPI.Exception):
        agreed.agree_as_workers()
    agreed.refuse_all()
    assert calls == [("workers", True), ("crew", False)]


def test_between_steps_no_worker_waits(agreed, calls):
    agreed.end_steps()
    agreed.refuse_all()
    agreed.begin_steps()
    agreed.refuse_all()
    assert calls == [("crew", False), ("workers", False), ("crew", False)]


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
    """In place of a `Committed`."""

    def __init__(self):
        self.facts = None

    def begin(self, facts):
        self.facts = dict(facts)

    def send_copies(self):
        pass

    def commit(self):
        self.facts = None

    def roll_back(self):
        facts, self.facts = self.facts, None
        return facts


@pytest.fixture
def transactions(agreed):
    made = Transactions(Training(), None, agreed, RunStatus(3, 3, "", False))
    assert not made.has_state
    made.install(State())
    return made


def test_a_step_that_is_agreed_on(transactions):
    assert transactions.take_step().loss == 0.25
    assert transactions.status == (4, 3, "", False)
    assert transactions._training.steps == [0.25]
    transactions.decide("steps")
    transactions.note_saved()
    assert transactions.status == (4, 4, "steps", True)


@pytest.mark.parametrize(("committed", "steps", "losses"), [(3, 3, []), (4, 4, [0.25])])
def test_a_step_that_fails_is_what_it_is_to_the_others(transactions, failing, committed, steps, losses):
    failing.add("workers")
    with pytest.raises(MPI.Exception):
        transactions.take_step()
    assert transactions.status == (3, 3, "", False)
    newest = RunStatus(committed, 3, "", False)
    transactions.adopt(newest)
    assert transactions.status == newest
    assert (transactions._training.steps, transactions._training.facts["steps"]) == (losses, steps)


def test_going_back_without_a_step(transactions):
    transactions.roll_back()
    assert transactions._training.facts == {"steps": 3}
