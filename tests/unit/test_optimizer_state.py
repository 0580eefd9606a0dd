"""An optimizer's state and its files, its updates, and hyper-parameters by tensor and by step."""

from __future__ import annotations

import gc
import io
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from variants import full

from mpishard import (
    SGD,
    Adam,
    AdamW,
    DDPOptimizer,
    FlatParameters,
    LocalSGDOptimizer,
    Mesh,
    ParameterGroup,
    ParameterSpec,
    ShardingConfiguration,
    nn,
)
from mpishard.backend.array import Kernel
from mpishard.data_parallel import full_state
from mpishard.data_parallel.full_state import FullState, decode, encode
from mpishard.data_parallel.ownership import OwnedRanges
from mpishard.data_parallel.rank_state import Counters
from mpishard.optim import Rule, formulas
from mpishard.optim.loss_scale import LossScale
from mpishard.optim.lr_schedules import Schedule, constant, cosine, inverse_square_root, linear, warmup

# An optimizer's state on one rank: what `capture` says is what `restore` takes, and what comes on top of it.


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with Mesh(MPI.COMM_SELF) as mesh:
        yield mesh


def trained(optimizer: DDPOptimizer | LocalSGDOptimizer, steps: int) -> FlatParameters:
    parameters = FlatParameters([ParameterSpec("w", (3,))], np.float64)
    for step in range(steps):
        optimizer.step(parameters, np.full(3, 1.0 + step))
    return parameters


@pytest.mark.parametrize("kind", [DDPOptimizer, LocalSGDOptimizer])
def test_a_captured_state_is_restored(mesh: Mesh, kind: type[DDPOptimizer]) -> None:
    one, other = (kind(Adam(lr=0.1), ShardingConfiguration(mesh, max_gradient_norm=1.0)) for _ in range(2))
    parameters, target = trained(one, 3), trained(other, 1)
    one.state.consolidate()
    state = one.state.capture()
    other.state.check(state.facts)
    for shard, filled in zip(state.shards, other.state.capture().shards, strict=True):
        filled.array[...] = shard.array
    other.state.restore(state.facts)
    assert (other.steps, other.clock, other.gradient_norm) == (3, 3, one.gradient_norm)
    one.step(parameters, np.ones(3))
    other.step(target, np.ones(3))
    assert np.array_equal(parameters.flat, target.flat)


def test_another_loss_scale_is_that_of_the_steps_too(mesh: Mesh) -> None:
    optimizer = DDPOptimizer(SGD(lr=1.0), ShardingConfiguration(mesh, loss_scale=1.0))
    optimizer.scaling = LossScale(8.0)
    parameters = np.zeros(3)
    optimizer.step(parameters, np.full(3, optimizer.loss_scale))
    assert parameters.tolist() == [-1.0] * 3


def test_steps_between_averages_may_change_and_nothing_else(mesh: Mesh) -> None:
    optimizer = LocalSGDOptimizer(Adam(lr=0.1), mesh, 4, SGD(lr=0.7), parts=1, delay=1)
    parameters = trained(optimizer, 1)
    before = optimizer.settings.fingerprint
    optimizer.sync_every = 2
    assert optimizer.settings.changed  # so that ranks compare it
    assert optimizer.settings.by_name()["sync_every"] == "2"
    assert optimizer.settings.fingerprint != before
    assert not optimizer.settings.changed
    for _ in range(4):
        optimizer.step(parameters, np.ones(3))
    assert (optimizer.outer_steps, optimizer.staleness) == (2, 1)
    assert optimizer.state.facts["local_sgd.json"] == {"sync_every": 2, "parts": 1, "delay": 1}
    optimizer.state.rebuild(parameters)
    assert optimizer.staleness == 1
    with pytest.raises(ValueError, match="sync_every"):
        optimizer.sync_every = 0
    assert (optimizer.outer, optimizer.parts, optimizer.delay) == (SGD(lr=0.7), 1, 1)
    for name in ("outer", "parts", "delay"):
        with pytest.raises(AttributeError):
            setattr(optimizer, name, getattr(optimizer, name))


