"""The network and steps on a mesh with arrays that the host cannot touch: the numbers of one rank's host."""

from __future__ import annotations

import cuda_on_host
import ml_dtypes
import numpy as np
import pytest
import standin
from devices import CUPY_DIRECT
from mpi4py import MPI
from steps import STRATEGIES, write_gradients
from waits import counted_waits, launches

from mpishard import (
    LAMB,
    SGD,
    AdamW,
    CollectiveMismatchError,
    DDPOptimizer,
    FlatParameters,
    Mesh,
    ParameterGroup,
    RMSprop,
    ZeRO3Optimizer,
    nn,
)
from mpishard import ShardingConfiguration as Configuration
from mpishard.backend import array as arrays
from mpishard.layout.tensors import ParameterSpec

pytestmark = [
    pytest.mark.pairs(1),
    pytest.mark.filterwarnings("ignore:2 micro-batches for:UserWarning"),
    pytest.mark.filterwarnings("ignore:compute_dtype=.* on NumPy arrays:UserWarning"),
]
needs_compiler = pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no C++ compiler")

# The network on a mesh with arrays that the host cannot touch: the same numbers as on one rank's host.

# Not enough micro-batches to fill a pipeline, but enough to add up.
VOCABULARY, LENGTH, WIDTH, HEADS = 11, 5, 24, 24
SIZES = dict(vocabulary_size=VOCABULARY, context_length=LENGTH, width=WIDTH, heads=HEADS)
TOKENS, TARGETS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 3, LENGTH))


def alone(layers):
    """Loss, gradients, logits and a text of one rank."""
    model = nn.GPT(**SIZES, layers=layers, dtype=np.float64)
    loss = model.loss_and_gradient(TOKENS, TARGETS)
    gradients = {name: model.parameters.gradient(name)[0].copy() for name in model.parameters}
    return loss, gradients, model.logits(TOKENS), model.generate([1, 2], 2)


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_the_same_as_on_the_host_of_one_rank(comm, device, axis):
    layers = comm.size if axis == "pipeline" else 1
    loss, gradients, logits, text = alone(layers)
    module, shape = device.module, {"data": 1, "tensor": 1, "pipeline": 1, axis: comm.size}
    with Mesh(comm, **shape) as mesh:
        options = {"sharded_parameters": axis == "data", "sequence_parallel": axis == "tensor", "microbatches": 2}
        model = nn.GPT(**SIZES, layers=layers, dtype=np.float64, mesh=mesh, module=module, **options)
        assert model.loss_and_gradient(TOKENS, TARGETS) == pytest.approx(loss, rel=1e-13)
        for spec, name in zip(model.parameters.local, model.parameters, strict=True):
            own = tuple(slice(*extent) for extent in model.parameters.box(name))
            found = arrays.to_host(model.parameters.gradient(name)[0])
            if spec.partial:
                mesh.tensor.all_reduce(found)
            np.testing.assert_allclose(found, gradients[name][own], rtol=1e-11, atol=1e-11, err_msg=name)
        np.testing.assert_allclose(arrays.to_host(model.logits(TOKENS)), logits, rtol=1e-12, atol=1e-12)
        assert np.array_equal(model.generate([1, 2], 2), text)


def test_halves_travel_between_stages(comm, device):
    module = device.module
    with Mesh(comm, pipeline=comm.size) as mesh:
        halves = {"wire_dtype": np.float16, "compute_dtype": np.float16}
        model = nn.GPT(**SIZES, layers=comm.size, mesh=mesh, module=module, microbatches=2, **halves)
        assert model.loss_and_gradient(TOKENS, TARGETS) == pytest.approx(alone(comm.size)[0], rel=2e-3)


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_products_in_half_precision(comm, device, half, sequence_parallel):
    def run(**options):
        model = nn.GPT(**SIZES, layers=2, compute_dtype=half, module=device.module, **options)
        loss = model.loss_and_gradient(TOKENS, TARGETS)
        return loss, model, {name: arrays.to_host(model.parameters.gradient(name)[0]) for name in model.parameters}

    loss, _, gradients = run()
    precision = float(ml_dtypes.finfo(half).eps) / 2
    with Mesh(comm, data=1, tensor=comm.size) as mesh:
        found_loss, model, found = run(mesh=mesh, sequence_parallel=sequence_parallel)
        assert found_loss == pytest.approx(loss, rel=precision)
        for spec, name in zip(model.parameters.local, model.parameters, strict=True):
            if spec.partial:
                mesh.tensor.all_reduce(found[name])
            if name.endswith("qkv.bias"):
                continue  # the gradient by the bias of keys is rounding noise
            own = gradients[name][tuple(slice(*extent) for extent in model.parameters.box(name))]
            assert np.linalg.norm(found[name] - own) <= 4 * precision * np.linalg.norm(gradients[name]), name


