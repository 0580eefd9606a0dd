"""Compressed gradients: nothing is lost over the steps, all ranks stay alike, and less is sent."""

from __future__ import annotations

import numpy as np
import pytest
from steps import STRATEGIES

from mpishard import SGD, AdamW, ShardingConfiguration, ZeRO3Optimizer
from mpishard.compression import (
    BFloat16Compressor,
    Float16Compressor,
    Int8Compressor,
    SignCompressor,
    TopKCompressor,
)

COMPRESSORS = [
    Float16Compressor(),
    BFloat16Compressor(),
    Int8Compressor(block=16),
    SignCompressor(block=16),
    TopKCompressor(0.05),
]
SIZE, STEPS = 211, 200
each_compressor = pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES[:3])


def gradient(step, rank, size=SIZE, dtype=np.float64):
    return np.random.default_rng([step, rank]).standard_normal(size).astype(dtype)


def configured(mesh, compressor, **options):
    return ShardingConfiguration(
        mesh, **{"gradient_compressor": compressor, "minimum_parameter_group_size": 50, **options}
    )


def left_over(optimizer, mesh):
    """All ranks' errors together, in flat order."""
    strategy = optimizer._strategy
    errors, place = strategy.compressed.errors.copy(), 0
    for bucket, pieces in zip(strategy.buckets.buckets, strategy._counts, strict=True):
        start, count = bucket.start + sum(pieces[: mesh.data.rank]), pieces[mesh.data.rank]
        errors[start : start + count] += strategy.compressed.owned[place : place + count]
        place += count
    return mesh.data.all_reduce(errors)


@each_compressor
@each_strategy
def test_what_was_applied_and_what_is_left_are_all_gradients(mesh, same_on_all, strategy, compressor):
    """Over 200 steps in float64; steps that are skipped leave no trace."""
    optimizer = strategy(SGD(lr=1.0), configured(mesh, compressor, nonfinite_gradients="skip"))
    parameters, total = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(STEPS):
        own = gradient(step, mesh.rank)
        if step % 7 == 3:
            own[step % SIZE] = np.nan if mesh.rank == mesh.size - 1 else 1.0
        else:
            total += np.sum([gradient(step, rank) for rank in range(mesh.size)], axis=0)
        optimizer.step(parameters, own, count=1.0)
    assert optimizer.skipped_steps == len(range(3, STEPS, 7))
    assert same_on_all(parameters.tobytes())
    rest = left_over(optimizer, mesh)
    assert np.abs(-parameters + rest - total).max() <= 1e-12 * np.abs(total).max()
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


@pytest.mark.parametrize("overlap", [True, False])
@each_strategy
def test_overlap_changes_no_bit(mesh, same_on_all, strategy, overlap):
    optimizer = strategy(SGD(lr=0.1), configured(mesh, Int8Compressor(8), overlap_communication=overlap))
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


def test_what_does_not_go_together(mesh):
    with pytest.raises(ValueError, match="reproducible=True gives the same bits"):
        configured(mesh, Int8Compressor(), reproducible=True)
    with pytest.raises(ValueError, match="gradient compression is for DDP, ZeRO-1 and ZeRO-2"):
        ZeRO3Optimizer(SGD(lr=0.1), configured(mesh, Int8Compressor()))
    assert ShardingConfiguration(mesh, enable_gradient_compression=True).compressor == Int8Compressor()
    assert ShardingConfiguration(mesh).compressor is None
