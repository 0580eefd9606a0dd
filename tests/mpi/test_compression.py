"""Compressed gradients: nothing is lost over the steps, all ranks stay alike, less is sent, and it is state."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hybrid
import numpy as np
import pytest
from steps import STRATEGIES, write_gradients

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

# Compressed gradients: nothing is lost over the steps, all ranks stay alike, and less is sent.

COMPRESSORS = [
    Float16Compressor(),
    BFloat16Compressor(),
    Int8Compressor(block=16),
    SignCompressor(block=16),
    TopKCompressor(0.05),
    PowerSGDCompressor(rank=2),
]
SPECS = [
    ParameterSpec("first", (12, 10)),
    ParameterSpec("scalar", ()),
    ParameterSpec("vector", (27,)),
    ParameterSpec("second", (3, 7, 3)),
]
SIZE = sum(spec.size for spec in SPECS)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES[:3])


def gradient(step, rank, size=SIZE, dtype=np.float64):
    return np.random.default_rng([step, rank]).standard_normal(size).astype(dtype)


def configured(mesh, compressor, **options):
    return ShardingConfiguration(
        mesh, **{"gradient_compressor": compressor, "minimum_parameter_group_size": 50, **options}
    )


def zeros(dtype=np.float64):
    return FlatParameters.over(np.zeros(SIZE, dtype), SPECS)


def left_over(optimizer, mesh):
    """All ranks' errors together, in flat order."""
    optimizer.state.consolidate()
    shard = next(shard for shard in optimizer.state.capture().shards if shard.kind == "gradient_errors")
    starts = {piece.name: piece.start for piece in optimizer.parameters.pieces}
    shapes = {piece.name: piece.shape for piece in optimizer.parameters.pieces}
    errors = np.zeros(SIZE)
    for piece in shard.counted:
        start = starts[piece.name]
        whole = errors[start : start + np.prod(shapes[piece.name], dtype=int)].reshape(shapes[piece.name])
        inside = (*(slice(*ends) for ends in piece.box), ...)
        whole[inside] = shard.array[piece.start : piece.start + piece.size].reshape(whole[inside].shape)
    return mesh.data.all_reduce(errors)


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
def test_what_was_applied_and_what_is_left_are_all_gradients(mesh, same_on_all, short, strategy, compressor, nodes):
    """Over many steps in float64; steps that are skipped leave no trace, and what is folded is not lost."""
    steps = 200 if mesh.size <= 4 and strategy is STRATEGIES[0] and not short else 50
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
            total += np.sum([gradient(step, rank) for rank in range(mesh.size)], axis=0)
        optimizer.step(parameters, own, count=1.0)
    assert optimizer.skipped_steps == len(range(3, steps, 7))
    assert same_on_all(parameters.flat.tobytes())
    rest = left_over(optimizer, mesh)
    assert np.abs(-parameters.flat + rest - total).max() <= 1e-12 * np.abs(total).max()
    assert 0 < np.linalg.norm(rest) < 0.5 * np.linalg.norm(total)


@each_strategy
def test_all_of_the_largest_are_all(mesh, strategy):
    found = []
    for compressor in (TopKCompressor(1.0), None):
        optimizer = strategy(AdamW(lr=0.01), configured(mesh, compressor, max_gradient_norm=0.5))
        parameters = np.ones(SIZE)
        for step in range(20):
            optimizer.step(parameters, gradient(step, mesh.rank))
        found.append(parameters)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)


@each_strategy
def test_overlap_changes_no_bit(mesh, same_on_all, strategy):
    optimizer = strategy(SGD(lr=0.1), configured(mesh, Int8Compressor(8), overlap_communication=False))
    other = strategy(SGD(lr=0.1), configured(mesh, Int8Compressor(8)))
    one, two = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(5):
        optimizer.step(one, gradient(step, mesh.rank))
        other.step(two, gradient(step, mesh.rank))
    assert one.tobytes() == two.tobytes() and same_on_all(one.tobytes())


