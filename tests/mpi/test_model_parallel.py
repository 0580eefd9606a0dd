"""The GPT split over the tensor axis, and the pipeline interpreter, against the same on one rank."""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpishard import Mesh, nn
from mpishard.comm.axis import Axis
from mpishard.comm.ledger import all_reduce_elements, ring_elements
from mpishard.layout.boxes import run_lengths, split
from mpishard.layout.tensors import ModelParallelRank, ParameterSpec
from mpishard.nn import tensor_parallel
from mpishard.nn.tensor_parallel import Slices
from mpishard.nn.units import Batch
from mpishard.nn.workspace import Workspace
from mpishard.parameters.flat import FlatParameters
from mpishard.pipeline.runtime import Pipeline
from mpishard.pipeline.schedule import make_schedule, simulate

# The GPT split over the tensor axis against the same on one rank, and the pairs of operations that split it.

# 24 heads can be split over 1, 2, 3, 4 and 8 ranks; 11 tokens leave uneven slices, and 3 * 5 rows uneven runs of rows.
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 11, 6, 24, 2, 24
SIZES = dict(vocabulary_size=VOCABULARY, context_length=CONTEXT, width=WIDTH, layers=LAYERS, heads=HEADS)
BATCH, LENGTH = 3, 5
ROWS = BATCH * LENGTH


@pytest.fixture
def mesh(comm):
    with Mesh(comm, tensor=comm.size) as mesh:
        yield mesh


def model(mesh=None, **options):
    """A small network, away from its initial values so that every tensor matters; the same on every mesh."""
    gpt = nn.GPT(**SIZES | options, dtype=np.float64, mesh=mesh)
    for number, spec in enumerate(gpt.parameters.specs):
        if spec.name in gpt.parameters:
            box = tuple(slice(*extent) for extent in gpt.parameters.box(spec.name))
            change = 0.3 * np.random.default_rng(number).standard_normal(spec.shape)
            gpt.parameters[spec.name][...] += change[box]
    return gpt


def batch(vocabulary=VOCABULARY, size=BATCH, length=LENGTH):
    random = np.random.default_rng(0)
    return random.integers(0, vocabulary, (size, length)), random.integers(0, vocabulary, (size, length))


def gradients(gpt, *pair):
    """Loss, and the local slices of all gradients with the partial ones summed over the tensor axis.  Collective."""
    parameters = gpt.parameters
    parameters.reset_gradients()
    loss = gpt.loss_and_gradient(*pair)
    found = {}
    for spec in parameters.local:
        found[spec.name] = parameters.gradient(spec.name)[0].copy()
        if spec.partial and gpt.mesh is not None:
            gpt.mesh.tensor.all_reduce(found[spec.name])
    return loss, found


def assert_close(actual, expected, name=""):
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12, err_msg=name)


OPTIONS = [dict(sequence_parallel=sequence, tied=tied) for sequence in (False, True) for tied in (False, True)]


@pytest.mark.parametrize("options", [*OPTIONS, dict(vocabulary_size=5), dict(microbatches=2, sequence_parallel=True)])
@pytest.mark.quick
def test_loss_gradients_and_logits_are_those_of_one_rank(mesh, same_on_all, options):
    one = {name: value for name, value in options.items() if name in ("tied", "vocabulary_size")}
    reference, gpt = model(**one), model(mesh, **options)
    pair = batch(options.get("vocabulary_size", VOCABULARY))
    loss, expected = gradients(reference, *pair)
    found_loss, found = gradients(gpt, *pair)
    assert_close(found_loss, loss)
    assert same_on_all(found_loss)
    assert list(found) == list(expected)
    for name, gradient in found.items():
        box = tuple(slice(*extent) for extent in gpt.parameters.box(name))
        assert_close(gradient, expected[name][box], name)
    assert_close(gpt.loss(*pair), loss)
    logits = gpt.logits(pair[0])
    assert_close(logits, reference.logits(pair[0]))
    assert same_on_all(logits)
    text = gpt.generate([1, 2], 8, temperature=0.7, seed=4)
    np.testing.assert_array_equal(text, reference.generate([1, 2], 8, temperature=0.7, seed=4))
    assert same_on_all(text)


