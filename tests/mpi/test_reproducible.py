"""`reproducible=True`: the same bits on any number of ranks, under every strategy, and on pipelines."""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI
from steps import STRATEGIES, write_gradients

import mpishard
from mpishard import (
    SGD,
    AdamW,
    DDPOptimizer,
    OptimizationProblem,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    nn,
)
from mpishard.backend import array as arrays
from mpishard.comm.ledger import all_reduce_elements
from mpishard.data_parallel import arithmetic
from mpishard.data_parallel.models import HybridShardedModel
from mpishard.layout.tensors import ParameterSpec
from mpishard.parameters.flat import FlatParameters
from mpishard.reduction.tree_sum import tree_sum

pytestmark = pytest.mark.pairs(1)

# `reproducible=True`: the same bits on any number of ranks, under every strategy.

TOKENS = np.random.default_rng(1).integers(0, 23, (45, 9))
DATA = np.random.default_rng(0).standard_normal((45, 600)).astype(np.float32)
SIZES = {"samples": 45, "batch_size": 20, "tokens_per_sample": 8}
SPECS = [ParameterSpec("a", (20, 10)), ParameterSpec("b", (0,)), ParameterSpec("c", (399,)), ParameterSpec("d", (1,))]


each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def batch_of(samples):
    return TOKENS[samples, :-1], TOKENS[samples, 1:]


def make_gpt(mesh, layers=2, heads=2, **options):
    sizes = dict(vocabulary_size=23, context_length=8, width=16, layers=layers, heads=heads)
    return nn.GPT(**sizes, seed=3, mesh=mesh, **{"tied": True, **options})


def gpt_problem(mesh, sizes=(2, 2), **options):
    model = make_gpt(mesh, *sizes, **options.pop("model", {}))
    return OptimizationProblem.for_model(model, batch_of, **({**SIZES, "steps": 20} | options))


def terms_of(mesh):
    """A gradient of each rank."""
    return np.random.default_rng(2).standard_normal((mesh.size, 600)).astype(np.float32)


def own_problem(mesh, dtype=np.float32, **options):
    """Least squares, by a function of flat arrays."""
    data = DATA.astype(dtype)
    targets = data.sum(1)

    def function(parameters, samples, gradients):
        residual = data[samples] @ parameters - targets[samples]
        gradients += data[samples].T @ residual
        return 0.5 * float(residual @ residual)

    options = {"batch_size": 20, "steps": 20} | options
    return OptimizationProblem(function, np.zeros(600, dtype), samples=45, **options)


def run(strategy, mesh, make_problem, **options):
    """Parameters and losses."""
    options = {"max_gradient_norm": 0.5, "minimum_parameter_group_size": 2000} | options
    optimizer = strategy(AdamW(lr=0.01), ShardingConfiguration(mesh, reproducible=True, **options))
    result = optimizer.optimize(make_problem(mesh), progress=False)
    found = result.parameters
    return (found.gather() if isinstance(found, FlatParameters) else found).copy(), result.loss_history


def same_bits(found, expected):
    return all(one.dtype == two.dtype and np.array_equal(one, two) for one, two in zip(found, expected, strict=True))


@functools.cache
def alone(make_problem):
    """The run of one rank, by DDP."""
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        return run(DDPOptimizer, mesh, make_problem)


PROBLEMS = {
    "gpt": functools.partial(gpt_problem, micro_batch_size=3),
    "gpt, micro-batches by default": functools.partial(gpt_problem, steps=5),
    "gpt, fewer micro-batches than ranks": functools.partial(gpt_problem, micro_batch_size=8, steps=5),
    "own, float32": functools.partial(own_problem, micro_batch_size=3),
    "own, float64": functools.partial(own_problem, dtype=np.float64),
}


@each_strategy
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_bits_of_one_rank(mesh, strategy, problem):
    """With clipping, and batches of 20, 20 and 5 samples in an epoch of 45."""
    found = run(strategy, mesh, PROBLEMS[problem])
    assert same_bits(found, alone(PROBLEMS[problem]))


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer])
def test_buckets_and_overlap_do_not_matter(mesh, strategy):
    options = {"minimum_parameter_group_size": 100, "overlap_communication": False}
    assert same_bits(run(strategy, mesh, PROBLEMS["gpt"], **options), alone(PROBLEMS["gpt"]))