@pytest.mark.parametrize(
    ("compressor", "share"),
    [(Float16Compressor(), 1 / 2), (Int8Compressor(256), 1 / 4 + 1 / 256), (TopKCompressor(0.01), 0.02)],
    ids=str,
)
def test_bytes_sent(mesh, compressor, share):
    """Of what DDP sends in float32; here all ranks' runs have whole blocks."""
    size = 100 * 256 * mesh.size
    sent = []

    def so_far():
        return sum(total["bytes"] for name, total in mesh.ledger.summary().items() if "gradients" in name)

    for chosen in (None, compressor):
        optimizer = STRATEGIES[0](SGD(lr=0.1), configured(mesh, chosen))
        parameters = np.zeros(size, np.float32)
        before = so_far()
        optimizer.step(parameters, gradient(1, mesh.rank, size, np.float32))
        sent.append(so_far() - before)
    assert (sent[0] > 0) == (mesh.size > 1)
    assert sent[1] == sent[0] * share


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
        total += np.sum([gradient(step, rank) for rank in range(mesh.size)], axis=0)
        exact = np.abs(parameters.flat + total).max() <= 1e-12 * np.abs(total).max()
        assert exact == (step < 5)
    assert np.abs(left_over(optimizer, mesh) - parameters.flat - total).max() <= 1e-12 * np.abs(total).max()


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
    with pytest.raises(ValueError, match="compress_after=3 without anything that compresses"):
        ShardingConfiguration(mesh, compress_after=3)
    with pytest.raises(ValueError, match="reproducible=True gives the same bits"):
        configured(mesh, Int8Compressor(), reproducible=True)
    with pytest.raises(ValueError, match="gradient compression is for DDP, ZeRO-1 and ZeRO-2"):
        ZeRO3Optimizer(SGD(lr=0.1), configured(mesh, Int8Compressor()))
    assert ShardingConfiguration(mesh, enable_gradient_compression=True).compressor == Int8Compressor()
    assert ShardingConfiguration(mesh).compressor is None


@pytest.mark.parametrize("nodes", [False, 2])
@pytest.mark.parametrize("compressor", [None, *COMPRESSORS], ids=str)
def test_the_bytes_that_are_predicted_are_those_of_the_ledger(mesh, compressor, nodes):
    config = configured(mesh, compressor, hierarchical=nodes, sync_every=8)
    optimizer, parameters = STRATEGIES[0](SGD(lr=0.1), config), zeros(np.float32)
    optimizer.bind(parameters)

    def so_far(axis):
        sums = mesh.ledger.summary().items()
        return sum(total["bytes"] for name, total in sums if name.startswith(axis) and "gradients" in name)

    optimizer.step(parameters, gradient(1, mesh.rank, dtype=np.float32))
    foretold = config.gradient_traffic(optimizer.parameters)
    assert foretold == (so_far("data"), so_far("data across nodes"))
    text = config.describe(parameters)
    if mesh.size == 1:
        assert text == "One data rank: gradients are not sent."
    else:
        assert f"this rank sends {foretold.sent:,} bytes" in text
        assert (str(compressor) in text) == (compressor is not None)
        assert (f"{foretold.between_nodes:,} of them to other nodes" in text) == (foretold.between_nodes > 0)
        sent = foretold.between_nodes or foretold.sent
        assert f"LocalSGDOptimizer sends {sent / 8:,.0f} bytes a step" in text


def test_describes_a_number_of_parameters(mesh):
    text = ShardingConfiguration(mesh, overlap_communication=False).describe(1000 * mesh.size)
    if mesh.size > 1:
        assert "after the backward pass" in text
        assert f"this rank sends {8000 * (mesh.size - 1):,} bytes a sum." in text


# What compression leaves over is state: it outlives saves, other layouts, resizes and changes of the loss scale.

STATE_SPECS = [ParameterSpec("matrix", (12, 10)), ParameterSpec("scalar", ()), ParameterSpec("vector", (70,))]
STATE_SIZE = sum(spec.size for spec in STATE_SPECS)
# Of each sample, whatever the parameters are; three steps are an epoch.
SAMPLES, BATCH = 24, 8
GRADIENTS = np.random.default_rng(3).standard_normal((SAMPLES, STATE_SIZE))
STATE_COMPRESSORS = [Int8Compressor(16), TopKCompressor(0.05), PowerSGDCompressor(2)]


def zeros_of_state():
    return FlatParameters.over(np.zeros(STATE_SIZE), STATE_SPECS)


def problem(steps):
    def function(parameters, samples, gradients):
        write_gradients(parameters, GRADIENTS[samples].sum(0))
        return 0.0

    return OptimizationProblem(function, zeros_of_state(), samples=SAMPLES, batch_size=BATCH, steps=steps)


def configured_of_state(mesh, compressor, **options):
    options = {"gradient_compressor": compressor, "minimum_parameter_group_size": 60} | options
    return ShardingConfiguration(mesh, **options)


def left_over_of_state(optimizer):
    """What is left of all gradients, in flat order; collective."""
    return decode(optimizer.serialize()).others["gradient_errors"]