@pytest.mark.full
def test_weights_that_an_optimizer_shards_are_rounded_where_they_are_gathered(mesh, device):
    """The units of a model are gathered in turns into the same memory."""
    losses = []
    for optimizer_of in (DDPOptimizer, ZeRO3Optimizer):
        model = nn.GPT(**SIZES, layers=4, mesh=mesh, compute_dtype=np.float16, module=device.module)
        optimizer = optimizer_of(AdamW(lr=1e-2), mesh)
        losses.append([])
        for _ in range(3):
            losses[-1].append(model.loss_and_gradient(TOKENS, TARGETS))
            optimizer.step(model.parameters, count=mesh.data.size * TARGETS.size)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("kind", ["half", "device"])
def test_copies_that_travel_live_until_the_call_is_done(mesh, device, kind):
    """mpi4py does not hold them, and freed memory is soon written to by something else."""
    axis = mesh.data
    host = np.full(300 * axis.size, axis.rank + 1, np.float16 if kind == "half" else np.float64)
    total = axis.size * (axis.size + 1) / 2

    put = np.copy if kind == "half" else device.put
    for _ in range(5):
        out, everywhere, gathered = put(host[:300]), put(host), put(host)
        pending = [
            axis.start_reduce_scatter(put(host), out, [300] * axis.size),
            axis.start_all_reduce(put(host), everywhere),
            axis.start_all_gather(gathered, put(host[:300]), [300] * axis.size),
        ]
        rubbish = [np.full(size, 1e4) for size in range(1, 3000, 13)]
        for each in pending:
            each.wait()
        del rubbish
        assert np.all(arrays.to_host(out) == total)
        assert np.all(arrays.to_host(everywhere) == total)
        assert np.array_equal(arrays.to_host(gathered), np.repeat(np.arange(1, axis.size + 1), 300))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", ["aware", CUPY_DIRECT], indirect=True)
@pytest.mark.parametrize("start", ["", "start_"])
def test_debug_mode_says_that_some_ranks_reduce_and_scatter_by_device_pointers(comm, device, start):
    """From some size on NumPy arrays are exchanged, but MPI itself reduces what device pointers lead to."""
    with Mesh(comm, debug=True) as mesh:
        axis = mesh.data
        host = np.ones(2**16 * axis.size)
        call = getattr(axis, f"{start}reduce_scatter")
        with pytest.raises(CollectiveMismatchError, match=r"reduce_scatter\(.*, sum\) by device pointers called at"):
            call(host if mesh.rank == 0 else device.put(host))
        for put in (np.copy, device.put):
            found = call(put(host))
            assert (arrays.to_host(found.wait() if start else found) == axis.size).all()
        # One buffer of a rank may be elsewhere: the way is that of the first.
        out = (device.empty if mesh.rank == 0 else np.empty)(2**16)
        found = call(np.copy(host), out)
        assert (arrays.to_host(found.wait() if start else found) == axis.size).all()


@pytest.mark.parametrize("start", ["", "start_"])
def test_the_ledger_knows_where_calls_of_device_memory_were_made(mesh, device, start):
    axis = mesh.data
    for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        found = getattr(axis, f"{start}{name}")(device.put(np.ones(4)))
        if start:
            found.wait()
        call = mesh.ledger.recent[-1].call
        assert call.op == name and "test_device.py" in call.site


# Steps on a device: the bits of the host, in few launches, and with few waits.

