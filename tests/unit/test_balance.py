"""Terms are cut into runs that cost about the same."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from mpishard.data.sampling import TermCosts, balanced_cuts
from mpishard.layout.boxes import split
from mpishard.training.step_runner import StepRunner


def most(costs, cuts):
    return max(sum(costs[start:stop]) for start, stop in itertools.pairwise(cuts))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_no_other_cuts_are_better(ranks, seed):
    costs = np.random.default_rng(seed).uniform(0.1, 3.0, 8).tolist()
    cuts = balanced_cuts(costs, ranks)
    others = itertools.combinations_with_replacement(range(9), ranks - 1)
    best = min(most(costs, (0, *inner, 8)) for inner in others)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, 8, ranks + 1)
    assert cuts == sorted(cuts)
    assert most(costs, cuts) == pytest.approx(best, rel=1e-9)


def test_equal_costs_are_cut_evenly():
    assert most([1.0] * 9, balanced_cuts([1.0] * 9, 4)) == most([1.0] * 9, split(9, 4))


def test_costs_are_used_once_all_are_known():
    costs = TermCosts()
    assert costs.cuts(2) is None
    costs.begin(4)
    with costs.timed(0):
        pass
    assert costs.cuts(2) is None
    costs.seconds[:] = [3.0, 1.0, 1.0, 1.0]
    assert costs.cuts(2) == (0, 1, 4)


def test_cuts_stay_while_others_gain_little():
    costs = TermCosts()
    costs.begin(4)
    costs.seconds[:] = [3.0, 1.0, 1.0, 1.0]
    first = costs.cuts(2)
    costs.seconds[:] = [2.0, 1.1, 1.0, 1.0]  # (0, 2, 4) would have 3.1 in place of 3.1
    assert costs.cuts(2) is first
    costs.seconds[:] = [1.0, 1.0, 1.0, 1.0]
    assert costs.cuts(2) == (0, 2, 4)


def test_reading_ahead_knows_the_cuts():
    told = []
    runner = object.__new__(StepRunner)
    runner.problem = SimpleNamespace(expect=told.append, micro_batch_size=2)
    runner.axis, runner.ordered, runner.of_model = SimpleNamespace(rank=1, size=2), SimpleNamespace(), False
    runner.costs = TermCosts()
    runner.announce([np.arange(8)])
    runner.costs.seconds = np.array([3.0, 1.0, 1.0, 1.0])
    runner.announce([np.arange(8)])
    assert [np.concatenate(each).tolist() for each in told] == [[4, 5, 6, 7], [2, 3, 4, 5, 6, 7]]