def test_of_several_errors_before_an_average_the_first_is_raised(mesh: Mesh) -> None:
    optimizer, parameters = LocalSGDOptimizer(SGD(lr=0.1), mesh, sync_every=3), np.zeros(3)
    optimizer.step(parameters, np.ones(3))
    optimizer.step(parameters, np.array([math.nan, 1, 1]))
    with pytest.raises(FloatingPointError, match="step 2"):
        optimizer.step(parameters, np.array([math.nan, 1, 1]))


def test_arrays_of_an_earlier_capture_outlive_a_rebuild(mesh: Mesh) -> None:
    optimizer = DDPOptimizer(Adam(lr=0.1), mesh)
    parameters = trained(optimizer, 2)
    before = optimizer.state.capture()
    kept = [shard.array.copy() for shard in before.shards]
    optimizer.state.rebuild(parameters)
    assert all(np.array_equal(shard.array, array) for shard, array in zip(before.shards, kept, strict=True))
    assert all(not shard.array.any() for shard in optimizer.state.capture().shards[1:])
    optimizer.step(parameters, np.ones(3))
    assert all(np.array_equal(shard.array, array) for shard, array in zip(before.shards[1:], kept[1:], strict=True))


def test_without_parameters_there_is_no_state(mesh: Mesh) -> None:
    optimizer = DDPOptimizer(Adam(lr=0.1), mesh)
    for use in (optimizer.state.capture, optimizer.serialize):
        with pytest.raises(ValueError, match="no optimizer state before"):
            use()
    assert (optimizer.parameters, optimizer.state.nbytes, optimizer.state.gradient_bytes) == (None, 0, 0)
    optimizer.state.consolidate()
    optimizer.state.abandon()
    optimizer.state.resync()


def test_what_a_rank_owns_and_what_it_counts() -> None:
    """A state array has the owned ranges end to end; sums take the counted part of each, cut at tensors."""
    parameters = FlatParameters([ParameterSpec("a", (4,)), ParameterSpec("b", (4,))], np.float64)
    ownership = OwnedRanges(parameters, own=[(0, 3), (3, 8)], counted=[(1, 3), (3, 6)])
    views = ownership.state_views(np.arange(8))
    assert ownership.size == 8 and [view.tolist() for view in views] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert [view.tolist() for view in ownership.counted_views(views)] == [[1, 2], [3, 4, 5]]
    assert ownership.owned_parts == [(0, 0, 0, 3), (0, 1, 0, 1), (1, 1, 1, 5)]
    assert ownership.counted_parts == [(0, 0, 1, 3), (0, 1, 0, 1), (1, 1, 1, 3)]
    of_group = OwnedRanges(parameters, [(0, 8)], [(0, 4)], in_sync_group=[(0, 8)])
    assert of_group.counted_parts == [(0, 0, 0, 4), (1, 0, 4, 8)]


def test_parameters_whose_place_others_have_taken_are_freed(mesh: Mesh) -> None:
    optimizer = DDPOptimizer(Adam(lr=0.1), mesh)
    first, second = (FlatParameters([ParameterSpec("a", (4,))], np.float64) for _ in range(2))
    optimizer.bind(first)
    optimizer.bind(second)
    held = weakref.ref(first)
    del first
    gc.collect()
    assert held() is None and optimizer.parameters is second


def test_numbers_come_back_from_their_facts() -> None:
    counters, others = Counters("dynamic"), Counters("dynamic")
    counters.steps, counters.skipped_steps = 7, 2
    counters.scaling.overflowed()
    counters.scaling.succeeded()
    facts = counters.facts
    assert "gradient_norm" not in facts and facts["step"] == counters.clock == 9
    others.gradient_norm = 3.0
    others.restore(facts)
    assert math.isnan(others.gradient_norm)
    assert others.facts == facts


# Files of optimizer state: whatever is done to their bytes, they are refused with ValueError or read as they were.

SPECS = (ParameterSpec("a/b", (3, 5)), ParameterSpec("none", (0, 2)), ParameterSpec(".", ()))


def state(**changes):
    slots = {"exp_avg": np.linspace(-1, 1, 16), "exp_avg_sq": np.linspace(0, 1, 16)}
    facts = {"rule": "AdamW", "configuration": {"lr": 0.1}, "steps": 7, "skipped_steps": 1, "loss_scale": (2.0, 3)}
    facts |= {"outer_rule": "SGD", "outer_steps": 2, "others": {"outer/momentum_buffer": np.linspace(2, 3, 16)}}
    return FullState(**{**facts, "specs": SPECS, "dtype": np.dtype(np.float64), "slots": slots, **changes})


