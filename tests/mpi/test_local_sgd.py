"""Workers that go their own ways and meet: against DDP and plain NumPy, and their runs."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import hybrid
import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard import LAMB, SGD, AdamW, Checkpoints, DDPOptimizer, LocalSGDOptimizer, ShardingConfiguration
from mpishard.backend import array as arrays
from mpishard.compression import Int8Compressor, PowerSGDCompressor, TopKCompressor
from mpishard.data.sampling import Sampler, share
from mpishard.data_parallel.full_state import decode
from mpishard.parameters.flat import FlatParameters

pytestmark = pytest.mark.pairs(1)

# Workers that go their own ways and meet: against DDP, and against references in plain NumPy.

SHAPES = [(5,), (2, 4), (3,), (6,)]
SPECS = [mpishard.ParameterSpec(name, shape) for name, shape in zip("abcd", SHAPES, strict=True)]
EDGES = [0, 5, 13, 16, 22]
TENSORS = [slice(*run) for run in pairwise(EDGES)]
SIZE = EDGES[-1]
START = np.linspace(-1, 1, SIZE)
NESTEROV = SGD(lr=0.7, momentum=0.9, nesterov=True)
ADAMW = AdamW(lr=0.01, weight_decay=0.1)
INT8 = Int8Compressor(block=4)


def gradient(parameters, step, worker):
    """Of a bowl that is another one for each worker and step."""
    random = np.random.default_rng([step, worker])
    return random.uniform(0.5, 1.5, SIZE) * (parameters - random.standard_normal(SIZE))


def settings(mesh, **options):
    return ShardingConfiguration(mesh, **{"minimum_parameter_group_size": 1, **options})


def train(optimizer, parameters, steps, worker=None):
    worker = optimizer.axis.rank if worker is None else worker
    for step in steps:
        optimizer.step(parameters, gradient(parameters.flat, step, worker))
    return parameters.flat


def adamw(parameters, g, state, step):
    m, v = state[:] = 0.9 * state[0] + 0.1 * g, 0.999 * state[1] + 0.001 * g * g
    kept = (1 - 0.01 * 0.1) * parameters
    return kept - 0.01 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)


def reference(workers, steps, every, *, nesterov=False, parts=1, delay=0):
    """The parameters of each worker after a number of steps of AdamW, in plain NumPy."""
    own = [START.copy() for _ in range(workers)]
    states = [[np.zeros(SIZE), np.zeros(SIZE)] for _ in range(workers)]
    anchor, momentum, under_way = START.copy(), np.zeros(SIZE), []
    for step in range(1, steps + 1):
        for worker in range(workers):
            own[worker] = adamw(own[worker], gradient(own[worker], step, worker), states[worker], step)

        def take_in(step=step):
            while under_way and under_way[0][0] == step - delay:
                _, where, then = under_way.pop(0)
                outer = anchor[where] - np.mean(then, axis=0)
                if nesterov:
                    momentum[where] = 0.9 * momentum[where] + outer
                    outer = 0.7 * (outer + 0.9 * momentum[where])
                anchor[where] -= outer
                for worker in range(workers):
                    own[worker][where] += anchor[where] - then[worker]

        take_in()
        for part in range(parts):
            if (step + part * every // parts) % every == 0:
                where = np.concatenate([np.arange(SIZE)[tensor] for tensor in TENSORS[part::parts]])
                under_way.append((step, where, [each[where] for each in own]))
        take_in()
    return own


@pytest.mark.parametrize("rule", [SGD(lr=0.1), SGD(lr=0.05, momentum=0.9, nesterov=True)], ids=str)
@pytest.mark.quick
def test_an_average_every_step_is_ddp(mesh, same_on_all, rule):
    """By workers with unequal numbers of samples too."""
    found = []
    for optimizer in (DDPOptimizer(rule, mesh), LocalSGDOptimizer(rule, mesh, sync_every=1)):
        flat, count = START.copy(), mesh.size * (mesh.size + 1) / 2
        for step in range(50):
            optimizer.step(flat, (mesh.rank + 1) * gradient(flat, step, mesh.rank), count=count)
        assert same_on_all(flat)
        found.append(flat)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)
    assert optimizer.staleness == 0 and optimizer.outer_steps == 50


PARTS_AND_DELAYS = [(1, 0), (1, 3), (1, 6), (2, 1), (2, 6), (3, 0), (3, 3), (4, 0), (4, 1), (4, 6)]


@pytest.mark.parametrize(("every", "parts", "delay"), [(1, 1, 1), *((6, *each) for each in PARTS_AND_DELAYS)])
@pytest.mark.parametrize("nesterov", [False, True], ids=["mean", "diloco"])
def test_the_steps_of_a_reference(mesh, same_on_all, nesterov, every, parts, delay):
    outer = NESTEROV if nesterov else None
    optimizer = LocalSGDOptimizer(ADAMW, settings(mesh), every, outer, parts=parts, delay=delay)
    flat = train(optimizer, FlatParameters.over(START.copy(), SPECS), range(1, 41))
    expected = reference(mesh.size, 40, every, nesterov=nesterov, parts=parts, delay=delay)[mesh.rank]
    np.testing.assert_allclose(flat, expected, rtol=0, atol=1e-12)
    assert optimizer.staleness == delay
    optimizer.synchronize_optimizer_state()
    assert optimizer.staleness == 0 and same_on_all(flat)


def test_a_lower_sync_every_waits_for_the_average_under_way(mesh):
    """The averages of workers that do the same change nothing."""
    optimizer = LocalSGDOptimizer(SGD(lr=0.1), settings(mesh), 7, delay=3)
    flat, alone = START.copy(), START.copy()
    for step in range(1, 21):
        if step == 8:
            optimizer.sync_every = 4
        optimizer.step(flat, gradient(flat, step, 0))
        alone -= 0.1 * gradient(alone, step, 0)
    np.testing.assert_allclose(flat, alone, rtol=0, atol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_a_delayed_average_waits_for_nobody(mesh):
    """The first rank is two steps ahead of the others, which it lets go on only then."""
    optimizer, comm = LocalSGDOptimizer(SGD(lr=0.1), mesh, 3, delay=2), mesh.data.comm
    parameters = FlatParameters.over(START.copy())
    train(optimizer, parameters, [1, 2])
    if mesh.rank:
        comm.recv(source=0)
    train(optimizer, parameters, [3, 4])
    if mesh.rank == 0:
        for other in range(1, mesh.size):
            comm.send(None, other)
    train(optimizer, parameters, [5])
    assert optimizer.staleness == 2 and optimizer.outer_steps == 1


@pytest.mark.parametrize("delay", [0, 1])
def test_device_arrays_take_the_same_steps(mesh, device, delay):
    flat, there = START.copy(), device.put(START)
    optimizer, on_host = (LocalSGDOptimizer(ADAMW, mesh, 2, NESTEROV, delay=delay) for _ in range(2))
    for step in range(5):
        own = gradient(START, step, mesh.rank)
        optimizer.step(there, device.put(own))
        on_host.step(flat, own)
    assert optimizer.serialize() == on_host.serialize()
    assert np.array_equal(arrays.to_host(there), flat)


def test_after_a_death_the_first_worker_counts(mesh, same_on_all):
    """Each survivor has its own parameters; after the next average all have the same state."""
    optimizer, parameters = LocalSGDOptimizer(SGD(lr=1.0), mesh, 1), FlatParameters.over(np.zeros(4))
    optimizer.step(parameters, np.zeros(4))
    optimizer.state.rebuild(parameters)
    parameters.flat[...] = 5.0 + mesh.rank
    optimizer.step(parameters, np.full(4, float(mesh.rank)))
    assert same_on_all(parameters.flat)
    np.testing.assert_allclose(parameters.flat, 5.0 - (mesh.size - 1) / 2, rtol=0, atol=1e-14)


def sent(mesh):
    return mesh.ledger.sent("data", label="gradients")


def test_bytes_of_one_step_in_so_many(mesh, same_on_all):
    """Nothing at all goes over the data axis in between."""
    steps, every = 24, 8
    totals = []
    for optimizer in (DDPOptimizer(ADAMW, settings(mesh)), LocalSGDOptimizer(ADAMW, settings(mesh), every)):
        parameters = FlatParameters.over(START.copy(), SPECS)
        optimizer.bind(parameters)
        before = sent(mesh)
        for step in range(1, steps + 1):
            calls = len(mesh.ledger.recent)
            train(optimizer, parameters, [step])
            local = isinstance(optimizer, LocalSGDOptimizer) and step % every and step > 1
            assert not local or len(mesh.ledger.recent) == calls
        totals.append(sent(mesh) - before)
    assert same_on_all(parameters.flat)
    assert totals[0] == every * totals[1] and (totals[0] > 0) == (mesh.size > 1)


@pytest.mark.mpi(min_size=2)
def test_each_part_has_its_turn(mesh, same_on_all):
    optimizer = LocalSGDOptimizer(SGD(lr=0.1), settings(mesh), 8, parts=4)
    parameters = FlatParameters.over(START.copy(), SPECS)
    turns = {}
    for step in range(1, 25):
        flat = train(optimizer, parameters, [step])
        for part, tensor in enumerate(TENSORS):
            if same_on_all(flat[tensor]):
                turns.setdefault(part, []).append(step)
    assert turns == {0: [8, 16, 24], 1: [6, 14, 22], 2: [4, 12, 20], 3: [2, 10, 18]}


@pytest.mark.parametrize("compressor", [INT8, TopKCompressor(0.1), PowerSGDCompressor(1)], ids=str)
@pytest.mark.parametrize(("parts", "delay", "nodes"), [(1, 0, False), (2, 3, False), (2, 0, 2)])
def test_compressed_averages_lose_nothing(mesh, same_on_all, parts, delay, nodes, compressor):
    """What the workers have come to together is where they are, and what is left over."""
    config = settings(mesh, gradient_compressor=compressor, hierarchical=nodes)
    optimizer = LocalSGDOptimizer(SGD(lr=1.0), config, 4, parts=parts, delay=delay)
    # Large enough for a rank's piece to have whole blocks: a block of one element loses next to nothing.
    size = 4 * 64
    specs = [mpishard.ParameterSpec(name, (8, 8)) for name in "abcd"]
    parameters, total = FlatParameters.over(np.zeros(size), specs), np.zeros(size)
    for step in range(1, 42):
        given = [np.random.default_rng([step, worker]).standard_normal(size) for worker in range(mesh.size)]
        total += np.mean(given, axis=0)
        optimizer.step(parameters, given[mesh.rank])
        if (parts, delay) == (1, 0) and step % 4 == 0:
            assert same_on_all(parameters.flat)
    optimizer.synchronize_optimizer_state()
    assert same_on_all(parameters.flat)
    left = decode(optimizer.serialize()).others["average_errors"]
    assert np.abs(left).max() > 1e-4
    np.testing.assert_allclose(left - parameters.flat, total, rtol=0, atol=1e-12)


def test_state_from_elsewhere_replaces_what_is_under_way(mesh, same_on_all):
    """An average that was begun before `deserialize` is none of the run that goes on, and all workers are alike."""
    optimizer, flat = LocalSGDOptimizer(SGD(lr=1.0), mesh, 8, delay=3), np.zeros(4)
    state = None
    for step in range(1, 9):
        optimizer.step(flat, np.full(4, float(mesh.rank)))
        if step == 1:
            other = LocalSGDOptimizer(SGD(lr=1.0), mesh, 8)
            other.step(np.zeros(4), np.zeros(4))
            state = other.serialize()
    flat[...] = 100 + mesh.rank
    optimizer.deserialize(state)
    for _ in range(12):
        optimizer.step(flat, np.zeros(4))
    assert same_on_all(flat)
    assert np.array_equal(flat, np.full(4, 100.0))


@pytest.mark.parametrize("back", [False, True])
def test_what_is_left_of_gradients_is_nothing_of_averages(mesh, back):
    """They are other quantities: an optimizer of the other kind begins without."""
    config = settings(mesh, gradient_compressor=TopKCompressor(0.25))
    kinds = [DDPOptimizer, LocalSGDOptimizer][:: -1 if back else 1]
    first, second = (kind(SGD(lr=1e-3), config) for kind in kinds)
    flat = np.zeros(8)
    first.step(flat, np.arange(1.0, 9.0) * 1000)
    second.deserialize(first.serialize())
    flat[...] = 0
    for _ in range(9):
        second.step(flat, np.zeros(8))
    second.synchronize_optimizer_state()
    assert not flat.any()


@pytest.mark.parametrize("every", [1, 4])
def test_nodes_are_workers(mesh, same_on_all, every):
    """Two neighbours sum their gradients in every step; nodes average every few steps."""
    config = settings(mesh, hierarchical=2)
    optimizer, flat = LocalSGDOptimizer(SGD(lr=0.1), config, every), START.copy()
    ranks = 2 if mesh.size % 2 == 0 and mesh.size > 2 else 1
    workers = mesh.size // ranks
    own = [START.copy() for _ in range(workers)]
    for step in range(1, 21):
        optimizer.step(flat, gradient(flat, step, mesh.rank))
        for worker in range(workers):
            members = range(worker * ranks, (worker + 1) * ranks)
            own[worker] = own[worker] - 0.1 * np.mean([gradient(own[worker], step, rank) for rank in members], axis=0)
        if step % every == 0:
            own = [np.mean(own, axis=0)] * workers
        np.testing.assert_allclose(flat, own[mesh.rank // ranks], rtol=0, atol=1e-12)
    assert same_on_all(flat)
    between = sum(
        total["calls"]
        for name, total in mesh.ledger.summary().items()
        if name.startswith("data across nodes") and "gradients" in name
    )
    assert between == (0 if ranks == 1 else 20 // every * len(optimizer.state.strategy.shares.buckets))


@pytest.mark.parametrize("options", [{}, {"outer": NESTEROV}, {"outer": NESTEROV, "parts": 3, "delay": 2}], ids=str)
def test_one_state_when_asked_for(mesh, same_on_all, options):
    optimizer = LocalSGDOptimizer(ADAMW, settings(mesh), 4, **options)
    parameters = FlatParameters.over(START.copy(), SPECS)
    train(optimizer, parameters, range(1, 8))
    optimizer.synchronize_optimizer_state()
    assert same_on_all(parameters.flat) and all(same_on_all(slot) for slot in optimizer.state.on_rank.slots.values())
    before = parameters.flat.copy(), optimizer.serialize()
    optimizer.synchronize_optimizer_state()
    assert np.array_equal(parameters.flat, before[0]) and optimizer.serialize() == before[1]
    assert same_on_all(before[1])
    # Another one goes on with the same bits.
    other, theirs = LocalSGDOptimizer(ADAMW, settings(mesh), 4, **options), FlatParameters.over(before[0], SPECS)
    other.deserialize(before[1])
    assert other.serialize() == before[1]
    train(optimizer, parameters, range(8, 17))
    train(other, theirs, range(8, 17))
    assert np.array_equal(parameters.flat, theirs.flat)
    assert optimizer.serialize() == other.serialize()


def test_a_checkpoint_of_ones_own_loop(mesh, folder, same_on_all):
    optimizer = LocalSGDOptimizer(ADAMW, settings(mesh), 4, NESTEROV)
    parameters = FlatParameters.over(START.copy(), SPECS)
    train(optimizer, parameters, range(1, 7))
    mpishard.save_checkpoint(folder, parameters, optimizer)
    assert same_on_all(parameters.flat)
    other, theirs = LocalSGDOptimizer(ADAMW, settings(mesh), 4, NESTEROV), FlatParameters(SPECS, np.float64)
    facts = mpishard.load_checkpoint(folder, theirs, other)
    assert (facts["outer_rule"], facts["outer_steps"], other.outer_steps) == ("SGD", 2, 2)
    train(optimizer, parameters, range(7, 12))
    train(other, theirs, range(7, 12))
    assert np.array_equal(parameters.flat, theirs.flat)
    for wrong in (None, SGD(lr=0.7)):
        refused = LocalSGDOptimizer(ADAMW, settings(mesh), 4, wrong)
        message = r"outer rule SGD \(slots: momentum_buffer\), .*outer="
        with pytest.raises(ValueError, match=message):
            mpishard.load_checkpoint(folder, FlatParameters(SPECS, np.float64), refused)
        with pytest.raises(ValueError, match=message):
            refused.deserialize(other.serialize())


@pytest.mark.parametrize("delay", [0, 2])
def test_a_worker_with_nan_leaves_its_step_out(mesh, same_on_all, delay):
    """At the next average all ranks raise, in the mode that raises."""
    bad = mesh.size - 1

    def gradients(step):
        own = np.ones(SIZE)
        own[7] = np.nan if step == 2 and mesh.rank == bad else 1.0
        return own

    for mode in ("skip", "raise"):
        optimizer = LocalSGDOptimizer(SGD(lr=1.0), settings(mesh, nonfinite_gradients=mode), 4, delay=delay)
        parameters = FlatParameters.over(np.zeros(SIZE), SPECS)
        raised = []
        for step in range(1, 9):
            try:
                optimizer.step(parameters, gradients(step))
            except FloatingPointError as error:
                raised.append((step, "'b' on rank" in str(error) and f"rank {bad}" in str(error)))
        assert raised == ([(4 + delay, True)] if mode == "raise" else [])
        assert optimizer.skipped_steps == (mesh.rank == bad)
        assert optimizer.clock == 8
        optimizer.synchronize_optimizer_state()
        np.testing.assert_allclose(parameters.flat, -8 + 1 / mesh.size, rtol=0, atol=1e-14)
        assert same_on_all(parameters.flat)
        assert (optimizer.steps, optimizer.skipped_steps) == (7, 1)


def test_nan_before_a_save_is_reported_then(mesh):
    optimizer = LocalSGDOptimizer(SGD(lr=1.0), mesh, 8)
    flat = np.zeros(3)
    optimizer.step(flat, np.full(3, np.nan if mesh.rank == 0 else 1.0))
    with pytest.raises(FloatingPointError, match="step 1: 'parameters' on rank 0"):
        optimizer.serialize()
    optimizer.serialize()


def test_a_dynamic_loss_scale_is_the_workers_own(mesh, same_on_all):
    optimizer = LocalSGDOptimizer(SGD(lr=1.0), settings(mesh, loss_scale="dynamic"), 4)
    parameters = FlatParameters.over(np.zeros(SIZE), SPECS)
    for step in range(4):
        scale = optimizer.loss_scale
        optimizer.step(parameters, np.full(SIZE, np.inf if step == 1 and mesh.rank == 0 else scale))
    assert optimizer.loss_scale == 2.0**16 / (2 if mesh.rank == 0 else 1)
    np.testing.assert_allclose(parameters.flat, -4 + 1 / mesh.size, rtol=0, atol=1e-14)
    optimizer.synchronize_optimizer_state()
    assert optimizer.loss_scale == parameters.loss_scale == 2.0**15


def test_clipping_is_the_workers_own(mesh):
    optimizer = LocalSGDOptimizer(SGD(lr=1.0), settings(mesh, max_gradient_norm=1.0), 1)
    flat = np.zeros(4)
    optimizer.step(flat, np.full(4, 0.5 * mesh.rank))
    assert optimizer.gradient_norm == mesh.rank
    expected = sum(0.5 * min(1, rank) for rank in range(mesh.size)) / mesh.size
    np.testing.assert_allclose(flat, -expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", [SGD(lr=0.1, momentum=0.9), LAMB(lr=0.1)], ids=lambda rule: type(rule).__name__)
def test_tensor_and_pipeline_ranks_are_one_worker(mesh, rule):
    """As the same number of workers of one rank each; averages of whole numbers of steps, and norms, agree."""
    for each in hybrid.meshes(mesh):
        workers = each.data.size
        config = ShardingConfiguration(each, max_gradient_norm=0.5, minimum_parameter_group_size=8)
        optimizer, parameters = LocalSGDOptimizer(rule, config, 3, NESTEROV, parts=1), hybrid.model(each)
        norms = hybrid.train(optimizer, parameters, range(6))
        found = hybrid.gathered(parameters, config)
        expected, expected_norms = reference_of_workers(rule, workers)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(norms, expected_norms[each.data.rank], rtol=1e-12)
        state = optimizer.serialize()
        assert set(each.world.allgather_object(state)) == {state}
        again = LocalSGDOptimizer(rule, config, 3, NESTEROV)
        again.bind(hybrid.model(each, start=found))
        again.deserialize(state)
        assert again.serialize() == state


def reference_of_workers(rule, workers):
    """Each worker alone on one rank, by DDP; then three steps' averages by hand."""
    found, norms, states = hybrid.START, [[] for _ in range(workers)], [None] * workers
    momentum = np.zeros(hybrid.SIZE)
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        for first in (0, 3):
            ends = []
            for worker in range(workers):
                parameters = hybrid.model(one, start=found)
                optimizer = DDPOptimizer(rule, ShardingConfiguration(one, max_gradient_norm=0.5))
                if states[worker]:
                    optimizer.deserialize(states[worker])
                for step in range(first, first + 3):
                    optimizer.step(parameters, hybrid.whole_gradient(step, worker, workers))
                    norms[worker].append(optimizer.gradient_norm)
                states[worker] = optimizer.serialize()
                ends.append(parameters.flat.copy())
            outer = found - np.mean(ends, axis=0)
            momentum = 0.9 * momentum + outer
            found = found - 0.7 * (outer + 0.9 * momentum)
    return found, norms