@each_strategy
@pytest.mark.parametrize("model", [nn.GPT, nn.Llama])
@pytest.mark.parametrize("how", ["bound", "bound by the first step", "a flat gradient"])
def test_tied_weights_in_a_loop_of_ones_own(mesh, strategy, model, how, monkeypatch):
    """To rounding the steps without reproducible sums; what nobody has written is NaN."""
    if how == "a flat gradient" and strategy.sharding.shards_parameters:
        pytest.skip("there is no flat gradient of parameters that are gathered on demand")
    monkeypatch.setattr(arrays, "_POISONS", True)
    sizes = {"vocabulary_size": 23, "context_length": 8, "width": 16, "layers": 2, "heads": 2}
    found = []
    for reproducible in (False, True):
        trained = model(**sizes, dtype=np.float64, seed=3, tied=True, mesh=mesh)
        optimizer = strategy(SGD(lr=0.001), ShardingConfiguration(mesh, reproducible=reproducible))
        if how == "bound":
            optimizer.bind(trained.parameters)
        for step in range(3):
            tokens = TOKENS[3 * (step * mesh.size + mesh.rank) :][:3] if step else TOKENS[mesh.rank :][:3]
            source = trained
            if how == "a flat gradient":  # by another model of the same values
                source = model(**sizes, dtype=np.float64, seed=3, tied=True)
                source.parameters.flat[...] = trained.parameters.flat
            source.loss_and_gradient(tokens[:, :-1], tokens[:, 1:])
            gradient = [source.parameters.gradients.flat.copy()] if source is not trained else []
            optimizer.step(trained.parameters, *gradient)
        found.append(trained.parameters.gather())
    np.testing.assert_allclose(found[1], found[0], rtol=1e-11, atol=1e-13)


def linear_problem(mesh):
    """Gradients that do not depend on the parameters, of a model that overflows while the loss scale is above 2**14."""
    parameters = FlatParameters(SPECS, dtype=np.float32)

    def function(_, samples, gradients):
        gradient = DATA[samples].sum(0) * parameters.loss_scale
        if 7 in samples and parameters.loss_scale > 2.0**14:
            gradient[3] = np.inf
        write_gradients(parameters, gradient)
        return float(DATA[samples, 0].astype(float).sum())

    return OptimizationProblem(function, parameters, samples=45, batch_size=20, micro_batch_size=2, steps=20)


@each_strategy
def test_dynamic_loss_scale(mesh, strategy):
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        expected = run(DDPOptimizer, one, linear_problem, loss_scale="dynamic")
        unscaled = run(DDPOptimizer, one, linear_problem)
    assert same_bits(run(strategy, mesh, linear_problem, loss_scale="dynamic"), expected)
    assert not np.array_equal(expected[0], unscaled[0])  # steps were skipped


@each_strategy
def test_what_is_not_finite_is_named_on_all_ranks(mesh, strategy):
    def spoiled(mesh):
        parameters = FlatParameters(SPECS, dtype=np.float32)

        def function(_, samples, gradients):
            gradient = np.ones(600, np.float32)
            gradient[300] = np.nan if 7 in samples else 1
            write_gradients(parameters, gradient)
            return 0.0

        return OptimizationProblem(function, parameters, samples=45, batch_size=45, micro_batch_size=2, steps=1)

    with pytest.raises(FloatingPointError, match="'c' on rank"):
        run(strategy, mesh, spoiled)


@each_strategy
def test_a_step_of_ones_own_adds_by_data_rank(mesh, device, strategy):
    """Device arrays are staged through the host, and added up where they are."""
    terms, expected = terms_of(mesh), np.zeros(600, np.float32)
    flat, there = expected.copy(), device.put(expected.copy())
    one, other = (strategy(SGD(lr=1.0), ShardingConfiguration(mesh, reproducible=True)) for _ in range(2))
    for _ in range(3):
        one.step(flat, terms[mesh.rank].copy(), count=1)
        other.step(there, device.put(terms[mesh.rank]), count=1)
        expected -= tree_sum(list(terms))
    assert np.array_equal(flat, expected) and np.array_equal(arrays.to_host(there), expected)


def test_a_model_of_ones_own_loop_adds_by_data_rank(mesh):
    """Before the first step, and with an optimizer."""
    terms = terms_of(mesh)
    config = ShardingConfiguration(mesh, reproducible=True)
    parameters = FlatParameters(SPECS, dtype=np.float32)
    model = mpishard.as_distributed(SimpleNamespace(parameters=parameters), config)
    optimizer = DDPOptimizer(SGD(lr=1.0), config)
    for _ in range(2):
        write_gradients(parameters, terms[mesh.rank])
        model.synchronize_gradients()
        assert np.array_equal(parameters.gradients.flat, tree_sum(list(terms)))
        optimizer.step(parameters)


