"""Optimizers on meshes with tensor and pipeline ranks: the step of one rank in every layout, by Muon, too."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import hybrid
import numpy as np
import pytest
from hybrid import START, alone, gathered, meshes, model, one_pass, train
from mpi4py import MPI
from steps import STRATEGIES, write_gradients
from variants import full

import mpishard
from mpishard import LAMB, SGD, AdamW, DDPOptimizer, HybridShardedOptimizer, Mesh, Muon, ShardingConfiguration, nn
from mpishard.backend import array as arrays

pytestmark = pytest.mark.pairs(1)

# Optimizers on meshes with tensor and pipeline ranks: every layout takes the step that one rank takes.

MUON = Muon(
    lr=0.1,
    matrices=["table", "*.wide", "*.none"],
    groups=[mpishard.ParameterGroup("1.*", lr_factor=0.5)],
    rest=AdamW(lr=0.1, groups=[mpishard.ParameterGroup("*.norm", weight_decay=0)]),
)
RULES = [SGD(lr=0.1, momentum=0.9), AdamW(lr=0.1), LAMB(lr=0.1), MUON]
LIMIT = 0.5


@pytest.fixture(scope="module")
def base(comm):
    with Mesh(comm) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def debug_base(comm):
    with Mesh(comm, debug=True) as mesh:
        yield mesh


@pytest.fixture
def plain_base(comm):
    with Mesh(comm, debug=False) as mesh:
        yield mesh


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rule", [*RULES[:2], *full(*RULES[2:])], ids=lambda rule: type(rule).__name__)
def test_every_layout_takes_the_step_of_one_rank_to_the_last_bit(base, same_on_all, strategy, rule):
    """Parameters, clip norms and the state, with ties, partial gradients, and tensors that do not divide.

    Also with several chunks a rank, and a first pass before the optimizer.
    """
    for mesh in meshes(base):
        expected = alone(base, rule, mesh.data.size, limit=LIMIT)
        for overlap, chunks in ((True, 2), (True, 1), (False, 1)):
            config = ShardingConfiguration(
                mesh, overlap_communication=overlap, minimum_parameter_group_size=24, max_gradient_norm=LIMIT
            )
            optimizer, parameters = strategy(rule, config), model(mesh, chunks)
            if chunks == 1:
                optimizer.bind(parameters)
            norms = train(optimizer, parameters)
            assert norms == expected.norms, mesh
            whole = gathered(parameters, config)
            assert np.array_equal(whole, expected.parameters), mesh
            assert same_on_all(whole)
        if isinstance(rule, AdamW | Muon):
            assert optimizer.serialize() == expected.state, mesh


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_norm_has_the_same_bits_in_every_layout(base, strategy):
    """Of the same gradient values, here any numbers: every copy but the first adds zero."""
    values = np.random.default_rng(0).standard_normal(hybrid.SIZE) * 10.0 ** np.linspace(-8, 8, hybrid.SIZE)
    norms = []
    with Mesh(MPI.COMM_SELF) as single:
        for mesh in (single, *meshes(base)):
            optimizer, parameters = strategy(SGD(), mesh), model(mesh)
            optimizer.measure_norm = True
            optimizer.bind(parameters)
            whole = hybrid.tensors(values)
            local = [np.empty(0)]
            for spec in parameters.local:
                first = mesh.place.runs(spec.stage) or not spec.copies
                first = first and (mesh.tensor.rank == 0 or not spec.partial) and mesh.data.rank == 0
                local.append(first * hybrid.slice_of(whole[spec.name], parameters.box(spec.name)).ravel())
            write_gradients(parameters, np.concatenate(local))
            optimizer.step(parameters, count=1)
            norms.append(optimizer.gradient_norm)
    assert norms == norms[:1] * len(norms)
    assert norms[0] == pytest.approx(np.linalg.norm(values), rel=1e-13)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulated_passes(base, strategy):
    """auto_sync_gradients=False: three passes, one step along their mean."""
    for mesh in meshes(base):
        config = ShardingConfiguration(mesh, auto_sync_gradients=False, minimum_parameter_group_size=24)
        optimizer, parameters = strategy(SGD(lr=1.0), config), model(mesh)
        ranks = range(mesh.data.size)
        total = sum(hybrid.whole_gradient(step, rank, mesh.data.size) for step in range(3) for rank in ranks)
        expected = START - total / (3 * mesh.data.size)
        train(optimizer, parameters)
        optimizer.synchronize_optimizer_state()
        assert np.allclose(gathered(parameters, config), expected, rtol=1e-14, atol=1e-14), mesh


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bound", [False, True])
def test_synchronized_gradients_are_the_sum(base, strategy, bound):
    for mesh in meshes(base):
        parameters = model(mesh)
        wrapped = mpishard.as_distributed(SimpleNamespace(parameters=parameters), mesh)
        assert type(wrapped) is (mpishard.ShardedModel if mesh.data.size == mesh.size else mpishard.HybridShardedModel)
        assert (wrapped.rank, wrapped.world_size) == (mesh.data.rank, mesh.data.size)
        optimizer = strategy(SGD(lr=1.0), mesh)
        if bound:
            optimizer.bind(parameters)
        one_pass(parameters, mesh, 0)
        wrapped.synchronize_gradients()
        wrapped.synchronize_gradients()  # a second time does nothing
        if not bound:
            whole = sum(hybrid.whole_gradient(0, rank, mesh.data.size) for rank in range(mesh.data.size))
            expected = hybrid.tensors(whole)
            for name in parameters:
                local = parameters.gradients.flat[slice_in(parameters, name)]
                assert np.array_equal(local, hybrid.slice_of(expected[name], parameters.box(name)).ravel())
        optimizer.step(parameters)
        expected = alone(base, SGD(lr=1.0), mesh.data.size, last=1)
        assert np.array_equal(wrapped.gather_full_parameters(), expected.parameters), mesh
        shards = mesh.data.comm.allgather(wrapped.local_parameter_shard)
        assert sum(shard.size for shard in shards) == parameters.size


def slice_in(parameters, name):
    piece = next(piece for piece in parameters.pieces if piece.name == name)
    return slice(piece.start, piece.start + piece.size)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_moves_between_any_two_layouts(base, strategy):
    """What one rank saved, every layout loads, saves again as the same bytes, and goes on with.

    Gradients may come as one array.
    """
    rule = AdamW(lr=0.1)
    half = alone(base, rule, 3)
    for mesh in meshes(base):
        expected = alone(base, rule, mesh.data.size, 3, 6, chain=3)
        for before_binding in (True, False):
            optimizer, parameters = strategy(rule, mesh), model(mesh, start=half.parameters)
            if before_binding:
                optimizer.deserialize(half.state)
            optimizer.bind(parameters)
            if not before_binding:
                optimizer.deserialize(half.state)
            assert optimizer.serialize() == half.state
            train(optimizer, parameters, range(3, 6), as_array=before_binding)
            assert np.array_equal(gathered(parameters, mesh), expected.parameters), mesh
            assert optimizer.serialize() == expected.state, mesh


def total(mesh, **key):
    return mesh.world.comm.allreduce(mesh.ledger.sent(**key))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_sent_and_held(plain_base, strategy):
    """2 (N - 1) / N of a place's parameters over the data axis, 3 under ZeRO-3; over the others what is shared."""
    for mesh in meshes(plain_base):
        optimizer, parameters = strategy(AdamW(lr=0.1), mesh), model(mesh)
        optimizer.bind(parameters)
        mesh.ledger.clear()
        train(optimizer, parameters, steps=range(2))

        sums = functools.partial(total, mesh)
        sizes = {spec.name: piece.size * 8 for spec, piece in zip(parameters.local, parameters.pieces, strict=True)}
        local = plain_base.world.comm.allreduce(sum(sizes.values()))  # data * all places
        partial = plain_base.world.comm.allreduce(sum(sizes[spec.name] for spec in parameters.local if spec.partial))
        tied = plain_base.world.comm.allreduce(sum(sizes[spec.name] for spec in parameters.local if spec.copies))
        data, tensor = mesh.data.size, mesh.tensor.size
        times = 3 if strategy is mpishard.ZeRO3Optimizer else 2
        moved = sums(axis="data", label="gradients") + sums(axis="data", label="parameters")
        assert moved * data == 2 * times * (data - 1) * local
        assert sums(axis="tensor") * tensor == 2 * 2 * (tensor - 1) * partial
        ties = f"ties 0+{mesh.pipeline.size - 1}"
        assert sums(axis=ties) * 2 == (2 * 2 * tied if mesh.pipeline.size > 1 else 0)
        assert sums(axis="pipeline") == 0

        whole = sum(sizes.values())
        held = (optimizer.state.nbytes, parameters.nbytes)
        if strategy is DDPOptimizer:
            assert held == (2 * whole, whole)
        else:
            assert mesh.data.comm.allreduce(optimizer.state.nbytes) == 2 * whole


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_start_alike(base, strategy):
    """From data rank 0, tensor rank 0 and the stages that own ties, whatever the others had."""
    for mesh in meshes(base):
        for make in (strategy(SGD(lr=1.0), mesh).bind, lambda p, on=mesh: mpishard.as_distributed(namespace(p), on)):
            parameters = model(mesh)
            owner = {spec.name: mesh.place.runs(spec.stage) for spec in parameters.local}
            split = {spec.name: spec.tensor_dim is not None for spec in parameters.local}
            for name in parameters:
                mine = mesh.data.rank == 0 and owner[name] and (split[name] or mesh.tensor.rank == 0)
                if not mine:
                    parameters[name][...] = 100 + mesh.rank
            make(parameters)
            flat = parameters.gather()
            expected = hybrid.tensors(START)
            for name in parameters:
                piece = flat[slice_in(parameters, name)]
                assert np.array_equal(piece, hybrid.slice_of(expected[name], parameters.box(name)).ravel()), mesh