def test_debug_compares_where_workers_are_alike(comm):
    with mpishard.Mesh(comm, debug=True) as mesh:
        optimizer = LocalSGDOptimizer(ADAMW, settings(mesh), 4, parts=2, delay=1)
        parameters = FlatParameters.over(START.copy(), SPECS)
        train(optimizer, parameters, range(1, 8))
        optimizer.synchronize_optimizer_state()


@pytest.mark.mpi(min_size=2)
def test_arguments_are_compared_where_workers_meet(mesh):
    optimizer = LocalSGDOptimizer(SGD(lr=1.0), mesh, 2)
    flat = np.zeros(4)
    with pytest.raises(ValueError, match="above 0"):
        optimizer.step(flat, np.ones(4), count=0 if mesh.rank == 0 else 1)  # the first step: on all
    optimizer.step(flat, np.ones(4), count=mesh.size)
    with pytest.raises(ValueError, match="above 0"):
        optimizer.step(flat, np.ones(4), count=0 if mesh.rank == 0 else 1)  # an average follows: on all
    optimizer.step(flat, np.ones(4), count=mesh.size)
    if mesh.rank == 0:
        with pytest.raises(ValueError, match="above 0"):
            optimizer.step(flat, np.ones(4), count=0)  # in between: alone
    for _ in range(2):
        optimizer.step(flat, np.ones(4), count=mesh.size)
    np.testing.assert_allclose(flat, -4.0, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="sync_every is 2 on rank 0, 3 on rank 1"):
        LocalSGDOptimizer(SGD(lr=1.0), mesh, 2 + mesh.rank)
    changed = LocalSGDOptimizer(SGD(lr=1.0), mesh, 2)
    changed.step(flat, np.ones(4))
    changed.sync_every = 2 + mesh.rank
    with pytest.raises(ValueError, match="sync_every is 2 on rank 0, 3 on rank 1"):
        for _ in range(mesh.size):  # each until its own next average
            changed.step(flat, np.ones(4))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"sync_every": 0}, ValueError, "sync_every=0"),
        ({"sync_every": 2.5}, TypeError, "sync_every=2.5"),
        ({"parts": 0}, ValueError, "parts=0"),
        ({"delay": -1}, ValueError, "delay=-1"),
        ({"delay": 9}, ValueError, "delay=9 .*sync_every=8"),
        ({"outer": 0.7}, TypeError, "outer .*got float"),
        ({"outer": LAMB(lr=0.1)}, ValueError, "LAMB needs whole tensors"),
    ],
)
def test_numbers_that_make_no_sense(mesh, options, kind, message):
    with pytest.raises(kind, match=message):
        LocalSGDOptimizer(SGD(lr=0.1), mesh, **options)