SHAPES = {"weight": (13, 17), "bias": (17,), "none": (0,), "scale": ()}
SPECS = [ParameterSpec(f"{layer}.{name}", shape) for layer in range(6) for name, shape in SHAPES.items()]
SIZE = sum(spec.size for spec in SPECS)
GROUPS = [ParameterGroup("*.bias", weight_decay=0.0), ParameterGroup("[0-2].weight", lr_factor=0.5)]
RULES = [
    AdamW(lr=lambda step: 0.01 / step, groups=GROUPS, ema_decay=0.9),
    SGD(lr=0.1, momentum=0.9, groups=GROUPS),
    RMSprop(),
    LAMB(groups=GROUPS, ema_decay=0.5),
]


def model(kind, dtype):
    module = np if kind is np.ndarray else arrays.module_of(standin.empty(1, kind=kind))
    parameters = FlatParameters(SPECS, dtype, module=module)
    arrays.copy_to_device(np.random.default_rng(0).standard_normal(SIZE).astype(dtype), parameters.flat)
    return parameters


def write(parameters, flat):
    if arrays.is_device(parameters.like):
        flat = standin.on_device(flat)
    write_gradients(parameters, flat)


def gradient(step, mesh, dtype):
    """Whole numbers, so that sums over ranks are exact."""
    rng = np.random.default_rng([step, mesh.data.rank])
    return rng.integers(-9, 10, SIZE).astype(dtype)


def trained(strategy, rule, mesh, kind, dtype, **options):
    """Bits of parameters and state after three steps, and the norms of their gradients."""
    parameters = model(kind, dtype)
    optimizer = strategy(rule, Configuration(mesh, minimum_parameter_group_size=200, **options))
    norms = []
    for step in range(3):
        write(parameters, gradient(step, mesh, dtype))
        optimizer.step(parameters)
        norms.append(optimizer.gradient_norm)
    own = [arrays.to_host(each).tobytes() for each in optimizer.state.on_rank.slots.values()]
    values = [arrays.to_host(each).tobytes() for each in optimizer.state.strategy.values()]
    return own, values, np.array(norms).tobytes()


