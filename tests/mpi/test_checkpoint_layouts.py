"""What one layout wrote, another reads: the files alone, without what makes saving safe."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import hybrid
import numpy as np
import pytest
from hybrid import gathered, model, train

from mpishard import AdamW, DDPOptimizer, Mesh, ShardingConfiguration, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer
from mpishard.backend import array as arrays
from mpishard.checkpoint.index import read_index, write_index
from mpishard.checkpoint.load import fill
from mpishard.checkpoint.pieces import PieceValues, pieces_file, stored, write_pieces
from mpishard.data_parallel.rank_state import parameters_alone
from mpishard.layout.run_state import RunState
from mpishard.parameters.flat import FlatParameters

STRATEGIES = [DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer]
RULE = AdamW(lr=0.1)
KINDS = ("parameters", "optimizer/exp_avg", "optimizer/exp_avg_sq")


@pytest.fixture
def base(comm):
    with Mesh(comm) as mesh:
        yield mesh


def layouts(base):
    """Meshes of every shape with strategies in turn, and two with two chunks a rank."""
    for number, mesh in enumerate(hybrid.meshes(base)):
        yield mesh, STRATEGIES[-1 - number % 4], 1
    mesh = base.reshaped(data=-1, pipeline=2 - base.size % 2)
    yield mesh, DDPOptimizer, 2
    yield mesh, ZeRO2Optimizer, 2


def built(mesh, strategy, chunks=1, **options):
    config = ShardingConfiguration(mesh, minimum_parameter_group_size=24)
    parameters = model(mesh, chunks, **options)
    optimizer = strategy(RULE, config)
    optimizer.bind(parameters)
    return optimizer, parameters


def save(folder, state, axis):
    """Every rank writes what it counts, and rank 0 the index.  Collective."""
    parts = []
    for shard in state.shards:
        for piece in shard.counted:
            values = shard.array[piece.start : piece.start + piece.size].reshape(piece.shape)
            parts.append(PieceValues(shard.kind, piece.name, piece.box, values))
    write_pieces(folder / pieces_file(axis.rank), parts, id="0" * 32, writer=axis.rank)
    boxes = axis.allgather_object([part.where for part in parts])
    if axis.rank == 0:
        write_index(
            folder / "index.h5",
            id="0" * 32,
            generation=1,
            tensors={spec.name: spec.shape for spec in state.specs},
            kinds={shard.kind: shard.array.dtype for shard in state.shards},
            pieces=[piece for rank, read_there in enumerate(boxes) for piece in stored(read_there, pieces_file(rank))],
            facts=state.facts,
        )
    axis.barrier()


def test_every_layout_reads_what_another_wrote(base, folder):
    cases = list(layouts(base))
    trained = []
    for number, case in enumerate(cases):
        optimizer, parameters = built(*case)
        train(optimizer, parameters)
        place = folder / str(number)
        if base.rank == 0:
            place.mkdir()
        base.world.barrier()
        save(place, optimizer.state.capture(), base.world)
        trained.append((place, gathered(parameters, optimizer.config), optimizer.serialize()))
    for number, case in enumerate(cases):
        for one_node, (place, whole, image) in enumerate((trained[number - 1], trained[number - len(cases) // 2])):
            optimizer, parameters = built(*case, start=np.full(hybrid.SIZE, np.nan))
            contents = read_index(place)
            state = optimizer.state.capture()
            optimizer.state.check(contents.facts)
            fill(contents, state, base.world, base.world, one_node=bool(one_node))
            optimizer.state.restore(contents.facts)
            assert np.array_equal(gathered(parameters, optimizer.config), whole), case
            assert optimizer.serialize() == image, case
            for shard in optimizer.state.capture().shards:
                assert not np.isnan(shard.array).any(), case


def test_parameters_alone(base, folder):
    """A checkpoint may have more than is wanted."""
    optimizer, parameters = built(base, ZeRO2Optimizer)
    train(optimizer, parameters)
    save(folder, optimizer.state.capture(), base.world)
    for mesh in hybrid.meshes(base):
        fresh = model(mesh, start=np.full(hybrid.SIZE, np.nan))
        fill(read_index(folder), parameters_alone(fresh, mesh.data), base.world, base.world)
        assert np.array_equal(gathered(fresh, mesh), gathered(parameters, base)), mesh


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_device_arrays(base, folder, device, strategy):
    optimizer, parameters = built(base, DDPOptimizer)
    train(optimizer, parameters)
    save(folder, optimizer.state.capture(), base.world)
    contents = read_index(folder)
    for mesh in hybrid.meshes(base):
        fresh = FlatParameters(
            hybrid.specs(mesh.pipeline.size), np.float64, place=mesh.place, units=hybrid.units(), module=device.module
        )
        other = strategy(RULE, ShardingConfiguration(mesh, minimum_parameter_group_size=24))
        other.bind(fresh)
        fill(contents, other.state.capture(), base.world, base.world)
        other.state.restore(contents.facts)
        assert np.array_equal(arrays.to_host(gathered(fresh, mesh)), gathered(parameters, base)), mesh
        assert other.serialize() == optimizer.serialize(), mesh


def test_what_does_not_fit_is_refused_on_all_ranks_before_anything_is_written(base, folder):
    optimizer, parameters = built(base, ZeRO1Optimizer)
    train(optimizer, parameters)
    state = optimizer.state.capture()
    save(folder, state, base.world)
    contents = read_index(folder)
    before = [shard.array.copy() for shard in state.shards]
    for array in (shard.array for shard in state.shards):
        array += 1
    shard = state.shards[0]
    other_kind = replace(shard, kind="optimizer/momentum")
    other_dtype = replace(shard, array=shard.array.astype(np.float32))
    for wrong, message in (
        (RunState(state.specs[1:], state.shards), "is of another model: it has 22 tensors and this model 21"),
        (RunState(state.specs, (shard, other_kind)), "has no optimizer/momentum, but parameters, optimizer/exp_avg"),
        (RunState(state.specs, (other_dtype,)), "parameters in float64, and this run in float32"),
    ):
        # One rank that is wrong is enough.
        asked = wrong if base.rank == base.size - 1 else state
        with pytest.raises(ValueError, match=message):
            fill(contents, asked, base.world, base.world)
        assert all(np.array_equal(shard.array, old + 1) for shard, old in zip(state.shards, before, strict=True))
    fill(contents, state, base.world, base.world)
    assert all(np.array_equal(shard.array, old) for shard, old in zip(state.shards, before, strict=True))


def test_a_piece_that_one_rank_cannot_read_raises_on_all(base, folder):
    optimizer, _ = built(base, ZeRO1Optimizer)
    save(folder, optimizer.state.capture(), base.world)
    contents = read_index(folder)
    base.world.barrier()
    if base.rank == 0:
        (folder / pieces_file(base.size - 1)).write_bytes(b"")
    base.world.barrier()
    with pytest.raises(ValueError, match=r"pieces-.*are not those of this checkpoint"):
        fill(contents, optimizer.state.capture(), base.world, base.world)


def test_each_element_is_read_from_the_disk_once(base, folder, monkeypatch):
    """Unless all ranks are on one node."""
    optimizer, parameters = built(base, DDPOptimizer)
    train(optimizer, parameters)
    save(folder, optimizer.state.capture(), base.world)
    sizes = []
    reader = "mpishard.checkpoint.pieces.PieceReader."
    monkeypatch.setattr(reader + "read", lambda self, piece, inside, out: sizes.append((piece.kind, out.size)))
    monkeypatch.setattr(
        reader + "read_runs", lambda self, runs, out: sizes.extend((run.source.kind, run.size) for run in runs)
    )
    for mesh in hybrid.meshes(base):
        sizes.clear()
        optimizer, _ = built(mesh, DDPOptimizer)
        fill(read_index(folder), optimizer.state.capture(), base.world, base.world)
        total = Counter()
        for read_there in base.world.allgather_object(sizes):
            for kind, size in read_there:
                total[kind] += size
        assert total == dict.fromkeys(KINDS, hybrid.SIZE), mesh
