"""Compressed gradients: nothing is lost over the steps, all ranks stay alike, less is sent, and it is state."""

from __future__ import annotations

import tempfile
from pathlib import Path

import cuda_on_host
import hybrid
import numpy as np
import pytest
from steps import STRATEGIES, write_gradients
from variants import full

from mpishard import (
    SGD,
    AdamW,
    Checkpoints,
    DDPOptimizer,
    ElasticOptimizer,
    FlatParameters,
    Mesh,
    OptimizationProblem,
    ParameterSpec,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
    load_checkpoint,
    save_checkpoint,
)
from mpishard.backend import array as arrays
from mpishard.compression import (
    BFloat16Compressor,
    Float16Compressor,
    Int8Compressor,
    PowerSGDCompressor,
    SignCompressor,
    TopKCompressor,
)
from mpishard.data_parallel.full_state import decode

pytestmark = pytest.mark.pairs(1)

# Compressed gradients: nothing is lost over the steps, all ranks stay alike, and less is sent.

COMPRESSORS = [Float16Compressor(), BFloat16Compressor(), Int8Compressor(block=16), SignCompressor(block=12)]
COMPRESSORS += [TopKCompressor(0.05), PowerSGDCompressor(rank=2)]
SHAPES = {"first": (12, 10), "scalar": (), "vector": (27,), "second": (3, 7, 3)}
SPECS = [ParameterSpec(name, shape) for name, shape in SHAPES.items()]
SIZE = sum(spec.size for spec in SPECS)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES[:3])


def gradient(step, rank, size=SIZE, dtype=np.float64):
    return np.random.default_rng([step, rank]).standard_normal(size).astype(dtype)


def sum_of_gradients(step, mesh, size=SIZE):
    return sum(gradient(step, rank, size) for rank in range(mesh.size))


def configured(mesh, compressor, **options):
    options = {"gradient_compressor": compressor, "minimum_parameter_group_size": 50, **options}
    return ShardingConfiguration(mesh, **options)


def zeros(dtype=np.float64, specs=SPECS):
    return FlatParameters.over(np.zeros(sum(spec.size for spec in specs), dtype), specs)


def left_over(optimizer):
    """What is left of all ranks' gradients, in flat order; collective."""
    return decode(optimizer.serialize()).others["gradient_errors"]


def assert_sum(found, total):
    assert np.abs(found - total).max() <= 1e-12 * np.abs(total).max()


def gradient_bytes(mesh, axis=""):
    """Bytes of gradients that this rank has sent on an axis, by the beginning of its name."""
    totals = mesh.ledger.summary().items()
    return sum(total["bytes"] for name, total in totals if name.startswith(axis) and "gradients" in name)


def bytes_of_a_step(mesh, compressor, parameters):
    before = gradient_bytes(mesh)
    optimizer = DDPOptimizer(SGD(lr=0.1), configured(mesh, compressor))
    optimizer.step(parameters, gradient(1, mesh.rank, parameters.size, np.float32))
    return gradient_bytes(mesh) - before


@pytest.mark.parametrize("steps", [50, *full(200)])
@pytest.mark.parametrize(
    ("strategy", "compressor", "nodes"),
    [
        *((STRATEGIES[0], compressor, False) for compressor in COMPRESSORS),
        (STRATEGIES[0], Int8Compressor(block=16), 2),
        (STRATEGIES[1], TopKCompressor(0.05), False),
        (STRATEGIES[2], Int8Compressor(block=16), False),
        (STRATEGIES[2], PowerSGDCompressor(rank=2), False),
    ],
    ids=str,
)
def test_what_was_applied_and_what_is_left_are_all_gradients(mesh, same_on_all, steps, strategy, compressor, nodes):
    """Over many steps in float64; steps that are skipped leave no trace, and what is folded is not lost."""
    options = {"nonfinite_gradients": "skip", "hierarchical": nodes}
    optimizer = strategy(SGD(lr=1.0), configured(mesh, compressor, **options))
    parameters, total = zeros(), np.zeros(SIZE)
    for step in range(steps):
        if step % 50 == 49:
            optimizer.state.consolidate()
        own = gradient(step, mesh.rank)
        if step % 7 == 3:
            own[step % SIZE] = np.nan if mesh.rank == mesh.size - 1 else 1.0
        else:
            total += sum_of_gradients(step, mesh)
        optimizer.step(parameters, own, count=1.0)
    assert optimizer.skipped_steps == len(range(3, steps, 7))
    assert same_on_all(parameters.flat.tobytes())
    rest = left_over(optimizer)
    assert_sum(rest - parameters.flat, total)
    assert 0 < np.linalg.norm(rest) < 0.5 * np.linalg.norm(total)


