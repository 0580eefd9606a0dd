"""PowerSGD: exact where the rank suffices, the bytes of its formula, and the approximations of PyTorch's hook."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from steps import STRATEGIES

from mpishard import SGD, DDPOptimizer, FlatParameters, ParameterSpec, ShardingConfiguration
from mpishard.compression import PowerSGDCompressor

ROWS, COLUMNS, VECTOR = 24, 17, 9
SPECS = [ParameterSpec("matrix", (ROWS, COLUMNS)), ParameterSpec("vector", (VECTOR,))]
SIZE = sum(spec.size for spec in SPECS)


def zeros(dtype=np.float64):
    return FlatParameters.over(np.zeros(SIZE, dtype), SPECS)


def gradient(step, rank, dtype=np.float64):
    return np.random.default_rng([step, rank]).standard_normal(SIZE).astype(dtype)


def configured(mesh, rank, **options):
    return ShardingConfiguration(mesh, gradient_compressor=PowerSGDCompressor(rank), **options)


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_gradients_of_no_higher_rank_are_exact(mesh, strategy):
    """The sum of all ranks' has rank 3; what each of them leaves out is nothing in all."""
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.standard_normal((size, 3)))[0] for size in (ROWS, COLUMNS))
    parameters, total = zeros(), np.zeros(SIZE)
    optimizer = strategy(SGD(lr=1.0), configured(mesh, 3))
    for _ in range(20):
        # All of one sign, so that the sum is as well conditioned as they are.
        rights = np.array([np.diag(random.uniform(1, 2, 3)) @ right.T for _ in range(mesh.size)])
        vectors = random.standard_normal((mesh.size, VECTOR))
        optimizer.step(parameters, np.concatenate([(left @ rights[mesh.rank]).ravel(), vectors[mesh.rank]]), count=1)
        total += np.concatenate([(left @ rights.sum(0)).ravel(), vectors.sum(0)])
        assert np.abs(parameters.flat + total).max() <= 1e-12 * np.abs(total).max()


def test_full_rank_is_exact(mesh):
    """A factor of as many columns as the matrix would be no smaller: the matrix travels as it is."""
    optimizer, parameters, total = DDPOptimizer(SGD(lr=1.0), configured(mesh, COLUMNS)), zeros(), np.zeros(SIZE)
    for step in range(20):
        optimizer.step(parameters, gradient(step, mesh.rank), count=1)
        total += sum(gradient(step, rank) for rank in range(mesh.size))
    assert np.abs(parameters.flat + total).max() <= 1e-12 * np.abs(total).max()


@pytest.mark.parametrize("rank", [1, 4, 9])
def test_bytes_sent(mesh, rank):
    """``rank * (rows + columns)`` elements of a matrix, all of a vector, if that is less."""

    def so_far():
        return sum(total["bytes"] for name, total in mesh.ledger.summary().items() if "gradients" in name)

    sent = []
    size = SIZE
    for config in (ShardingConfiguration(mesh), configured(mesh, rank)):
        optimizer, parameters, before = DDPOptimizer(SGD(lr=1.0), config), zeros(np.float32), so_far()
        optimizer.step(parameters, gradient(0, mesh.rank, np.float32))
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
            tensors = [torch.nn.Parameter(torch.zeros(spec.shape, dtype=torch.float64)) for spec in SPECS]
            module = torch.nn.Module()
            for spec, tensor in zip(SPECS, tensors, strict=True):
                module.register_parameter(spec.name, tensor)
            # A loss whose gradient is the one that is given.
            module.forward = lambda flat: sum(
                (tensor * part.reshape(tensor.shape)).sum()
                for tensor, part in zip(tensors, flat.split([spec.size for spec in SPECS]), strict=True)
            )
            parallel = torch.nn.parallel.DistributedDataParallel(module)
            state = powerSGD_hook.PowerSGDState(
                None, rank, start_powerSGD_iter=plain, min_compression_rate=1, random_seed=seed
            )
            parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            theirs = []
            for step in range(-plain, 8):
                parallel.zero_grad()
                parallel(torch.from_numpy(gradient(max(step, 0), mesh.rank))).backward()
                theirs.append(np.concatenate([tensor.grad.numpy().ravel() for tensor in tensors]))
            torch.manual_seed(np.random.RandomState(seed).randint(1_000_000_000))
            basis = torch.randn(1, COLUMNS, rank, dtype=torch.float64)[0].numpy()
        finally:
            mesh.world.barrier()
            distributed.destroy_process_group()
    optimizer, parameters = DDPOptimizer(SGD(lr=1.0), configured(mesh, rank)), zeros()
    optimizer.bind(parameters)
    optimizer.state.strategy.compressed._bases["matrix"] = basis
    for step in range(8):
        before = parameters.flat.copy()
        optimizer.step(parameters, gradient(step, mesh.rank))
        np.testing.assert_allclose(before - parameters.flat, theirs[plain + step], rtol=0, atol=1e-12)


def test_what_it_refuses():
    for rank in (0, -1, 1.5, True, "4"):
        with pytest.raises((ValueError, TypeError), match="rank=.* must be a whole number of at least 1"):
            PowerSGDCompressor(rank)
