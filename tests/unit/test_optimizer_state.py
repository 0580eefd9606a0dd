"""An optimizer's state on one rank: what `capture` says is what `restore` takes, and what comes on top of it."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpishard import (
    SGD,
    Adam,
    DDPOptimizer,
    FlatParameters,
    LocalSGDOptimizer,
    Mesh,
    ParameterSpec,
    ShardingConfiguration,
)
from mpishard.data_parallel.local_sgd import AveragingSchedule, LocalSteps
from mpishard.data_parallel.ownership import OwnedRanges
from mpishard.data_parallel.rank_state import Counters
from mpishard.optim.rule import LossScale


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with Mesh(MPI.COMM_SELF) as mesh:
        yield mesh


def trained(optimizer: DDPOptimizer | LocalSGDOptimizer, steps: int) -> FlatParameters:
    parameters = FlatParameters([ParameterSpec("w", (3,))], np.float64)
    for step in range(steps):
        optimizer.step(parameters, np.full(3, 1.0 + step))
    return parameters


@pytest.mark.parametrize("kind", [DDPOptimizer, LocalSGDOptimizer])
def test_a_captured_state_is_restored(mesh: Mesh, kind: type[DDPOptimizer]) -> None:
    one, other = (kind(Adam(lr=0.1), ShardingConfiguration(mesh, max_gradient_norm=1.0)) for _ in range(2))
    parameters, target = trained(one, 3), trained(other, 1)
    one.state.consolidate()
    state = one.state.capture()
    other.state.check(state.facts)
    for shard, filled in zip(state.shards, other.state.capture().shards, strict=True):
        filled.array[...] = shard.array
    other.state.restore(state.facts)
    assert (other.steps, other.clock, other.gradient_norm) == (3, 3, one.gradient_norm)
    one.step(parameters, np.ones(3))
    other.step(target, np.ones(3))
    assert np.array_equal(parameters.flat, target.flat)


def test_another_loss_scale_is_that_of_the_steps_too(mesh: Mesh) -> None:
    optimizer = DDPOptimizer(SGD(lr=1.0), ShardingConfiguration(mesh, loss_scale=1.0))
    optimizer.scaling = LossScale(8.0)
    parameters = np.zeros(3)
    optimizer.step(parameters, np.full(3, optimizer.loss_scale))
    assert parameters.tolist() == [-1.0] * 3


def test_steps_between_averages_may_change(mesh: Mesh) -> None:
    optimizer = LocalSGDOptimizer(Adam(lr=0.1), mesh, sync_every=4)
    parameters = trained(optimizer, 1)
    before = optimizer.settings.fingerprint
    optimizer.sync_every = 2
    assert optimizer.settings.changed  # so that ranks compare it
    assert optimizer.settings.by_name()["sync_every"] == "2"
    assert optimizer.settings.fingerprint != before
    assert not optimizer.settings.changed
    for _ in range(3):
        optimizer.step(parameters, np.ones(3))
    assert optimizer.outer_steps == 2
    assert optimizer.state.facts["local_sgd.json"] == {"sync_every": 2, "parts": 1, "delay": 0}
    with pytest.raises(ValueError, match="sync_every"):
        optimizer.sync_every = 0


def test_what_averages_are_made_for_stays(mesh: Mesh) -> None:
    optimizer = LocalSGDOptimizer(Adam(lr=0.1), mesh, 4, SGD(lr=0.7), parts=2, delay=1)
    assert (optimizer.outer, optimizer.parts, optimizer.delay) == (SGD(lr=0.7), 2, 1)
    for name in ("outer", "parts", "delay"):
        with pytest.raises(AttributeError):
            setattr(optimizer, name, getattr(optimizer, name))


def test_the_staleness_of_the_last_average_outlives_a_rebuild(mesh: Mesh) -> None:
    optimizer = LocalSGDOptimizer(Adam(lr=0.1), mesh, sync_every=2, delay=1)
    parameters = trained(optimizer, 3)
    assert optimizer.staleness == 1
    optimizer.state.rebuild(parameters)
    assert optimizer.staleness == 1


def test_arrays_of_an_earlier_capture_outlive_a_rebuild(mesh: Mesh) -> None:
    optimizer = DDPOptimizer(Adam(lr=0.1), mesh)
    parameters = trained(optimizer, 2)
    before = optimizer.state.capture()
    kept = [shard.array.copy() for shard in before.shards]
    optimizer.state.rebuild(parameters)
    assert all(np.array_equal(shard.array, array) for shard, array in zip(before.shards, kept, strict=True))
    assert all(not shard.array.any() for shard in optimizer.state.capture().shards[1:])
    optimizer.step(parameters, np.ones(3))
    assert all(np.array_equal(shard.array, array) for shard, array in zip(before.shards[1:], kept[1:], strict=True))


def test_without_parameters_there_is_no_state(mesh: Mesh) -> None:
    optimizer = DDPOptimizer(Adam(lr=0.1), mesh)
    for use in (optimizer.state.capture, optimizer.serialize):
        with pytest.raises(ValueError, match="there is no optimizer state before the first step"):
            use()
    assert (optimizer.parameters, optimizer.state.nbytes, optimizer.state.gradient_bytes) == (None, 0, 0)
    optimizer.state.consolidate()
    optimizer.state.abandon()
    optimizer.state.resync()


def test_what_a_rank_owns_and_what_it_counts() -> None:
    """A state array has the owned ranges end to end; sums take the counted part of each, cut at tensors."""
    parameters = FlatParameters([ParameterSpec("a", (4,)), ParameterSpec("b", (4,))], np.float64)
    ownership = OwnedRanges(parameters, own=[(0, 3), (3, 8)], counted=[(1, 3), (3, 6)])
    views = ownership.state_views(np.arange(8))
    assert ownership.size == 8 and [view.tolist() for view in views] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert [view.tolist() for view in ownership.counted_views(views)] == [[1, 2], [3, 4, 5]]
    assert ownership.owned_parts == [(0, 0, 0, 3), (0, 1, 0, 1), (1, 1, 1, 5)]
    assert ownership.counted_parts == [(0, 0, 1, 3), (0, 1, 0, 1), (1, 1, 1, 3)]
    assert OwnedRanges(parameters, [(0, 8)], [(0, 4)], in_sync_group=[(0, 8)]).counted_parts == [
        (0, 0, 0, 4),
        (1, 0, 4, 8),
    ]


def test_parameters_whose_place_others_have_taken_are_freed(mesh: Mesh) -> None:
    optimizer = DDPOptimizer(Adam(lr=0.1), mesh)
    first, second = (FlatParameters([ParameterSpec("a", (4,))], np.float64) for _ in range(2))
    optimizer.bind(first)
    optimizer.bind(second)
    held = weakref.ref(first)
    del first
    gc.collect()
    assert held() is None and optimizer.parameters is second


def test_numbers_come_back_from_their_facts() -> None:
    counters, others = Counters("dynamic"), Counters("dynamic")
    counters.steps, counters.skipped_steps = 7, 2
    counters.scaling.overflowed()
    counters.scaling.succeeded()
    facts = counters.facts
    assert "gradient_norm" not in facts and facts["step"] == counters.clock == 9
    others.gradient_norm = 3.0
    others.restore(facts)
    assert math.isnan(others.gradient_norm)
    assert others.facts == facts


@pytest.mark.parametrize(
    ("schedule", "starts"),
    [
        (AveragingSchedule(4, 1, 0), {4: [0], 8: [0]}),
        (AveragingSchedule(4, 2, 0), {2: [1], 4: [0], 6: [1], 8: [0]}),
        (
            AveragingSchedule(2, 4, 1),
            {1: [2, 3], 2: [0, 1], 3: [2, 3], 4: [0, 1], 5: [2, 3], 6: [0, 1], 7: [2, 3], 8: [0, 1]},
        ),
    ],
)
def test_parts_take_turns(schedule: AveragingSchedule, starts: dict[int, list[int]]) -> None:
    assert {step: schedule.due(step) for step in range(1, 9) if schedule.due(step)} == starts


class FakeAverages:
    """Notes what starts and ends, and when."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pending: list[tuple[int, int]] = []

    def begin(self) -> None:
        self.log.append("anchor")

    def progress(self) -> None:
        pass

    def start(self, part: int, now: int, problem: Exception | None) -> None:
        self.log.append(f"start {part} after {now}{'' if problem is None else f' with {problem}'}")
        self.pending.append((part, now))

    def ends(self, latest: int) -> bool:
        return any(begun <= latest for _, begun in self.pending)

    def lacks(self, part: int, now: int) -> bool:
        return True

    def take_in(self, now: int, latest: int) -> tuple[int | None, bool, Exception | None]:
        due = [each for each in self.pending if each[1] <= latest]
        self.pending = [each for each in self.pending if each[1] > latest]
        self.log += [f"end {part} after {now}" for part, _ in due]
        return (now - due[-1][1] if due else None), False, None


def test_an_average_ends_its_delay_after_its_start(mesh: Mesh) -> None:
    averages = FakeAverages()
    steps = LocalSteps(mesh.data, AveragingSchedule(3, 1, 2), averages)  # type: ignore[arg-type]
    waits = []
    for step in range(1, 6):
        waits.append(steps.next_finishes)
        steps.begin()
        if step == 2:
            steps.note(ValueError("trouble"))
            steps.note(ValueError("more"))
        steps.end()
    assert averages.log == ["anchor", "start 0 after 3 with trouble", "end 0 after 5"]
    assert waits == [False, False, False, False, True] and steps.staleness == 2
    assert steps.average_all() and averages.log[3:] == ["start 0 after 5", "end 0 after 5"]
    steps.restart()
    assert not steps.average_all()