def namespace(parameters):
    return SimpleNamespace(parameters=parameters)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["table", "gain", "3.bias", "3.norm"])
def test_debug_notices_copies_that_drift(debug_base, strategy, name):
    """Ranks change what they hold: noticed where others hold it too, and put right.

    One data rank alone can do so under DDP only; else the owners' parts overwrite it.
    """
    for mesh in meshes(debug_base):
        optimizer, parameters = strategy(SGD(lr=1.0), mesh), model(mesh)
        optimizer.bind(parameters)
        spec = next(spec for spec in parameters.specs if spec.name == name)
        inside = len(mesh.place.holders(spec)) > 1 or (spec.tensor_dim is None and mesh.tensor.size > 1)
        copied = inside or (mesh.data.size > 1 and strategy is DDPOptimizer)
        last = max(mesh.world.comm.allgather((name in parameters, mesh.rank, mesh.place)), key=lambda found: found[:2])
        if mesh.place == last[2] if inside else mesh.rank == last[1]:
            parameters.assign(name, np.full(parameters.gradients.gradient(name)[0].shape, 7.0))
            parameters.reset_gradients()
        one_pass(parameters, mesh, 0)
        if not copied:
            optimizer.step(parameters)
            continue
        with pytest.raises(RuntimeError, match="after step 1 .*differ from their copies"):
            optimizer.step(parameters)
        optimizer.synchronize_optimizer_state()
        one_pass(parameters, mesh, 1)
        optimizer.step(parameters)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_that_drifts_is_mended(base, strategy):
    for mesh in meshes(base):
        optimizer, parameters = strategy(AdamW(lr=0.1), mesh), model(mesh)
        train(optimizer, parameters)
        state = optimizer.serialize()
        on_rank = optimizer.state.on_rank
        views = on_rank.strategy.ownership.state_views(on_rank.slots["exp_avg"])
        first = mesh.data.rank == 0 or strategy is not DDPOptimizer
        held = dict(zip(parameters, parameters.local, strict=True))
        for tensor, owned, start, stop in on_rank.strategy.ownership.owned_parts:
            spec = held[parameters.specs[tensor].name]
            if not (first and mesh.place.is_primary(spec)):
                views[owned][start:stop] = np.nan
        optimizer.synchronize_optimizer_state()
        assert not any(np.isnan(slot).any() for slot in on_rank.slots.values()), mesh
        assert optimizer.serialize() == state


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["table", "gain", "2.wide"])
def test_nonfinite_gradients_name_the_rank_of_the_world(base, strategy, name):
    for mesh in meshes(base):
        for mode in ("raise", "skip"):
            config = ShardingConfiguration(mesh, nonfinite_gradients=mode)
            optimizer, parameters = strategy(SGD(lr=1.0), config), model(mesh)
            optimizer.bind(parameters)
            train(optimizer, parameters, range(1))
            before = parameters.gather()
            gradient = hybrid.local_gradient(parameters, mesh, 1)
            held = gradient[slice_or_nothing(parameters, name)].size
            culprit = max(base.world.comm.allgather(mesh.rank if held else 0))
            if mesh.rank == culprit:
                gradient[slice_in(parameters, name)] = np.inf
            write_gradients(parameters, gradient)
            if mode == "raise":
                with pytest.raises(FloatingPointError, match=f"step 2: '{name}' on rank {culprit};"):
                    optimizer.step(parameters)
            else:
                optimizer.step(parameters)
                assert (optimizer.steps, optimizer.skipped_steps) == (1, 1)
            assert np.array_equal(parameters.gather(), before)


