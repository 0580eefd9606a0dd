"""Elastic runs without faults: workers that leave and come back between steps change no bit of the result."""

from __future__ import annotations

import functools
import gc
import math
import os
import resource
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import standin
from mpi4py import MPI
from steps import STRATEGIES
from variants import full

import mpishard
from mpishard import LBFGS, AdamW, ElasticOptimizer, OptimizationProblem, ParameterSpec, ShardingConfiguration, nn
from mpishard.backend import array as arrays
from mpishard.checkpoint import Checkpoints, save
from mpishard.comm.channel import Channel
from mpishard.comm.deferred import DEFERRED
from mpishard.elastic import loop
from mpishard.elastic.phases import Phase, next_phase
from mpishard.elastic.transactions import BuddyCheckpoint, Transactions
from mpishard.layout.run_state import RunState, Shard
from mpishard.layout.tensors import Piece
from mpishard.parameters.flat import FlatParameters

pytestmark = pytest.mark.pairs(1)

TOKENS = np.random.default_rng(1).integers(0, 11, (45, 9))
DATA = np.random.default_rng(0).standard_normal((45, 300)).astype(np.float32)
TARGETS = DATA.sum(1)
STEPS = 12


def gpt_problem(mesh, note=None, **options):
    """`note` is called with the samples of each batch."""

    def batch(samples):
        if note is not None:
            note(samples.tolist())
        return TOKENS[samples, :-1], TOKENS[samples, 1:]

    model = nn.GPT(
        vocabulary_size=11, context_length=8, width=16, layers=1, heads=2, dtype=np.float32, seed=3, mesh=mesh
    )
    options = {"samples": 45, "batch_size": 16, "micro_batch_size": 2, "steps": STEPS} | options
    return OptimizationProblem.for_model(model, batch, tokens_per_sample=8, **options)


def own_problem(**options):
    """Least squares, by a function of flat arrays."""

    def function(parameters, samples, gradients):
        residual = DATA[samples] @ parameters - TARGETS[samples]
        gradients += DATA[samples].T @ residual
        return 0.5 * float(residual @ residual)

    options = {"batch_size": 16, "micro_batch_size": 2, "steps": STEPS} | options
    return OptimizationProblem(function, np.zeros(300, np.float32), samples=45, **options)


def inner(strategy, mesh):
    config = ShardingConfiguration(mesh, max_gradient_norm=0.5, minimum_parameter_group_size=500, reproducible=True)
    return strategy(AdamW(lr=mpishard.cosine(0.02, steps=STEPS, warmup=3, floor=0.01)), config)


def elastic(strategy, mesh, **options):
    return ElasticOptimizer(inner(strategy, mesh), **options)


def bits(result):
    found = result.parameters
    parameters = found.gather() if isinstance(found, FlatParameters) else found
    return parameters.tobytes(), result.loss_history.tobytes(), result.samples, result.stop_reason


@functools.cache
def alone(make_problem):
    """The run of one rank that is not elastic."""
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        return bits(inner(mpishard.DDPOptimizer, mesh).optimize(make_problem(mesh), progress=False))


@functools.cache
def batches():
    """The samples of each step of that run."""
    taken: dict[int, list[int]] = {}
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = inner(mpishard.DDPOptimizer, mesh)
        problem = gpt_problem(mesh, lambda samples: taken.setdefault(optimizer.clock + 1, []).extend(samples))
        optimizer.optimize(problem, progress=False)
    return taken


