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

import mpishard
from mpishard import LBFGS, AdamW, ElasticOptimizer, OptimizationProblem, ParameterSpec, ShardingConfiguration, nn
from mpishard.backend import array as arrays
from mpishard.checkpoint import Checkpoints
from mpishard.comm.channel import Channel
from mpishard.comm.deferred import DEFERRED
from mpishard.elastic import loop
from mpishard.elastic.phases import Phase, next_phase
from mpishard.elastic.transactions import BuddyCheckpoint, Transactions
from mpishard.layout.run_state import RunState, Shard
from mpishard.layout.tensors import Piece
from mpishard.parameters.flat import FlatParameters

# Elastic runs without faults: workers that leave and come back between steps change no bit of the result.

TOKENS = np.random.default_rng(1).integers(0, 11, (45, 9))
DATA = np.random.default_rng(0).standard_normal((45, 300)).astype(np.float32)
TARGETS = DATA.sum(1)
STEPS = 12


def gpt_problem(mesh, seen=None, **options):
    model = nn.GPT(11, 8, 16, 1, 2, np.float32, seed=3, mesh=mesh)

    def batch(samples):
        if seen is not None:
            seen.extend(samples.tolist())
        return TOKENS[samples, :-1], TOKENS[samples, 1:]

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


def elastic(strategy, mesh, **options):
    config = ShardingConfiguration(mesh, max_gradient_norm=0.5, minimum_parameter_group_size=500, reproducible=True)
    return ElasticOptimizer(strategy(AdamW(lr=0.01), config), **options)


def bits(result):
    found = result.parameters
    parameters = found.gather() if isinstance(found, FlatParameters) else found
    return parameters.tobytes(), result.loss_history.tobytes(), result.samples, result.stop_reason


@functools.cache
def alone(make_problem):
    """The run of one rank that is not elastic."""
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        config = ShardingConfiguration(mesh, max_gradient_norm=0.5, minimum_parameter_group_size=500, reproducible=True)
        return bits(mpishard.DDPOptimizer(AdamW(lr=0.01), config).optimize(make_problem(mesh), progress=False))