@needs_compiler
@pytest.mark.parametrize("kind", [standin.DeviceArray, standin.AwareArray])
@pytest.mark.parametrize("options", [{"max_gradient_norm": 2.0}, {"max_gradient_value": 1.5}], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bits_of_the_host(mesh, strategy, rule, options, kind):
    dtype = np.float32 if "max_gradient_norm" in options else np.float64
    found = [trained(strategy, rule, mesh, each, dtype, **options) for each in (kind, np.ndarray)]
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", [RULES[0], RULES[-1]], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.full
def test_the_bits_of_the_host_without_a_compiler_for_cuda(mesh, rule, strategy, monkeypatch):
    monkeypatch.setattr(standin.StandIn, "compiles_cuda", False)
    kinds, options = (standin.DeviceArray, np.ndarray), {"max_gradient_norm": 2.0}
    found = [trained(strategy, rule, mesh, kind, np.float32, **options) for kind in kinds]
    assert found[0] == found[1]


def counts(strategy, rule, mesh, monkeypatch, **options):
    """The launches of a step, from the first backward pass to the end of the update, its waits and looks at buckets."""
    parameters = model(standin.DeviceArray, np.float32)
    optimizer = strategy(rule, Configuration(mesh, minimum_parameter_group_size=200, **options))
    with monkeypatch.context() as patch:
        for step in range(2):  # the second one is counted: memory and tables are there
            flat = standin.on_device(gradient(step, mesh, np.float32))
            arrays.ready(flat)
            names, waits = launches(patch), counted_waits(patch)
            write_gradients(parameters, flat)
            optimizer.step(parameters)
    bound = optimizer.state.strategy
    # One rank's sums are what its buckets have: it looks at these only where they do not stay.
    looks = 0 if mesh.size == 1 and bound.reducer.keeps_memory else len(bound.shares.buckets)
    return names, len(waits), looks


@needs_compiler
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_launches_of_a_step(mesh, strategy, monkeypatch):
    names, _, looks = counts(strategy, RULES[0], mesh, monkeypatch, max_gradient_norm=2.0)
    assert names.count("adam_over_ranges") == names.count("moving_average_over_ranges") == 1
    # Each bucket when it is complete, and the sums at once; for a norm two functions.
    assert names.count("largest_of_ranges") == looks + 1
    assert names.count("squares_of_ranges") == names.count("sums_of_chunks") == 1
    assert not {"adam", "moving_average"} & set(names)


@needs_compiler
def test_launches_of_a_rule_with_norms_of_tensors(mesh, monkeypatch):
    names, _, looks = counts(DDPOptimizer, LAMB(groups=GROUPS), mesh, monkeypatch, max_gradient_value=1.0)
    expected = ["clip_by_value_over_ranges", "lamb_direction_over_ranges", "lamb_apply_over_ranges"]
    assert [name for name in names if name.endswith("_over_ranges")] == expected
    assert names.count("largest_of_ranges") == looks + 1 + 2
    assert names.count("squares_of_ranges") == names.count("sums_of_chunks") == 2


@needs_compiler
@pytest.mark.parametrize(
    "rule, options, most",
    [
        (RULES[0], {}, 1),  # whether all is finite
        (RULES[0], {"max_gradient_norm": 2.0}, 2),  # and the norm
        (RULES[0], {"max_gradient_value": 1.0}, 1),
        (LAMB(groups=GROUPS), {}, 5),  # two for the norms of parameters, and of directions
    ],
    ids=["plain", "norm", "value", "lamb"],
)
@pytest.mark.usefixtures("without_debug")
def test_waits_of_a_step_of_one_rank(rule, options, most, monkeypatch):
    """Sums over ranks have waits of their own."""
    with Mesh(MPI.COMM_SELF) as mesh:
        for strategy in STRATEGIES:
            assert counts(strategy, rule, mesh, monkeypatch, **options)[1] == most, strategy


@needs_compiler
@pytest.mark.parametrize("rule", [AdamW, LAMB])
def test_a_learning_rate_that_is_refused_changes_nothing(mesh, rule):
    parameters = model(standin.DeviceArray, np.float32)
    optimizer = DDPOptimizer(rule(lr=lambda step: 0.1 if step == 1 else -1.0), mesh)
    write(parameters, gradient(0, mesh, np.float32))
    optimizer.step(parameters)
    state = [parameters.flat, *optimizer.state.on_rank.slots.values()]
    before = [arrays.to_host(each).tobytes() for each in state]
    write(parameters, gradient(1, mesh, np.float32))
    with pytest.raises(ValueError, match="at least 0 and finite"):
        optimizer.step(parameters)
    assert [arrays.to_host(each).tobytes() for each in state] == before


class Halved(LAMB):
    """A rule of a user's own, with another direction."""

    def direction(self, parameters, gradients, slots, step, *, divisor=1.0, clip=1.0, out):
        super().direction(parameters, gradients, slots, step, divisor=2 * divisor, clip=clip, out=out)


class Twice(SGD):
    def update(self, parameters, gradients, slots, step, *, divisor=1.0, clip=1.0):
        for _ in range(2):
            super().update(parameters, gradients, slots, step, divisor=divisor, clip=clip)


@needs_compiler
@pytest.mark.parametrize("rule", [Halved(groups=GROUPS), Twice(lr=0.1, groups=GROUPS)], ids=["direction", "update"])
def test_rules_of_ones_own_are_asked(mesh, rule):
    kinds, options = (np.ndarray, standin.DeviceArray), {"max_gradient_norm": 2.0}
    own = [trained(DDPOptimizer, rule, mesh, kind, np.float32, **options) for kind in kinds]
    plain = trained(DDPOptimizer, type(rule).__mro__[1](lr=rule.lr, groups=GROUPS), mesh, np.ndarray, np.float32)
    assert own[0] == own[1] and own[0] != plain


@needs_compiler
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [np.ndarray, standin.DeviceArray])
def test_what_is_not_finite_is_named(mesh, strategy, kind):
    parameters, last = model(kind, np.float32), mesh.data.size - 1
    optimizer = strategy(SGD(lr=0.1), Configuration(mesh, minimum_parameter_group_size=200))
    for place, value in ((0, np.nan), (13 * 17 + 3, np.inf), (SIZE - 1, np.nan), (SIZE - 1, -np.inf)):
        flat = gradient(0, mesh, np.float32)
        flat[place] = value if mesh.data.rank == last else 1
        names = [piece.name for piece in parameters.pieces if piece.start <= place and piece.size]
        write(parameters, flat)
        with pytest.raises(FloatingPointError, match=f"'{names[-1]}' on rank {last};"):
            optimizer.step(parameters)
        write(parameters, gradient(0, mesh, np.float32))
        optimizer.step(parameters)