def assert_nothing_lost(optimizer, parameters, epochs):
    total, left = epochs * GRADIENTS.sum(0) / BATCH, left_over_of_state(optimizer) / BATCH
    assert np.abs(left - parameters.flat - total).max() <= 1e-12 * np.abs(total).max()
    assert np.linalg.norm(left) > 0


@pytest.mark.parametrize("compressor", STATE_COMPRESSORS[::2], ids=str)
def test_nothing_is_lost_from_save_to_load_at_other_sizes(comm, folder, compressor):
    """One epoch each, with fewer ranks, with all again, as another strategy and by nodes."""
    fewer = max(1, comm.size // 2)
    runs = [(comm.size, DDPOptimizer, False), (fewer, ZeRO2Optimizer, False), (comm.size, DDPOptimizer, 2)]
    runs += [(fewer, DDPOptimizer, False), (comm.size, ZeRO1Optimizer, False)]
    for epoch, (size, strategy, nodes) in enumerate(runs, start=1):
        part = comm.Split(int(comm.rank < size), comm.rank)
        if comm.rank < size:
            with Mesh(part) as mesh, Checkpoints(folder, mesh) as checkpoints:
                optimizer = strategy(SGD(lr=1.0), configured_of_state(mesh, compressor, hierarchical=nodes))
                task = problem(3 * epoch)
                result = optimizer.optimize(task, progress=False, checkpoints=checkpoints, resume=True)
                assert (result.steps, result.resumed_steps) == (3 * epoch, 3 * epoch - 3)
                assert_nothing_lost(optimizer, task.start, epoch)
        part.Free()
        comm.Barrier()


@pytest.mark.parametrize(
    ("strategy", "compressor"), [(DDPOptimizer, STATE_COMPRESSORS[0]), (ZeRO2Optimizer, STATE_COMPRESSORS[2])], ids=str
)
def test_a_run_that_goes_on_and_one_that_is_resumed_have_the_same_bits(mesh, folder, compressor, strategy):
    found = []
    for name, stops in (("whole", [7]), ("stopped", [2, 4, 7])):
        for steps in stops:
            optimizer = strategy(
                AdamW(lr=0.1), configured_of_state(mesh, compressor, max_gradient_norm=0.5, hierarchical=2)
            )
            task = problem(steps)
            with Checkpoints(folder / name, mesh, every=2) as checkpoints:
                optimizer.optimize(task, progress=False, checkpoints=checkpoints, resume=True)
        found.append((task.start.flat.tobytes(), left_over_of_state(optimizer).tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize(("strategy", "compressor"), list(zip(STRATEGIES[:3], STATE_COMPRESSORS, strict=True)), ids=str)
def test_nothing_is_lost_in_resizes(mesh, compressor, strategy):
    ranks = mesh.size
    sizes = {1: 1, 2: ranks, 4: max(1, ranks - 1), 5: (ranks + 1) // 2, 7: ranks, 9: 1, 10: min(3, ranks), 12: 1}
    optimizer = ElasticOptimizer(strategy(SGD(lr=1.0), configured_of_state(mesh, compressor, hierarchical=2)))

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
    config = configured_of_state(mesh, Int8Compressor(16), loss_scale="dynamic")
    optimizer, parameters = strategy(SGD(lr=1.0), config), zeros_of_state()
    total = np.zeros(STATE_SIZE)
    for step in range(12):
        gradient = GRADIENTS[step] * (1 + mesh.rank)
        optimizer.step(parameters, gradient * (np.inf if step in (3, 7) else optimizer.loss_scale), count=1)
        if step not in (3, 7):
            total += GRADIENTS[step] * sum(range(1, mesh.size + 1))
    assert (optimizer.skipped_steps, optimizer.loss_scale) == (2, 2.0**14)
    limit = 1e-12 * np.abs(total).max()
    assert np.abs(left_over_of_state(optimizer) - parameters.flat - total).max() <= limit
    other = DDPOptimizer(SGD(lr=1.0), configured_of_state(mesh, SignCompressor(16)))
    other.deserialize(optimizer.serialize())
    for step in range(12, 20):
        other.step(parameters, GRADIENTS[step] * (1 + mesh.rank), count=1)
        total += GRADIENTS[step] * sum(range(1, mesh.size + 1))
    assert np.abs(left_over_of_state(other) - parameters.flat - total).max() <= limit


def test_checkpoints_with_and_without(mesh, folder):
    """A run without compression goes on from one with it, and the other way round, then with nothing left over."""
    config = configured_of_state(mesh, Int8Compressor(16))
    first, parameters = DDPOptimizer(SGD(lr=1.0), config), zeros_of_state()
    first.step(parameters, GRADIENTS[0].copy())
    save_checkpoint(folder / "with", parameters, first)
    plain = DDPOptimizer(SGD(lr=1.0), mesh)
    load_checkpoint(folder / "with", parameters, plain)
    save_checkpoint(folder / "without", parameters, plain)
    first.step(parameters, GRADIENTS[1].copy())
    assert left_over_of_state(first).any()
    load_checkpoint(folder / "without", parameters, first)
    assert first.steps == 1
    assert not left_over_of_state(first).any()


@pytest.mark.parametrize(
    ("strategy", "compressor"),
    [(strategy, STATE_COMPRESSORS[0]) for strategy in STRATEGIES[:3]]
    + [(DDPOptimizer, STATE_COMPRESSORS[2]), (ZeRO2Optimizer, SignCompressor(4))],
    ids=str,
)
def test_tensor_and_pipeline_ranks(comm, strategy, compressor):
    """Copies of a tensor stay alike, which the mesh sees to after each step, and nothing is lost."""
    with Mesh(comm, debug=True) as base:
        for mesh in hybrid.meshes(base):
            config = ShardingConfiguration(mesh, gradient_compressor=compressor, minimum_parameter_group_size=24)
            optimizer, parameters = strategy(SGD(lr=1.0), config), hybrid.model(mesh)
            optimizer.bind(parameters)
            total = -hybrid.START
            for step in range(4):
                hybrid.one_pass(parameters, mesh, step)
                optimizer.step(parameters, count=1)
                total = total + sum(hybrid.whole_gradient(step, rank, mesh.data.size) for rank in range(mesh.data.size))
            left = left_over_of_state(optimizer)
            assert np.abs(left - hybrid.gathered(parameters, config) - total).max() <= 1e-12 * np.abs(total).max()


# Compressed gradients in memory that the host cannot touch: the same training as with NumPy arrays.

DEVICE_COMPRESSORS = [
    Float16Compressor(),
    BFloat16Compressor(),
    Int8Compressor(block=16),
    SignCompressor(block=12),
    TopKCompressor(0.05),
]
DEVICE_SIZE, STEPS = 211, 6


@pytest.mark.parametrize("compressor", DEVICE_COMPRESSORS, ids=str)
@pytest.mark.parametrize(("strategy", "dtype"), [(STRATEGIES[0], np.float64), (STRATEGIES[2], np.float32)])
def test_the_same_as_on_the_host(mesh, device, strategy, compressor, dtype):
    """Several buckets, uneven parts; a step whose gradient is not finite is skipped."""
    found = []
    for place in (np.copy, device.put):
        configuration = ShardingConfiguration(
            mesh, gradient_compressor=compressor, minimum_parameter_group_size=50, nonfinite_gradients="skip"
        )
        optimizer = strategy(AdamW(lr=0.01), configuration)
        parameters = place(np.ones(DEVICE_SIZE, dtype))
        for step in range(STEPS):
            gradient = np.random.default_rng([step, mesh.rank]).standard_normal(DEVICE_SIZE).astype(dtype)
            if step == 3 and mesh.rank == mesh.size - 1:
                gradient[17] = np.inf
            optimizer.step(parameters, place(gradient))
        assert optimizer.skipped_steps == 1
        found.append(arrays.to_host(parameters))
    np.testing.assert_array_equal(*found)
    assert (found[0] != 1).all()


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[2]])
def test_products_of_thin_matrices(mesh, device, strategy):
    """PowerSGD, whose products are those of the arrays' own library."""
    specs = [ParameterSpec("matrix", (12, 10)), ParameterSpec("vector", (DEVICE_SIZE - 120,))]
    found = []
    for place in (np.copy, device.put):
        configuration = ShardingConfiguration(mesh, gradient_compressor=PowerSGDCompressor(2))
        optimizer, parameters = strategy(AdamW(lr=0.01), configuration), place(np.ones(DEVICE_SIZE))
        named = FlatParameters.over(parameters, specs)
        optimizer.bind(named)
        for step in range(STEPS):
            optimizer.step(named, place(np.random.default_rng([step, mesh.rank]).standard_normal(DEVICE_SIZE)))
        found.append(arrays.to_host(parameters))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)
    assert (found[0] != 1).all()


# PowerSGD: exact where the rank suffices, the bytes of its formula, and the approximations of PyTorch's hook.

ROWS, COLUMNS, VECTOR = 24, 17, 9
SGD_SPECS = [ParameterSpec("matrix", (ROWS, COLUMNS)), ParameterSpec("vector", (VECTOR,))]
SGD_SIZE = sum(spec.size for spec in SGD_SPECS)


def zeros_of_sgd(dtype=np.float64):
    return FlatParameters.over(np.zeros(SGD_SIZE, dtype), SGD_SPECS)


def gradient_of_sgd(step, rank, dtype=np.float64):
    return np.random.default_rng([step, rank]).standard_normal(SGD_SIZE).astype(dtype)


def configured_of_sgd(mesh, rank, **options):
    return ShardingConfiguration(mesh, gradient_compressor=PowerSGDCompressor(rank), **options)


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_gradients_of_no_higher_rank_are_exact(mesh, strategy):
    """The sum of all ranks' has rank 3; what each of them leaves out is nothing in all."""
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.standard_normal((size, 3)))[0] for size in (ROWS, COLUMNS))
    parameters, total = zeros_of_sgd(), np.zeros(SGD_SIZE)
    optimizer = strategy(SGD(lr=1.0), configured_of_sgd(mesh, 3))
    for _ in range(20):
        # All of one sign, so that the sum is as well conditioned as they are.
        rights = np.array([np.diag(random.uniform(1, 2, 3)) @ right.T for _ in range(mesh.size)])
        vectors = random.standard_normal((mesh.size, VECTOR))
        optimizer.step(parameters, np.concatenate([(left @ rights[mesh.rank]).ravel(), vectors[mesh.rank]]), count=1)
        total += np.concatenate([(left @ rights.sum(0)).ravel(), vectors.sum(0)])
        assert np.abs(parameters.flat + total).max() <= 1e-12 * np.abs(total).max()