@each_strategy
def test_all_of_the_largest_are_all(mesh, strategy):
    found = np.ones((2, SIZE))
    for compressor, parameters in zip((TopKCompressor(1.0), None), found, strict=True):
        optimizer = strategy(AdamW(lr=0.01), configured(mesh, compressor, max_gradient_norm=0.5))
        for step in range(20):
            optimizer.step(parameters, gradient(step, mesh.rank))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)


@each_strategy
def test_overlap_changes_no_bit(mesh, same_on_all, strategy):
    found = np.zeros((2, SIZE))
    for overlap, parameters in zip((False, True), found, strict=True):
        optimizer = strategy(SGD(lr=0.1), configured(mesh, Int8Compressor(8), overlap_communication=overlap))
        for step in range(5):
            optimizer.step(parameters, gradient(step, mesh.rank))
    assert found[0].any() and found[0].tobytes() == found[1].tobytes() and same_on_all(found)


@pytest.mark.parametrize(
    ("compressor", "share"),
    [(Float16Compressor(), 1 / 2), (Int8Compressor(256), 1 / 4 + 1 / 256), (TopKCompressor(0.01), 0.02)],
    ids=str,
)
def test_bytes_sent(mesh, compressor, share):
    """Of what DDP sends in float32; here all ranks' runs have whole blocks."""
    size = 100 * 256 * mesh.size
    plain, compressed = (bytes_of_a_step(mesh, each, np.zeros(size, np.float32)) for each in (None, compressor))
    assert (plain > 0) == (mesh.size > 1) and compressed == plain * share


@pytest.mark.parametrize(
    ("strategy", "compressor", "nodes"),
    [
        (STRATEGIES[0], PowerSGDCompressor(1), False),
        (STRATEGIES[0], TopKCompressor(0.05), 2),
        (STRATEGIES[1], PowerSGDCompressor(1), False),
        (STRATEGIES[2], TopKCompressor(0.05), False),
    ],
    ids=str,
)
def test_compression_begins_after_some_updates(mesh, strategy, compressor, nodes):
    """Until then every step is exact; then nothing is lost either, with the same state from bytes in between."""
    config = configured(mesh, compressor, compress_after=5, hierarchical=nodes)
    optimizer, parameters, total = strategy(SGD(lr=1.0), config), zeros(), np.zeros(SIZE)
    for step in range(12):
        if step in (3, 8):
            state = optimizer.serialize()
            optimizer = strategy(SGD(lr=1.0), config)
            optimizer.deserialize(state)
        optimizer.step(parameters, gradient(step, mesh.rank), count=1.0)
        total += sum_of_gradients(step, mesh)
        exact = np.abs(parameters.flat + total).max() <= 1e-12 * np.abs(total).max()
        assert exact == (step < 5)
    assert_sum(left_over(optimizer) - parameters.flat, total)


@each_strategy
def test_no_save_while_gradients_travel(mesh, strategy):
    """After a backward pass without its step, on all ranks; once the gradients are forgotten it goes on."""
    optimizer, parameters = strategy(SGD(lr=1.0), configured(mesh, TopKCompressor(0.05))), zeros()
    optimizer.bind(parameters)
    write_gradients(parameters, gradient(0, mesh.rank))
    optimizer.step(parameters)
    if mesh.size > 1:
        write_gradients(parameters, gradient(1, mesh.rank))
        with pytest.raises(ValueError, match="on their way.*take the step"):
            optimizer.serialize()
        optimizer.step(parameters)
    optimizer.serialize()


