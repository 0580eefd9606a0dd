"""Why a run stops: requests of ranks come before goals."""

import math

import numpy as np
import pytest

from mpishard.data.evaluation import EarlyStopping
from mpishard.training.objective import Objective, StopCondition, StopRequest


def condition(**goals):
    return StopCondition(Objective(lambda *_: 0.0, np.zeros(2), 4, 2, **goals))


@pytest.mark.parametrize(
    ("goals", "steps", "norm", "goal"),
    [
        ({}, 9, 0.0, ""),
        ({"steps": 3}, 2, math.nan, ""),
        ({"steps": 3}, 3, math.nan, "steps"),
        ({"steps": 3}, 4, math.nan, "steps"),
        ({"steps": 0}, 0, math.nan, "steps"),
        ({"tolerance": 0.5}, 1, 0.6, ""),
        ({"tolerance": 0.5}, 1, 0.5, "tolerance"),
        ({"tolerance": 0.5}, 1, math.nan, ""),
        ({"steps": 3, "tolerance": 0.5}, 3, 0.1, "tolerance"),
    ],
)
def test_goals(goals, steps, norm, goal):
    stop = condition(**goals)
    assert stop.goal(steps, norm) == goal
    assert stop.reason(StopRequest.NONE, steps, norm) == goal


@pytest.mark.parametrize(("strongest", "reason"), [(1, "seconds"), (2, "callback"), (3, "signal")])
def test_a_request_comes_before_a_goal(strongest, reason):
    assert condition(steps=3).reason(strongest, 3, math.nan) == reason


def test_the_strongest_request_is_the_largest():
    assert max(StopRequest.SECONDS, StopRequest.NONE, StopRequest.CALLBACK) == StopRequest.CALLBACK
    assert sorted(StopRequest)[-2:] == [StopRequest.SIGNAL, StopRequest.FAILED]


def test_the_end_of_a_method_comes_first_and_patience_last():
    stop = StopCondition(condition(steps=3).problem, EarlyStopping(patience=2))
    worse = [1.0, 2.0, 1.0]
    assert stop.reason(StopRequest.SIGNAL, 3, math.nan, method_ended="ftol", validated=worse) == "ftol"
    assert stop.reason(StopRequest.SIGNAL, 3, math.nan, validated=worse) == "signal"
    assert stop.reason(StopRequest.NONE, 3, math.nan, validated=worse) == "steps"
    assert stop.reason(StopRequest.NONE, 2, math.nan, validated=worse) == "patience"
    assert stop.reason(StopRequest.NONE, 2, math.nan, validated=worse[:2]) == ""
    assert [stop.described(reason) for reason in ("steps", "patience")] == ["steps=3", "patience=2"]