def same(one, other):
    plain = ("rule", "configuration", "steps", "skipped_steps", "dtype", "loss_scale", "specs", "outer_rule")
    return all(getattr(one, name) == getattr(other, name) for name in (*plain, "outer_steps")) and all(
        mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in ((one.slots, other.slots), (one.others, other.others))
    )


def mutated(data, other, random):
    """The bytes with a mutation: flips, runs of noise or zeros, cuts, repeats, swaps, or parts of another image."""
    data = bytearray(data)
    start, stop = sorted(int(place) for place in random.integers(0, len(data) + 1, 2))
    length = min(int(random.integers(1, 64)), len(data) - start)
    match int(random.integers(8)):
        case 0:
            for place in random.integers(0, len(data), random.integers(1, 9)):
                data[place] ^= 1 << int(random.integers(8))
        case 1:
            data[start : start + length] = random.bytes(length)
        case 2:
            data[start:stop] = bytes(stop - start)
        case 3:
            del data[start:]
        case 4:
            del data[start:stop]
        case 5:
            data[start:start] = data[start:stop]
        case 6:
            middle = (start + stop) // 2
            data[start:stop] = data[middle:stop] + data[start:middle]
        case 7:
            data[start:stop] = other[start:stop]
    return bytes(data)


@pytest.mark.parametrize("images", [1_000, *full(10_000)])
def test_mutated_images_are_refused_or_read_as_they_were(images):
    whole = state()
    data = encode(whole)
    changed = {which: {name: -slot for name, slot in getattr(whole, which).items()} for which in ("slots", "others")}
    other = encode(state(steps=8, **changed))
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(images):
        try:
            assert same(decode(mutated(data, other, random)), whole)
        except ValueError:
            refused += 1
    assert refused > 0.9 * images


def forged(change):
    """An image whose content was changed by somebody who knows how to sign it."""
    file = io.BytesIO(encode(state()))
    with h5py.File(file, "r+") as h5:
        change(h5)
    return full_state._IMAGE.seal(file.getvalue())


def replace(name, **options):
    def change(h5):
        del h5[name]
        if options:
            h5.create_dataset(name, **options)

    return change


def texts(name, *values, **options):
    return replace(name, data=list(values), dtype=TEXT, **options)


def linked(path, target):
    def change(h5):
        del h5[path]
        h5[path] = target

    return change


def virtual(h5):
    layout = h5py.VirtualLayout((3, 5), np.float64)
    layout[...] = h5py.VirtualSource("/elsewhere.h5", "x", (3, 5))
    del h5[ARRAY]
    h5.create_virtual_dataset(ARRAY, layout)


def of_no_array(h5):
    """A tensor of 33 dimensions, which has no state that could have another shape."""
    del h5["slots"], h5["others"]
    texts("shapes", str([1] * 33), "[0, 2]", "[]")(h5)