def test_what_does_not_go_together(mesh):
    with pytest.raises(ValueError, match="compress_after=3"):
        ShardingConfiguration(mesh, compress_after=3)
    with pytest.raises(ValueError, match="reproducible=True"):
        configured(mesh, Int8Compressor(), reproducible=True)
    with pytest.raises(ValueError, match="DDP, ZeRO-1 and ZeRO-2"):
        ZeRO3Optimizer(SGD(lr=0.1), configured(mesh, Int8Compressor()))
    assert ShardingConfiguration(mesh, enable_gradient_compression=True).compressor == Int8Compressor()
    assert ShardingConfiguration(mesh).compressor is None


@pytest.mark.parametrize("nodes", [False, 2])
@pytest.mark.parametrize("compressor", [None, *COMPRESSORS], ids=str)
def test_the_bytes_that_are_predicted_are_those_of_the_ledger(mesh, compressor, nodes):
    config = configured(mesh, compressor, hierarchical=nodes, sync_every=8)
    optimizer, parameters = DDPOptimizer(SGD(lr=0.1), config), zeros(np.float32)
    optimizer.bind(parameters)
    optimizer.step(parameters, gradient(1, mesh.rank, dtype=np.float32))
    foretold = config.gradient_traffic(optimizer.parameters)
    assert foretold == (gradient_bytes(mesh, "data"), gradient_bytes(mesh, "data across nodes"))
    text = config.describe(parameters)
    if mesh.size == 1:
        assert text == "One data rank: gradients are not sent."
    else:
        assert f"this rank sends {foretold.sent:,} bytes" in text
        assert (str(compressor) in text) == (compressor is not None)
        assert (f"{foretold.between_nodes:,} of them to other nodes" in text) == (foretold.between_nodes > 0)
        sent = foretold.between_nodes or foretold.sent
        assert f"LocalSGDOptimizer sends {sent / 8:,.0f} bytes a step" in text
        text = ShardingConfiguration(mesh, overlap_communication=False).describe(1000 * mesh.size)
        assert "for each of which the backward pass waits" in text
        assert f"this rank sends {8000 * (mesh.size - 1):,} bytes a sum." in text


# What compression leaves over is state: it outlives saves, other layouts, resizes and changes of the loss scale.

# Of each sample, whatever the parameters are; three steps are an epoch.
SAMPLES, BATCH = 24, 8
GRADIENTS = np.random.default_rng(3).standard_normal((SAMPLES, SIZE))


def problem(steps):
    def function(parameters, samples, gradients):
        write_gradients(parameters, GRADIENTS[samples].sum(0))
        return 0.0

    return OptimizationProblem(function, zeros(), samples=SAMPLES, batch_size=BATCH, steps=steps)


def assert_nothing_lost(optimizer, parameters, epochs):
    left = left_over(optimizer) / BATCH
    assert_sum(left - parameters.flat, epochs * GRADIENTS.sum(0) / BATCH)
    assert np.linalg.norm(left) > 0