def test_what_does_not_go_together(mesh):
    with pytest.raises(ValueError, match="number of workers"):
        LocalSGDOptimizer(SGD(lr=0.1), settings(mesh, reproducible=True))
    with pytest.raises(ValueError, match="auto_sync_gradients=False"):
        LocalSGDOptimizer(SGD(lr=0.1), settings(mesh, auto_sync_gradients=False))
    optimizer = LocalSGDOptimizer(SGD(lr=0.1), settings(mesh), parts=5)
    message = "parts=5, .*4 buckets"
    with pytest.raises(ValueError, match=message):
        train(optimizer, FlatParameters.over(START.copy(), SPECS), [1])


# Runs of workers that meet: stopped and resumed, in another layout, resized, and ended by a tolerance.

ROWS = np.random.default_rng(0).standard_normal((37, 6))


def least_squares(parameters, samples, gradients):
    residual = ROWS[samples, :5] @ parameters - ROWS[samples, 5]
    gradients += ROWS[samples, :5].T @ residual
    return 0.5 * residual @ residual


def problem(steps=None, **changes):
    options = {"samples": len(ROWS), "batch_size": 16, "seed": 4, "steps": steps, **changes}
    return mpishard.OptimizationProblem(least_squares, np.zeros(5), **options)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.usefixtures("without_debug")