TEXT, ARRAY, ELSEWHERE = h5py.string_dtype(), "slots/exp_avg/a%2Fb", h5py.ExternalLink("/elsewhere.h5", "x")
CHANGES = {
    "no names": replace("names"),
    "names that are numbers": replace("names", data=[1, 2, 3]),
    "too few names": texts("names", "a/b"),
    "names longer than the image": texts("names", "a/b" * 1000, "none", ".", chunks=(1,)),
    "empty names": replace("names", data=h5py.Empty(TEXT)),
    "names in another file": replace("names", shape=(3,), dtype="S8", external=[("/dev/zero", 0, 24)]),
    "names by a link": linked("names", ELSEWHERE),
    "no shape": texts("shapes", "[3, 5]", "[0, 2]", "null"),
    "negative shape": texts("shapes", "[3, 5]", "[0, 2]", "[-1]"),
    "large shape": texts("shapes", "[1000000, 10000000000]", "[0, 2]", "[]"),
    "shape of no whole numbers": texts("shapes", "[3, 5.5]", "[0, 2]", "[]"),
    "nested shape": texts("shapes", "[" * 100_000, "[0, 2]", "[]"),
    "shape of many dimensions": texts("shapes", str([1] * 100_000), "[0, 2]", "[]"),
    "shape of more dimensions than any array": of_no_array,
    "many shapes in pieces": replace("shapes", shape=(2**46,), dtype=TEXT, chunks=(1024,)),
    "many shapes": replace("shapes", shape=(2**46,), dtype=TEXT),
    "slots that are a number": replace("slots", data=1.0),
    "slots by a link": linked("slots", h5py.SoftLink("/others")),
    "others that are a number": replace("others", data=1.0),
    "another of another shape": replace("others/outer%2Fmomentum_buffer/a%2Fb", data=np.zeros((5, 3))),
    "a slot that is a number": replace("slots/exp_avg", data=1.0),
    "a slot by a link": linked("slots/exp_avg", ELSEWHERE),
    "a slot by a soft link": linked("slots/exp_avg", h5py.SoftLink("/slots/exp_avg_sq")),
    "a tensor less": replace("slots/exp_avg/%2E"),
    "an array of another shape": replace(ARRAY, data=np.zeros((5, 3))),
    "an array of another dtype": replace(ARRAY, data=np.zeros((3, 5), np.float32)),
    "an array in pieces": replace(ARRAY, data=np.zeros((3, 5)), chunks=(1, 5)),
    "an array in another file": replace(ARRAY, shape=(3, 5), dtype=np.float64, external=[("/dev/zero", 0, 120)]),
    "an array by a soft link": linked(ARRAY, h5py.SoftLink("/slots/exp_avg_sq/a%2Fb")),
    "an array by a link": linked(ARRAY, ELSEWHERE),
    "a virtual array": virtual,
    "no rule": lambda h5: h5.attrs.__delitem__("rule"),
    "no good_steps": lambda h5: h5.attrs.__delitem__("good_steps"),
}
ATTRIBUTES = {
    "steps": [-5, np.inf, 2**60, "seven", np.arange(3)],
    "skipped_steps": [0.5],
    "loss_scale": [np.nan, -1.0, "large"],
    "good_steps": [-1],
    "outer_steps": [-1, "two"],
    "dtype": ["object", "no dtype"],
    "configuration": ["{"],
}
for name, values in ATTRIBUTES.items():
    CHANGES |= {f"{name}={value}": lambda h5, name=name, value=value: h5.attrs.create(name, value) for value in values}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_forged_images_are_refused(change):
    with pytest.raises(ValueError, match="optimizer state that this mpishard") as caught:
        decode(forged(change))
    assert len(str(caught.value)) < 1000


def test_texts_that_are_one_long_text_again_and_again_are_refused():
    """A megabyte of references to a megabyte of text would take 60 GB."""
    assert same(decode(forged(lambda h5: None)), state())  # only signed anew
    data = bytearray(forged(texts("names", "x" * 2**16, *[""] * 99)))
    with h5py.File(io.BytesIO(data)) as h5:
        start = h5["names"].id.get_offset()
    data[start : start + 1600] = data[start : start + 16] * 100
    with pytest.raises(ValueError, match="names is longer than the image"):
        decode(full_state._IMAGE.seal(bytes(data)))


# Updates ask a rule one question: whether it is based on norms of whole tensors.


@dataclass(frozen=True)
class Lars(Rule):
    """Each tensor moves by `lr` times its own norm (You et al. 2017, without momentum)."""

    norm_based: ClassVar[bool] = True
    slots = ()
    kernel = formulas.lamb_direction

    def scalars(self, step: int) -> tuple[float, ...]:
        return ()

    def direction(self, parameters: Any, gradients: Any, *_: Any, divisor: float, clip: float, out: Any) -> None:
        out[...] = gradients / divisor * clip

    def trust_ratio(self, parameter_norm: float, direction_norm: float) -> float:
        return parameter_norm / direction_norm

    def apply(self, parameters: Any, direction: Any, step: int, ratio: float) -> None:
        parameters -= self.learning_rate(step) * ratio * direction


def test_a_norm_based_rule_of_ones_own_sees_whole_tensors() -> None:
    with Mesh(MPI.COMM_SELF) as mesh:
        parameters = FlatParameters([ParameterSpec("a", (2,)), ParameterSpec("b", (2,))], np.float64)
        parameters["a"][...], parameters["b"][...] = (3, 4), (0, 2)
        DDPOptimizer(Lars(lr=0.5), mesh).step(parameters, np.array([0.0, 7, 5, 0]))
        np.testing.assert_array_equal(parameters["a"], [3, 1.5])  # 0.5 * 5 along the unit vector
        np.testing.assert_array_equal(parameters["b"], [-1, 2])


