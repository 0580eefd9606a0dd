"""Hyper-parameters by tensor and by step: parameter groups and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from mpi4py import MPI

from mpishard import SGD, Adam, AdamW, DDPOptimizer, FlatParameters, LocalSGDOptimizer, Mesh, ParameterGroup, nn
from mpishard.backend.array import Kernel
from mpishard.optim import Rule, formulas
from mpishard.optim.lr_schedules import Schedule, constant, cosine, inverse_square_root, linear, warmup

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


def test_tensors_with_a_factor_of_0_stay() -> None:
    (rule,) = SGD(lr=0.1, momentum=0.9, groups=[ParameterGroup("*", lr_factor=0)]).by_tensor(["x"])
    x = np.ones(3)
    rule.update(x, np.ones(3), [np.zeros(3)], 1)
    assert np.array_equal(x, np.ones(3))


def test_norms_and_biases_of_a_gpt() -> None:
    names = [spec.name for spec in nn.GPT(11, 4, 8, 2, 2).parameters.specs]
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


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ParameterGroup("a"), ValueError, "has no own value; give weight_decay or lr_factor"),
        (lambda: ParameterGroup([], lr_factor=1), ValueError, "name no tensor"),
        (lambda: ParameterGroup(["a", ""], lr_factor=1), ValueError, "name no tensor"),
        (lambda: ParameterGroup(3, lr_factor=1), TypeError, "must be texts"),  # type: ignore[arg-type]
        (
            lambda: ParameterGroup("a", lr_factor=-1),
            ValueError,
            r"ParameterGroup\('a'\): lr_factor=-1 must be a finite",
        ),
        (lambda: ParameterGroup("a", weight_decay="0"), TypeError, "weight_decay='0'"),  # type: ignore[arg-type]
        (lambda: SGD(groups=["a"]), TypeError, "SGD: groups=.* must be a list of ParameterGroup"),  # type: ignore[list-item]
        (lambda: SGD(groups=ParameterGroup("a", lr_factor=1)), TypeError, "must be a list"),  # type: ignore[arg-type]
        (
            lambda: Bare(0.1, groups=[ParameterGroup("a", weight_decay=1)]),
            ValueError,
            "weight_decay, which Bare has not",
        ),
    ],
)
def test_bad_groups(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [ParameterGroup("*.biases", weight_decay=0)],
            "'[*].biases' matches none of the tensors token.weight, block.norm",
        ),
        (
            [ParameterGroup("*norm*", weight_decay=0), ParameterGroup("block.*", weight_decay=0.2)],
            "'block.norm.weight' is in two parameter groups that differ: weight_decay is 0.0 in .* and 0.2 in ",
        ),
    ],
)
def test_groups_that_do_not_fit_the_tensors(groups: list[ParameterGroup], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Adam(groups=groups).by_tensor(NAMES)


def test_groups_are_checked_where_a_rule_meets_parameters() -> None:
    wrong = SGD(lr=0.1, groups=[ParameterGroup("weights", lr_factor=2)])
    with Mesh(MPI.COMM_SELF) as mesh:
        parameters = FlatParameters.over(np.zeros(3))
        with pytest.raises(ValueError, match="'weights' matches none of the tensors parameters"):
            DDPOptimizer(wrong, mesh).step(parameters, np.ones(3))
        optimizer = DDPOptimizer(SGD(lr=0.1), mesh)
        optimizer.step(parameters, np.ones(3))
        with pytest.raises(ValueError, match="'weights' matches none"):
            optimizer.rule = wrong
        optimizer.rule = SGD(lr=0.1, groups=[ParameterGroup("param*", lr_factor=2)])
        optimizer.step(parameters, np.ones(3))
        np.testing.assert_allclose(parameters.flat, [-0.3] * 3)
        with pytest.raises(ValueError, match="outer rule SGD has parameter groups"):
            LocalSGDOptimizer(SGD(), mesh, outer=wrong)


# Learning-rate schedules: values at the steps that matter, and what they refuse.

ALL = [
    constant(0.1),
    constant(0.1, warmup=5),
    warmup(0.1, 5),
    linear(0.1, 20),
    linear(0.1, 20, warmup=5, floor=0.01),
    cosine(0.1, 20),
    cosine(0.1, 20, warmup=5, floor=0.01),
    inverse_square_root(0.1, warmup=5),
    inverse_square_root(0.1, warmup=5, floor=0.06),
]
each = pytest.mark.parametrize("schedule", ALL, ids=repr)


@each
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


def test_linear_and_cosine_half_way() -> None:
    assert linear(0.3, 21, floor=0.1)(11) == pytest.approx(0.2, rel=1e-15)
    assert cosine(0.3, 21, floor=0.1)(11) == pytest.approx(0.2, rel=1e-15)
    assert cosine(0.3, 25, warmup=5, floor=0.1)(10) == pytest.approx(0.1 + 0.2 * (1 + math.cos(math.pi / 4)) / 2)


def test_inverse_square_root_halves_at_four_times_the_warmup() -> None:
    schedule = inverse_square_root(0.4, warmup=100)
    assert schedule(400) == pytest.approx(0.2, rel=1e-15)
    assert schedule(10**12) == pytest.approx(0.4e-5, rel=1e-12)


@each
def test_is_a_value_with_a_repr_that_makes_it(schedule: Schedule) -> None:
    again = eval(repr(schedule))
    assert again == schedule and hash(again) == hash(schedule)
    assert [again(step) for step in range(1, 40)] == [schedule(step) for step in range(1, 40)]


def test_repr_is_short() -> None:
    assert repr(cosine(1e-3, 1000, warmup=100)) == "cosine(peak=0.001, steps=1000, warmup=100)"
    assert repr(warmup(1, 10)) == "warmup(peak=1.0, steps=10)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constant(-0.1), "constant: peak=-0.1 must be a finite number of at least 0"),
        (lambda: constant(math.inf), "peak=inf must be a finite number"),
        (lambda: cosine("0.1", 10), "peak='0.1' must be a finite number of at least 0"),  # type: ignore[arg-type]
        (lambda: cosine(0.1, 10, floor=0.2), "cosine: floor=0.2 is above peak=0.1"),
        (lambda: cosine(0.1, 10, floor=-0.2), "floor=-0.2 must be a finite number of at least 0"),
        (lambda: cosine(0.1, 10, warmup=10), "steps=10 must be above warmup=10"),
        (lambda: linear(0.1, 0), "steps=0 must be above warmup=0"),
        (lambda: linear(0.1, 10.5), "steps=10.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: linear(0.1, 10, warmup=-1), "warmup=-1 must be a whole number of at least 0"),
        (lambda: warmup(0.1, 0), "warmup: steps=0 must be a whole number of at least 1"),
        (lambda: inverse_square_root(0.1, warmup=0), "warmup=0 must be a whole number of at least 1"),
    ],
)
def test_nonsense_is_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()