# Training with products in float16: it follows float32, and an overflow on one rank is one on all.

HALF_VOCABULARY, HALF_LENGTH = 11, 8
HALF_TOKENS = np.random.default_rng(1).integers(0, HALF_VOCABULARY, (9, HALF_LENGTH + 1))


class Run:
    """A model and its optimizer, a step at a time."""

    def __init__(self, mesh, compute_dtype, strategy=DDPOptimizer, **sizes):
        sizes = dict(vocabulary_size=HALF_VOCABULARY, context_length=HALF_LENGTH, width=24, layers=1, heads=2) | sizes
        self.mesh = mesh
        self.model = nn.GPT(**sizes, mesh=mesh, compute_dtype=compute_dtype)
        scale = None if compute_dtype is None else "dynamic"
        self.optimizer = strategy(AdamW(lr=3e-3), Configuration(mesh, loss_scale=scale))
        self.optimizer.bind(self.model.parameters)

    def step(self):
        """Summed loss of all data ranks before the step."""
        mine = np.array_split(HALF_TOKENS, self.mesh.data.size)[self.mesh.data.rank]
        loss = self.model.loss_and_gradient(mine[:, :-1], mine[:, 1:])
        self.optimizer.step(self.model.parameters, count=HALF_TOKENS[:, 1:].size)
        return self.mesh.data.comm.allreduce(loss)

    def losses(self, steps):
        """The loss before each step that is taken, not skipped, until there are `steps` of them."""
        losses = {}
        while (taken := self.optimizer.steps) < steps:
            assert self.optimizer.skipped_steps < 16
            losses[taken] = self.step()
        return np.array(list(losses.values()))


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO3Optimizer])
@pytest.mark.full
def test_thirty_steps_follow_those_in_float32(mesh, same_on_all, strategy):
    exact, half = Run(mesh, None, strategy), Run(mesh, np.float16, strategy)
    losses, half_losses = exact.losses(30), half.losses(30)
    assert losses[-1] < 0.8 * losses[0]
    assert np.all(np.abs(half_losses - losses) < 0.02 * losses)
    assert not np.array_equal(half_losses, losses)
    assert same_on_all(half.model.parameters.gather())


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_an_overflow_on_one_rank_skips_on_all(comm, same_on_all, axis):
    shape = {"data": 1, "tensor": 1, "pipeline": 1, axis: comm.size}
    with Mesh(comm, **shape) as mesh:
        run = Run(mesh, np.float16, heads=24, layers=max(1, mesh.pipeline.size))
        run.losses(1)  # the scale is one that fits now
        scale, skipped = run.optimizer.loss_scale, run.optimizer.skipped_steps
        parameters, before = run.model.parameters, run.model.parameters.gather()
        if comm.rank == comm.size - 1:
            parameters.loss_scale = 2.0**40
        first = run.step()
        assert np.array_equal(parameters.gather(), before)
        assert (run.optimizer.steps, run.optimizer.skipped_steps) == (1, skipped + 1)
        assert run.optimizer.loss_scale == parameters.loss_scale == scale / 2
        losses = run.losses(8)
        assert losses[0] == first
        assert losses[-1] < losses[0]
        assert same_on_all((run.optimizer.steps, run.optimizer.skipped_steps, losses.tolist()))
        assert axis != "data" or same_on_all(parameters.gather())
        assert np.isfinite(parameters.gather()).all()