def test_a_run_meets_at_averages_only(mesh, same_on_all, delay):
    """In the end every loss is that of all ranks, and a rank that is to stop waits for the others."""
    expected = DDPOptimizer(SGD(lr=0.0), mesh).optimize(problem(30), progress=False).loss_history
    seen = []

    def callback(state):
        seen.append(state.loss)
        return state.step == 18 and mesh.rank == mesh.size - 1

    optimizer = LocalSGDOptimizer(SGD(lr=0.0), mesh, 4, delay=delay)
    before = mesh.ledger.summary().get("world.all_reduce control", {"calls": 0})["calls"]
    result = optimizer.optimize(problem(30), progress=False, callback=callback)
    assert result.stop_reason == "callback"
    assert result.steps == (20 if delay == 0 else 21)
    np.testing.assert_allclose(result.loss_history, expected[: result.steps], rtol=1e-12)
    assert same_on_all(result.loss_history)
    assert seen[3 + delay] == result.loss_history[3 + delay]  # all ranks were there
    calls = mesh.ledger.summary()["world.all_reduce control"]["calls"] - before
    assert calls <= 5 + 4  # one an average, and those of the first step and at both ends of the run
    first = result.steps
    result = optimizer.optimize(problem(6), progress=False)  # ends between averages
    np.testing.assert_allclose(result.loss_history, expected[first : first + 6], rtol=1e-12)


