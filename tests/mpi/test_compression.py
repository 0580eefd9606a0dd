"""Compressed gradients: nothing is lost over the steps, all ranks stay alike, and less is sent."""

from __future__ import annotations

import numpy as np
import pytest
from steps import STRATEGIES, write_gradients

from mpishard import SGD, AdamW, FlatParameters, ParameterSpec, ShardingConfiguration, ZeRO3Optimizer
from mpishard.compression import (
    BFloat16Compressor,
    Float16Compressor,
    Int8Compressor,
    PowerSGDCompressor,
    SignCompressor,
    TopKCompressor,
)

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