def test_full_rank_is_exact(mesh):
    """A factor of as many columns as the matrix would be no smaller: the matrix travels as it is."""
    optimizer, parameters, total = (
        DDPOptimizer(SGD(lr=1.0), configured_of_sgd(mesh, COLUMNS)),
        zeros_of_sgd(),
        np.zeros(SGD_SIZE),
    )
    for step in range(20):
        optimizer.step(parameters, gradient_of_sgd(step, mesh.rank), count=1)
        total += sum(gradient_of_sgd(step, rank) for rank in range(mesh.size))
    assert np.abs(parameters.flat + total).max() <= 1e-12 * np.abs(total).max()


@pytest.mark.parametrize("rank", [1, 4, 9])
def test_bytes_sent_of_sgd(mesh, rank):
    """``rank * (rows + columns)`` elements of a matrix, all of a vector, if that is less."""

    def so_far():
        return sum(total["bytes"] for name, total in mesh.ledger.summary().items() if "gradients" in name)

    sent = []
    size = SGD_SIZE
    for config in (ShardingConfiguration(mesh), configured_of_sgd(mesh, rank)):
        optimizer, parameters, before = DDPOptimizer(SGD(lr=1.0), config), zeros_of_sgd(np.float32), so_far()
        optimizer.step(parameters, gradient_of_sgd(0, mesh.rank, np.float32))
        sent.append(so_far() - before)
    elements = min(rank * (ROWS + COLUMNS) + VECTOR, size)
    # A sum of n elements sends 2 n (ranks - 1) / ranks of them, each cut being rounded.
    assert abs(sent[1] - sent[0] * elements / size) <= 4 * 4 * (mesh.size > 1)
    assert PowerSGDCompressor(rank).elements((ROWS, COLUMNS)) + VECTOR == elements


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
                parallel(torch.from_numpy(gradient_of_sgd(max(step, 0), mesh.rank))).backward()
                theirs.append(np.concatenate([tensor.grad.numpy().ravel() for tensor in tensors]))
            torch.manual_seed(np.random.RandomState(seed).randint(1_000_000_000))
            basis = torch.randn(1, COLUMNS, rank, dtype=torch.float64)[0].numpy()
        finally:
            mesh.world.barrier()
            distributed.destroy_process_group()
    optimizer, parameters = DDPOptimizer(SGD(lr=1.0), configured_of_sgd(mesh, rank)), zeros_of_sgd()
    optimizer.bind(parameters)
    optimizer.state.strategy.compressed._bases["matrix"] = basis
    for step in range(8):
        before = parameters.flat.copy()
        optimizer.step(parameters, gradient_of_sgd(step, mesh.rank))
        np.testing.assert_allclose(before - parameters.flat, theirs[plain + step], rtol=0, atol=1e-12)


def test_what_it_refuses():
    for rank in (0, -1, 1.5, True, "4"):
        with pytest.raises((ValueError, TypeError), match="rank=.* must be a whole number of at least 1"):
            PowerSGDCompressor(rank)