# Hyper-parameters by tensor and by step: parameter groups and learning-rate schedules.

# Parameter groups: which tensors they have, and what is wrong with some.

NAMES = ["token.weight", "block.norm.weight", "block.norm.bias", "head.weight"]


def test_each_tensor_has_the_values_of_its_groups() -> None:
    groups = [
        ParameterGroup(["*norm*", "*.bias"], weight_decay=0),
        ParameterGroup("head.*", lr_factor=0.5),
        ParameterGroup("block.*", lr_factor=2),
        ParameterGroup("*.bias", weight_decay=0),  # once more the same value
    ]
    rules: list[Any] = AdamW(lr=lambda step: 0.1 * step, weight_decay=0.3, groups=groups).by_tensor(NAMES)
    assert [rule.weight_decay for rule in rules] == [0.3, 0, 0, 0.3]
    assert [rule.learning_rate(2) for rule in rules] == [0.2, 0.4, 0.4, 0.1]
    assert rules[1] is rules[2]
    alone = SGD(lr=0.1)
    assert all(rule is alone for rule in alone.by_tensor(NAMES))
    (rule,) = SGD(lr=0.1, momentum=0.9, groups=[ParameterGroup("*", lr_factor=0)]).by_tensor(["x"])
    x = np.ones(3)
    rule.update(x, np.ones(3), [np.zeros(3)], 1)
    assert np.array_equal(x, np.ones(3))


def test_norms_and_biases_of_a_gpt() -> None:
    names = [
        spec.name for spec in nn.GPT(vocabulary_size=11, context_length=4, width=8, layers=2, heads=2).parameters.specs
    ]
    rules: list[Any] = AdamW(groups=[ParameterGroup(["*norm.weight", "*.bias"], weight_decay=0)]).by_tensor(names)
    plain = {name for name, rule in zip(names, rules, strict=True) if rule.weight_decay == 0}
    assert plain == {name for name in names if name.endswith("bias") or "norm" in name}


@dataclass(frozen=True)
class Bare(Rule):
    """Has no weight decay."""

    slots: ClassVar[tuple[str, ...]] = ()  # type: ignore[misc]
    kernel: ClassVar[Kernel] = formulas.sgd  # type: ignore[misc]

    def scalars(self, step: int) -> tuple[float, ...]:
        return (self.learning_rate(step), 0.0)