@pytest.mark.parametrize("vocabulary", [1, 3, 7])
def test_the_loss_has_the_same_bits_on_all_ranks(mesh, same_on_all, vocabulary):
    """Also where ranks hold more, fewer, or no columns of the logits."""
    gpt = model(mesh, vocabulary_size=vocabulary)
    for size in range(1, 9):
        assert same_on_all(gpt.loss(*batch(vocabulary, size))), size


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_replicas_have_equal_gradients_unless_declared_partial(mesh, same_on_all, sequence_parallel):
    gpt = model(mesh, sequence_parallel=sequence_parallel)
    gpt.loss_and_gradient(*batch())
    for spec in gpt.parameters.specs:
        if spec.tensor_dim is None and not spec.partial:
            assert same_on_all(gpt.parameters.gradient(spec.name)[0]), spec.name


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_rank_holds_its_part_only(mesh, sequence_parallel):
    size, rank = mesh.tensor.size, mesh.tensor.rank
    gpt = model(mesh, sequence_parallel=sequence_parallel)
    vocabulary = run_lengths(split(VOCABULARY, size))[rank]
    assert gpt.parameters["token_embedding.weight"].shape == (vocabulary, WIDTH)
    assert gpt.parameters["head.weight"].shape == (WIDTH, vocabulary)
    assert gpt.parameters["blocks.0.attention.qkv.weight"].shape == (WIDTH, 3 * WIDTH // size)
    assert gpt.parameters["blocks.0.mlp.contract.weight"].shape == (4 * WIDTH // size, WIDTH)
    gpt.loss_and_gradient(*batch())
    (work,) = gpt.chunks[0].workspaces
    # Of each row: 14 widths of split things in a block, 4 of the norms and the residual stream, which rows split too.
    split_part = LAYERS * ROWS * (12 * WIDTH + HEADS) // size + ROWS * vocabulary
    own_rows = run_lengths(split(ROWS, size))[rank] if sequence_parallel else ROWS
    residual = own_rows * (LAYERS * (4 * WIDTH + 4) + 2 * WIDTH + 2)
    assert work.saved_bytes == 8 * (split_part + residual)


@pytest.mark.parametrize("options", OPTIONS)
def test_bytes_on_the_tensor_axis(mesh, options):
    """What a step sends, for n rows of c channels in L blocks.

    All rows on every rank: all-reduces of n c elements, 1 + 2 L forward (embedding; attention and MLP of each block)
    and 1 + 2 L backward (head; the same).  Rows split: each of them becomes a reduce-scatter, with an all-gather of
    the other direction as its adjoint, so 1 + 2 L of both in both directions; and the inputs of the 1 + 2 L
    column-parallel layers are gathered once more for the gradients of their weights.  The loss: a maximum and two sums
    a row.
    """
    size, rank = mesh.tensor.size, mesh.tensor.rank
    gpt = model(mesh, **options)
    mesh.ledger.clear()
    gpt.loss_and_gradient(*batch())

    def sent(op, label):
        return mesh.ledger.sent("tensor", op, label)

    times = 1 + 2 * LAYERS
    loss = all_reduce_elements(ROWS, size, rank) + all_reduce_elements(2 * ROWS, size, rank) if size > 1 else 0
    stream = all_reduce_elements(ROWS * WIDTH, size, rank) if size > 1 else 0
    pieces = [WIDTH * count for count in run_lengths(split(ROWS, size))]
    gather, scatter = (ring_elements(op, pieces, rank) if size > 1 else 0 for op in ("all_gather", "reduce_scatter"))
    if not options["sequence_parallel"]:
        assert sent("all_reduce", "activations") == 8 * (times * stream + loss)
        assert sent("all_reduce", "activation gradients") == 8 * times * stream
        assert mesh.ledger.sent("tensor") == 8 * (2 * times * stream + loss)
    else:
        assert sent("all_reduce", "activations") == 8 * loss
        assert sent("reduce_scatter", "activations") == 8 * times * scatter
        assert sent("all_gather", "activations") == 8 * 2 * times * gather
        assert sent("reduce_scatter", "activation gradients") == 8 * times * scatter
        assert sent("all_gather", "activation gradients") == 8 * times * gather
        assert mesh.ledger.sent("tensor") == 8 * (times * (2 * scatter + 3 * gather) + loss)
    assert mesh.ledger.sent() == mesh.ledger.sent("tensor")


# Stored activations are rounded to 8 or 11 bits, and so the gradients are off by about half of the last of these.
@pytest.mark.parametrize("dtype, bits", [(ml_dtypes.bfloat16, 8), (np.float16, 11)])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_stored_in_half_precision(mesh, dtype, bits, recompute):
    plain = model(mesh, microbatches=2)
    half = model(mesh, microbatches=2, storage_dtype=dtype, recompute=recompute, schedule="gpipe")
    loss, expected = gradients(plain, *batch())
    found_loss, found = gradients(half, *batch())
    # The forward pass itself is not rounded.
    assert found_loss == loss
    squares = np.array([[((found[name] - g) ** 2).sum(), (g**2).sum()] for name, g in expected.items()]).sum(axis=0)
    error = np.sqrt(np.divide(*mesh.tensor.all_reduce(squares)))
    assert 2.0**-bits / 4 < error < 2 * 2.0**-bits


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_weight_gradients_apart(mesh, sequence_parallel, recompute):
    """Input gradients of two micro-batches and then their weight gradients, against whole backward passes."""
    whole = model(mesh, microbatches=2, sequence_parallel=sequence_parallel)
    apart = model(mesh, sequence_parallel=sequence_parallel, recompute=recompute)
    tokens, targets = batch(size=4)
    loss, expected = gradients(whole, tokens, targets)
    (chunk,) = apart.chunks
    works = [chunk.workspace(), chunk.workspace()]
    parts = [
        Batch(*(np.ascontiguousarray(each[2 * i : 2 * i + 2]).ravel() for each in (tokens, targets)), LENGTH)
        for i in range(2)
    ]
    order = []
    apart.parameters.gradients.mark_ready = order.append
    assert sum(chunk.forward(None, work, part) for work, part in zip(works, parts, strict=True)) == loss
    for work, part in zip(works, parts, strict=True):
        assert chunk.input_gradient(None, work, part) is None
    assert not order
    for work in works:
        chunk.weight_gradient(work)
    assert sorted(order) == sorted(2 * list(apart.parameters))
    for name, gradient in expected.items():
        found = apart.parameters.gradient(name)[0].copy()
        if sequence_parallel and any(spec.partial for spec in apart.parameters.specs if spec.name == name):
            mesh.tensor.all_reduce(found)
        np.testing.assert_array_equal(found, gradient, err_msg=name)


@pytest.mark.parametrize("options", [*OPTIONS, dict(recompute=True), dict(storage_dtype=np.float16)])
def test_a_batch_of_none(mesh, options):
    gpt = model(mesh, **options)
    tokens = np.zeros((0, LENGTH), int)
    loss, found = gradients(gpt, tokens, tokens)
    assert loss == 0 == gpt.loss(tokens, tokens)
    assert not any(gradient.any() for gradient in found.values())
    assert gpt.logits(tokens).shape == (0, LENGTH, VOCABULARY)


def test_initial_values_do_not_depend_on_the_mesh(mesh):
    whole = nn.GPT(**SIZES, tied=True)
    parts = nn.GPT(**SIZES, tied=True, mesh=mesh, sequence_parallel=True)
    for name in parts.parameters:
        box = tuple(slice(*extent) for extent in parts.parameters.box(name))
        np.testing.assert_array_equal(parts.parameters[name], whole.parameters[name][box], err_msg=name)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bad", [VOCABULARY, -1, 2**40])
def test_a_number_that_no_rank_has_is_an_error_on_all(mesh, bad):
    tensor, (first, stop) = nn.TensorParallel(mesh.tensor), split(VOCABULARY, mesh.size)[mesh.rank : mesh.rank + 2]

    def loss(targets, vocabulary_size):
        given = tensor, first, nn.Workspace(float), vocabulary_size
        return nn.cross_entropy(np.ones((3, stop - first)), np.array(targets), *given)

    for vocabulary_size in (None, VOCABULARY):
        with pytest.raises(ValueError, match=rf"targets_n\[1\]={bad} .*0 to 10"):
            loss([0, bad, VOCABULARY - 1], vocabulary_size)
        assert loss([0, 5, VOCABULARY - 1], vocabulary_size) == pytest.approx(3 * np.log(VOCABULARY))
    chunk = model(mesh).chunks[0]
    with pytest.raises(ValueError, match=rf"indices_n\[2\]={bad} .*0 to 10"):
        chunk.infer(None, chunk.workspace(), Batch(np.array([0, 1, bad, 3, 4]), None, LENGTH))


@pytest.mark.mpi(min_size=2)
def test_heads_that_cannot_be_split(mesh):
    heads = mesh.tensor.size + 1
    with pytest.raises(ValueError, match=f"{heads} attention heads .*{heads - 1} tensor-parallel"):
        nn.GPT(**SIZES | dict(width=4 * heads, heads=heads), mesh=mesh)


def test_measured_costs_are_the_same_on_all_ranks(mesh, same_on_all):
    gpt = model(mesh, stage_costs="measured")
    assert same_on_all(repr(gpt.parameters.specs))
    loss, _ = gradients(model(mesh), *batch())
    assert gpt.loss(*batch()) == loss


class Deep(nn.Architecture):
    def __post_init__(self):
        super().__post_init__()
        if self.layers < LAYERS:  # as of the one block that is measured
            raise ValueError(f"{self.layers} layers are too few")


def test_costs_that_the_first_rank_cannot_measure_are_an_error_on_all(mesh):
    with pytest.raises(ValueError, match="1 layers are too few"):
        nn.Decoder(Deep(*SIZES.values()), mesh=mesh, stage_costs="measured")


# -- pairs ---------------------------------------------------------------------------------------------------------

COLUMNS = 7
PAIRS = {
    "copy": (tensor_parallel.Copy, "replicated", "apart"),
    "reduce": (tensor_parallel.Reduce, "apart", "replicated"),
    "gather rows": (tensor_parallel.GatherRows, "rows", "apart"),
    "reduce-scatter rows": (tensor_parallel.ReduceScatterRows, "apart", "rows"),
    "gather columns": (lambda a, s: tensor_parallel.GatherColumns(a, COLUMNS, s), "columns", "replicated"),
    "scatter columns": (lambda a, s: tensor_parallel.ScatterColumns(a, COLUMNS, s), "replicated", "columns"),
}


def element(axis, kind, rows, seed, slices):
    """A random array over the axis; where slices are apart, one for each sum of the rank's slices."""
    own = np.random.default_rng([seed, 0 if kind == "replicated" else axis.rank])
    part = run_lengths(slices.rank_cuts(rows if kind == "rows" else COLUMNS))[axis.rank]
    shape = part if kind == "rows" else rows, part if kind == "columns" else COLUMNS
    if kind != "apart":
        return own.standard_normal(shape)
    sums = slices.add(lambda index, out: None, lambda depth: np.empty(shape))
    return [own.standard_normal(shape) for _ in sums]


def inner(axis, kind, x, y):
    if kind == "apart":  # a single array stands for each
        x, y = np.broadcast_arrays(np.array(x), np.array(y))
    assert x.shape == y.shape
    product = np.array([(x * y).sum()])
    return (product if kind == "replicated" else axis.all_reduce(product))[0]


@pytest.mark.parametrize("each", [0, 1, 2, 3])  # slices of a rank; 0: one, and sums in any order
@pytest.mark.parametrize("rows", [13, 2, 0])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.pairs
@pytest.mark.quick
def test_adjoint(mesh, name, rows, each):
    """<A x, y> = <x, A' y>, each in the inner product of its space."""
    axis = mesh.tensor
    make, source, target = PAIRS[name]
    slices = Slices(axis, max(1, each * axis.size))
    pair = make(axis, slices)

    def memory(*shape):
        return np.full(shape, np.nan)

    x, y = element(axis, source, rows, 1, slices), element(axis, target, rows, 2, slices)
    image = pair.forward(copy.deepcopy(x), rows, memory).copy()
    back = pair.backward(copy.deepcopy(y), rows, memory).copy()
    assert inner(axis, target, image, y) == pytest.approx(inner(axis, source, x, back), rel=1e-13, abs=1e-13)
    # What is called replicated is.
    for kind, array in ((target, image), (source, back)):
        if kind == "replicated":
            same = axis.all_reduce(array.copy(), op="max") - axis.all_reduce(array.copy(), op="min")
            assert not same.any()


@pytest.mark.parametrize("name", PAIRS)
def test_one_rank_gets_back_what_it_gave(name):
    axis = Axis.single("tensor")
    make, source, target = PAIRS[name]
    pair, x = make(axis, Slices(axis)), np.ones((3, COLUMNS))
    assert pair.forward([x] if source == "apart" else x, 3, None) is x
    assert pair.backward([x] if target == "apart" else x, 3, None) is x


# The pipeline interpreter: every schedule gives the gradients of one rank, and does what its program says.

PIPELINE_WIDTH = 3
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)]


