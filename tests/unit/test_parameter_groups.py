"""Parameter groups: which tensors they have, and what is wrong with some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from mpi4py import MPI

from mpishard import SGD, Adam, AdamW, DDPOptimizer, FlatParameters, LocalSGDOptimizer, Mesh, ParameterGroup, nn
from mpishard.backend.array import Kernel
from mpishard.optim import Rule, formulas

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