@pytest.mark.parametrize(
    ("every", "outer", "delay", "compressor"),
    [(4, None, 0, None), (5, NESTEROV, 5, None), (5, NESTEROV, 0, INT8), (4, NESTEROV, 2, INT8)],
    ids=str,
)
def test_a_run_goes_on_where_it_stopped(mesh, folder, same_on_all, every, outer, delay, compressor):
    """With the same bits as the run that has saved on its way; on any number of ranks from the same state."""

    def optimizer(mesh):
        config = ShardingConfiguration(mesh, minimum_parameter_group_size=1, gradient_compressor=compressor)
        return LocalSGDOptimizer(AdamW(lr=0.1), config, every, outer, delay=delay)

    with Checkpoints(folder, mesh, every=5) as checkpoints:
        whole = optimizer(mesh).optimize(problem(10), progress=False, checkpoints=checkpoints)
    assert same_on_all(whole.parameters)
    with Checkpoints(folder / "again", mesh, every=5) as checkpoints:
        optimizer(mesh).optimize(problem(5), progress=False, checkpoints=checkpoints)
        resumed = optimizer(mesh)
        result = resumed.optimize(problem(10), progress=False, checkpoints=checkpoints, resume=True)
    assert (result.resumed_steps, result.steps) == (5, 10)
    assert np.array_equal(result.parameters, whole.parameters)
    assert np.array_equal(result.loss_history, whole.loss_history)
    if mesh.rank == 0:  # fewer workers go on from what all had
        with mpishard.Mesh(MPI.COMM_SELF) as one, Checkpoints(folder / "again", one) as checkpoints:
            alone = optimizer(one)
            result = alone.optimize(problem(10), progress=False, checkpoints=checkpoints, resume=True)
            assert np.array_equal(result.parameters, whole.parameters)
            assert alone.outer_steps == resumed.outer_steps
            assert alone.serialize() == resumed_image(folder, one, optimizer(one))
    mesh.world.barrier()