def slice_or_nothing(parameters, name):
    return slice_in(parameters, name) if name in parameters else slice(0, 0)


@pytest.mark.parametrize("zero_stage", range(4))
def test_hybrid_optimizer_arranges_the_ranks(comm, zero_stage):
    rule = AdamW(lr=0.1)
    with Mesh(comm) as mesh:
        for data, tensor, pipeline in hybrid.factorisations(comm.size)[:5]:
            optimizer = HybridShardedOptimizer(rule, mesh, pipeline, tensor, zero_stage=zero_stage)
            assert optimizer.mesh.shape == {"pipeline": pipeline, "data": data, "tensor": tensor}
            assert (optimizer.mesh is mesh) == (data == comm.size)
            for given in ((mesh, pipeline, tensor, data), (optimizer.mesh,)):
                assert HybridShardedOptimizer(rule, *given, zero_stage=zero_stage).mesh is optimizer.mesh
            parameters = model(optimizer.mesh)
            train(optimizer, parameters)
            wrapped = mpishard.HybridShardedModel(namespace(parameters), optimizer.config)
            assert np.array_equal(wrapped.gather_full_parameters(), alone(mesh, rule, data).parameters)
            assert (parameters.sharded is not None) == (zero_stage == 3)
            assert (optimizer.state.nbytes == 2 * 8 * parameters.size) == (zero_stage == 0 or data == 1)


