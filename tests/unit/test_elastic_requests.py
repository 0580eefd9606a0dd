"""What an elastic run hears from outside, how many workers it wants, and which mesh they take."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from mpishard import (
    AdamW,
    AutoLayouts,
    DDPOptimizer,
    ElasticOptimizer,
    Mesh,
    OptimizationProblem,
    ShardingConfiguration,
    ZeRO3Optimizer,
    nn,
)
from mpishard.cli.app import main
from mpishard.elastic import optimizer, requests
from mpishard.elastic.control import Control, ControlFolder, Discovery, count_slots, request_resize
from mpishard.elastic.mesh_choice import MeshChoice, MeshSizes
from mpishard.elastic.mesh_limits import MeshLimits
from mpishard.elastic.requests import WorkerTarget
from mpishard.elastic.roles import Peer
from mpishard.elastic.stopped_peers import StoppedPeerMonitor, this_process
from mpishard.estimate import TYPICAL, Workload, layouts, table
from mpishard.io.files import NotPrivateError
from mpishard.launch.signals import Signals
from mpishard.layout.tensors import ModelParallelRank

# How many workers an elastic run shall have: the last request counts, whichever rank it came from.


@pytest.fixture
def target():
    return WorkerTarget(3, min_workers=1, max_workers=6)


def test_a_request_counts_once_all_ranks_know_of_it(target):
    assert target.request == target.agreed == 3
    target.resize(5)
    assert target.agreed_size == 3
    target.adopt_request(target.request)
    assert target.agreed_size == 5
    joining = WorkerTarget(0, min_workers=1, max_workers=6)
    joining.adopt_request(target.agreed)
    assert joining.agreed_size == 5


def test_the_last_request_of_any_rank_is_the_largest(target):
    other = WorkerTarget(3, min_workers=1, max_workers=6)
    target.resize(6)
    other.resize(2)
    assert target.request > other.request  # of two at once the larger number counts
    for rank in (target, other):
        rank.adopt_request(target.request)
    other.resize(2)
    assert other.request > target.request
    target.adopt_request(other.request)
    assert target.agreed_size == 2


def test_who_asks_again_for_the_same_uses_up_no_number(target):
    target.resize(5)
    first = target.request
    target.resize(5)
    assert target.request == first
    target.adopt_request(first)
    target.resize(5)
    assert target.request == first
    target.cap_workers(2)
    target.resize(5)  # after deaths it is another request
    target.adopt_request(target.request)
    assert target.agreed_size == 5


def test_a_cap_after_deaths_is_older_than_a_request_from_before_them(target):
    before = target.agreed
    target.cap_workers(3)
    assert target.agreed == before
    target.resize(5)
    target.cap_workers(2)
    assert target.agreed_size == 2
    target.adopt_request(target.request)
    assert target.agreed_size == 5


def test_a_request_is_within_the_limits_and_gives_every_worker_a_sample(target):
    for workers in (0, 7):
        with pytest.raises(ValueError, match=rf"resize\({workers}\) .*min_workers=1 .*max_workers=6"):
            target.resize(workers)
    target.most = 4
    with pytest.raises(ValueError, match=r"resize\(5\): batch_size=4"):
        target.resize(5)
    target.resize(4)
    cells = WorkerTarget(4, min_workers=1, max_workers=6, fewest=2)
    with pytest.raises(ValueError, match=r"resize\(1\): no mesh of layouts .*at least 2"):
        cells.resize(1)
    cells.resize(2)


@pytest.mark.parametrize(("wanted", "workers", "agreed"), [(5, 2, 5), (None, 3, 3)])
def test_what_is_wanted_from_outside_is_a_request(target, wanted, workers, agreed):
    heard = []
    asks = SimpleNamespace(wanted=lambda *given: heard.append(given) or wanted)
    target.poll_requests(asks, workers=workers, step=9)
    assert heard == [(workers, 9, workers < 3, "")]  # a third is on its way
    assert (target.request == target.agreed) == (wanted is None)
    target.adopt_request(target.request)
    assert target.agreed_size == agreed


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
def recruiter(made, target_of_recruiter):
    """``recruiter(first_run, respawn)`` of two workers of two processes each, of which five are wanted."""
    membership, place = SimpleNamespace(roles=SimpleNamespace(able=2, cell=2)), ModelParallelRank(tensor_size=2)
    return lambda first_run=True, respawn=True: requests.Recruiter(
        membership, target_of_recruiter, place, first_run, respawn
    )


@pytest.fixture
def target_of_recruiter():
    target = WorkerTarget(2, 1, 8)
    target.resize(5)
    target.adopt_request(target.request)
    return target


def test_processes_for_the_workers_that_are_missing(made, recruiter):
    recruits = recruiter()
    assert not recruits.is_starting
    assert recruits.recruit() == recruits.recruit() == 0
    (request,) = made
    assert (request.processes, request.cell) == (6, (2, 1))
    assert recruits.is_starting
    request.here = True
    assert recruits.recruit() == 3
    assert recruits.hand_over() is request and recruits.hand_over() is None
    assert not request.given_up


def test_nobody_is_wanted_any_more(made, recruiter, target_of_recruiter):
    recruits = recruiter()
    recruits.recruit()
    target_of_recruiter.cap_workers(2)
    assert recruits.recruit() == 0
    assert made[0].given_up and not recruits.is_starting
    recruits.dismiss()
    assert len(made) == 1


@pytest.mark.parametrize(("later", "agreed"), [(None, 2), (4, 4)], ids=["last request", "a later request"])
def test_who_cannot_come_is_not_waited_for(made, recruiter, target_of_recruiter, capsys, later, agreed):
    recruits = recruiter()
    recruits.recruit()
    if later:
        target_of_recruiter.resize(later)
    made[0].problem = "no slots"
    assert recruits.recruit() == 0
    assert "continuing with 2 workers; no more could be spawned: no slots" in capsys.readouterr().err
    target_of_recruiter.adopt_request(target_of_recruiter.request)
    assert target_of_recruiter.agreed_size == agreed


def test_nobody_can_come_to_another_run_of_the_process(made, recruiter, capsys):
    assert recruiter(first_run=False).recruit() == 0
    assert not made and "this is another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("respawn", "step", "disruption", "workers"),
    [
        (True, 4, 3, 5),
        (True, 4, 4, 2),  # no step since the last death or arrival: another process would not help
        (True, 0, -1, 5),
        (False, 4, -1, 2),
    ],
)
def test_whether_the_dead_are_replaced(recruiter, target_of_recruiter, respawn, step, disruption, workers):
    recruits = recruiter(respawn=respawn)
    recruits.note_lost(step, disruption)
    assert (target_of_recruiter.agreed_size, recruits.last_disruption) == (workers, step)


# Which mesh a run takes for a number of processes.


@pytest.mark.parametrize(
    ("layouts", "ranks", "expected"),
    [
        ([{}], 5, (5, 1, 1)),
        ([{"tensor": 2, "pipeline": 2}, {"tensor": 2}], 8, (2, 2, 2)),  # the first of those with the most ranks
        ([{"tensor": 2, "pipeline": 2}, {"tensor": 2}], 7, (3, 2, 1)),
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
    assert choice.best(4, 16) == (1, 4, 1) and choice.best(3, 16) is None
    assert MeshChoice(lambda ranks: {"data": min(ranks, 2)}, 3).best(8, 16) is None
    assert choice.fewest == 4 and MeshChoice([{"tensor": 2}], 1).fewest == 2
    assert MeshChoice([{"tensor": 2}, {"tensor": 4, "data": 3}], 5).fewest == 6
    assert MeshChoice(lambda ranks: None, 3).fewest == 3


@pytest.mark.parametrize("returned", [{"data": 5}, {"data": 3, "tensor": 2}, {"tensor": 5}])
def test_a_function_that_returns_more_than_there_is(returned):
    with pytest.raises(ValueError, match=r"layouts\(4\) returned .*at most 4"):
        MeshChoice(lambda ranks: returned, 1).best(4, 4)


@pytest.mark.parametrize(
    ("layouts", "error", "match"),
    [
        ([], ValueError, "empty"),
        ("tensor=2", TypeError, "a function of a number of ranks"),
        ([{"tensr": 2}], TypeError, "sizes by axis"),
        ([(2, 2)], TypeError, "sizes by axis"),
        ([{"tensor": 0}], ValueError, "below 1"),
        ([{"tensor": 2.5}], TypeError, "tensor"),
    ],
)
def test_invalid_layouts(layouts, error, match):
    with pytest.raises(error, match=match):
        MeshChoice(layouts, 1)


def test_a_limit_that_is_set_later_counts(mesh):
    elastic = ElasticOptimizer(AdamW(), mesh, layouts=[{"tensor": 2}])
    elastic.min_workers = 3
    assert elastic._choice.best(3, 16) is None
    with pytest.raises(ValueError, match="at least 4"):
        elastic.resize(3)


def test_a_mesh_that_is_asked_for_must_be_listed():
    choice = MeshChoice([{"tensor": 2}, {"data": 3}], 1)
    assert [choice.why_refused(MeshSizes(*sizes)) for sizes in ((4, 2, 1), (3, 1, 1))] == ["", ""]
    refused = "data=2,pipeline=2 is none of the layouts of the run: tensor=2; data=3"
    assert choice.why_refused(MeshSizes(2, 1, 2)) == refused
    assert choice.why_refused(MeshSizes(2))
    assert not MeshChoice(lambda ranks: None, 1).why_refused(MeshSizes(2, 1, 2))


def test_sizes_as_text():
    assert MeshSizes.parse("data=2, tensor=3") == MeshSizes(2, 3, 1)
    assert [str(sizes) for sizes in (MeshSizes(2, 3, 1), MeshSizes(1))] == ["data=2,tensor=3", "data=1"]
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
    with pytest.raises(ValueError, match="tensor=2, .*heads are odd"):
        listed.check()
    function.check()
    with pytest.raises(ValueError, match=r"layouts\(4\) .*heads are odd"):
        function.best(4, 8)
    assert [choice.why_refused(MeshSizes(1, 2)) for choice in (listed, function)] == ["heads are odd"] * 2


# Meshes by an estimate: those that fit into memory, and of these the fastest.


@pytest.fixture(scope="module")
def mesh():
    with Mesh(MPI.COMM_SELF) as made:
        yield made


def choice(mesh, auto, strategy=DDPOptimizer, batch_size=32, reproducible=False):
    optimizer = strategy(AdamW(), ShardingConfiguration(mesh, reproducible=reproducible))
    model = nn.GPT(vocabulary_size=64, context_length=16, width=32, layers=4, heads=4, mesh=mesh)
    made = OptimizationProblem.for_model(model, lambda samples: (), samples=64, batch_size=batch_size, steps=1)
    return auto.for_problem(optimizer, made, MeshLimits(optimizer, made)), made


def by_memory(mesh, made, ranks, stage=0):
    """The least memory of any layout, and its sizes."""
    architecture = nn.Architecture(**made.facts["model.json"])
    candidates = layouts(ranks, architecture, zero_stages=(stage,), schedules=("1f1b",))
    least = min(table(candidates, architecture, 32, Workload(), TYPICAL), key=lambda each: each.memory.total)
    return least.memory.total, {name: getattr(least.layout, name) for name in ("data", "tensor", "pipeline")}


@pytest.mark.parametrize(("strategy", "stage"), [(DDPOptimizer, 0), (ZeRO3Optimizer, 3)])
def test_the_fastest_of_those_that_fit(mesh, strategy, stage):
    for ranks in (4, 8):
        chosen, made = choice(mesh, AutoLayouts(), strategy)
        least, smallest = by_memory(mesh, made, ranks, stage)
        wide = chosen(ranks)
        assert wide["data"] * wide["tensor"] * wide["pipeline"] <= ranks
        assert choice(mesh, AutoLayouts(memory_limit=least * 1.001), strategy)[0](ranks) == smallest
        assert choice(mesh, AutoLayouts(memory_limit=1.0), strategy)[0](ranks) is None


def test_without_a_limit_that_least_of_all_exceeds_memory(mesh, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: 1)  # one page of one byte
    chosen, made = choice(mesh, AutoLayouts())
    assert chosen(8) == by_memory(mesh, made, 8)[1]


def test_the_share_of_a_rank_follows_the_number_of_ranks(mesh, monkeypatch):
    """Of the memory of a node, which the one rank that has begun the run had alone."""
    least, smallest = by_memory(mesh, choice(mesh, AutoLayouts())[1], 8)
    of_node = 8 * 1.001 * least
    assert choice(mesh, AutoLayouts(memory_limit=of_node))[0](8) != smallest
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": of_node}.get)
    assert choice(mesh, AutoLayouts())[0](8) == smallest


def test_no_mesh_that_the_run_cannot_have(mesh):
    """A batch of two samples, and a tensor size that changes the bits."""
    chosen, _ = choice(mesh, AutoLayouts(), batch_size=2, reproducible=True)
    found = chosen(8)
    assert found["tensor"] == 1
    assert found["data"] <= 2
    assert chosen(1) == {"data": 1, "tensor": 1, "pipeline": 1}


@pytest.mark.parametrize("shards", [4, 1])
def test_a_process_that_joins_can_choose_too(mesh, monkeypatch, shards):
    """It may become the first one.  It has the tensor size of the run once it has joined it."""
    monkeypatch.setattr(optimizer, "is_joining", lambda: True)
    auto, function = (ElasticOptimizer(AdamW(), mesh, layouts=each) for each in ("auto", lambda ranks: {"tensor": 3}))
    for elastic in (auto, function):
        elastic._built(
            lambda mesh: OptimizationProblem.for_model(
                nn.GPT(vocabulary_size=64, context_length=16, width=32, layers=4, heads=4, mesh=mesh, shards=shards),
                lambda samples: (),
                samples=64,
                batch_size=32,
                steps=1,
            )
        )
    monkeypatch.setattr(mesh, "tensor", SimpleNamespace(size=2))
    assert auto._choice.best(4, 32).ranks == 4
    assert auto._choice.best(4, 32).tensor == 2 or shards == 4
    with pytest.raises(ValueError, match=r"layouts\(4\) returned .*tensor.*, but "):
        function._choice.best(4, 32)


def test_a_model_of_unknown_architecture(mesh):
    optimizer = DDPOptimizer(AdamW(), mesh)
    made = OptimizationProblem(
        lambda *_: 0.0,
        nn.GPT(vocabulary_size=8, context_length=4, width=8, layers=1, heads=2, mesh=mesh).parameters,
        8,
        8,
        steps=1,
    )
    with pytest.raises(ValueError, match="layouts='auto'"):
        AutoLayouts().for_problem(optimizer, made, lambda sizes: "")


# What an elastic run hears from outside, without MPI: the control folder, discovery, signals, stopped processes.

LIMITS = 2, 6


def until(condition, limit=120.0):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def control_of(folder, why_mesh_refused=None):
    """One that looks whenever it is asked."""
    return Control(folder, *LIMITS, why_mesh_refused, every=0.0)


@pytest.fixture
def folder(tmp_path):
    made = ControlFolder(tmp_path / "run")
    made.make()
    return made


@contextmanager
def polling(poll, interval=0.01):
    """Calls ``poll()`` over and over in another thread."""
    end = threading.Event()

    def go():
        while not end.wait(interval):
            poll()

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.fixture
def run(folder):
    """A run that takes a step every hundredth of a second, and has at most four processes."""
    control, now = control_of(folder), SimpleNamespace(workers=4, step=0)

    def poll():
        now.step += 1
        wanted = control.poll(now.workers, now.step)
        now.workers = now.workers if wanted is None else min(wanted, 4)

    with polling(poll):
        until(lambda: folder.standing is not None)
        yield folder.path.parent
    control.close()


class TestControl:
    def test_a_request_is_taken_over_and_the_command_says_what_happened(self, run, capfd):
        answer = request_resize(run, 3, 10.0)
        assert (answer.before, answer.after) == (4, 3) and answer.step > 0
        assert request_resize(run.parent, 4, 10.0).before == 3  # the folder around that of the checkpoints
        assert not (run / "control" / "request").exists()
        assert main(["resize", str(run), "2"]) == 0
        assert "4 -> 2 workers after step" in capfd.readouterr().out
        assert main(["resize", str(run), "6"]) == 0
        assert "2 -> 4 workers" in (out := capfd.readouterr().out) and "too few processes for 6" in out
        assert main(["resize", str(run), "7"]) == 2
        assert "7 workers are outside of min_workers=2 to max_workers=6" in capfd.readouterr().err
        assert main(["resize", str(run / "elsewhere"), "3"]) == 2
        assert "no elastic run in" in capfd.readouterr().err
        (run.parent / "other" / "control").mkdir(parents=True)
        assert main(["resize", str(run.parent), "3"]) == 2
        assert f"one of {run.parent / 'other'}, {run}" in " ".join(capfd.readouterr().err.split())

    def test_only_the_owner_can_use_it(self, folder, tmp_path, monkeypatch):
        folder.write("run", {})
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert (folder.path / "run").stat().st_mode & 0o777 == 0o600
        ask = functools.partial(request_resize, folder.path.parent, 3, 1.0)
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="who has started a run"):
            patch.setattr(os, "geteuid", lambda: 4242)
            ask()
        folder.path.chmod(0o755)
        for use in (folder.make, ask):
            with pytest.raises(ValueError, match="nobody else may open"):
                use()
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (tmp_path / "control").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match="must be a folder"):
            ControlFolder(tmp_path).make()

    def test_a_folder_that_was_exchanged_is_not_written(self, folder, tmp_path, monkeypatch, capfd):
        """Whoever may write into the run's folder can rename what is in it."""
        control = control_of(folder)
        assert control.poll(4, 1) is None
        (tmp_path / "secret").write_text("mine")
        (tmp_path / "secret").chmod(0o600)
        exchanged = folder.path.rename(tmp_path / "before")
        folder.path.mkdir(mode=0o777)
        folder.path.chmod(0o777)
        for name in ("run", "request", f".run-{os.uname().nodename}-{os.getpid()}"):
            (folder.path / name).symlink_to(tmp_path / "secret")
        for step in (2, 3):
            assert control.poll(3, step) is None
        assert capfd.readouterr().err.count("the folder for requests was replaced") == 1
        assert (tmp_path / "secret").read_text() == "mine" and (exchanged / "run").exists()
        shutil.rmtree(folder.path)
        folder.path.symlink_to(exchanged)
        for use in (folder.make, folder.check, lambda: folder.write("run", {}), lambda: folder.request):
            with pytest.raises(NotPrivateError, match="must be a folder"):
                use()

    def test_a_run_that_does_not_answer_gets_no_request_later(self, folder):
        with pytest.raises(TimeoutError, match="taken back"):
            request_resize(folder.path.parent, 3, 0.1)
        assert not (folder.path / "request").exists()

    @pytest.mark.parametrize(
        "content",
        [
            "[]",
            "[" * 100_000,
            '{"answer": null}',
            '{"min_workers": 2, "max_workers": 6, "workers": "4", "answer": null, "taken": "", "mesh": ""}',
            '{"min_workers": 2, "max_workers": 6, "workers": 4, "answer": {"id": "x"}, "taken": "", "mesh": ""}',
        ],
    )
    def test_a_damaged_state_of_the_run_is_named(self, folder, content, capfd):
        (folder.path / "run").write_text(content)
        assert main(["resize", str(folder.path.parent), "3", "--wait", "0"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert f"{folder.path / 'run'} is " in line

    @pytest.mark.parametrize(
        "content", ["{", "7", "[" * 100_000, '{"id": "x", "workers": "many"}', '{"id": "x", "workers": 99}']
    )
    def test_what_is_no_request_is_dropped(self, folder, content):
        (folder.path / "request").write_text(content)
        assert control_of(folder).poll(4, 1) is None
        assert not (folder.path / "request").exists()
        assert folder.standing.answer.refused

    def test_a_request_outlives_the_rank_that_read_it(self, folder):
        folder.write("request", {"id": "x", "workers": 3})
        assert control_of(folder).poll(4, 1) == 3
        successor = control_of(folder)
        assert [successor.poll(*now) for now in ((4, 1), (3, 2), (3, 3))] == [3, None, None]
        assert (folder.standing.answer.after, folder.standing.answer.step) == (3, 1)

    def test_a_request_that_comes_while_another_is_carried_out_is_not_lost(self, folder):
        control = control_of(folder)
        folder.write("request", {"id": "x", "workers": 3})
        assert control.poll(4, 1) == 3
        folder.write("request", {"id": "y", "workers": 5})
        assert control.poll(3, 2) is None and folder.standing.answer.id == "x"
        assert control.poll(3, 3) == 5
        folder.take_back("x")
        assert folder.request == ("y", 5)
        assert control.poll(5, 4) is None and folder.standing.answer.id == "y"
        assert folder.request is None

    def test_a_request_that_waits_for_workers_gives_way_to_another(self, folder):
        control = control_of(folder)
        assert control.poll(4, 0) is None
        folder.write("request", {"id": "x", "workers": 6})
        assert control.poll(4, 1) == 6
        assert folder.standing.taken == "x"
        assert control.poll(4, 2, waits=True) is None and folder.standing.answer is None
        folder.write("request", {"id": "y", "workers": 3})
        assert control.poll(4, 3, waits=True) == 3
        assert folder.standing.taken == "y"
        assert control.poll(3, 4) is None
        assert (folder.standing.answer.id, folder.standing.answer.after, folder.standing.taken) == ("y", 3, "")
        assert folder.standing.answer.step == 3  # as the run says it

    def test_a_request_that_waits_for_workers_is_not_taken_back(self, folder):
        control = control_of(folder)

        def poll():
            control.poll(4, 1, waits=folder.standing is not None and bool(folder.standing.taken))

        with polling(poll), pytest.raises(TimeoutError, match="continues with 4 workers"):
            request_resize(folder.path.parent, 6, 0.5)
        assert folder.request is not None

    def test_the_end_of_the_run_is_said(self, folder):
        thread = threading.Timer(0.2, control_of(folder).close)
        thread.start()
        with pytest.raises(FileNotFoundError, match="has ended"):
            request_resize(folder.path.parent, 3, 10.0)
        thread.join()
        assert not folder.path.exists()


class TestDiscovery:
    @pytest.mark.parametrize(
        ("text", "slots"), [("4\n", 4), ("a\nb\n", 2), ("a:3\n\n# b:5\nc slots=2 # two\n", 5), ("10.0.0.1:2", 2)]
    )
    def test_host_files(self, text, slots):
        assert count_slots(text) == slots

    @pytest.mark.parametrize("text", ["", "-3", "a:b", "a\na"])
    def test_what_is_no_host_file(self, text):
        with pytest.raises(ValueError):
            count_slots(text)

    @pytest.mark.parametrize("known", [False, True], ids=["nothing heard before", "heard already"])
    def test_news_come_once(self, known):
        wanted, asked = [3], threading.Semaphore(0)
        discovery = Discovery(lambda: asked.release() or wanted[0], every=0.01)
        if known:
            discovery.known = 3
            assert discovery.news() is None
        else:
            until(lambda: discovery.news() == 3)
        for _ in range(3):
            assert asked.acquire(timeout=120)
        assert discovery.news() is None
        wanted[0] = 4
        until(lambda: discovery.news() == 4)
        assert discovery.known == 4
        discovery.close()

    def test_a_file_a_program_and_a_failure(self, tmp_path, capfd):
        path = tmp_path / "hosts"
        discovery = Discovery(path, every=0.01)
        until(lambda: discovery.news() is None and "No such file" in capfd.readouterr().err)
        path.write_text("a:2\nb:2\n")
        until(lambda: discovery.news() == 4)
        program = tmp_path / "program"
        program.write_text(f"#!{sys.executable}\nprint('a:7')\n")
        program.chmod(0o700)
        program.rename(path)
        until(lambda: discovery.news() == 7)
        discovery.close()

    def test_a_function_that_exits_is_asked_again(self, capfd):
        answers = iter([lambda: sys.exit("no list yet"), lambda: 5])
        discovery = Discovery(lambda: next(answers)(), every=0.01)
        until(lambda: discovery.news() == 5)
        discovery.close()
        assert "no list yet" in capfd.readouterr().err


class TestSignals:
    def test_handlers_are_put_back(self):
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
        with Signals() as signals:
            assert signals.report() == 0
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.came
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before

    def test_others_get_time_to_hear_it(self, monkeypatch):
        monkeypatch.setattr("mpishard.launch.signals._SKEW_S", 0.05)
        signals = Signals()
        signals.came = True
        assert signals.report() == 1
        time.sleep(0.06)
        assert signals.report() == 2

    def test_another_thread_takes_none(self):
        before, seen = signal.getsignal(signal.SIGTERM), []

        def enter():
            with Signals():
                seen.append(signal.getsignal(signal.SIGTERM))

        with ThreadPoolExecutor() as pool:
            pool.submit(enter).result()
        assert seen == [before]


class TestWatch:
    @pytest.fixture
    def sleepers(self):
        processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
        yield processes
        for process in processes:
            process.kill()
            process.wait()

    def peer(self, process):
        started = open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[19]
        return Peer(this_process().host, process.pid, started)

    def test_one_that_is_stopped_is_ended(self, sleepers):
        stopped, running = sleepers
        with StoppedPeerMonitor(0.4) as monitor:
            monitor.follow([this_process(), *map(self.peer, sleepers)])
            stopped.send_signal(signal.SIGSTOP)
            assert stopped.wait(120) == -signal.SIGKILL
            assert running.poll() is None

    @pytest.mark.full
    def test_one_that_goes_on_in_time_is_not(self, sleepers):
        with StoppedPeerMonitor(2.0) as monitor:
            monitor.follow(map(self.peer, sleepers))
            for _ in range(3):
                sleepers[0].send_signal(signal.SIGSTOP)
                time.sleep(0.7)
                sleepers[0].send_signal(signal.SIGCONT)
                time.sleep(0.7)
            assert sleepers[0].poll() is None

    @pytest.mark.parametrize("changes", [{"host": "another"}, {"started": "1"}])
    def test_others_of_the_same_number_are_left_alone(self, sleepers, changes):
        with StoppedPeerMonitor(0.2) as monitor:
            monitor.follow([self.peer(sleepers[0])._replace(**changes)])
            sleepers[0].send_signal(signal.SIGSTOP)
            time.sleep(0.6)
            assert sleepers[0].poll() is None


def test_a_mesh_is_asked_for(folder):
    """A run that may change its mesh, and takes whatever is asked for but tensor=3."""
    control = control_of(folder, lambda sizes: "no tensor=3" if sizes.tensor == 3 else "")
    now, steps = SimpleNamespace(workers=4, mesh="data=4"), itertools.count(1)
    ask = functools.partial(request_resize, folder.path.parent)

    def poll():
        wanted = control.poll(now.workers, next(steps), mesh=now.mesh)
        if wanted is not None:
            now.workers, now.mesh = wanted.ranks, str(wanted)

    with polling(poll):
        until(lambda: folder.standing is not None)
        answer = ask(MeshSizes(1, 2, 3), 10.0)
        assert (answer.before, answer.after, answer.mesh) == (4, 6, "tensor=2,pipeline=3")
        with pytest.raises(ValueError, match="has refused: no tensor=3"):
            ask(MeshSizes(1, 3), 10.0)
        with pytest.raises(ValueError, match="8 workers are outside"):
            ask(MeshSizes(8), 10.0)


def test_a_mesh_is_asked_for_of_a_run_that_keeps_its_own(run, capsys):
    with pytest.raises(ValueError, match="tensor and pipeline .*layouts="):
        request_resize(run, MeshSizes(1, 2), 10.0)
    assert main(["resize", str(run)]) == main(["resize", str(run), "3", "--mesh", "data=2"]) == 2
    assert "give the number of workers, or --mesh" in capsys.readouterr().err
    assert main(["resize", str(run), "--mesh", "2x2"]) == 2
    assert "data=2,tensor=2" in capsys.readouterr().err
