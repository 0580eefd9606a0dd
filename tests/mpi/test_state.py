"""What one layout wrote, another reads; arrays move between layouts."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from dataclasses import replace

import h5py
import hybrid
import numpy as np
import pytest
import standin
from grid_cases import every_pair
from hybrid import gathered, model, train
from layouts import Layout, filled, lower_bound, random_layout, random_model, tensors_of
from mpi4py import MPI
from variants import full

import mpishard
from mpishard import SGD, AdamW, Checkpoints, DDPOptimizer, Mesh, ShardingConfiguration, ZeRO1Optimizer, ZeRO2Optimizer
from mpishard.backend import array as arrays
from mpishard.checkpoint.index import read_index
from mpishard.checkpoint.load import fill
from mpishard.checkpoint.pieces import pieces_file
from mpishard.comm.reshard import reshard, reshard_state
from mpishard.data_parallel.full_state import decode
from mpishard.data_parallel.rank_state import parameters_alone
from mpishard.layout.boxes import split
from mpishard.layout.run_state import RunState, Shard
from mpishard.layout.tensors import WHOLE, ParameterSpec, Piece, cut_holding
from mpishard.parameters.flat import FlatParameters

pytestmark = pytest.mark.pairs(1)

# serialize and deserialize: any number of ranks, any strategy, and nothing but what serialize wrote.

STRATEGIES = [DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, mpishard.ZeRO3Optimizer]
SPECS = [ParameterSpec("layer.a", (3, 5)), ParameterSpec("layer/b", (0,)), ParameterSpec("c", (1,))]


def gradient(step):
    return np.random.default_rng(step).integers(-8, 9, 16).astype(np.float64)


def run(optimizer, flat, steps):
    """Every rank has the same gradient, so that any number of ranks takes the same steps."""
    parameters = FlatParameters.over(flat, SPECS)
    for step in steps:
        optimizer.step(parameters, gradient(step))
    return optimizer


def pairs_of_moves(moves):
    return every_pair(moves, lambda move: dict(enumerate(move)))


@pytest.mark.parametrize("choose", [pairs_of_moves, *full(list)], ids=["pairs", "all"])
@pytest.mark.parametrize("rule", [mpishard.Adam(lr=0.1, amsgrad=True), mpishard.LAMB(lr=0.1), SGD(lr=0.1)])
def test_state_moves_between_strategies_and_numbers_of_ranks(comm, choose, rule, same_on_all):
    moves = choose(list(itertools.product(STRATEGIES, STRATEGIES, ("all to all", "all to one", "one to all"))))
    with Mesh(MPI.COMM_SELF) as single, Mesh(comm) as mesh:
        meshes = {"all": mesh, "one": single}
        expected = np.linspace(-1, 1, 16)
        run(DDPOptimizer(rule, single), expected, range(6))
        for before, after, sizes in moves:
            mesh_before, mesh_after = (meshes[size] for size in sizes.split(" to "))
            flat = np.linspace(-1, 1, 16)
            data = run(before(rule, mesh_before), flat, range(3)).serialize()
            assert same_on_all(data)
            optimizer = after(rule, mesh_after)
            optimizer.deserialize(data)
            assert optimizer.serialize() == data  # before it is bound to parameters
            run(optimizer, flat, range(3, 6))
            assert np.array_equal(flat, expected)
            assert optimizer.steps == 6


def test_deserialize_into_a_running_optimizer(mesh):
    flat = np.linspace(-1, 1, 16)
    optimizer = run(ZeRO1Optimizer(AdamW(lr=0.1), mesh), flat, range(3))
    data, saved = optimizer.serialize(), flat.copy()
    run(optimizer, flat, range(3, 6))
    after = flat.copy()
    flat[:] = saved
    optimizer.deserialize(data)
    run(optimizer, flat, range(3, 6))
    assert np.array_equal(flat, after)


def test_the_bytes_are_an_hdf5_file_that_anybody_can_read(mesh):
    optimizer = run(ZeRO2Optimizer(AdamW(lr=0.1), mesh), np.linspace(-1, 1, 16), range(3))
    with h5py.File(io.BytesIO(optimizer.serialize()), "r") as file:
        assert (file.attrs["steps"], file.attrs["rule"]) == (3, "AdamW")
        moment = file["slots/exp_avg/layer.a"][()]
    assert moment.shape == (3, 5)
    expected = np.zeros(16)
    for step in range(3):
        expected = 0.9 * expected + 0.1 * gradient(step)
    assert np.allclose(moment.ravel(), expected[:15], rtol=1e-12)


def image(mesh):
    return run(DDPOptimizer(AdamW(lr=0.1), mesh), np.linspace(-1, 1, 16), range(2)).serialize()


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda data: data[:-1], ValueError, "cut short"),
        (lambda data: data[:100], ValueError, "no optimizer state of mpishard"),
        (lambda data: data + b"\0", ValueError, "cut short or padded"),
        (lambda data: b"\x89HDF\r\n\x1a\n" + bytes(5000), ValueError, "no optimizer state of mpishard"),
        (lambda data: data[:3000] + bytes([data[3000] ^ 1]) + data[3001:], ValueError, "damaged"),
        (lambda data: data.decode("latin-1"), TypeError, "bytes .*got str"),
    ],
)
def test_bad_bytes_on_one_rank_raise_on_all(mesh, bound, change, error, message):
    data = image(mesh)
    optimizer = DDPOptimizer(AdamW(lr=0.1), mesh)
    if bound:
        run(optimizer, np.linspace(-1, 1, 16), range(2))
    with pytest.raises(error, match=message):
        optimizer.deserialize(change(data) if mesh.rank == mesh.size - 1 else data)
    assert optimizer.serialize() == data if bound else optimizer.steps == 0


def test_every_flipped_bit_is_noticed(mesh):
    if mesh.rank:
        pytest.skip("one rank is enough to read: all of them call `decode`")
    with Mesh(MPI.COMM_SELF) as single:
        data = bytearray(image(single))
    random = np.random.default_rng(0)
    for place in (*random.integers(0, 512, 100), *random.integers(512, len(data), 200)):
        bit = 1 << int(random.integers(8))
        data[place] ^= bit
        with pytest.raises(ValueError):
            decode(bytes(data))
        data[place] ^= bit
    assert decode(bytes(data)).steps == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_of_other_parameters(mesh, strategy):
    data = image(mesh)
    other = FlatParameters([ParameterSpec("layer.a", (5, 3)), *SPECS[1:]], np.float64)
    bound = strategy(AdamW(lr=0.1), mesh)
    bound.step(other, np.ones(16))
    with pytest.raises(ValueError, match=r"other parameters: .*\(3, 5\).*\(5, 3\)"):
        bound.deserialize(data)
    unbound = strategy(AdamW(lr=0.1), mesh)
    unbound.deserialize(data)
    with pytest.raises(ValueError, match="of other parameters"):
        unbound.step(other, np.ones(16))
    with pytest.raises(ValueError, match="state is float64, .*float32"):
        unbound.step(FlatParameters(SPECS, np.float32), np.ones(16, np.float32))
    with pytest.raises(ValueError, match="before the first step"):
        strategy(AdamW(lr=0.1), mesh).serialize()


def test_the_state_of_a_gpt(mesh):
    """Its specs say more than names and shapes."""
    model = mpishard.nn.GPT(vocabulary_size=7, context_length=4, width=4, layers=1, heads=1, dtype=np.float64)
    tokens = np.arange(8).reshape(2, 4) % 7
    optimizer = ZeRO1Optimizer(AdamW(lr=0.1), mesh)
    model.loss_and_gradient(tokens, tokens)
    optimizer.step(model.parameters)
    data = optimizer.serialize()
    optimizer.deserialize(data)
    fresh = ZeRO2Optimizer(AdamW(lr=0.1), mesh)
    fresh.deserialize(data)
    model.loss_and_gradient(tokens, tokens)
    model.parameters.gradients.finalize()
    assert optimizer.serialize() == data


def test_names_that_look_like_folders(mesh):
    specs = [ParameterSpec(name, (size,)) for name, size in (("a", 2), ("a/b", 3), (".", 1), ("a%2Fb", 1))]
    optimizer, again = DDPOptimizer(AdamW(lr=0.1), mesh), DDPOptimizer(AdamW(lr=0.1), mesh)
    optimizer.step(FlatParameters(specs, np.float64), np.arange(7.0))
    again.deserialize(optimizer.serialize())
    again.step(FlatParameters(specs, np.float64), np.arange(7.0))
    assert again.steps == 2


def test_skipped_steps_are_part_of_the_state(mesh):
    config = ShardingConfiguration(mesh, nonfinite_gradients="skip")
    optimizer = DDPOptimizer(SGD(lr=0.1), config)
    flat = np.zeros(3)
    for value in (1.0, np.nan, 1.0):
        optimizer.step(flat, np.full(3, value))
    again = DDPOptimizer(SGD(lr=0.1), config)
    again.deserialize(optimizer.serialize())
    assert (again.steps, again.skipped_steps, again.clock) == (2, 1, 3)


# What one layout wrote, another reads.

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
    parameters = model(mesh, chunks, **options)
    optimizer = strategy(RULE, ShardingConfiguration(mesh, minimum_parameter_group_size=24))
    optimizer.bind(parameters)
    return optimizer, parameters


def save(folder, state, mesh):
    """What is in the index of the checkpoint.  Collective."""
    with Checkpoints(folder, mesh) as checkpoints:
        return read_index(checkpoints.save(state))


def test_every_layout_reads_what_another_wrote(base, folder):
    cases = list(layouts(base))
    trained = []
    for number, case in enumerate(cases):
        optimizer, parameters = built(*case)
        train(optimizer, parameters)
        contents = save(folder / str(number), optimizer.state.capture(), base)
        trained.append((contents, gathered(parameters, optimizer.config), optimizer.serialize()))
    for number, case in enumerate(cases):
        for one_node, (contents, whole, image) in enumerate((trained[number - 1], trained[number - len(cases) // 2])):
            optimizer, parameters = built(*case, start=np.full(hybrid.SIZE, np.nan))
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
    contents = save(folder, optimizer.state.capture(), base)
    for mesh in hybrid.meshes(base):
        fresh = model(mesh, start=np.full(hybrid.SIZE, np.nan))
        fill(contents, parameters_alone(fresh, mesh.data), base.world, base.world)
        assert np.array_equal(gathered(fresh, mesh), gathered(parameters, base)), mesh


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_device_arrays(base, folder, device, strategy):
    optimizer, parameters = built(base, DDPOptimizer)
    train(optimizer, parameters)
    contents = save(folder, optimizer.state.capture(), base)
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
    contents = save(folder, state, base)
    before = [shard.array.copy() for shard in state.shards]
    for array in (shard.array for shard in state.shards):
        array += 1
    shard = state.shards[0]
    other_kind = replace(shard, kind="optimizer/momentum")
    other_dtype = replace(shard, array=shard.array.astype(np.float32))
    for wrong, message in (
        (RunState(state.specs[1:], state.shards), "22 tensors and this model 21"),
        (RunState(state.specs, (shard, other_kind)), "no optimizer/momentum, .*optimizer/exp_avg"),
        (RunState(state.specs, (other_dtype,)), "float64, and this run in float32"),
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
    contents = save(folder, optimizer.state.capture(), base)
    base.world.barrier()
    if base.rank == 0:
        (contents.folder / pieces_file(base.size - 1)).write_bytes(b"")
    base.world.barrier()
    with pytest.raises(ValueError, match="pieces-.*not those"):
        fill(contents, optimizer.state.capture(), base.world, base.world)


def test_each_element_is_read_from_the_disk_once(base, folder, monkeypatch):
    """Unless all ranks are on one node."""
    optimizer, parameters = built(base, DDPOptimizer)
    train(optimizer, parameters)
    contents, total = save(folder, optimizer.state.capture(), base), Counter()
    reader = "mpishard.checkpoint.pieces.CheckpointReader."
    monkeypatch.setattr(reader + "read_piece", lambda self, piece, inside, out: total.update({piece.kind: out.size}))
    monkeypatch.setattr(
        reader + "read_ranges",
        lambda self, ranges, out: [total.update({each.piece.kind: each.size}) for each in ranges],
    )
    for mesh in hybrid.meshes(base):
        total.clear()
        optimizer, _ = built(mesh, DDPOptimizer)
        fill(contents, optimizer.state.capture(), base.world, base.world)
        assert sum(base.world.allgather_object(total), Counter()) == dict.fromkeys(KINDS, hybrid.SIZE), mesh


# Arrays move between layouts: every element to its place, none that is there already, and a bucket at a time.


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
    with Mesh(comm, debug=True) as mesh:
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
    with pytest.raises(ValueError, match="elements lie elsewhere"):
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
    with pytest.raises(ValueError, match="bucket_bytes .*got 0"):
        reshard(mesh.world, source, target, bucket_bytes=0 if last else 8)


def test_the_state_of_a_run(mesh):
    shapes = hybrid.factorisations(mesh.size)
    first, last = (
        mesh.reshaped(data=shape[0], tensor=shape[1], pipeline=shape[2]) for shape in (shapes[0], shapes[-1])
    )
    one, before = built(first, ZeRO2Optimizer)
    train(one, before)
    other, after = built(last, ZeRO1Optimizer, start=np.zeros(hybrid.SIZE))
    source = one.state.capture().with_facts({"history": np.arange(3.0), "words.json": ["a", 1], "seed": 5})
    facts = reshard_state(mesh.world, source, other.state.capture(), bucket_bytes=64)
    assert (facts["steps"], facts["seed"], facts["words.json"]) == (3, 5, ["a", 1])
    assert np.array_equal(facts["history"], np.arange(3.0))
    other.state.restore(facts)
    assert other.serialize() == one.serialize()
    assert np.array_equal(gathered(after, other.config), gathered(before, one.config))


def test_states_of_other_models_and_kinds(mesh):
    last = mesh.rank == mesh.size - 1
    specs = (ParameterSpec("a", (2, 3)),)
    shard = Shard("parameters", np.zeros(6), WHOLE.holding(specs), ())
    slot = replace(shard, kind="optimizer/exp_avg", array=np.zeros(6))
    state = RunState(specs, (shard,), {"steps": 1})
    with pytest.raises(ValueError, match=r"a is \(2, 3\) there and \(3, 2\) here"):
        reshard_state(mesh.world, state, replace(state, specs=(ParameterSpec("a", (3, 2)),)) if last else state)
    with pytest.raises(ValueError, match="optimizer/exp_avg, .*only parameters"):
        reshard_state(mesh.world, state, replace(state, shards=(shard, slot)))
    with pytest.raises(ValueError, match="no rank has a state"):
        reshard_state(mesh.world, None, state)
    more = replace(state, shards=(replace(shard, array=np.ones(6)), replace(slot, array=np.ones(6))))
    assert reshard_state(mesh.world, more, state) == {"steps": 1}
    assert shard.array.all()