@pytest.mark.parametrize("compressor", [Int8Compressor(16), PowerSGDCompressor(2)], ids=str)
def test_nothing_is_lost_from_save_to_load_at_other_sizes(comm, folder, compressor):
    """One epoch each, with fewer ranks, with all again, as another strategy and by nodes."""
    fewer = max(1, comm.size // 2)
    runs = [(comm.size, DDPOptimizer, False), (fewer, ZeRO2Optimizer, False), (comm.size, DDPOptimizer, 2)]
    runs += [(fewer, DDPOptimizer, False), (comm.size, ZeRO1Optimizer, False)]
    for epoch, (size, strategy, nodes) in enumerate(runs, start=1):
        part = comm.Split(int(comm.rank < size), comm.rank)
        if comm.rank < size:
            with Mesh(part) as mesh, Checkpoints(folder, mesh) as checkpoints:
                optimizer = strategy(SGD(lr=1.0), configured(mesh, compressor, hierarchical=nodes))
                task = problem(3 * epoch)
                result = optimizer.optimize(task, progress=False, checkpoints=checkpoints, resume=True)
                assert (result.steps, result.resumed_steps) == (3 * epoch, 3 * epoch - 3)
                assert_nothing_lost(optimizer, task.start, epoch)
        part.Free()
        comm.Barrier()


@pytest.mark.parametrize(
    ("strategy", "compressor"), [(DDPOptimizer, Int8Compressor(16)), (ZeRO2Optimizer, PowerSGDCompressor(2))], ids=str
)
def test_a_run_that_goes_on_and_one_that_is_resumed_have_the_same_bits(mesh, folder, compressor, strategy):
    found = []
    for name, stops in (("whole", [7]), ("stopped", [2, 4, 7])):
        for steps in stops:
            config = configured(mesh, compressor, max_gradient_norm=0.5, hierarchical=2)
            optimizer, task = strategy(AdamW(lr=0.1), config), problem(steps)
            with Checkpoints(folder / name, mesh, every=2) as checkpoints:
                optimizer.optimize(task, progress=False, checkpoints=checkpoints, resume=True)
        found.append((task.start.flat.tobytes(), left_over(optimizer).tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("strategy", "compressor"),
    zip(STRATEGIES[:3], [Int8Compressor(16), TopKCompressor(0.05), PowerSGDCompressor(2)], strict=True),
    ids=str,
)
def test_nothing_is_lost_in_resizes(mesh, compressor, strategy):
    ranks = mesh.size
    sizes = {1: 1, 2: ranks, 4: max(1, ranks - 1), 5: (ranks + 1) // 2, 7: ranks, 9: 1, 10: min(3, ranks), 12: 1}
    optimizer = ElasticOptimizer(strategy(SGD(lr=1.0), configured(mesh, compressor, hierarchical=2)))

    def callback(state):
        if state.step in sizes:
            optimizer.resize(sizes[state.step])

    task = problem(12)
    result = optimizer.optimize(task, progress=False, callback=callback)
    assert (result.steps, optimizer.current_workers) == (12, ranks)
    assert_nothing_lost(optimizer.optimizer, task.start, 4)


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer])
def test_what_is_left_follows_the_loss_scale(mesh, strategy):
    """One that halves after an overflow; and the bytes of the state, for an optimizer without."""
    config = configured(mesh, Int8Compressor(16), loss_scale="dynamic")
    optimizer, parameters, total = strategy(SGD(lr=1.0), config), zeros(), np.zeros(SIZE)
    for step in range(12):
        scale = np.inf if step in (3, 7) else optimizer.loss_scale
        optimizer.step(parameters, GRADIENTS[step] * (1 + mesh.rank) * scale, count=1)
        if step not in (3, 7):
            total += GRADIENTS[step] * sum(range(1, mesh.size + 1))
    assert (optimizer.skipped_steps, optimizer.loss_scale) == (2, 2.0**14)
    assert_sum(left_over(optimizer) - parameters.flat, total)
    other = DDPOptimizer(SGD(lr=1.0), configured(mesh, SignCompressor(16)))
    other.deserialize(optimizer.serialize())
    for step in range(12, 20):
        other.step(parameters, GRADIENTS[step] * (1 + mesh.rank), count=1)
        total += GRADIENTS[step] * sum(range(1, mesh.size + 1))
    assert_sum(left_over(other) - parameters.flat, total)


def test_checkpoints_with_and_without(mesh, folder):
    """A run without compression goes on from one with it, and the other way round, then with nothing left over."""
    first, parameters = DDPOptimizer(SGD(lr=1.0), configured(mesh, Int8Compressor(16))), zeros()
    first.step(parameters, GRADIENTS[0].copy())
    save_checkpoint(folder / "with", parameters, first)
    plain = DDPOptimizer(SGD(lr=1.0), mesh)
    load_checkpoint(folder / "with", parameters, plain)
    save_checkpoint(folder / "without", parameters, plain)
    first.step(parameters, GRADIENTS[1].copy())
    assert left_over(first).any()
    load_checkpoint(folder / "without", parameters, first)
    assert first.steps == 1 and not left_over(first).any()


@pytest.mark.parametrize(
    ("strategy", "compressor"),
    [
        (DDPOptimizer, PowerSGDCompressor(2)),
        (ZeRO2Optimizer, SignCompressor(4)),
        *(pytest.param(strategy, Int8Compressor(16), marks=pytest.mark.full) for strategy in STRATEGIES[:3]),
    ],
    ids=str,
)
def test_tensor_and_pipeline_ranks(comm, strategy, compressor):
    """Copies of a tensor stay alike, which the mesh sees to after each step, and nothing is lost."""
    with Mesh(comm, debug=True) as base:
        for mesh in hybrid.meshes(base):
            config = configured(mesh, compressor, minimum_parameter_group_size=24)
            optimizer, parameters = strategy(SGD(lr=1.0), config), hybrid.model(mesh)
            optimizer.bind(parameters)
            total = -hybrid.START
            for step in range(4):
                hybrid.one_pass(parameters, mesh, step)
                optimizer.step(parameters, count=1)
                total = total + sum(hybrid.whole_gradient(step, rank, mesh.data.size) for rank in range(mesh.data.size))
            assert_sum(left_over(optimizer) - hybrid.gathered(parameters, config), total)


# Compressed gradients in memory that the host cannot touch: the same training as with NumPy arrays.


@pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize(("strategy", "dtype"), [(STRATEGIES[0], np.float64), (STRATEGIES[2], np.float32)])
def test_the_same_as_on_the_host(mesh, device, strategy, compressor, dtype):
    """Several buckets, uneven parts; a step whose gradient is not finite is skipped."""
    low_rank = isinstance(compressor, PowerSGDCompressor)  # whose products are those of the arrays' own library
    dtype, found = np.float64 if low_rank else dtype, []
    for place in (np.copy, device.put):
        optimizer = strategy(AdamW(lr=0.01), configured(mesh, compressor, nonfinite_gradients="skip"))
        parameters = place(np.ones(SIZE, dtype))
        named = FlatParameters.over(parameters, SPECS) if low_rank else parameters
        for step in range(6):
            own = gradient(step, mesh.rank, dtype=dtype)
            if step == 3 and mesh.rank == mesh.size - 1:
                own[17] = np.inf
            optimizer.step(named, place(own))
        assert optimizer.skipped_steps == 1
        found.append(arrays.to_host(parameters))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12 if low_rank else 0)
    assert (found[0] != 1).all()