@pytest.mark.mpi(min_size=4)
@each_strategy
def test_the_number_of_data_ranks_does_not_matter_to_tensor_and_pipeline_ranks(comm, strategy):
    """Their own number does: they add up in the order of MPI, which two ranks have only one of."""
    if comm.size % 2:
        pytest.skip("for an even number of ranks")
    make = functools.partial(gpt_problem, sizes=(4, 2), micro_batch_size=3, steps=3)
    for shape, model in (
        ({"tensor": 2}, {"sequence_parallel": True}),
        ({"pipeline": 2}, {"chunks": 2, "schedule": "interleaved"}),
    ):
        found = []
        for ranks in (2, comm.size):
            part = comm.Split(comm.rank // ranks, comm.rank)
            with mpishard.Mesh(part, **shape) as mesh:
                bits = run(strategy, mesh, functools.partial(make, model=model))
                found.append(comm.allgather(((mesh.pipeline.rank, mesh.tensor.rank), bits)))
            part.Free()
        expected = dict(found[0])
        for place, bits in found[1]:
            assert same_bits(bits, expected[place])


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer])
def test_one_partial_sum_a_rank_costs_the_bytes_of_an_all_reduce(mesh, strategy):
    optimizer = strategy(SGD(lr=1.0), ShardingConfiguration(mesh, reproducible=True))
    optimizer.step(np.zeros(1001, np.float32), np.ones(1001, np.float32))
    summary = mesh.ledger.summary()
    kinds = ["data.all_to_all gradients", "data.all_gather gradients", "data.all_gather parameters"]
    assert sum(summary[kind]["bytes"] for kind in kinds if kind in summary) == 4 * all_reduce_elements(
        1001, mesh.size, mesh.rank
    )
    assert "data.all_reduce gradients" not in summary
    assert "data.reduce_scatter gradients" not in summary


def test_what_cannot_be_ordered_is_refused(comm, mesh):
    with pytest.raises(ValueError, match="auto_sync_gradients=False"):
        ShardingConfiguration(mesh, reproducible=True, auto_sync_gradients=False)
    with pytest.raises(ValueError, match="losses_and_gradient"):
        run(ZeRO2Optimizer, mesh, cut_problem)


class Plain:
    """A model that takes one micro-batch in a call, and may cut it."""

    def __init__(self, model):
        self.parameters, self.loss_and_gradient = model.parameters, model.loss_and_gradient


def cut_problem(mesh):
    """A model that makes two micro-batches of each that it gets, without a word to the loop."""
    model = make_gpt(mesh, microbatches=2)
    return OptimizationProblem.for_model(Plain(model), batch_of, **SIZES, micro_batch_size=3, steps=5)


def test_what_a_model_makes_of_one_micro_batch_adds_up(mesh):
    for strategy in (DDPOptimizer, ZeRO1Optimizer):
        assert same_bits(run(strategy, mesh, cut_problem), alone(cut_problem))


@each_strategy
def test_a_model_that_takes_several_micro_batches_cuts_none(mesh, strategy):
    make = functools.partial(gpt_problem, micro_batch_size=3, steps=5)
    cutting = functools.partial(make, model={"microbatches": 2})
    assert same_bits(run(strategy, mesh, cutting), alone(make))


@pytest.fixture
def resumed(mesh, folder):
    """A run of some steps in all, from where the last one ended."""

    def resumed(steps, size=3, **options):
        optimizer = ZeRO1Optimizer(SGD(lr=0.01), ShardingConfiguration(mesh, reproducible=True, **options))
        with mpishard.Checkpoints(folder, mesh) as checkpoints:
            problem = own_problem(mesh, steps=steps, micro_batch_size=size)
            result = optimizer.optimize(problem, checkpoints=checkpoints, resume=True, progress=False)
        return optimizer.state.facts, result.resumed_steps

    return resumed


