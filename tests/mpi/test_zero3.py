"""ZeRO-3: parameters exist as a whole only while they are used, and nothing else changes."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import cuda_on_host
import numpy as np
import pytest
import standin
from mpi4py import MPI
from steps import SPECS, start, write_gradients

import mpishard
from mpishard import AdamW, DDPOptimizer, Mesh, ShardingConfiguration, ZeRO2Optimizer, ZeRO3Optimizer, nn
from mpishard.backend import array as arrays
from mpishard.layout.tensors import ParameterSpec
from mpishard.parameters.flat import FlatParameters

TOKENS = np.random.default_rng(1).integers(0, 11, (12, 9))
LAYERS = 3
UNITS = [["a", "b"], ["c"], ["d"]]  # of SPECS


def gpt(mesh=None, **options):
    return nn.GPT(
        vocabulary_size=11,
        context_length=8,
        width=12,
        layers=LAYERS,
        heads=2,
        dtype=np.float64,
        seed=3,
        mesh=mesh,
        **options,
    )


def batch(mesh, samples=TOKENS):
    mine = np.array_split(samples, mesh.data.size)[mesh.data.rank]
    return mine[:, :-1], mine[:, 1:]


def train(model, optimizer, steps=3, samples=TOKENS):
    optimizer.bind(model.parameters)
    losses = []
    for _ in range(steps):
        loss = model.loss_and_gradient(*batch(optimizer.mesh, samples))
        optimizer.step(model.parameters, count=samples[:, 1:].size)
        losses.append(optimizer.mesh.data.comm.allreduce(loss))
    return losses


@pytest.fixture(scope="module")
def expected():
    """The run on one rank: losses and parameters."""
    with Mesh(MPI.COMM_SELF) as alone:
        model = gpt()
        return train(model, DDPOptimizer(AdamW(lr=1e-2), alone)), model.parameters.flat.copy()


@pytest.mark.parametrize("from_the_start", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.quick
def test_trains_as_one_rank(mesh, expected, same_on_all, from_the_start, overlap):
    model = gpt(mesh, sharded_parameters=from_the_start)
    config = ShardingConfiguration(mesh, overlap_communication=overlap, max_gradient_norm=100.0)
    losses = train(model, ZeRO3Optimizer(AdamW(lr=1e-2), config))
    whole = mpishard.as_distributed(model, config).gather_full_parameters()
    assert np.allclose(losses, expected[0], rtol=1e-12)
    assert np.allclose(whole, expected[1], rtol=1e-10, atol=1e-12)
    assert same_on_all(whole)


@pytest.mark.usefixtures("without_debug")
def test_sends_three_times_where_others_send_twice(comm):
    """By total over the ranks: a gather in each direction and a reduce-scatter, (N - 1) times the bytes each."""
    with Mesh(comm) as mesh:
        model, optimizer = gpt(mesh), ZeRO3Optimizer(AdamW(lr=1e-2), mesh)
        optimizer.bind(model.parameters)
        mesh.ledger.clear()
        train(model, optimizer, steps=2)
        nbytes = 8 * model.parameters.size

        def sent(label):
            return comm.allreduce(mesh.ledger.sent(label=label))

        assert sent("parameters") == 2 * 2 * (mesh.size - 1) * nbytes
        assert sent("gradients") == 2 * (mesh.size - 1) * nbytes
        # What is only evaluated is gathered once.
        mesh.ledger.clear()
        model.loss(*batch(mesh))
        assert sent("parameters") == (mesh.size - 1) * nbytes
        assert sent("gradients") == 0


@pytest.mark.parametrize("from_the_start", [False, True])
@pytest.mark.quick
def test_memory_is_the_share_and_the_units_in_use(mesh, from_the_start):
    model = gpt(mesh, sharded_parameters=from_the_start)
    parameters = model.parameters
    optimizer = ZeRO3Optimizer(AdamW(lr=1e-2), mesh)
    optimizer.bind(parameters)
    share = parameters.sharded.shard.nbytes
    sizes = [sum(piece.size for piece in parameters.pieces[first:last]) for first, last in parameters.units]
    assert len(sizes) == LAYERS + 2
    assert abs(share - 8 * parameters.size / mesh.size) <= 8 * len(sizes)
    assert parameters.nbytes == share  # nothing is gathered yet
    train(model, optimizer)
    largest = 8 * max(sizes)
    # The unit in use, and the next; the embeddings and the head use a smaller block in turns.
    smaller = 8 * max(size for size in sizes if 2 * 8 * size <= largest)
    assert parameters.nbytes == share + 2 * largest + smaller
    assert optimizer.state.nbytes == 2 * share
    assert share + largest <= optimizer.state.gradient_bytes <= share + 2 * largest + smaller


@pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no C++ compiler")
@pytest.mark.full
def test_a_large_table_is_in_memory_once(mesh, standin_kind):
    """A tied model whose table is most of it: blocks of other units are not as large, and a device keeps none."""
    if mesh.size > 4:
        pytest.skip("slow where cores are few, and nothing new")
    held = {}
    for strategy in (mpishard.ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer):
        for module in (np, arrays.module_of(standin.empty(1, kind=standin_kind))):
            sharded = strategy is ZeRO3Optimizer
            before = device_bytes()
            model = nn.GPT(
                vocabulary_size=500,
                context_length=8,
                width=12,
                layers=LAYERS,
                heads=2,
                mesh=mesh,
                module=module,
                tied=True,
                dtype=np.float32,
                sharded_parameters=sharded,
            )
            parameters = model.parameters
            config = ShardingConfiguration(mesh, minimum_parameter_group_size=100)
            optimizer = strategy(AdamW(lr=1e-2), config)
            train(model, optimizer)
            first = parameters.units[0] if sharded else (0, 1)
            table = 4 * sum(piece.size for piece in parameters.pieces[slice(*first)])
            others = 4 * 2 * 12 * 14 * 12  # two blocks of the model, and more
            share = 4 * parameters.size // mesh.size
            if strategy is not mpishard.ZeRO1Optimizer:
                assert optimizer.state.gradient_bytes <= share + table + others
            if sharded:
                assert parameters.nbytes <= share + table + others
            if module is not np:
                held[strategy] = device_bytes() - before - model.activation_bytes
            del model, parameters, optimizer
    whole = (
        4 * nn.GPT(vocabulary_size=500, context_length=8, width=12, layers=LAYERS, heads=2, tied=True).parameters.size
    )
    small = 4 * 500 * 12 // 4  # a quarter of the table
    assert abs(held[mpishard.ZeRO1Optimizer] - (2 + 2 / mesh.size) * whole) < small
    assert abs(held[ZeRO2Optimizer] - (1 + 3 / mesh.size) * whole) < small
    assert abs(held[ZeRO3Optimizer] - 4 / mesh.size * whole) < small


def device_bytes():
    """Bytes of the stand-in's memory that somebody holds."""
    standin.current_stream().synchronize()  # work that is queued holds its operands
    gc.collect()
    return sum(memory.bytes.size for memory in set(standin.Memory.by_page.values()))