# PowerSGD: exact where the rank suffices, the bytes of its formula, and the approximations of PyTorch's hook.

ROWS, COLUMNS, VECTOR = 24, 17, 9
SGD_SPECS = [ParameterSpec("matrix", (ROWS, COLUMNS)), ParameterSpec("vector", (VECTOR,))]
SGD_SIZE = sum(spec.size for spec in SGD_SPECS)


@each_strategy
def test_gradients_of_no_higher_rank_are_exact(mesh, strategy):
    """The sum of all ranks' has rank 3; what each of them leaves out is nothing in all."""
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.standard_normal((size, 3)))[0] for size in (ROWS, COLUMNS))
    parameters, total = zeros(specs=SGD_SPECS), np.zeros(SGD_SIZE)
    optimizer = strategy(SGD(lr=1.0), configured(mesh, PowerSGDCompressor(3)))
    for _ in range(20):
        # All of one sign, so that the sum is as well conditioned as they are.
        rights = np.array([np.diag(random.uniform(1, 2, 3)) @ right.T for _ in range(mesh.size)])
        vectors = random.standard_normal((mesh.size, VECTOR))
        optimizer.step(parameters, np.concatenate([(left @ rights[mesh.rank]).ravel(), vectors[mesh.rank]]), count=1)
        total += np.concatenate([(left @ rights.sum(0)).ravel(), vectors.sum(0)])
        assert_sum(-parameters.flat, total)


