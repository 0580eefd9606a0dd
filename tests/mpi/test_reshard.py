"""Arrays move between layouts: every element to its place, none that is there already, and a bucket at a time."""

from __future__ import annotations

from dataclasses import replace

import hybrid
import numpy as np
import pytest
import standin
from layouts import Layout, filled, lower_bound, random_layout, random_model, tensors_of

import mpishard
from mpishard.backend import array as arrays
from mpishard.comm.reshard import reshard, reshard_state
from mpishard.layout.boxes import split
from mpishard.layout.run_state import RunState, Shard
from mpishard.layout.tensors import WHOLE, ParameterSpec, Piece, cut_holding


def shard_of(layout, holding, rank, array, kind="parameters"):
    """None on a rank that idles in this layout."""
    return None if rank >= layout.ranks - layout.idle else Shard(kind, array, holding, ())


def sent(mesh):
    return mesh.ledger.sent("world", "all_to_all", "reshard")


@pytest.fixture
def largest(monkeypatch, mesh):
    """Bytes of the largest buffers passed to the exchange of elements."""
    seen = [0]
    exchange = mesh.world.all_to_all

    def watched(buffer, out, *arguments, label, **options):
        if label == "reshard":
            seen[0] = max(seen[0], buffer.nbytes, out.nbytes)
        return exchange(buffer, out, *arguments, label=label, **options)

    monkeypatch.setattr(mesh.world, "all_to_all", watched)
    return seen


@pytest.mark.parametrize("bucket_bytes", [8, 200, 2**26])
def test_random_layouts(mesh, bucket_bytes, largest):
    for number in range(12):
        random = np.random.default_rng([number, mesh.size])
        model = random_model(random)
        tensors = tensors_of(model)
        before, after = (random_layout(random, mesh.size) for _ in range(2))
        source, target = (layout.holdings(model, random) for layout in (before, after))
        mine, expected = (filled(side[mesh.rank], tensors, np.float64) for side in (source, target))
        found = np.full_like(expected, np.nan)
        start = sent(mesh)
        reshard(
            mesh.world,
            shard_of(before, source[mesh.rank], mesh.rank, mine),
            shard_of(after, target[mesh.rank], mesh.rank, found),
            bucket_bytes=bucket_bytes,
        )
        assert np.array_equal(found, expected)
        assert np.array_equal(mine, filled(source[mesh.rank], tensors, np.float64))
        everywhere = sum(mesh.world.allgather_object(sent(mesh) - start))
        assert everywhere == 8 * sum(lower_bound(source, target, tensors))
    assert largest[0] <= max(bucket_bytes, 8 * (mesh.size - 1))


def test_ranks_that_only_take_part(comm):
    """From the first rank to the last one, with every collective compared across the ranks."""
    piece = (Piece("a", ((0, 4), (0, 3)), 0),)
    source, target = Shard("x", np.arange(12.0), piece, ()), Shard("x", np.zeros(12), piece, ())
    with mpishard.Mesh(comm, debug=True) as mesh:
        first, last = mesh.rank == 0, mesh.rank == mesh.size - 1
        reshard(mesh.world, source if first else None, target if last else None, bucket_bytes=40)
    assert np.array_equal(target.array, np.arange(12.0) * last)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_kinds_of_memory_and_dtypes(mesh, device, on_host, dtype):
    random = np.random.default_rng(mesh.size)
    model = random_model(random)
    tensors = tensors_of(model)
    before = Layout(1, mesh.size, 1, 1, 0, 0)
    after = Layout(mesh.size, 1, 1, 1, 1, 0)
    source, target = (layout.holdings(model, random)[mesh.rank] for layout in (before, after))
    mine, expected = (filled(holding, tensors, dtype) for holding in (source, target))
    like = np.empty(0) if on_host else device.empty(0)
    held, found = (arrays.zeros(array.size, dtype, like=like) for array in (mine, expected))
    arrays.copy_to_device(mine, held)
    reshard(mesh.world, Shard("x", held, source, ()), Shard("x", found, target, ()), bucket_bytes=20)
    assert np.array_equal(arrays.to_host(found), expected)


def test_what_is_missing_arrives_in_the_array_itself(mesh):
    """As after a load: each rank has read its part of an array that it holds whole."""
    specs = [ParameterSpec("a", (5, 3)), ParameterSpec("none", (0,)), ParameterSpec("b", ()), ParameterSpec("c", (9,))]
    whole = WHOLE.holding(specs)
    cuts = split(25, mesh.size)
    start, stop = cuts[mesh.rank], cuts[mesh.rank + 1]
    part = tuple(replace(piece, start=piece.start + start) for piece in cut_holding(whole, [(start, stop)]))
    array = np.zeros(25)
    array[start:stop] = np.arange(25)[start:stop]
    shard = Shard("x", array, whole, part)
    before = sent(mesh)
    reshard(mesh.world, replace(shard, holding=part), shard, bucket_bytes=24)
    assert np.array_equal(array, np.arange(25))
    assert sum(mesh.world.allgather_object(sent(mesh) - before)) == 8 * 25 * (mesh.size - 1)


