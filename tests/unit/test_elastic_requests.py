"""Elastic runs: how many workers are wanted, which processes are asked for, and which mesh they take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from mpi4py import MPI

from mpishard import (
    AdamW,
    AutoLayouts,
    DDPOptimizer,
    Mesh,
    OptimizationProblem,
    ShardingConfiguration,
    ZeRO3Optimizer,
    nn,
)
from mpishard.elastic import requests
from mpishard.elastic.mesh_choice import MeshChoice, MeshSizes
from mpishard.elastic.optimizer import MeshLimits
from mpishard.elastic.requests import WorkerTarget
from mpishard.estimate import TYPICAL, Workload, layouts, table
from mpishard.layout.tensors import ModelParallelRank

# How many workers an elastic run shall have: the last request counts, whichever rank it came from.


class Asks:
    """Asks for a number of workers from outside of the script; `heard` has the arguments of each call."""

    def __init__(self, wanted):
        self._wanted = wanted

    def wanted(self, workers, step, waits, mesh):
        self.heard = workers, step, waits
        return self._wanted


@pytest.fixture
def target():
    return WorkerTarget(3, min_workers=1, max_workers=6)


def test_begins_with_its_workers(target):
    assert target.agreed_size == 3
    assert target.request == target.agreed


def test_a_request_counts_once_all_ranks_know_of_it(target):
    target.resize(5)
    assert target.agreed_size == 3
    target.adopt_request(target.request)
    assert target.agreed_size == 5


def test_the_last_request_of_any_rank_is_the_largest(target):
    other = WorkerTarget(3, min_workers=1, max_workers=6)
    target.resize(6)
    for rank in (target, other):
        rank.adopt_request(max(target.request, other.request))
    other.resize(2)
    assert other.request > target.request
    target.adopt_request(other.request)
    assert target.agreed_size == 2


def test_of_two_requests_at_once_the_larger_number_counts(target):
    other = WorkerTarget(3, min_workers=1, max_workers=6)
    target.resize(2)
    other.resize(4)
    assert max(target.request, other.request) == other.request


def test_a_cap_after_deaths_is_older_than_a_request_from_before_them(target):
    target.resize(5)
    target.cap_workers(2)
    assert target.agreed_size == 2
    target.adopt_request(target.request)
    assert target.agreed_size == 5


def test_a_cap_above_what_is_wanted_changes_nothing(target):
    before = target.agreed
    target.cap_workers(3)
    assert target.agreed == before


def test_a_process_that_comes_wants_nothing_and_hears_of_what_the_run_wants(target):
    comes = WorkerTarget(0, min_workers=1, max_workers=6)
    target.resize(4)
    target.adopt_request(target.request)
    comes.adopt_request(target.agreed)
    assert comes.agreed_size == 4


@pytest.mark.parametrize("workers", [0, 7])
def test_a_request_is_within_the_limits(target, workers):
    with pytest.raises(ValueError, match=rf"resize\({workers}\) is outside of min_workers=1 to max_workers=6"):
        target.resize(workers)


def test_every_worker_has_a_sample(target):
    target.most = 4
    with pytest.raises(ValueError, match=r"resize\(5\): batch_size=4 gives some of them no sample"):
        target.resize(5)
    target.resize(4)


def test_what_is_wanted_from_outside_is_a_request(target):
    requests = Asks(5)
    target.poll_requests(requests, workers=2, step=9)
    assert requests.heard == (2, 9, True)  # a third is on its way
    target.adopt_request(target.request)
    assert target.agreed_size == 5


def test_nothing_wanted_from_outside_asks_for_nothing(target):
    before = target.request
    requests = Asks(None)
    target.poll_requests(requests, workers=3, step=1)
    assert (target.request, requests.heard) == (before, (3, 1, False))


def test_a_request_for_a_mesh(target):
    assert target.agreed_mesh is None
    target.resize(4, MeshSizes(1, 2, 2))
    target.adopt_request(target.request)
    assert (target.agreed_size, target.agreed_mesh) == (4, (1, 2, 2))
    target.resize(4)
    target.adopt_request(target.request)
    assert (target.agreed_size, target.agreed_mesh) == (4, None)
    target.resize(6, MeshSizes(2, 3))
    target.adopt_request(target.request)
    target.cap_workers(5)  # after a death that nobody replaces any mesh may come
    assert (target.agreed_size, target.agreed_mesh) == (5, None)
    assert target.request < 2**62
    with pytest.raises(ValueError, match="above 1023"):
        target.resize(3, MeshSizes(1, 1024))


# What an elastic run does where workers are missing; nobody is spawned here.


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
def target_of_recruiter():
    target_of_recruiter = WorkerTarget(2, 1, 8)
    target_of_recruiter.resize(5)
    target_of_recruiter.adopt_request(target_of_recruiter.request)
    return target_of_recruiter


def make(membership, target_of_recruiter, first_run=True, respawn=True):
    return requests.Recruiter(membership, target_of_recruiter, ModelParallelRank(tensor_size=2), first_run, respawn)


def test_processes_for_the_workers_that_are_missing(made, membership, target_of_recruiter):
    recruits = make(membership, target_of_recruiter)
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


def test_nobody_is_wanted_any_more(made, membership, target_of_recruiter):
    recruits = make(membership, target_of_recruiter)
    recruits.recruit()
    target_of_recruiter.cap_workers(2)
    assert recruits.recruit() == 0
    assert made[0].given_up
    assert not recruits.is_starting
    recruits.dismiss()
    assert len(made) == 1


def test_who_cannot_come_is_not_waited_for(made, membership, target_of_recruiter, capsys):
    recruits = make(membership, target_of_recruiter)
    recruits.recruit()
    made[0].problem = "no slots"
    assert recruits.recruit() == 0
    assert "continuing with 2 workers; no more could be spawned: no slots" in capsys.readouterr().err
    target_of_recruiter.adopt_request(target_of_recruiter.request)
    assert target_of_recruiter.agreed_size == 2


def test_a_later_request_outlives_the_problem_of_one_before(made, membership, target_of_recruiter):
    recruits = make(membership, target_of_recruiter)
    recruits.recruit()
    target_of_recruiter.resize(4)
    made[0].problem = "no slots"
    recruits.recruit()
    target_of_recruiter.adopt_request(target_of_recruiter.request)
    assert target_of_recruiter.agreed_size == 4


def test_nobody_can_come_to_another_run_of_the_process(made, membership, target_of_recruiter, capsys):
    assert make(membership, target_of_recruiter, first_run=False).recruit() == 0
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
def test_whether_the_dead_are_replaced(membership, target_of_recruiter, respawn, step, disruption, workers):
    recruits = make(membership, target_of_recruiter, respawn=respawn)
    recruits.note_lost(step, disruption)
    assert (target_of_recruiter.agreed_size, recruits.last_disruption) == (workers, step)


# Which mesh a run takes for a number of processes.


@pytest.mark.parametrize(
    ("layouts", "ranks", "expected"),
    [
        ([{}], 5, (5, 1, 1)),
        ([{"tensor": 2, "pipeline": 2}, {"tensor": 2}], 8, (2, 2, 2)),  # the first of those with the most ranks
        ([{"tensor": 2, "pipeline": 2}, {"tensor": 2}], 7, (3, 2, 1)),
        ([{"tensor": 2, "pipeline": 2}, {"tensor": 2}, {}], 7, (7, 1, 1)),
        ([{"data": 2, "tensor": 2}, {"data": 3}, {"data": -1, "tensor": 4}], 3, (3, 1, 1)),
        ([{"tensor": 2}], 1, None),
        ([{}], 30, (16, 1, 1)),  # more data ranks than samples would idle
        ([{"data": 20}, {"data": 2}], 30, (2, 1, 1)),
        (lambda ranks: {"tensor": 2} if ranks % 2 == 0 else None, 7, (3, 2, 1)),
        (lambda ranks: {"pipeline": 4}, 11, (2, 1, 4)),
        (lambda ranks: None, 4, None),
    ],
)
def test_best(layouts, ranks, expected):
    assert MeshChoice(layouts, 1).best(ranks, batch_size=16) == expected


def test_no_mesh_is_smaller_than_the_limit():
    choice = MeshChoice([{"tensor": 4}, {"tensor": 2, "data": 1}], 3)
    assert choice.best(4, 16) == (1, 4, 1)
    assert choice.best(3, 16) is None
    assert MeshChoice(lambda ranks: {"data": min(ranks, 2)}, 3).best(8, 16) is None


@pytest.mark.parametrize("returned", [{"data": 5}, {"data": 3, "tensor": 2}, {"tensor": 5}])
def test_a_function_that_returns_more_than_there_is(returned):
    with pytest.raises(ValueError, match=r"layouts\(4\) returned .* at most 4 ranks, or None"):
        MeshChoice(lambda ranks: returned, 1).best(4, 4)


@pytest.mark.parametrize(
    ("layouts", "error", "match"),
    [
        ([], ValueError, "empty"),
        ("tensor=2", TypeError, "a list of mesh sizes, a function of a number of ranks, or"),
        ([{"tensr": 2}], TypeError, "sizes by axis"),
        ([(2, 2)], TypeError, "sizes by axis"),
        ([{"tensor": 0}], ValueError, "below 1"),
        ([{"tensor": 2.5}], TypeError, "tensor"),
    ],
)
def test_invalid_layouts(layouts, error, match):
    with pytest.raises(error, match=match):
        MeshChoice(layouts, 1)


def test_a_mesh_that_is_asked_for_must_be_listed():
    choice = MeshChoice([{"tensor": 2}, {"data": 3}], 1)
    assert [choice.refuse(MeshSizes(*sizes)) for sizes in ((4, 2, 1), (3, 1, 1))] == ["", ""]
    assert choice.refuse(MeshSizes(2, 1, 2)) == "data=2,pipeline=2 is none of the layouts of the run: tensor=2; data=3"
    assert choice.refuse(MeshSizes(2))
    assert not MeshChoice(lambda ranks: None, 1).refuse(MeshSizes(2, 1, 2))


def test_sizes_as_text():
    assert MeshSizes.parse("data=2, tensor=3") == MeshSizes(2, 3, 1)
    assert str(MeshSizes(2, 3, 1)) == "data=2,tensor=3"
    assert str(MeshSizes(1)) == "data=1"
    assert MeshSizes.parse(str(MeshSizes(1, 1, 4))).ranks == 4
    for text in ("", "2x2", "data=0", "data=2,data=3", "tensor", "node=3", "data=-1"):
        with pytest.raises(ValueError, match="give sizes such as"):
            MeshSizes.parse(text)


def test_meshes_that_the_model_cannot_have():
    def why_not(sizes):
        return "heads are odd" if sizes.tensor == 2 else ""

    listed, function = MeshChoice([{}, {"tensor": 2}], 1), MeshChoice(lambda ranks: {"tensor": 2}, 1)
    listed.check()
    listed.why_not = function.why_not = why_not
    with pytest.raises(ValueError, match="layouts has tensor=2, but heads are odd"):
        listed.check()
    function.check()
    with pytest.raises(ValueError, match=r"layouts\(4\) returned .*, but heads are odd"):
        function.best(4, 8)
    assert [choice.refuse(MeshSizes(1, 2)) for choice in (listed, function)] == ["heads are odd"] * 2


# Meshes by an estimate: those that fit into memory, and of these the fastest.


@pytest.fixture(scope="module")
def mesh():
    with Mesh(MPI.COMM_SELF) as made:
        yield made


def problem(mesh, **options):
    options = {"samples": 64, "batch_size": 32, "steps": 1} | options
    model = nn.GPT(64, 16, 32, 4, 4, mesh=mesh)
    return OptimizationProblem.for_model(model, lambda samples: (), **options)


def choice(mesh, auto, strategy=DDPOptimizer, **options):
    reproducible = options.pop("reproducible", False)
    optimizer = strategy(AdamW(), ShardingConfiguration(mesh, reproducible=reproducible))
    made = problem(mesh, **options)
    return auto.for_problem(optimizer, made, MeshLimits(optimizer, made)), made


def seen(mesh, made, ranks, stage=0):
    architecture = nn.Architecture(**made.facts["model.json"])
    candidates = layouts(ranks, architecture, zero_stages=(stage,), schedules=("1f1b",))
    return table(candidates, architecture, 32, Workload(), TYPICAL)


@pytest.mark.parametrize(("strategy", "stage"), [(DDPOptimizer, 0), (ZeRO3Optimizer, 3)])
def test_the_fastest_of_those_that_fit(mesh, strategy, stage):
    for ranks in (4, 8):
        chosen, made = choice(mesh, AutoLayouts(), strategy)
        every = seen(mesh, made, ranks, stage)
        wide = chosen(ranks)
        assert wide["data"] * wide["tensor"] * wide["pipeline"] <= ranks
        least = min(each.memory.total for each in every)
        narrow, _ = choice(mesh, AutoLayouts(memory_limit=least * 1.001), strategy)
        found = narrow(ranks)
        smallest = min(every, key=lambda each: each.memory.total).layout
        assert found == {name: getattr(smallest, name) for name in found}
        assert choice(mesh, AutoLayouts(memory_limit=1.0), strategy)[0](ranks) is None


def test_without_a_limit_that_least_of_all_exceeds_memory(mesh, monkeypatch):
    monkeypatch.setattr("mpishard.elastic.auto_layouts._memory", lambda: 1.0)
    chosen, made = choice(mesh, AutoLayouts())
    smallest = min(seen(mesh, made, 8), key=lambda each: each.memory.total)
    found = chosen(8)
    assert found == {name: getattr(smallest.layout, name) for name in found}


def test_no_mesh_that_the_run_cannot_have(mesh):
    """A batch of two samples, and a tensor size that changes the bits."""
    chosen, _ = choice(mesh, AutoLayouts(), batch_size=2, reproducible=True)
    found = chosen(8)
    assert found["tensor"] == 1
    assert found["data"] <= 2
    assert chosen(1) == {"data": 1, "tensor": 1, "pipeline": 1}


def test_a_model_of_unknown_architecture(mesh):
    optimizer = DDPOptimizer(AdamW(), mesh)
    made = OptimizationProblem(lambda *_: 0.0, nn.GPT(8, 4, 8, 1, 2, mesh=mesh).parameters, 8, 8, steps=1)
    with pytest.raises(ValueError, match="layouts='auto' estimates meshes of an nn.GPT"):
        AutoLayouts().for_problem(optimizer, made, lambda sizes: "")