def test_ranks_without_samples_take_part(mesh):
    """The training loop calls them with none."""
    results = []
    for strategy in (ZeRO2Optimizer, ZeRO3Optimizer):
        model = gpt()
        task = mpishard.OptimizationProblem.for_model(
            model,
            lambda samples: (TOKENS[samples, :-1], TOKENS[samples, 1:]),
            samples=12,
            batch_size=mesh.size + 1,
            micro_batch_size=2,  # fewer micro-batches than ranks
            steps=4,
            tokens_per_sample=8,
        )
        result = strategy(AdamW(lr=1e-2), mesh).optimize(task, progress=False)
        assert result.parameters is model.parameters
        results.append((result.loss_history, model.parameters.gather()))
    for one, other in zip(*results, strict=True):
        assert np.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_parameters_are_there_between_use_and_release(mesh):
    parameters = FlatParameters(SPECS, np.float64, units=UNITS)
    parameters.flat[...] = start(40, np.float64)
    parameters.shard(mesh.data)
    with pytest.raises(ValueError, match="ZeRO-3.* have no flat array"):
        _ = parameters.flat
    with pytest.raises(RuntimeError, match="'a' is sharded .* call use"):
        parameters["a"]
    with pytest.raises(KeyError):
        parameters["nothing"]
    parameters.use(["a"])
    parameters.prefetch(["d"])
    assert np.array_equal(parameters["a"].ravel(), start(40, np.float64)[:15])
    assert parameters["b"].shape == (0,)
    parameters.use(["a", "b"])  # a second user of the unit
    parameters.release(["a"])
    assert np.array_equal(parameters["a"].ravel(), start(40, np.float64)[:15])
    parameters.release(["b"])
    with pytest.raises(RuntimeError, match="not gathered now"):
        parameters["a"]
    parameters.assign("d", np.full((2, 3, 4), 5.0))
    parameters.sharded.free_all()  # also of what was only prefetched
    parameters.use(["d"])
    assert (parameters["d"] == 5).all()
    parameters.assign("d", np.full((2, 3, 4), 6.0))
    assert (parameters["d"] == 6).all()
    parameters.release(["d"])
    whole = start(40, np.float64)
    whole[16:] = 6
    assert np.array_equal(parameters.gather(), whole)
    with pytest.raises(RuntimeError, match="unit of .a. was released"):
        parameters.release(["b"])
    parameters.use(["a"])
    parameters.release(["a"])
    with pytest.raises(RuntimeError, match=".a. is sharded"):
        parameters["a"]