def test_full_rank_is_exact(mesh):
    """A factor of as many columns as the matrix would be no smaller: the matrix travels as it is."""
    optimizer = DDPOptimizer(SGD(lr=1.0), configured(mesh, PowerSGDCompressor(COLUMNS)))
    parameters, total = zeros(specs=SGD_SPECS), np.zeros(SGD_SIZE)
    for step in range(20):
        optimizer.step(parameters, gradient(step, mesh.rank, SGD_SIZE), count=1)
        total += sum_of_gradients(step, mesh, SGD_SIZE)
    assert_sum(-parameters.flat, total)


@pytest.mark.parametrize("rank", [1, 4, 9])
def test_bytes_sent_by_power_sgd(mesh, rank):
    """``rank * (rows + columns)`` elements of a matrix, all of a vector, if that is less."""
    compressor = PowerSGDCompressor(rank)
    plain, sent = (bytes_of_a_step(mesh, each, zeros(np.float32, SGD_SPECS)) for each in (None, compressor))
    elements = min(rank * (ROWS + COLUMNS) + VECTOR, SGD_SIZE)
    # A sum of n elements sends 2 n (ranks - 1) / ranks of them, each cut being rounded.
    assert abs(sent - plain * elements / SGD_SIZE) <= 4 * 4 * (mesh.size > 1)
    assert compressor.elements((ROWS, COLUMNS)) + VECTOR == elements


def test_approximations_are_those_of_pytorch(mesh):
    """Over eight steps of the same gradients, with error feedback and warm start, from the same random basis."""
    if mesh.size not in (1, 3):
        pytest.skip("loading PyTorch takes seconds: on one rank and on three")
    torch = pytest.importorskip("torch", reason="PyTorch, the reference, is not installed (extra: peers)")
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this PyTorch is built without torch.distributed")
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    rank, seed, plain = 3, 5, 2  # the hook takes at least two steps without compression first
    with tempfile.TemporaryDirectory() as name:
        folder = Path(mesh.world.comm.bcast(name))
        store = distributed.FileStore(str(folder / "store"), mesh.size)
        distributed.init_process_group("gloo", store=store, rank=mesh.rank, world_size=mesh.size)
        try:
            tensors = [torch.nn.Parameter(torch.zeros(spec.shape, dtype=torch.float64)) for spec in SGD_SPECS]
            module = torch.nn.Module()
            for spec, tensor in zip(SGD_SPECS, tensors, strict=True):
                module.register_parameter(spec.name, tensor)
            # A loss whose gradient is the one that is given.
            module.forward = lambda flat: sum(
                (tensor * part.reshape(tensor.shape)).sum()
                for tensor, part in zip(tensors, flat.split([spec.size for spec in SGD_SPECS]), strict=True)
            )
            parallel = torch.nn.parallel.DistributedDataParallel(module)
            state = powerSGD_hook.PowerSGDState(
                None, rank, start_powerSGD_iter=plain, min_compression_rate=1, random_seed=seed
            )
            parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            theirs = []
            for step in range(-plain, 8):
                parallel.zero_grad()
                parallel(torch.from_numpy(gradient(max(step, 0), mesh.rank, SGD_SIZE))).backward()
                theirs.append(np.concatenate([tensor.grad.numpy().ravel() for tensor in tensors]))
            torch.manual_seed(np.random.RandomState(seed).randint(1_000_000_000))
            basis = torch.randn(1, COLUMNS, rank, dtype=torch.float64)[0].numpy()
        finally:
            mesh.world.barrier()
            distributed.destroy_process_group()
    optimizer = DDPOptimizer(SGD(lr=1.0), ShardingConfiguration(mesh, gradient_compressor=PowerSGDCompressor(rank)))
    parameters = zeros(specs=SGD_SPECS)
    optimizer.bind(parameters)
    optimizer.state.strategy.compressed._bases["matrix"] = basis
    for step in range(8):
        before = parameters.flat.copy()
        optimizer.step(parameters, gradient(step, mesh.rank, SGD_SIZE))
        np.testing.assert_allclose(before - parameters.flat, theirs[plain + step], rtol=0, atol=1e-12)