def test_sizes_that_do_not_fit(comm):
    with Mesh(comm) as mesh:
        with pytest.raises(ValueError, match=rf"pipeline=3 x data=-?\d+ x tensor=5 needs .*15 ranks, got {comm.size}"):
            HybridShardedOptimizer(SGD(), mesh, 3, 5)
        with pytest.raises(ValueError, match="mesh size tensor=0"):
            HybridShardedOptimizer(SGD(), mesh, 1, 0)
        for stage in (4, -1):
            with pytest.raises(ValueError, match=f"zero_stage={stage}"):
                HybridShardedOptimizer(SGD(), mesh, zero_stage=stage)
        with pytest.raises(TypeError, match="zero_stage=None"):
            HybridShardedOptimizer(SGD(), mesh, zero_stage=None)


@pytest.mark.mpi(min_size=2)
def test_a_mesh_that_is_split_otherwise(comm):
    with Mesh(comm, tensor=comm.size) as mesh:
        with pytest.raises(ValueError, match=f"tensor={comm.size} already, but pipeline="):
            HybridShardedOptimizer(SGD(), mesh, comm.size)
        with pytest.raises(ValueError, match="rank 0 of pipeline=1 and rank 0 of tensor=1"):
            DDPOptimizer(SGD(), mesh).step(np.zeros(3), np.zeros(3))
        with pytest.raises(ValueError, match="mesh of its optimizer"):
            DDPOptimizer(SGD(), mesh).bind(mpishard.FlatParameters(hybrid.specs()))
        with pytest.raises(ValueError, match="parameters are laid out for"):
            mpishard.HybridShardedModel(namespace(mpishard.FlatParameters(hybrid.specs())), mesh)
        with pytest.raises(ValueError, match="use HybridShardedModel"):
            mpishard.ShardedModel(namespace(model(mesh)), mesh)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_misplaces_its_parameters(comm, mesh):
    with Mesh(comm, pipeline=comm.size) as pipe:
        parameters = model(mesh if pipe.rank == comm.size - 1 else pipe)
        with pytest.raises(ValueError, match="parameters are laid out for"):
            mpishard.ZeRO1Optimizer(SGD(), pipe).bind(parameters)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_device_arrays_take_the_same_steps(base, device, strategy):
    rule = LAMB(lr=0.1)
    for mesh in meshes(base):
        parameters = mpishard.FlatParameters(
            hybrid.specs(mesh.pipeline.size), np.float64, place=mesh.place, units=hybrid.units(), module=device.module
        )
        arrays.copy_to_device(model(mesh).flat, parameters.flat)
        optimizer = strategy(rule, ShardingConfiguration(mesh, max_gradient_norm=LIMIT))
        for step in range(3):
            optimizer.step(parameters, device.put(hybrid.local_gradient(parameters, mesh, step)))
        expected = alone(base, rule, mesh.data.size, limit=LIMIT)
        assert np.array_equal(arrays.to_host(gathered(parameters, mesh)), expected.parameters), mesh
        optimizer.synchronize_optimizer_state()
        assert optimizer.serialize() == expected.state, mesh


