"""What an elastic run does where workers are missing; nobody is spawned here."""

from types import SimpleNamespace

import pytest

from mpishard.elastic import requests
from mpishard.elastic.requests import WorkerTarget
from mpishard.layout.tensors import ModelParallelRank


class Spawns:
    """In place of a `SpawnRequest`."""

    def __init__(self, processes, cell):
        self.processes, self.cell = processes, cell
        self.here, self.is_new, self.problem, self.given_up = False, True, "", False
        self.made.append(self)

    def give_up(self):
        self.given_up = True


@pytest.fixture
def made(monkeypatch):
    Spawns.made = []
    monkeypatch.setattr(requests, "SpawnRequest", Spawns)
    return Spawns.made


@pytest.fixture
def membership():
    """Two workers of two processes each."""
    return SimpleNamespace(roles=SimpleNamespace(able=2, cell=2))


@pytest.fixture
def target():
    target = WorkerTarget(2, 1, 8)
    target.resize(5)
    target.adopt_request(target.request)
    return target


def make(membership, target, first_run=True, respawn=True):
    return requests.Recruiter(membership, target, ModelParallelRank(tensor_size=2), first_run, respawn)


def test_processes_for_the_workers_that_are_missing(made, membership, target):
    recruits = make(membership, target)
    assert not recruits.is_starting
    assert recruits.recruit() == recruits.recruit() == 0
    (request,) = made
    assert (request.processes, request.cell) == (6, (2, 1))
    assert recruits.is_starting
    request.here = True
    assert recruits.recruit() == 3
    assert recruits.hand_over() is request
    assert recruits.hand_over() is None
    assert not request.given_up


def test_nobody_is_wanted_any_more(made, membership, target):
    recruits = make(membership, target)
    recruits.recruit()
    target.cap_workers(2)
    assert recruits.recruit() == 0
    assert made[0].given_up
    assert not recruits.is_starting
    recruits.dismiss()
    assert len(made) == 1


def test_who_cannot_come_is_not_waited_for(made, membership, target, capsys):
    recruits = make(membership, target)
    recruits.recruit()
    made[0].problem = "no slots"
    assert recruits.recruit() == 0
    assert "continuing with 2 workers; no more could be spawned: no slots" in capsys.readouterr().err
    target.adopt_request(target.request)
    assert target.agreed_size == 2


def test_a_later_request_outlives_the_problem_of_one_before(made, membership, target):
    recruits = make(membership, target)
    recruits.recruit()
    target.resize(4)
    made[0].problem = "no slots"
    recruits.recruit()
    target.adopt_request(target.request)
    assert target.agreed_size == 4


def test_nobody_can_come_to_another_run_of_the_process(made, membership, target, capsys):
    assert make(membership, target, first_run=False).recruit() == 0
    assert not made
    assert "this is another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("respawn", "step", "disruption", "workers"),
    [
        (True, 4, 3, 5),
        (True, 4, 4, 2),  # no step since the last death or arrival: another process would not help
        (True, 0, -1, 5),
        (False, 4, -1, 2),
    ],
)
def test_whether_the_dead_are_replaced(membership, target, respawn, step, disruption, workers):
    recruits = make(membership, target, respawn=respawn)
    recruits.note_death(step, disruption)
    assert (target.agreed_size, recruits.last_disruption) == (workers, step)