def test_a_gather_that_mpi_truncates_names_its_unit(mesh, monkeypatch):
    """As Open MPI does where another rank gathers a longer unit."""

    def truncated():
        raise MPI.Exception(MPI.ERR_TRUNCATE)

    parameters = FlatParameters(SPECS, np.float64, units=UNITS, sharded_over=mesh.data)
    monkeypatch.setattr(mesh.data, "start_all_gather", lambda *_, **__: SimpleNamespace(wait=truncated))
    with pytest.raises(mpishard.CollectiveMismatchError, match="unit of 'c', .*MPISHARD_DEBUG=1"):
        parameters.use(["c"])


def test_made_sharded_is_the_same_as_sharded_later(mesh):
    made = FlatParameters(SPECS, np.float64, units=UNITS, sharded_over=mesh.data)
    later = FlatParameters(SPECS, np.float64, units=UNITS)
    for parameters in (made, later):
        for index, spec in enumerate(SPECS):
            parameters.assign(spec.name, index + np.arange(spec.size, dtype=float).reshape(spec.shape))
    later.shard(mesh.data)
    later.shard(mesh.data)  # a second time does nothing
    assert np.array_equal(made.sharded.shard, later.sharded.shard)
    assert made.nbytes == later.nbytes


def test_a_pass_before_the_first_step_counts_and_what_was_gathered_before_a_step_is_not_used_after_it(mesh):
    """The optimizer shards parameters whose gradients are written already."""
    parameters = FlatParameters(SPECS, np.float64, units=UNITS)
    optimizer = ZeRO3Optimizer(mpishard.SGD(lr=1.0), mesh)
    for step in range(2):
        if step:
            parameters.prefetch(["a", "d"])
        write_gradients(parameters, np.ones(40))
        optimizer.step(parameters)
    parameters.use(["a", "d"])
    assert (parameters["a"] == -2).all() and (parameters["d"] == -2).all()
    parameters.release(["a", "d"])
    assert (parameters.gather() == -2).all()


def test_a_flat_array_stays_whole(mesh):
    flat, gradient = start(40), np.ones(40, np.float32)
    optimizer = ZeRO3Optimizer(mpishard.SGD(lr=1.0), mesh)
    optimizer.step(flat, gradient)
    assert np.array_equal(flat, start(40) - 1)


def test_sharded_parameters_need_an_optimizer_for_them(comm, mesh):
    parameters = FlatParameters(SPECS, sharded_over=mesh.data)
    for strategy in (DDPOptimizer, ZeRO2Optimizer):
        with pytest.raises(ValueError, match="are sharded .*ZeRO3Optimizer"):
            strategy(AdamW(), mesh).bind(parameters)
    with Mesh(comm) as other, pytest.raises(ValueError, match="data axis that is not this optimizer's"):
        ZeRO3Optimizer(AdamW(), other).bind(parameters)


def test_units_name_every_tensor():
    with pytest.raises(ValueError, match="'c' is in no unit"):
        FlatParameters(SPECS, units=[["a", "b"], ["d"]])


def test_an_optimizer_stays_with_its_units(mesh):
    optimizer = ZeRO3Optimizer(AdamW(), mesh)
    specs = [ParameterSpec("a", (4,)), ParameterSpec("b", (4,))]
    optimizer.bind(FlatParameters(specs, units=[["a"], ["b"]]))
    optimizer.bind(FlatParameters(specs, units=[["a"], ["b"]]))
    with pytest.raises(ValueError, match="use one optimizer for each model"):
        optimizer.bind(FlatParameters(specs))
    with pytest.raises(ValueError, match="use one optimizer for each model"):
        optimizer.bind(FlatParameters.over(np.zeros(8, np.float32), specs))


def test_what_was_gathered_before_copies_are_made_alike_is_not_used_after_it(comm):
    with Mesh(comm, data=1, tensor=comm.size) as mesh:
        parameters = FlatParameters(SPECS, np.float64, place=mesh.place, sharded_over=mesh.data)
        parameters.assign("d", np.full((2, 3, 4), 1.0 + mesh.rank))
        parameters.prefetch(["d"])
        mpishard.HybridShardedModel(SimpleNamespace(parameters=parameters), mesh)
        parameters.use(["d"])
        assert (parameters["d"] == 1).all()
        parameters.release(["d"])