def resumed_image(folder, mesh, optimizer):
    flat = np.zeros(5)
    mpishard.load_checkpoint(folder, flat, optimizer, mesh=mesh)
    return optimizer.serialize()


def test_a_tolerance_ends_all(mesh, same_on_all):
    """Once no worker's own gradient is larger."""

    def consistent(parameters, samples, gradients):
        residual = ROWS[samples, :5] @ (parameters - 1)
        gradients += ROWS[samples, :5].T @ residual
        return 0.5 * residual @ residual

    task = mpishard.OptimizationProblem(consistent, np.zeros(5), 37, batch_size=37, steps=500, tolerance=0.2)
    optimizer = LocalSGDOptimizer(SGD(lr=0.1), mesh, 4)
    result = optimizer.optimize(task, progress=False)
    assert result.stop_reason == "tolerance" and 1 < result.steps < 500
    assert same_on_all((result.steps, optimizer.gradient_norm)) and same_on_all(result.parameters)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_ranks_of_a_node_leave_a_step_out_together(mesh, mode):
    """Where the loss of one is NaN, and its gradient is not."""
    if mesh.size % 2:
        pytest.skip("no two ranks for each node")

    def function(parameters, samples, gradients):
        loss = least_squares(parameters, samples, gradients)
        return np.nan if mesh.rank == 1 and len(taken) == 1 else loss

    taken = []
    optimizer = LocalSGDOptimizer(ADAMW, settings(mesh, hierarchical=2, nonfinite_gradients=mode), 3)
    task = mpishard.OptimizationProblem(function, np.zeros(5), 37, batch_size=16, steps=3)
    raises = pytest.raises(FloatingPointError, match="step 2: nan of samples .* rank 1")
    with raises if mode == "raise" else contextlib.nullcontext():
        optimizer.optimize(task, progress=False, callback=lambda state: taken.append(optimizer.steps))
    assert taken[:2] == ([1, 1] if mesh.rank < 2 else [1, 2])