# Muon, whose matrices are whole where a step needs them: Local SGD, modules of PyTorch, files (see test_hybrid).

SHAPES = dict(a=(5, 5), b=(4,), c=(6, 2), d=(2, 2))
SPECS = [mpishard.ParameterSpec(name, shape) for name, shape in SHAPES.items()]
RULE = Muon(lr=0.1, matrices=["a", "c"], rest=AdamW(lr=0.1))


def parameters():
    return mpishard.FlatParameters.over(np.linspace(-1, 1, sum(spec.size for spec in SPECS)), SPECS)


def gradients(step):
    return np.random.default_rng(step).integers(-8, 9, sum(spec.size for spec in SPECS)).astype(float)


def alone_of_muon(steps):
    """Each tensor by itself."""
    values, first = parameters().flat, 0
    for spec, rule in zip(SPECS, RULE.by_shape({spec.name: spec.shape for spec in SPECS}), strict=True):
        own = slice(first, first := first + spec.size)
        slots = [np.zeros(spec.size) for _ in rule.slots]
        shape = spec.shape if isinstance(rule, Muon) else (spec.size,)
        for step in range(steps):
            rule.update(values[own].reshape(shape), gradients(step)[own].reshape(shape), slots, step + 1)
    return values


def trained(mesh, strategy):
    """A transformer, after some steps in sums of a fixed order."""
    tokens = np.random.default_rng(1).integers(0, 23, (20, 9))
    model = nn.GPT(
        vocabulary_size=23,
        context_length=8,
        width=16,
        layers=2,
        heads=2,
        dtype=np.float32,
        seed=3,
        mesh=mesh,
        tied=True,
    )
    sizes = dict(samples=20, batch_size=12, tokens_per_sample=8, micro_batch_size=3, steps=4)
    problem = mpishard.OptimizationProblem.for_model(model, lambda s: (tokens[s, :-1], tokens[s, 1:]), **sizes)
    rule = Muon(lr=0.01, matrices="blocks.*", rest=AdamW(lr=0.01), adjust_lr_fn="match_rms_adamw", ema_decay=0.5)
    config = ShardingConfiguration(mesh, reproducible=True, max_gradient_norm=0.5, minimum_parameter_group_size=2000)
    return strategy(rule, config).optimize(problem, progress=False).parameters.gather().copy()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bits_of_one_rank(mesh, strategy):
    with Mesh(MPI.COMM_SELF) as single:
        expected = trained(single, DDPOptimizer)
    assert np.array_equal(trained(mesh, strategy), expected)


def test_workers_of_local_sgd_have_whole_matrices(mesh, same_on_all):
    """All have one gradient, so that their average is the step of each."""
    optimizer, own = mpishard.LocalSGDOptimizer(RULE, mesh, sync_every=2), parameters()
    for step in range(4):
        optimizer.step(own, gradients(step), count=mesh.size)
    assert same_on_all(own.flat)
    np.testing.assert_allclose(own.flat, alone_of_muon(4), rtol=1e-12)
    with pytest.raises(ValueError, match="outer rule Muon"):
        mpishard.LocalSGDOptimizer(AdamW(), mesh, outer=RULE)