def test_a_resume_with_other_micro_batches_is_refused_or_recorded(mesh, resumed, capsys):
    """On all ranks, and before anything changes."""
    resumed(2)
    with pytest.raises(ValueError, match="micro_batch_size is 3 there and 2 here"):
        resumed(4, 2)
    assert resumed(3)[1] == 2
    capsys.readouterr()
    resumed(4, 2, allow_different_bits=True)
    difference = "micro_batch_size is 3 there and 2 here"
    assert (difference in capsys.readouterr().err) == (mesh.rank == 0)
    # It is in the checkpoint from then on.
    facts, _ = resumed(5, 2)
    assert facts["different_bits.json"] == [f"from step 3 on other bits than in one run: {difference}"]


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_kernels_are_told(mesh, monkeypatch, capsys):
    facts = arithmetic.arithmetic()
    kernels = "Zen" if mesh.rank == mesh.size - 1 else "Haswell"
    monkeypatch.setattr(arithmetic, "arithmetic", lambda: facts | {"BLAS kernels": kernels})
    with pytest.raises(ValueError, match=f"BLAS kernels is Haswell on rank.* Zen on rank {mesh.size - 1}"):
        run(DDPOptimizer, mesh, own_problem)
    run(DDPOptimizer, mesh, own_problem, allow_different_bits=True)
    assert ("Zen on rank" in capsys.readouterr().err) == (mesh.rank == 0)


# `reproducible=True` on pipelines: the bits of one rank, of parameters and losses, whatever the stages are.

SCHEDULES = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zb-h1": {"schedule": "zb-h1"},
    # Weight gradients of blocks come with the input gradients.
    "zb-h1, recompute": {"schedule": "zb-h1", "recompute": True},
}


def run_of_pipeline(mesh, strategy, tied, micro_batch_size=3, wrap=None, model=None, **options):
    """All parameters of the model, and the losses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*micro-batches for .* pipeline stages")
        gpt = make_gpt(mesh, layers=8, tied=tied, **(model or {}))
    whole = HybridShardedModel(gpt, mesh)
    trained = gpt if wrap is None else wrap(gpt)
    sizes = {**SIZES, "steps": 4, "micro_batch_size": micro_batch_size}
    _, losses = run(strategy, mesh, lambda _: OptimizationProblem.for_model(trained, batch_of, **sizes), **options)
    return whole.gather_full_parameters().tobytes(), np.array(losses).tobytes()


@functools.cache
def alone_of_pipeline(tied, micro_batch_size=3):
    """The run of one rank, by DDP."""
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        return run_of_pipeline(mesh, DDPOptimizer, tied, micro_batch_size)


@pytest.fixture(scope="module")
def meshes(comm):
    """Each number of stages that fits, the other ranks on the data axis."""
    made = [mpishard.Mesh(comm, pipeline=stages) for stages in (2, 3, 4) if comm.size % stages == 0]
    yield made or [mpishard.Mesh(comm)]
    for mesh in made:
        mesh.free()


@each_strategy
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_bits_of_one_rank_of_pipeline(meshes, tied, strategy, schedule):
    """With clipping, and batches of 20, 20 and 5 samples in an epoch of 45."""
    for mesh in meshes:
        assert run_of_pipeline(mesh, strategy, tied, model=SCHEDULES[schedule]) == alone_of_pipeline(tied)


@each_strategy
def test_data_ranks_with_fewer_micro_batches_or_none(meshes, strategy):
    """Batches of 3, 3 and 1 micro-batches; with buckets of few tensors, one sum at a time."""
    options = {"minimum_parameter_group_size": 100, "overlap_communication": False}
    for mesh in meshes:
        found = run_of_pipeline(mesh, strategy, True, 8, model=SCHEDULES["interleaved"], **options)
        assert found == alone_of_pipeline(True, 8) != alone_of_pipeline(True)


def test_a_model_without_the_method_is_called_for_each_micro_batch(meshes):
    for mesh in meshes:
        distributed = functools.partial(mpishard.as_distributed, mesh_or_config=mesh)
        for wrap, model in ((Plain, {"microbatches": 1}), (distributed, {})):
            assert run_of_pipeline(mesh, ZeRO1Optimizer, True, wrap=wrap, model=model) == alone_of_pipeline(True)


def test_ties_cost_no_message_a_micro_batch(meshes):
    """The table's gradient goes over the pipeline once a step: on each rank its own share."""
    for mesh in meshes:
        if mesh.pipeline.size == 1 or mesh.tensor.size > 1:
            continue
        mesh.ledger.clear()
        run_of_pipeline(mesh, ZeRO1Optimizer, True)
        summary = mesh.ledger.summary()
        calls = [entry["calls"] for kind, entry in summary.items() if "ties" in kind and "gradients" in kind]
        holds = mesh.pipeline.rank in (0, mesh.pipeline.size - 1)
        assert calls == ([4] if holds else [])


def test_storage_in_half_precision_is_refused_on_several_stages(meshes):
    for mesh in meshes:
        if mesh.pipeline.size > 1:
            with pytest.raises(ValueError, match="storage_dtype"):
                run_of_pipeline(mesh, DDPOptimizer, False, model={"storage_dtype": np.float16})
