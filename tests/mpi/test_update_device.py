"""Steps on a device: the bits of the host, in few launches, and with few waits."""

from __future__ import annotations

import cuda_on_host
import numpy as np
import pytest
import standin
from mpi4py import MPI
from steps import STRATEGIES, write_gradients
from waits import counted_waits, launches

from mpishard import LAMB, SGD, AdamW, DDPOptimizer, FlatParameters, Mesh, ParameterGroup, RMSprop
from mpishard import ShardingConfiguration as Configuration
from mpishard.backend import array as arrays
from mpishard.layout.tensors import ParameterSpec

pytestmark = pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no C++ compiler")
LAYERS = 6
SPECS = [
    spec
    for layer in range(LAYERS)
    for spec in (
        ParameterSpec(f"{layer}.weight", (13, 17)),
        ParameterSpec(f"{layer}.bias", (17,)),
        ParameterSpec(f"{layer}.none", (0,)),
        ParameterSpec(f"{layer}.scale", ()),
    )
]
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
    start = np.random.default_rng(0).standard_normal(SIZE).astype(dtype)
    for piece in parameters.pieces:
        view = parameters[piece.name]
        part = start[piece.start : piece.start + piece.size].reshape(piece.shape)
        if kind is np.ndarray:
            view[...] = part
        elif piece.size:
            arrays.copy_to_device(part, view)
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


@pytest.mark.parametrize("kind", [standin.DeviceArray, standin.AwareArray])
@pytest.mark.parametrize("options", [{"max_gradient_norm": 2.0}, {"max_gradient_value": 1.5}], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bits_of_the_host(comm, strategy, rule, options, kind):
    with Mesh(comm) as mesh:
        dtype = np.float32 if "max_gradient_norm" in options else np.float64
        assert trained(strategy, rule, mesh, kind, dtype, **options) == trained(
            strategy, rule, mesh, np.ndarray, dtype, **options
        )


@pytest.mark.parametrize("rule", [RULES[0], RULES[-1]], ids=lambda rule: type(rule).__name__)
def test_the_bits_of_the_host_without_a_compiler_for_cuda(comm, rule, monkeypatch):
    monkeypatch.setattr(standin.StandIn, "compiles_cuda", False)
    with Mesh(comm) as mesh:
        for strategy in STRATEGIES:
            assert trained(strategy, rule, mesh, standin.DeviceArray, np.float32, max_gradient_norm=2.0) == trained(
                strategy, rule, mesh, np.ndarray, np.float32, max_gradient_norm=2.0
            )


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
    looks = 0 if mesh.size == 1 and bound.reducer.keeps_memory else len(bound.buckets)
    return names, len(waits), looks


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_launches_of_a_step(comm, strategy, monkeypatch):
    with Mesh(comm) as mesh:
        names, _, looks = counts(strategy, RULES[0], mesh, monkeypatch, max_gradient_norm=2.0)
        assert names.count("adam_over_ranges") == names.count("moving_average_over_ranges") == 1
        # Each bucket when it is complete, and the sums at once; for a norm two functions.
        assert names.count("largest_of_ranges") == looks + 1
        assert names.count("squares_of_ranges") == names.count("sums_of_chunks") == 1
        assert {name for name in names if name in ("adam", "moving_average")} == set()


def test_launches_of_a_rule_with_norms_of_tensors(comm, monkeypatch):
    with Mesh(comm) as mesh:
        names, _, looks = counts(DDPOptimizer, LAMB(groups=GROUPS), mesh, monkeypatch, max_gradient_value=1.0)
        expected = ["clip_by_value_over_ranges", "lamb_direction_over_ranges", "lamb_apply_over_ranges"]
        assert [name for name in names if name.endswith("_over_ranges")] == expected
        assert names.count("largest_of_ranges") == looks + 1 + 2
        assert names.count("squares_of_ranges") == names.count("sums_of_chunks") == 2


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


@pytest.mark.parametrize("rule", [AdamW, LAMB])
def test_a_learning_rate_that_is_refused_changes_nothing(comm, rule):
    with Mesh(comm) as mesh:
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


@pytest.mark.parametrize("rule", [Halved(groups=GROUPS), Twice(lr=0.1, groups=GROUPS)], ids=["direction", "update"])
def test_rules_of_ones_own_are_asked(comm, rule):
    with Mesh(comm) as mesh:
        own = [
            trained(DDPOptimizer, rule, mesh, kind, np.float32, max_gradient_norm=2.0)
            for kind in (np.ndarray, standin.DeviceArray)
        ]
        plain = trained(DDPOptimizer, type(rule).__mro__[1](lr=rule.lr, groups=GROUPS), mesh, np.ndarray, np.float32)
        assert own[0] == own[1] and own[0] != plain


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_named(comm, strategy, value):
    with Mesh(comm) as mesh:
        rule, last = SGD(lr=0.1), mesh.data.size - 1
        for kind in (np.ndarray, standin.DeviceArray):
            parameters = model(kind, np.float32)
            optimizer = strategy(rule, Configuration(mesh, minimum_parameter_group_size=200))
            for place in (0, 13 * 17 + 3, SIZE - 1):
                flat = gradient(0, mesh, np.float32)
                flat[place] = value if mesh.data.rank == last else 1
                names = [piece.name for piece in parameters.pieces if piece.start <= place and piece.size]
                write(parameters, flat)
                with pytest.raises(FloatingPointError, match=f"'{names[-1]}' on rank {last};"):
                    optimizer.step(parameters)
                write(parameters, gradient(0, mesh, np.float32))
                optimizer.step(parameters)