def sizes_after(ranks):
    """How many workers there shall be after some steps: down and up again, the first and the last step included."""
    return {1: 1, 2: ranks, 4: max(1, ranks - 1), 5: (ranks + 1) // 2, 7: ranks, 9: 1, 10: min(3, ranks), STEPS: 1}


def resizing(optimizer, sizes, noted, *, of_one=False):
    """A callback that asks for these numbers of workers, on all ranks or on the last one."""

    def callback(state):
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
def test_resizes_change_no_bit(mesh, same_on_all, strategy, of_one):
    ranks, noted = mesh.size, {}
    optimizer = elastic(strategy, mesh)
    sizes = sizes_after(ranks)
    result = optimizer.optimize(
        gpt_problem(mesh), callback=resizing(optimizer, sizes, noted, of_one=of_one), progress=False
    )
    found = bits(result)
    assert found == alone(gpt_problem)
    assert same_on_all(found[1:])
    assert optimizer.current_workers == mesh.size == ranks
    # This rank worked in the steps in which there were more workers than its number.
    expected, now = {}, ranks
    for step in range(1, STEPS + 1):
        if mesh.rank < now:
            expected[step] = now
        now = sizes.get(step, now)
    assert noted == expected


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
    callback = resizing(optimizer, {2: 1, 4: mesh.size} if comes_back else {2: 1}, {})
    optimizer.optimize(own_problem(steps=6), callback=callback, progress=False)
    spares, works = mesh.size > 1, Phase.TRAINING if mesh.rank == 0 else Phase.WAITING
    expected = [Phase.STARTING, Phase.TRAINING, *[Phase.RESIZING, works] * spares]
    if comes_back:
        expected += [*[Phase.RESIZING, Phase.TRAINING] * spares, Phase.STOPPING, Phase.ENDING]
    else:
        expected += [*[Phase.STOPPING] * (mesh.rank == 0), *[Phase.RESIZING] * spares, Phase.ENDING]
    assert phases == [*expected, Phase.ENDED]


def test_a_function_of_flat_arrays(mesh):
    optimizer = elastic(STRATEGIES[1], mesh)
    callback = resizing(optimizer, sizes_after(mesh.size), {})
    found = bits(optimizer.optimize(own_problem(), callback=callback, progress=False))
    assert found == alone(lambda _: own_problem())


def test_no_more_workers_than_samples_in_a_step(mesh):
    ranks, refused = mesh.size, []
    optimizer = elastic(STRATEGIES[1], mesh)

    def callback(state):
        for workers, message in (
            (ranks + 1, f"batch_size={ranks} gives some of them no sample"),
            ("2", "whole number"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                optimizer.resize(workers)
            refused.append(workers)

    optimizer.optimize(own_problem(batch_size=ranks, micro_batch_size=1, steps=1), callback=callback, progress=False)
    assert len(refused) == 2
    for wrong, message in ((3, "optimize takes an OptimizationProblem, got int"), ("ck", "checkpoints must be")):
        problem, options = (wrong, {}) if wrong == 3 else (own_problem(), {"checkpoints": wrong})
        with pytest.raises(TypeError, match=message):
            optimizer.optimize(problem, progress=False, **options)


def test_steps_that_are_left_out_count_once_wherever_they_were_taken(mesh):
    ranks = mesh.size

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

    found = run(mesh, ElasticOptimizer, callback=lambda optimizer: resizing(optimizer, sizes_after(ranks), {}))
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


def test_every_sample_once_an_epoch(mesh):
    seen: list[int] = []
    optimizer = elastic(STRATEGIES[0], mesh)
    callback = resizing(optimizer, {1: 1, 2: mesh.size, 4: (mesh.size + 1) // 2}, {})
    result = optimizer.optimize(gpt_problem(mesh, seen, steps=6), callback=callback, progress=False)
    consumed = Counter(sample for part in mesh.world.comm.allgather(seen) for sample in part)
    assert result.samples == 90
    assert consumed == dict.fromkeys(range(45), 2)  # two epochs of three steps


def test_a_tolerance_ends_all(mesh):
    def problem(_):
        return own_problem(steps=None, tolerance=4.0)

    expected = alone(problem)
    optimizer = elastic(STRATEGIES[1], mesh)
    callback = resizing(optimizer, {2: 1, 4: mesh.size}, {})
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
def test_checkpoints_across_resizes(mesh, tmp_path, asynchronous):
    """What fewer workers have saved, all go on from, under another strategy."""
    folder = mesh.world.allgather_object(str(tmp_path))[0]
    optimizer = elastic(STRATEGIES[1], mesh)
    with Checkpoints(folder, mesh, every=2, asynchronous=asynchronous) as checkpoints:
        callback = resizing(optimizer, {1: 1, 3: mesh.size, 5: max(1, mesh.size - 1)}, {})
        optimizer.optimize(gpt_problem(mesh, steps=7), callback=callback, progress=False, checkpoints=checkpoints)
    again = elastic(STRATEGIES[3], mesh)
    with Checkpoints(folder, mesh, every=3, asynchronous=asynchronous) as checkpoints:
        callback = resizing(again, {8: 1, 10: mesh.size}, {})
        result = again.optimize(
            gpt_problem(mesh), callback=callback, progress=False, checkpoints=checkpoints, resume=True
        )
    assert result.resumed_steps == 7
    assert bits(result) == alone(gpt_problem)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.mpi(min_size=2)
def test_many_resizes_leave_nothing_behind(mesh, short, tmp_path, monkeypatch):
    """MPICH has about 2000 communicators: those that are left would be missed soon."""
    if mesh.size > 4:
        pytest.skip("slow where cores are few, and nothing new")
    ranks, steps, noted, channels = mesh.size, 44 if short else 104, {}, Counter()
    make, free = Channel.__init__, Channel.free

    def counted_make(channel, *arguments, **options):
        channels["open"] += 1
        make(channel, *arguments, **options)

    def counted_free(channel):
        channels["open"] -= 1
        free(channel)

    monkeypatch.setattr(Channel, "__init__", counted_make)
    monkeypatch.setattr(Channel, "free", counted_free)
    folder = mesh.world.allgather_object(str(tmp_path))[0]
    optimizer = elastic(STRATEGIES[1], mesh)

    def callback(state):
        if state.step in (20, steps):
            gc.collect()
        noted[state.step] = channels["open"], open_files(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        optimizer.resize(ranks - state.step % 2)

    with Checkpoints(folder, mesh) as checkpoints:
        result = optimizer.optimize(
            own_problem(steps=steps), callback=callback, progress=False, checkpoints=checkpoints
        )
    assert result.steps == steps
    if mesh.rank < ranks - 1:
        early, late = noted[20], noted[steps]
        assert late[0] == early[0]
        assert late[1] <= early[1]
        assert late[2] - early[2] < 8 * 1024  # KiB


def test_the_copies_of_the_state_go_with_the_run(mesh):
    """Not only when Python next looks for cycles: they are as large as the state, and may be in a device's memory."""
    optimizer = elastic(STRATEGIES[1], mesh)
    gc.collect()
    gc.disable()
    try:
        optimizer.optimize(own_problem(), progress=False)
        assert not [each for each in gc.get_objects() if isinstance(each, BuddyCheckpoint)]
    finally:
        gc.enable()


def test_an_error_of_one_worker_reaches_the_spares(mesh):
    if os.environ.get("OMPI_MCA_mpi_ft_enable") == "1":
        pytest.skip("counts as a death")
    optimizer = elastic(STRATEGIES[0], mesh, max_workers=mesh.size)

    def callback(state):
        if state.step == 1:
            optimizer.resize(max(1, mesh.size - 1))
        if state.step == 4 and own == 0:
            raise LookupError("no data")

    own = mesh.rank
    with pytest.raises(LookupError if own == 0 else RuntimeError, match="no data"):
        optimizer.optimize(own_problem(), callback=callback, progress=False)


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
        optimizer = ElasticOptimizer(LBFGS(gtol=0, ftol=0, history=history, line_search="armijo"), mesh)

        def callback(state):
            if state.step in resizes:
                optimizer.resize(resizes[state.step])

        return optimizer.optimize(
            own_problem(batch_size=45, steps=14), callback=callback if resizes else None, progress=False
        )

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
    with pytest.raises(TypeError, match="its own mesh and configuration; leave this configuration out"):
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


def test_an_error_of_the_function_is_the_users(mesh):
    """Where MPI cannot heal, it is raised on the rank that has it."""
    if os.environ.get("OMPI_MCA_mpi_ft_enable") == "1":
        pytest.skip("this MPI heals")

    def function(parameters, samples, gradients):
        raise ArithmeticError("spoilt")

    problem = OptimizationProblem(function, np.zeros(3), samples=45, batch_size=16, steps=2)
    with pytest.raises(ArithmeticError, match="spoilt"):
        elastic(STRATEGIES[0], mesh).optimize(problem, progress=False)


# One run on 2, 8, 3, 5, 1 and 4 workers: the bits of one rank, and every sample once an epoch.

SEQUENCE = (2, 8, 3, 5, 1, 4)
STEPS_EACH, STEPS_AN_EPOCH = 2, 3
SEQUENCE_STEPS = len(SEQUENCE) * STEPS_EACH
SAMPLES, BATCH = 45, 16
SEQUENCE_TOKENS = np.random.default_rng(1).integers(0, 11, (SAMPLES, 9))


def make(strategy, mesh):
    config = ShardingConfiguration(mesh, max_gradient_norm=0.5, minimum_parameter_group_size=500, reproducible=True)
    return strategy(AdamW(lr=mpishard.cosine(0.02, steps=SEQUENCE_STEPS, warmup=3)), config)


def problem(mesh, note=lambda samples: None):
    def batch(samples):
        note(samples)
        return SEQUENCE_TOKENS[samples, :-1], SEQUENCE_TOKENS[samples, 1:]

    return OptimizationProblem.for_model(
        nn.GPT(11, 8, 16, 1, 2, np.float32, seed=3, mesh=mesh),
        batch,
        samples=SAMPLES,
        batch_size=BATCH,
        micro_batch_size=1,
        steps=SEQUENCE_STEPS,
        tokens_per_sample=8,
    )


def bits_of_sequence(result):
    found = result.parameters
    parameters = found.gather() if isinstance(found, FlatParameters) else found
    assert parameters.dtype == np.float32
    return parameters.tobytes(), result.loss_history.tobytes()


@pytest.fixture(scope="module")
def alone_of_sequence():
    """The run of one rank that is not elastic, and its samples by step."""
    taken = {}
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = make(STRATEGIES[0], mesh)
        task = problem(mesh, lambda samples: taken.setdefault(optimizer.clock + 1, []).extend(samples.tolist()))
        return bits_of_sequence(optimizer.optimize(task, progress=False)), taken


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resize_sequence(mesh, strategy, alone_of_sequence):
    """With fewer than eight ranks, as many workers of each number as there are."""
    expected, batches = alone_of_sequence
    sizes = [min(workers, mesh.size) for workers in SEQUENCE]
    inner, taken, workers = make(strategy, mesh), {}, []
    elastic = ElasticOptimizer(inner, max_workers=sizes[0])
    elastic.max_workers = mesh.size

    def callback(state):
        workers.append(elastic.current_workers)
        if state.step % STEPS_EACH == 0 and state.step < SEQUENCE_STEPS:
            elastic.resize(sizes[state.step // STEPS_EACH])

    task = problem(mesh, lambda samples: taken.setdefault(inner.clock + 1, []).extend(samples.tolist()))
    result = elastic.optimize(task, callback=callback, progress=False)

    assert bits_of_sequence(result) == expected
    assert result.samples == SAMPLES * SEQUENCE_STEPS // STEPS_AN_EPOCH
    by_rank = mesh.world.comm.allgather(taken)
    assert mesh.rank > 0 or workers == [size for size in sizes for _ in range(STEPS_EACH)]
    for step in range(1, SEQUENCE_STEPS + 1):
        shares = [each.get(step, []) for each in by_rank]
        assert sorted(sum(shares, [])) == sorted(batches[step])
        assert [bool(share) for share in shares] == [
            rank < sizes[(step - 1) // STEPS_EACH] for rank in range(mesh.size)
        ]
    for first in range(1, SEQUENCE_STEPS + 1, STEPS_AN_EPOCH):
        epoch = Counter(
            s for step in range(first, first + STEPS_AN_EPOCH) for each in by_rank for s in each.get(step, [])
        )
        assert epoch == Counter(range(SAMPLES))


# The committed state of an elastic run whose arrays are in device memory.

SIZE = 7  # of each rank


def test_a_step_is_undone_and_the_state_of_a_dead_neighbour_is_given_to_others(mesh):
    axis = mesh.data
    array = standin.zeros(SIZE)
    array.fill(axis.rank + 1)  # late: nobody has waited for it when it is copied
    pieces = (Piece("x", ((SIZE * axis.rank, SIZE * (axis.rank + 1)),), 0),)
    state = RunState(
        (ParameterSpec("x", (SIZE * axis.size,)),), (Shard("optimizer/exp_avg", array, pieces, pieces),), {}
    )
    ranks = list(range(axis.size))
    committed = BuddyCheckpoint(axis, ranks, ["node"] * axis.size, state, dict)
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
    pieces = (Piece("x", ((SIZE * axis.rank, SIZE * (axis.rank + 1)),), 0),)
    given = [standin.zeros(SIZE) for _ in range(3)]
    shards = [Shard(f"optimizer/{number}", array, pieces, pieces) for number, array in enumerate(given)]
    ranks = list(range(axis.size))
    state = RunState((ParameterSpec("x", (SIZE * axis.size,)),), tuple(shards), {})
    committed = BuddyCheckpoint(axis, ranks, ["node"] * axis.size, state, dict)
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