class Scale:
    """One stage: ``y = x * w`` for each column; the loss is the sum of what comes out last."""

    def __init__(self, stage, stages, parameters):
        self.virtual_stage, self.last, self.parameters = stage, stages - 1, parameters
        self.scratch = Workspace(np.float64)

    def input_shape(self, batch):
        return batch.shape

    output_shape = input_shape

    def workspace(self):
        return Workspace(np.float64, sharing=self.scratch)

    def infer(self, x, work, batch):
        x = batch if x is None else x
        work.kept["x"] = x
        y = work.save("y", *x.shape)
        np.multiply(x, self.parameters[f"w{self.virtual_stage}"], out=y)
        return y

    def forward(self, x, work, batch):
        y = self.infer(x, work, batch)
        return float(y.sum()) if self.virtual_stage == self.last else y

    def input_gradient(self, dy, work, batch):
        dy = np.ones_like(batch) if dy is None else dy
        work.kept["dy"] = dy.copy()
        dx = work.borrow("dx", *dy.shape)
        np.multiply(dy, self.parameters[f"w{self.virtual_stage}"], out=dx)
        return None if self.virtual_stage == 0 else dx

    def weight_gradient(self, work):
        name = f"w{self.virtual_stage}"
        view, add = self.parameters.gradient(name)
        value = (work.kept["x"] * work.kept["dy"]).sum(axis=0)
        view[...] = view + value if add else value
        self.parameters.mark_ready(name)

    def backward(self, dy, work, batch):
        dx = self.input_gradient(dy, work, batch)
        self.weight_gradient(work)
        return dx