def sizes_after(ranks):
    """How many workers there shall be after some steps: down and up again, the first and the last step included."""
    return {1: 1, 2: ranks, 4: max(1, ranks - 1), 5: (ranks + 1) // 2, 7: ranks, 9: 1, 10: min(3, ranks), STEPS: 1}


def resizing(optimizer, sizes, noted=None, *, of_one=False):
    """A callback that asks for these numbers of workers, on all ranks or on the last one."""

    def callback(state):
        if noted is not None:
            noted[state.step] = optimizer.current_workers
        mesh = optimizer.mesh
        if state.step in sizes and (not of_one or mesh.rank == mesh.size - 1):
            optimizer.resize(sizes[state.step])

    return callback


@pytest.mark.parametrize(
    ("strategy", "of_one"),
    [*((strategy, False) for strategy in STRATEGIES), (STRATEGIES[1], True)],
    ids=[*(f"{strategy.__name__}, asked by all" for strategy in STRATEGIES), "asked by one"],
)
@pytest.mark.quick
def test_resizes_change_no_bit(mesh, same_on_all, strategy, of_one):
    """Each step has the samples of a run of one rank, of which each worker takes some: each sample once an epoch."""
    ranks, noted, taken = mesh.size, {}, {}
    optimizer, sizes = elastic(strategy, mesh), sizes_after(mesh.size)
    problem = gpt_problem(mesh, lambda samples: taken.setdefault(optimizer.optimizer.clock + 1, []).extend(samples))
    callback = resizing(optimizer, sizes, noted, of_one=of_one)
    found = bits(optimizer.optimize(problem, callback=callback, progress=False))
    assert found == alone(gpt_problem)
    assert same_on_all(found[1:])
    assert optimizer.current_workers == mesh.size == ranks
    by_rank, expected, now = mesh.world.comm.allgather(taken), {}, ranks
    for step in range(1, STEPS + 1):
        # This rank worked in the steps in which there were more workers than its number.
        if mesh.rank < now:
            expected[step] = now
        shares = [each.get(step, []) for each in by_rank]
        # An epoch's last batch may have fewer micro-batches, of two samples each, than there are workers.
        busy = min(now, -(-len(batches()[step]) // 2))
        assert [bool(share) for share in shares] == [rank < busy for rank in range(ranks)]
        assert sorted(sum(shares, [])) == sorted(batches()[step])
        now = sizes.get(step, now)
    assert noted == expected
    for first in range(1, STEPS + 1, 3):  # three steps an epoch
        epoch = Counter(sum((each.get(step, []) for step in range(first, first + 3) for each in by_rank), []))
        assert epoch == Counter(range(45))


@pytest.mark.parametrize("comes_back", [True, False])
def test_phases(mesh, monkeypatch, comes_back):
    """All but the first become spares after step 2; they work again from step 5 on, or to have the result."""
    phases = [Phase.STARTING]

    def note(phase, event):
        following = next_phase(phase, event)
        assert phase is phases[-1]
        phases.extend([following] * (following is not phase))
        return following

    monkeypatch.setattr(loop, "next_phase", note)
    optimizer = elastic(STRATEGIES[1], mesh)
    callback = resizing(optimizer, {2: 1, 4: mesh.size} if comes_back else {2: 1})
    optimizer.optimize(own_problem(steps=6), callback=callback, progress=False)
    spares, works = mesh.size > 1, Phase.TRAINING if mesh.rank == 0 else Phase.WAITING
    expected = [Phase.STARTING, Phase.TRAINING, *[Phase.RESIZING, works] * spares]
    if comes_back:
        expected += [*[Phase.RESIZING, Phase.TRAINING] * spares, Phase.STOPPING, Phase.ENDING]
    else:
        expected += [*[Phase.STOPPING] * (mesh.rank == 0), *[Phase.RESIZING] * spares, Phase.ENDING]
    assert phases == [*expected, Phase.ENDED]


def test_no_more_workers_than_samples_in_a_step(mesh):
    ranks, refused = mesh.size, []
    optimizer = elastic(STRATEGIES[1], mesh)

    def callback(state):
        few = f"batch_size={ranks} "
        for workers, error, message in ((ranks + 1, ValueError, few), ("2", TypeError, "whole number")):
            with pytest.raises(error, match=message):
                optimizer.resize(workers)
            refused.append(workers)

    optimizer.optimize(own_problem(batch_size=ranks, micro_batch_size=1, steps=1), callback=callback, progress=False)
    assert len(refused) == 2
    with pytest.raises(TypeError, match="OptimizationProblem, got int"):
        optimizer.optimize(3, progress=False)
    with pytest.raises(TypeError, match="checkpoints must be"):
        optimizer.optimize(own_problem(), checkpoints="ck", progress=False)


def test_steps_that_are_left_out_count_once_wherever_they_were_taken(mesh):
    def function(parameters, samples, gradients):
        residual = DATA[samples] @ parameters - TARGETS[samples]
        gradients += np.nan if 7 in samples else DATA[samples].T @ residual
        return math.nan if 7 in samples else 0.5 * float(residual @ residual)

    def run(mesh, wrap, **options):
        problem = OptimizationProblem(function, np.zeros(300, np.float32), 45, batch_size=16, steps=STEPS)
        config = ShardingConfiguration(mesh, nonfinite_gradients="skip", reproducible=True)
        optimizer = wrap(mpishard.ZeRO1Optimizer(AdamW(lr=0.01), config))
        if "callback" in options:
            options["callback"] = options["callback"](optimizer)
        result = optimizer.optimize(problem, progress=False, **options)
        return *bits(result), result.skipped_steps, result.resumed_steps

    found = run(mesh, ElasticOptimizer, callback=lambda optimizer: resizing(optimizer, sizes_after(mesh.size)))
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        assert found == run(one, lambda optimizer: optimizer)
    assert found[-2:] == (STEPS // 3, 0)  # three steps an epoch


def test_spares_of_the_start_take_part_later(mesh):
    """More than `max_workers` never train; of `min_workers` and more those who are asked for do."""
    most, noted = max(1, mesh.size - 1), {}
    optimizer = elastic(STRATEGIES[2], mesh, max_workers=most)
    callback = resizing(optimizer, {3: 1, 6: most}, noted)
    found = bits(optimizer.optimize(gpt_problem(mesh), callback=callback, progress=False))
    assert found == alone(gpt_problem)
    gathered = mesh.world.allgather_object(tuple(sorted(noted.items())))
    expected = [{step: 1 if 3 < step <= 6 else most for step in range(1, STEPS + 1)}]
    expected += [{step: most for step in range(1, STEPS + 1) if not 3 < step <= 6}] * (most - 1)
    expected += [{}] * (mesh.size - most)
    assert [dict(each) for each in gathered] == expected


def test_a_tolerance_ends_all(mesh):
    def problem(_):
        return own_problem(steps=None, tolerance=4.0)

    expected = alone(problem)
    optimizer = elastic(STRATEGIES[1], mesh)
    callback = resizing(optimizer, {2: 1, 4: mesh.size})
    found = bits(optimizer.optimize(problem(mesh), callback=callback, progress=False))
    assert found == expected
    assert found[-1] == "tolerance"


def test_a_callback_ends_spares_too(mesh):
    optimizer = elastic(STRATEGIES[3], mesh, max_workers=max(1, mesh.size - 1))
    result = optimizer.optimize(
        gpt_problem(mesh), callback=lambda state: state.step == 5 and mesh.rank == 0, progress=False
    )
    assert (result.stop_reason, result.steps, len(result.loss_history)) == ("callback", 5, 5)
    assert bits(result)[:3] == alone(lambda mesh: gpt_problem(mesh, steps=5))[:3]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_across_resizes(mesh, folder, asynchronous):
    """What fewer workers have saved, all go on from, under another strategy."""
    ranks, cases = mesh.size, ((STRATEGIES[1], 2, 7), (STRATEGIES[3], 3, STEPS))
    sizes = {1: 1, 3: ranks, 5: max(1, ranks - 1), 8: 1, 10: ranks}
    for strategy, every, steps in cases:
        optimizer = elastic(strategy, mesh)
        with Checkpoints(folder, mesh, every=every, asynchronous=asynchronous) as checkpoints:
            result = optimizer.optimize(
                gpt_problem(mesh, steps=steps),
                callback=resizing(optimizer, sizes),
                progress=False,
                checkpoints=checkpoints,
                resume=True,
            )
    assert result.resumed_steps == 7
    assert bits(result) == alone(gpt_problem)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("steps", [44, *full(104)])
def test_many_resizes_leave_nothing_behind(mesh, steps, folder, monkeypatch):
    """MPICH has about 2000 communicators: those that are left would be missed soon."""
    if mesh.size > 4:
        pytest.skip("slow where cores are few, and nothing new")
    ranks, noted, channels = mesh.size, {}, Counter()

    def count(name, change):
        original = getattr(Channel, name)

        def counted(channel, *arguments, **options):
            channels["open"] += change
            original(channel, *arguments, **options)

        monkeypatch.setattr(Channel, name, counted)

    count("__init__", 1)
    count("free", -1)
    optimizer = elastic(STRATEGIES[1], mesh)

    def callback(state):
        if state.step in (20, steps):
            gc.collect()
        files = len(list(Path("/proc/self/fd").iterdir()))
        noted[state.step] = channels["open"], files, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        optimizer.resize(ranks - state.step % 2)

    with Checkpoints(folder, mesh) as checkpoints:
        problem = own_problem(steps=steps)
        result = optimizer.optimize(problem, callback=callback, progress=False, checkpoints=checkpoints)
    assert result.steps == steps
    if mesh.rank < ranks - 1:
        early, middle, late = noted[20], noted[(20 + steps) // 2], noted[steps]
        assert late[0] == early[0]
        assert late[1] <= early[1]
        # KiB.  What each resize leaves behind shows in both halves.  Under Open MPI the peak was seen to rise by 9 MiB
        # between these steps in some runs, and by 0.5 MiB in 400 resizes.
        assert min(middle[2] - early[2], late[2] - middle[2]) < 4 * 1024


def test_the_copies_of_the_state_go_with_the_run(mesh):
    """Not only when Python next looks for cycles: they are as large as the state, and may be in a device's memory."""
    optimizer = elastic(STRATEGIES[1], mesh)
    gc.collect()
    gc.disable()
    try:
        optimizer.optimize(own_problem(), progress=False)
        assert not [each for each in gc.get_objects() if type(each) is BuddyCheckpoint]
    finally:
        gc.enable()


@pytest.mark.skipif(os.environ.get("OMPI_MCA_mpi_ft_enable") == "1", reason="where MPI heals it counts as a death")
def test_an_error_is_the_users_and_reaches_the_spares(mesh):
    """It is raised on the rank that has it; all may have it."""
    own = mesh.rank

    def function(parameters, samples, gradients):
        raise ArithmeticError("spoilt")

    problem = OptimizationProblem(function, np.zeros(3), samples=45, batch_size=16, steps=2)
    with pytest.raises(ArithmeticError, match="spoilt"):
        elastic(STRATEGIES[0], mesh).optimize(problem, progress=False)

    def moving(parameters, samples, gradients):
        samples += own == mesh.size - 1
        return 0.0

    problem = OptimizationProblem(moving, np.zeros(3), samples=45, batch_size=16, steps=2)
    with pytest.raises(ValueError, match="changes the sample indices"):
        elastic(STRATEGIES[0], mesh).optimize(problem, progress=False)

    begun = []

    def rate(step):
        if begun and own == mesh.size - 1:
            raise LookupError("no rate")
        return 0.1

    with pytest.raises(LookupError if own == mesh.size - 1 else RuntimeError, match="no rate"):
        ElasticOptimizer(AdamW(lr=rate), mesh).optimize(own_problem(), callback=begun.append, progress=False)
    optimizer = elastic(STRATEGIES[0], mesh, max_workers=mesh.size)

    def callback(state):
        if state.step == 1:
            optimizer.resize(max(1, mesh.size - 1))
        if state.step == 4 and own == 0:
            raise LookupError("no data")

    with pytest.raises(LookupError if own == 0 else RuntimeError, match="no data"):
        optimizer.optimize(own_problem(), callback=callback, progress=False)


@pytest.mark.skipif(os.environ.get("OMPI_MCA_mpi_ft_enable") == "1", reason="where MPI heals it counts as a death")
def test_gradients_that_are_not_finite_end_spares_too(mesh):
    optimizer, fewer, calls = elastic(STRATEGIES[0], mesh), max(1, mesh.size - 1), []

    def function(parameters, samples, gradients):
        gradients += math.nan if calls else 1.0
        return 1.0

    def callback(state):
        calls.append(state.step)
        optimizer.resize(fewer)

    problem = OptimizationProblem(function, np.zeros(3), samples=45, batch_size=16, steps=5)
    with pytest.raises(FloatingPointError, match="step 2"):
        optimizer.optimize(problem, callback=callback, progress=False)
    # A loop of the user's own makes the passes from now on.
    assert not optimizer.optimizer.state.strategy.reducer.progress.in_loop


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(os.environ.get("OMPI_MCA_mpi_ft_enable") == "1", reason="where MPI heals it counts as a death")
def test_a_function_of_all_workers_that_exits_ends_spares_too(mesh):
    def fun(x):
        raise SystemExit(3)

    with pytest.raises(SystemExit) as exited:
        mpishard.minimize(fun, np.zeros(3), mesh=mesh, elastic={"max_workers": mesh.size - 1})
    assert exited.value.code == 3


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(os.environ.get("OMPI_MCA_mpi_ft_enable") == "1", reason="where MPI heals it counts as a death")
@pytest.mark.parametrize("what", ["rebuild", "save"])
def test_an_error_of_a_resize_reaches_the_spares(mesh, folder, monkeypatch, what):
    """Of what is made for the next mesh, and of a save that is still under way."""
    ranks = mesh.size

    def fail(*arguments, **options):
        raise OSError("no disk")

    def callback(state):
        optimizer.resize(ranks - 1 if state.step < 3 else ranks)
        if state.step == 3 and what == "save":
            monkeypatch.setattr(save, "write_pieces", fail)

    def rebuild(mesh):
        if what == "rebuild" and optimizer.optimizer.clock < 3:
            fail()

    optimizer = elastic(STRATEGIES[1], mesh, rebuild=rebuild)
    checkpoints = Checkpoints(folder, mesh, every=3, asynchronous=True)
    with pytest.raises(OSError, match="no disk"):
        optimizer.optimize(own_problem(), callback=callback, progress=False, checkpoints=checkpoints)
    checkpoints.close()


def test_what_a_method_has_not_written_is_not_copied_again(mesh, monkeypatch):
    """Yet after each evaluation, also one that was taken back, the buddies have the neighbour's whole state."""
    history, again, commit, compute = 4, set(), Transactions.commit, Transactions.compute

    def compare(transactions):
        outcome = commit(transactions)
        checkpoint, axis = transactions._checkpoint, transactions._training.optimizer.mesh.data
        everything = axis.allgather_object([shard.array.tobytes() for shard in checkpoint.state.shards])
        kept = {kind: copy.tobytes() for kind, copy in checkpoint._neighbour_copies.items()}
        theirs = everything[checkpoint._neighbour_rank]
        assert kept == ({kind: theirs[kind] for kind in kept} if axis.size > 1 else {})
        assert len(kept) == (len(theirs) - 1 if axis.size > 1 else 0)  # all ranks have the parameters
        return outcome

    def twice(transactions):
        if transactions.status.committed_step in again:
            compute(transactions)
            transactions.rollback()
        compute(transactions)

    def run(resizes):
        optimizer = ElasticOptimizer(LBFGS(gtol=0, ftol=0, history=history), mesh)
        callback = resizing(optimizer, resizes) if resizes else None
        return optimizer.optimize(own_problem(batch_size=45, steps=14), callback=callback, progress=False)

    plain = run({})
    monkeypatch.setattr(Transactions, "commit", compare)
    monkeypatch.setattr(Transactions, "compute", twice)
    again |= {0, 2, 6, 7, 11}
    disturbed = run({4: 1, 9: mesh.size})
    assert disturbed.parameters.tobytes() == plain.parameters.tobytes()
    assert disturbed.loss_history.tobytes() == plain.loss_history.tobytes()
    if mesh.size > 1:
        # At the start all vectors and the point, in an iteration base, gradient, direction, a pair and the point.
        assert plain.communication["data.send buddy"]["calls"] <= 2 * history + 4 + 6 * 14


def test_what_has_no_sense_is_refused(mesh):
    inner = STRATEGIES[0](AdamW(lr=0.01), ShardingConfiguration(mesh, reproducible=True))
    for least, most in ((0, 4), (2, 1)):
        with pytest.raises(ValueError, match="1 <= min <= max"):
            ElasticOptimizer(inner, min_workers=least, max_workers=most)
    with pytest.raises(ValueError, match="start more of them"):
        ElasticOptimizer(inner, min_workers=mesh.size + 1, max_workers=mesh.size + 1)
    with pytest.raises(TypeError, match="leave this configuration out"):
        ElasticOptimizer(inner, ShardingConfiguration(mesh))
    assert ElasticOptimizer(inner, mesh).mesh is mesh
    with pytest.raises(TypeError, match="needs a Mesh"):
        ElasticOptimizer(AdamW(lr=0.01))
    optimizer = ElasticOptimizer(AdamW(lr=0.01), mesh, max_workers=mesh.size)
    assert optimizer.optimizer.config.reproducible
    assert (optimizer.can_scale_up, optimizer.can_scale_down) == (False, mesh.size > 1)
    for workers in (0, mesh.size + 1):
        with pytest.raises(ValueError, match=f"resize\\({workers}\\) is outside"):
            optimizer.resize(workers)


# The committed state of an elastic run whose arrays are in device memory.

SIZE = 7  # of each rank


def committed_of(axis, arrays):
    """A `BuddyCheckpoint` of arrays of which each rank has its part of one tensor."""
    pieces = (Piece("x", ((SIZE * axis.rank, SIZE * (axis.rank + 1)),), 0),)
    shards = [Shard(f"optimizer/{number}", array, pieces, pieces) for number, array in enumerate(arrays)]
    state = RunState((ParameterSpec("x", (SIZE * axis.size,)),), tuple(shards), {})
    return BuddyCheckpoint(axis, list(range(axis.size)), ["node"] * axis.size, state, dict)


@pytest.mark.quick
def test_a_step_is_undone_and_the_state_of_a_dead_neighbour_is_given_to_others(mesh):
    axis = mesh.data
    array, ranks = standin.zeros(SIZE), list(range(axis.size))
    array.fill(axis.rank + 1)  # late: nobody has waited for it when it is copied
    committed = committed_of(axis, [array])
    committed.begin({"step": 1})
    array.fill(99)
    committed.send_to_buddy()
    assert committed.rollback() == {"step": 1}
    assert (arrays.to_host(array) == axis.rank + 1).all()

    committed.begin({"step": 2})
    array *= 10.0
    committed.send_to_buddy()
    committed.commit()
    assert (arrays.to_host(committed.source(ranks).shards[0].array) == 10 * (axis.rank + 1)).all()
    if axis.size > 1:
        neighbour = (axis.rank - 1) % axis.size
        assert committed.neighbour == neighbour
        (shard,) = committed.source([rank for rank in ranks if rank != neighbour]).shards
        both = np.repeat([10.0 * (axis.rank + 1), 10.0 * (neighbour + 1)], SIZE)
        assert np.array_equal(arrays.to_host(shard.array), both)
        assert [piece.start for piece in shard.holding] == [0, SIZE]


@pytest.mark.usefixtures("without_debug")
def test_copies_of_several_arrays_leave_the_device_before_the_host_waits(mesh, monkeypatch):
    axis, waited = mesh.data, []
    committed = committed_of(axis, [standin.zeros(SIZE) for _ in range(3)])
    monkeypatch.setattr(standin.Stream, "pass_one", lambda self: None)
    usual = type(DEFERRED).until

    def until(self, is_over):
        waited.append(len(self.waiting))
        monkeypatch.undo()
        usual(self, is_over)

    monkeypatch.setattr(type(DEFERRED), "until", until)
    monkeypatch.setattr(type(DEFERRED), "flush", lambda self: waited.append("flush"))
    committed.send_to_buddy()
    assert waited == ([3] if axis.size > 1 else [])
    committed.commit()
