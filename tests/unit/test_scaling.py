"""Batch and learning rate by the number of workers: the policies, and rules with another rate."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard import LAMB, SGD, Adagrad, Adam, AdamW, Lion, RMSprop, cosine
from mpishard.training import Scaling

RULES = [
    SGD(lr=0.25, momentum=0.9),
    Adam(lr=0.25),
    AdamW(lr=0.25, weight_decay=0.5),
    RMSprop(lr=0.25),
    Adagrad(lr=0.25),
    Lion(lr=0.25),
]


@pytest.mark.parametrize(
    ("policy", "sizes", "factor"),
    [("constant", [16, 16, 16], 1.0), ("linear", [5, 10, 64], 4.0), ("square_root", [5, 10, 64], 2.0)],
)
def test_policies(policy, sizes, factor):
    scaling = Scaling(policy, 3)
    assert [scaling.batch_size(16, workers) for workers in (1, 2, 12)] == sizes
    assert (scaling.rate_factor(1.0), scaling.rate_factor(4.0)) == (1.0, factor)


def test_a_batch_is_not_empty():
    assert Scaling("linear", 8).batch_size(4, 1) == 1


@pytest.mark.parametrize("policy", ["cubic", "", None])
def test_other_policies_are_refused(policy):
    with pytest.raises(ValueError, match="is none of 'constant', 'linear', 'square_root'"):
        Scaling(policy, 1)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_rule_with_another_rate_takes_the_steps_of_that_rate(rule):
    ends = []
    for each in (rule.scaled(3.0), type(rule)(**{**vars(rule), "lr": 0.75})):
        parameters = np.linspace(-1, 1, 9)
        slots = [np.full(9, each.initial(name)) for name in each.slots]
        for step in (1, 2, 3):
            each.update(parameters, np.arange(9.0) - 4, slots, step)
        ends.append(parameters.tobytes())
    assert ends[0] == ends[1]


def test_schedules_are_multiplied():
    schedule = cosine(0.5, steps=9, warmup=2)
    rule = LAMB(lr=schedule)
    assert [rule.scaled(0.5).learning_rate(step) for step in range(1, 12)] == [schedule(s) / 2 for s in range(1, 12)]
    assert rule.scaled(1.0) is rule