def pipeline(mesh, schedule, chunks, **options):
    """A pipeline over all ranks, with a parameter on each stage."""
    stages = mesh.size * chunks
    specs = [ParameterSpec(f"w{stage}", (PIPELINE_WIDTH,), stage=stage) for stage in range(stages)]
    parameters = FlatParameters(
        specs, np.float64, place=ModelParallelRank(pipeline_rank=mesh.pipeline.rank, pipeline_size=mesh.size)
    )
    for name in parameters:
        parameters[name][...] = weights(stages)[int(name[1:])]
    own = [Scale(chunk * mesh.size + mesh.pipeline.rank, stages, parameters) for chunk in range(chunks)]
    return Pipeline(mesh.pipeline, own, schedule, parameters, **options)


def weights(stages):
    return np.random.default_rng(stages).uniform(0.5, 1.5, (stages, PIPELINE_WIDTH))


def micro_batches(count):
    """Uneven ones, some empty."""
    random = np.random.default_rng(count)
    return [random.standard_normal((index % 4, PIPELINE_WIDTH)) for index in range(count)]


@pytest.fixture(scope="module")
def pipe():
    with Mesh(MPI.COMM_WORLD, data=1, pipeline=MPI.COMM_WORLD.size) as mesh:
        yield mesh


def counts_of_pipeline(size):
    """Fewer micro-batches than stages, as many, and no multiple."""
    return sorted({1, max(1, size - 1), size, size + 1, 2 * size + 1})


