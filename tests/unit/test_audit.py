"""Who checks what, as a function of the step alone, and who was wrong where two results differ."""

import functools
import math
from collections import Counter

import pytest

from mpishard.reduction.tree_sum import TermAssignment
from mpishard.training.audit import Check, draw, expected_steps, rounds_of, verdict

SHARES = pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
RANKS = pytest.mark.parametrize("ranks", [2, 3, 8])
PARTS, STEPS = 16, 1000


@functools.cache
def drawn(share, ranks):
    assignment = TermAssignment(PARTS, ranks)
    return assignment, [draw(share, assignment, step) for step in range(1, (STEPS if share < 1 else 100) + 1)]


@SHARES
@RANKS
def test_the_share_is_that_of_the_micro_batches_and_ranks_have_equal_parts_of_it(share, ranks):
    assignment, steps = drawn(share, ranks)
    checks = [check for step in steps for check in step]
    if share == 1:
        assert all(sorted(check.micro_batch for check in step) == list(range(PARTS)) for step in steps)
    else:
        assert len(checks) == pytest.approx(share * PARTS * STEPS, rel=0.03)
        # A rank has the same number of checks as any other one, however many micro-batches it has.
        assert len(set(Counter(check.owner for check in checks).values())) == 1
        assert len(set(Counter(check.auditor for check in checks).values())) == 1
    for check in checks:
        assert check.micro_batch in assignment.terms(check.owner)
        assert check.owner != check.auditor
    for step in steps:
        assert len({check.micro_batch for check in step}) == len(step)
    # Each micro-batch and each pair of ranks comes up.
    assert {check.micro_batch for check in checks} == set(range(PARTS))
    assert len({check[1:] for check in checks}) == ranks * (ranks - 1)


def test_a_rank_without_micro_batches_still_checks_others():
    assignment = TermAssignment(3, 4, cuts=(0, 0, 1, 2, 3))
    checks = [check for step in range(9) for check in draw(1.0, assignment, step)]
    assert Counter(check.micro_batch for check in checks) == {0: 9, 1: 9, 2: 9}
    assert 0 in [check.auditor for check in checks]
    assert draw(1.0, TermAssignment(3, 1), 1) == []


@pytest.mark.parametrize("rate", [0.004, 0.11, 0.9, 2.7])
def test_one_round_comes_in_each_period(rate):
    counts = [rounds_of(step, rate) for step in range(1, STEPS + 1)]
    assert abs(sum(counts) - rate * STEPS) <= 1
    gaps = [step for step, count in enumerate(counts) if count]
    longest = max(after - before for before, after in zip(gaps[:-1], gaps[1:], strict=True))
    assert longest <= math.ceil(2 / rate)


@SHARES
@RANKS
def test_the_steps_until_a_rank_is_checked_are_as_said(share, ranks):
    """From each step on, until the next one with a check."""
    _, steps = drawn(share, ranks)
    waits, following = [], None
    for step in reversed(range(len(steps))):
        following = step if steps[step] else following
        waits += [] if following is None else [following - step + 1]
    mean, most = expected_steps(share, PARTS, ranks)
    assert max(waits) <= most
    assert sum(waits) / len(waits) == pytest.approx(mean, rel=0.08)


@pytest.mark.parametrize(
    ("first", "again", "wrong"),
    [
        ((7, 5), (5, 5, 5), [1]),  # the owner, once
        ((7, 5), (5, 7, 5), [1]),  # and again
        ((7, 5), (5, 8, 5), [1]),
        ((5, 7), (5, 5, 7), [2]),  # the auditor
        ((5, 7), (5, 5, 5), [2]),
        ((7, 8), (5, 5, 5), [1, 2]),  # both, and the third one decides
        ((7, 5), (6, 7, 5), None),  # all differ: the function does not give the same bits twice
        ((7, 5), (5, 7, 5, 7), None),
        ((7, 5), (5, 7, 5, 5), [1]),
        ((7, 5), (6, 7, 5, 5, 5), [0, 1]),  # and another one that nobody had checked
        ((7, 5), (5, 5), None),  # two ranks are no majority, even if one changes its mind
        ((7, 5), (7, 5), None),
    ],
)
def test_the_third_decides(first, again, wrong):
    check = Check(3, owner=1, auditor=2) if len(again) > 2 else Check(3, owner=0, auditor=1)
    assert verdict(check, first, again) == wrong