def test_a_run_goes_on_in_another_layout(mesh, folder):
    """Of the same number of workers: to the last digits as the one that has saved and went on."""
    expected = {}
    for each in hybrid.meshes(mesh):
        workers, rule = each.data.size, AdamW(lr=0.1, eps=1e-3)
        config = ShardingConfiguration(each, minimum_parameter_group_size=8)
        optimizer, parameters = LocalSGDOptimizer(rule, config, 3, NESTEROV, delay=1), hybrid.model(each)
        if workers in expected:
            mpishard.load_checkpoint(folder / str(workers), parameters, optimizer)
        else:
            hybrid.train(optimizer, parameters, range(5))
            mpishard.save_checkpoint(folder / str(workers), parameters, optimizer)
        assert (optimizer.clock, optimizer.outer_steps) == (5, 2)
        hybrid.train(optimizer, parameters, range(5, 10))
        optimizer.synchronize_optimizer_state()
        found = hybrid.gathered(parameters, config)
        np.testing.assert_allclose(found, expected.setdefault(workers, found), rtol=0, atol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_workers_that_come_and_go(mesh, same_on_all):
    """Resizes begin from one state, which goes with them."""
    ranks = mesh.size
    optimizer = mpishard.ElasticOptimizer(LocalSGDOptimizer(SGD(lr=0.05), mesh, 4, NESTEROV))
    sizes = {6: ranks - 1, 12: ranks}

    def callback(state):
        if state.step in sizes:
            optimizer.resize(sizes[state.step])

    result = optimizer.optimize(problem(18), callback=callback, progress=False)
    assert (result.steps, optimizer.current_workers) == (18, ranks)
    assert same_on_all(result.parameters)
    np.testing.assert_allclose(result.parameters, reference_of_resizes(ranks), rtol=0, atol=1e-12)


def reference_of_resizes(ranks):
    sampler, anchor, momentum = Sampler(len(ROWS), 16, 4), np.zeros(5), np.zeros(5)
    for first, workers in ((1, ranks), (7, ranks - 1), (13, ranks)):
        for steps in (range(first, first + 4), range(first + 4, first + 6)):
            own = [anchor.copy() for _ in range(workers)]
            for step in steps:
                batch = sampler.batch(step)
                for worker in range(workers):
                    grad = np.zeros(5)
                    least_squares(own[worker], share(batch, worker, workers)[0], grad)
                    own[worker] -= 0.05 * grad / (len(batch) / workers)
            outer = anchor - np.mean(own, axis=0)
            momentum = 0.9 * momentum + outer
            anchor = anchor - 0.7 * (outer + 0.9 * momentum)
    return anchor