class Synchronous:
    """A communicator whose sends complete only when their receiver is there."""

    def __init__(self, comm):
        self.comm = comm

    def Isend(self, *arguments):
        return self.comm.Issend(*arguments)

    def __getattr__(self, name):
        return getattr(self.comm, name)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.quick
def test_gradients_and_loss_of_one_rank(pipe, monkeypatch, schedule, chunks, synchronous):
    if synchronous:
        monkeypatch.setattr(pipe.pipeline._channel, "comm", Synchronous(pipe.pipeline.comm))
    for count in counts_of_pipeline(pipe.size):
        line = pipeline(pipe, schedule, chunks)
        batches = micro_batches(count)
        product = weights(line.virtual_stages).prod(axis=0)
        columns = sum(batch.sum(axis=0) for batch in batches)
        for total in (1, 2):  # a second call adds its gradients
            assert np.isclose(line.train(batches), (columns * product).sum(), rtol=1e-12)
            for name in line.parameters:
                expected = total * columns * product / weights(line.virtual_stages)[int(name[1:])]
                assert np.allclose(line.parameters.gradient(name)[0], expected, rtol=1e-12, atol=1e-12)
        assert np.isclose(line.evaluate(batches), (columns * product).sum(), rtol=1e-12)
        prediction = line.infer(batches[-1])
        assert (prediction is None) == (pipe.rank < pipe.size - 1)
        if prediction is not None:
            assert np.allclose(prediction, batches[-1] * product, rtol=1e-12)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_runs_what_the_simulator_ran(pipe, comm, schedule, chunks):
    """Actions by rank, what waited for what, and how many micro-batches are in flight."""
    count = 2 * pipe.size + 1
    line = pipeline(pipe, schedule, chunks)
    line.train(micro_batches(count))
    plan = make_schedule(schedule, pipe.size, count, chunks)
    timeline = simulate(plan)
    executed = [item.action for item in line.executed]
    mine = sorted((event for event in timeline.events if event.rank == pipe.rank), key=lambda event: event.start)
    assert executed == list(plan.programs[pipe.rank]) == [event.action for event in mine]
    assert line.peak_in_flight == timeline.peak_live[pipe.rank]
    times = {
        (item.action.kind, item.action.chunk * pipe.size + rank, item.action.microbatch): item
        for rank, actions in enumerate(comm.allgather(line.executed))
        for item in actions
    }
    back = "I" if schedule == "zb-h1" else "B"
    for (kind, stage, microbatch), item in times.items():
        if kind == "F" and stage:
            assert times["F", stage - 1, microbatch].start < item.stop
        if kind == back and stage < line.virtual_stages - 1:
            assert times[back, stage + 1, microbatch].start < item.stop


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_on_the_wire(pipe, dtype):
    line = pipeline(pipe, "1f1b", 1, wire_dtype=dtype)
    batches = [np.ones((2, PIPELINE_WIDTH))] * 3
    pipe.ledger.clear()
    loss = line.train(batches)
    expected = 6 * weights(line.virtual_stages).prod(axis=0).sum()
    assert np.isclose(loss, expected, rtol=0.01 * pipe.size)
    assert np.isclose(loss, expected, rtol=1e-12) == (pipe.size == 1)
    last, first = pipe.rank == pipe.size - 1, pipe.rank == 0
    assert pipe.ledger.sent("pipeline", "send", "activations") == (0 if last else 3 * 2 * PIPELINE_WIDTH * 2)
    assert pipe.ledger.sent("pipeline", "send", "activation gradients") == (0 if first else 3 * 2 * PIPELINE_WIDTH * 2)


def test_no_pass_after_one_that_was_left(pipe):
    """Messages of the pass that was left would be taken for those of the next."""
    line = pipeline(pipe, "gpipe", 1)
    batches = [np.full((2, PIPELINE_WIDTH), value) for value in (1.0, 2.0, 3.0)]
    # Each rank leaves before it waits for what others no longer send, and what was sent is received.
    left, forward, calls = (2 if pipe.rank == 0 else 1), line.chunks[0].forward, []

    def leaving(x, work, batch):
        calls.append(batch)
        if len(calls) == left:
            raise ZeroDivisionError
        return forward(x, work, batch)

    line.chunks[0].forward = leaving
    if pipe.rank > 1:
        line._unfinished = True
    else:
        with pytest.raises(ZeroDivisionError):
            line.train(batches)
    line.chunks[0].forward = forward
    line.parameters.reset_gradients()
    if pipe.size == 1:
        assert np.isclose(line.train(batches), 12 * weights(1).sum(), rtol=1e-12)
    else:
        with pytest.raises(RuntimeError, match="earlier pipeline pass"):
            line.train(batches)