def test_one_array_with_two_orders_is_refused(mesh):
    one, two = Piece("a", ((0, 2),), 0), Piece("b", ((0, 2),), 2)
    array = np.arange(4.0)
    moved = (replace(one, start=2), replace(two, start=0))
    with pytest.raises(ValueError, match="share memory, but elements lie elsewhere"):
        reshard(mesh.world, Shard("x", array, (one, two), ()), Shard("x", array, moved, ()))
    with pytest.raises(ValueError, match="share memory"):
        reshard(mesh.world, Shard("x", array, (one,), ()), Shard("x", array[1:], (one,), ()))
    assert np.array_equal(array, np.arange(4.0))


def test_problems_are_everybodys(mesh):
    """The last rank errs, or all do; nobody waits and nothing is written."""
    last = mesh.rank == mesh.size - 1
    piece = (Piece("a", ((0, 4),), 0),)
    source, target = Shard("x", np.ones(4), piece, ()), Shard("x", np.zeros(4), piece, ())
    cases = [
        (source, replace(target, array=np.zeros(4, np.float32)), TypeError, "is float64 but .* is float32"),
        (source, replace(target, kind="y"), ValueError, "is 'x' but .* is 'y'"),
        (source, replace(target, array=np.zeros(3)), ValueError, "pieces up to element 4 in an array of shape .3,."),
        (source, replace(target, holding=(Piece("b", ((0, 4),), 0),)), ValueError, "no rank .* of tensor 'b'"),
        (source, replace(target, holding=(Piece("a", ((1, 5),), 0),)), ValueError, r"holds \(\(4, 5\),\) of"),
        (source, replace(target, array=standin.zeros(4)), TypeError, "use one kind"),
    ]
    for mine, other, error, message in cases:
        with pytest.raises(error, match=message):
            reshard(mesh.world, mine, other if last else target)
        assert not target.array.any()
    with pytest.raises(ValueError, match="no rank has a source"):
        reshard(mesh.world, None, target)
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1, got 0"):
        reshard(mesh.world, source, target, bucket_bytes=0 if last else 8)


def states(mesh, rule, optimizers, shapes):
    """Run states of the tests' model, of optimizers over the same ranks, bound but for the first not trained."""
    found = []
    for optimizer_class, (data, tensor, pipeline) in zip(optimizers, shapes, strict=True):
        sub = mesh.reshaped(data=data, tensor=tensor, pipeline=pipeline)
        parameters = hybrid.model(sub, start=hybrid.START if not found else np.zeros(hybrid.SIZE))
        optimizer = optimizer_class(rule, sub)
        optimizer.bind(parameters)
        if not found:
            hybrid.train(optimizer, parameters)
        found.append((optimizer, parameters))
    return found


def test_the_state_of_a_run(mesh):
    shapes = hybrid.factorisations(mesh.size)
    rule = mpishard.AdamW(lr=0.1)
    (one, before), (other, after) = states(
        mesh, rule, [mpishard.ZeRO2Optimizer, mpishard.ZeRO1Optimizer], [shapes[0], shapes[-1]]
    )
    source = one.state.capture().with_facts({"history": np.arange(3.0), "words.json": ["a", 1], "seed": 5})
    facts = reshard_state(mesh.world, source, other.state.capture(), bucket_bytes=64)
    assert facts["steps"] == 3
    assert (facts["seed"], facts["words.json"]) == (5, ["a", 1])
    assert np.array_equal(facts["history"], np.arange(3.0))
    other.state.restore(facts)
    assert other.serialize() == one.serialize()
    assert np.array_equal(
        hybrid.gathered(after, mpishard.ShardingConfiguration(other.mesh)),
        hybrid.gathered(before, mpishard.ShardingConfiguration(one.mesh)),
    )


def test_states_of_other_models_and_kinds(mesh):
    last = mesh.rank == mesh.size - 1
    specs = (ParameterSpec("a", (2, 3)),)
    shard = Shard("parameters", np.zeros(6), WHOLE.holding(specs), ())
    slot = replace(shard, kind="optimizer/exp_avg", array=np.zeros(6))
    state = RunState(specs, (shard,), {"steps": 1})
    with pytest.raises(ValueError, match=r"a is \(2, 3\) there and \(3, 2\) here"):
        reshard_state(mesh.world, state, replace(state, specs=(ParameterSpec("a", (3, 2)),)) if last else state)
    with pytest.raises(ValueError, match="the target has optimizer/exp_avg, but the source only parameters"):
        reshard_state(mesh.world, state, replace(state, shards=(shard, slot)))
    with pytest.raises(ValueError, match="no rank has a state"):
        reshard_state(mesh.world, None, state)
    more = replace(state, shards=(replace(shard, array=np.ones(6)), replace(slot, array=np.ones(6))))
    assert reshard_state(mesh.world, more, state) == {"steps": 1}
    assert shard.array.all()
