"""The time limit of a collective, from the steps of the run so far."""

from __future__ import annotations

from mpishard.comm.ledger import Ledger
from mpishard.comm.time_limit import TimeLimit


def test_a_choice_of_the_users_stands() -> None:
    limit = TimeLimit(7.5)
    for step, now in ((0, 0.0), (1, 10.0), (2, 500.0)):
        limit.note(step, now)
    assert limit.seconds == 7.5 and not limit.in_set_up and "7.5 s" in str(limit)


def test_the_set_up_ends_with_the_first_step_that_is_over() -> None:
    limit = TimeLimit(None)
    for step, now in ((0, 0.0), (0, 900.0), (1, 1000.0), (1, 1030.0)):  # it compiles in the first step, too
        limit.note(step, now)
        assert limit.in_set_up and limit.seconds == 1800
    limit.note(2, 1003.0)
    assert not limit.in_set_up and limit.seconds == 120


def test_steps_that_were_over_before_the_first_look_end_the_set_up() -> None:
    ledger, limit = Ledger(), TimeLimit(None)
    ledger.step = 1001
    limit.note(ledger.step, 0.0, ledger.any_over)
    assert limit.in_set_up
    ledger, limit = Ledger(), TimeLimit(None)
    for ledger.step in (1001, 1002, 1003):
        pass
    limit.note(ledger.step, 0.0, ledger.any_over)
    assert not limit.in_set_up and limit.seconds == 120


def test_long_steps_and_what_comes_between_them_lengthen_it() -> None:
    limit = TimeLimit(None)
    for step, now in ((101, 0.0), (102, 30.0), (103, 32.0)):
        limit.note(step, now)
    assert limit.seconds == 300
    limit.note(103, 400.0)  # under way, or in a collective that hangs
    assert limit.seconds == 300
    limit.note(110, 500.0)
    assert limit.seconds == 4680 and "10 times the longest step" in str(limit)


def test_another_run_of_an_optimizer_may_begin_anew() -> None:
    limit = TimeLimit(None)
    for step, now in ((1, 0.0), (9, 5.0), (1, 25.0)):
        limit.note(step, now)
    assert limit.seconds == 200