def group(*names: str, **values: float) -> ParameterGroup:
    return ParameterGroup(names, **values)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: group("a"), ValueError, "weight_decay or lr_factor"),
        (lambda: group(lr_factor=1), ValueError, "name no tensor"),
        (lambda: group("a", "", lr_factor=1), ValueError, "name no tensor"),
        (lambda: ParameterGroup(3, lr_factor=1), TypeError, "must be texts"),  # type: ignore[arg-type]
        (lambda: group("a", lr_factor=-1), ValueError, r"ParameterGroup\('a'\): lr_factor=-1"),
        (lambda: group("a", weight_decay="0"), TypeError, "weight_decay='0'"),  # type: ignore[arg-type]
        (lambda: SGD(groups=["a"]), TypeError, "SGD: groups=.*ParameterGroup"),  # type: ignore[list-item]
        (lambda: SGD(groups=group("a", lr_factor=1)), TypeError, "must be a list"),  # type: ignore[arg-type]
        (lambda: Bare(0.1, groups=[group("a", weight_decay=1)]), ValueError, "weight_decay, .*Bare"),
        (
            lambda: SGD(groups=[group("*.biases", weight_decay=0)]).by_tensor(NAMES),
            ValueError,
            "'[*].biases' .*token.weight, block.norm",
        ),
        (
            lambda: Adam(groups=[group("*norm*", weight_decay=0), group("block.*", weight_decay=0.2)]).by_tensor(NAMES),
            ValueError,
            "'block.norm.weight' .*weight_decay is 0.0 .*0.2",
        ),
    ],
)
def test_bad_groups(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_groups_are_checked_where_a_rule_meets_parameters() -> None:
    wrong = SGD(lr=0.1, groups=[ParameterGroup("weights", lr_factor=2)])
    with Mesh(MPI.COMM_SELF) as mesh:
        parameters = FlatParameters.over(np.zeros(3))
        with pytest.raises(ValueError, match="'weights' .*parameters"):
            DDPOptimizer(wrong, mesh).step(parameters, np.ones(3))
        optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
        optimizer.step(parameters, np.ones(3))
        with pytest.raises(ValueError, match="'weights' matches none"):
            optimizer.rule = wrong
        with pytest.raises(ValueError, match="keeps momentum_buffer .*has nothing"):
            optimizer.rule = SGD(lr=0.1, momentum=0.9)
        with pytest.raises(TypeError, match="rule_of .*got the class SGD"):
            optimizer.rule = SGD
        optimizer.rule = SGD(lr=0.1, groups=[ParameterGroup("param*", lr_factor=2)])
        optimizer.step(parameters, np.ones(3))
        np.testing.assert_allclose(parameters.flat, [-0.3] * 3)
        with pytest.raises(ValueError, match="outer rule SGD has parameter groups"):
            LocalSGDOptimizer(SGD(), mesh, outer=wrong)


# Learning-rate schedules: values at the steps that matter, and what they refuse.

ALL = [constant(0.1), constant(0.1, warmup=5), warmup(0.1, 5), linear(0.1, 20), cosine(0.1, 20, warmup=5, floor=0.01)]
ALL += [linear(0.1, 20, warmup=5, floor=0.01), inverse_square_root(0.1, warmup=5, floor=0.06)]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_rises_to_its_peak_and_never_below_its_floor_again(schedule: Schedule) -> None:
    rates = [schedule(step) for step in range(1, 41)]
    top = max(1, schedule.warmup)
    assert rates[top - 1] == schedule.peak == max(rates)
    for step in range(1, schedule.warmup):
        assert rates[step - 1] == pytest.approx(schedule.peak * step / schedule.warmup, rel=1e-15)
    falling = rates[top - 1 :]
    assert all(later <= earlier for earlier, later in zip(falling[:-1], falling[1:], strict=True))
    assert min(falling) >= schedule.floor
    if schedule.steps is not None:
        assert set(rates[schedule.steps - 1 :]) == {schedule.floor}
    again = eval(repr(schedule))
    assert again == schedule and hash(again) == hash(schedule)
    assert [again(step) for step in range(1, 41)] == rates


def test_values_half_way_and_short_representations() -> None:
    assert linear(0.3, 21, floor=0.1)(11) == pytest.approx(0.2, rel=1e-15)
    assert cosine(0.3, 21, floor=0.1)(11) == pytest.approx(0.2, rel=1e-15)
    assert cosine(0.3, 25, warmup=5, floor=0.1)(10) == pytest.approx(0.1 + 0.2 * (1 + math.cos(math.pi / 4)) / 2)
    falling = inverse_square_root(0.4, warmup=100)
    assert falling(400) == pytest.approx(0.2, rel=1e-15)
    assert falling(10**12) == pytest.approx(0.4e-5, rel=1e-12)
    assert repr(cosine(1e-3, 1000, warmup=100)) == "cosine(peak=0.001, steps=1000, warmup=100)"
    assert repr(warmup(1, 10)) == "warmup(peak=1.0, steps=10)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constant(-0.1), "constant: peak=-0.1"),
        (lambda: constant(math.inf), "peak=inf"),
        (lambda: cosine("0.1", 10), "peak='0.1'"),  # type: ignore[arg-type]
        (lambda: cosine(0.1, 10, floor=0.2), "floor=0.2 .*peak=0.1"),
        (lambda: cosine(0.1, 10, floor=-0.2), "floor=-0.2"),
        (lambda: cosine(0.1, 10, warmup=10), "steps=10 .*warmup=10"),
        (lambda: linear(0.1, 0), "steps=0 .*warmup=0"),
        (lambda: linear(0.1, 10.5), "steps=10.5"),  # type: ignore[arg-type]
        (lambda: linear(0.1, 10, warmup=-1), "warmup=-1"),
        (lambda: warmup(0.1, 0), "warmup: steps=0"),
        (lambda: inverse_square_root(0.1, warmup=0), "warmup=0"),
    ],
)
def test_nonsense_is_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()