@pytest.mark.mpi(min_size=2)
def test_workers_that_have_parts_of_matrices_are_refused_on_all_ranks(mesh):
    with Mesh(mesh.world.comm, tensor=mesh.size) as divided:
        specs = [mpishard.ParameterSpec("a", (6, 5), tensor_dim=0)]
        own = mpishard.FlatParameters(specs, np.float64, place=divided.place)
        with pytest.raises(ValueError, match="Muon .*tensor=1 and pipeline=1"):
            mpishard.LocalSGDOptimizer(Muon(matrices="a"), divided).bind(own)


def test_the_ledger_counts_what_travels(mesh):
    """Under ZeRO-1 the parts of matrices that others have, to their owners and back; under DDP owners have all."""
    size = sum(spec.size for spec in SPECS if spec.name in RULE.matrices)
    sent = {}
    for kind in (DDPOptimizer, mpishard.ZeRO1Optimizer):
        optimizer, own, before = kind(RULE, mesh), parameters(), mesh.ledger.sent("world", "all_to_all", "matrices")
        optimizer.step(own, gradients(0) * (mesh.rank == 0), count=1)
        np.testing.assert_array_equal(own.flat, alone_of_muon(1))
        found = mesh.ledger.sent("world", "all_to_all", "matrices") - before
        sent[kind] = mesh.world.all_reduce(np.array([found]))[0]
    assert sent[DDPOptimizer] == 8 * size * (mesh.size - 1)
    assert sent[mpishard.ZeRO1Optimizer] <= 2 * 8 * size
    assert (sent[mpishard.ZeRO1Optimizer] > 0) == (mesh.size > 1)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_modules_take_the_steps_of_pytorch(mesh, folder, monkeypatch, zero):
    """With schedulers, and continued from a file on one rank: as torch.optim.Muon beside AdamW, in float64."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    from torch_models import images, loss_of, samples_of, smooth

    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())  # its products, as ours
    x, y = images()[0].double(), images()[1]

    def take_steps(optimizers, module, own, steps):
        for step in steps:
            for each in optimizers:
                each.zero_grad()
            loss_of(module, x, y, own(step)).backward()
            for each in optimizers:
                each.step()
                for group in each.param_groups:
                    group["lr"] *= 0.75

    def order(step):
        return np.concatenate(mesh.world.allgather_object(samples_of(mesh, step)))

    theirs = smooth().double()
    matrix, *others = [theirs[1].weight, theirs[1].bias, theirs[3].weight, theirs[3].bias]
    pair = [torch.optim.Muon([matrix], lr=0.1), torch.optim.AdamW(others, lr=0.02, weight_decay=0.1)]
    take_steps(pair, theirs, order, range(6))

    rule = Muon(lr=0.1, matrices="1.*", rest=AdamW(lr=0.02, weight_decay=0.1))
    ours = smooth().double()
    units = {"shard_units": torch.nn.Linear} if zero == 3 else {}
    optimizer = mpishard.torch.as_distributed(ours, mesh, rule, zero=zero, **units)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]
    take_steps([optimizer], ours, lambda step: samples_of(mesh, step), range(3))
    optimizer.save_checkpoint(folder)
    again, orders = smooth().double(), {step: order(step) for step in range(3, 6)}
    take_steps([optimizer], ours, lambda step: samples_of(mesh, step), range(3, 6))
    with Mesh(MPI.COMM_SELF) as single:
        resumed = mpishard.torch.as_distributed(again, single, rule)
        resumed.load_checkpoint(folder)
        assert [group["lr"] for group in resumed.param_groups] == [0.1 * 0.75**3, 0.02 * 0.75**3]
        take_steps([resumed], again, orders.get, range(3, 6))
    with mpishard.torch.summon_full_parameters(ours):
        for p, q, r in zip(theirs.parameters(), ours.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-8, atol=1e-11)
            torch.testing.assert_close(r, p, rtol=1e-8, atol=1e-11)
    with pytest.raises(ValueError, match=r"param_groups\[0\]: Muon: momentum=2.0"):
        optimizer.param_groups[0]["momentum"] = 2.0
        loss_of(ours, x, y, samples_of(mesh, 0)).backward()
        optimizer.step()
    mesh.world.barrier()
