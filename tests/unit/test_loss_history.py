"""Losses of steps in which ranks do not meet become those of all ranks once they do."""

import numpy as np
import pytest

from mpishard.training.run import LossHistory


class Ranks:
    """As many ranks that have all the same losses."""

    def __init__(self, size):
        self.size, self.calls = size, 0

    def all_reduce(self, values, label):
        assert label == "loss"
        self.calls += 1
        values *= self.size
        return values


@pytest.fixture
def history():
    return LossHistory(Ranks(2))


def test_steps_in_which_ranks_meet(history):
    for loss in (np.array([3.0]), np.array([1.0, 2.0, 4.0])):
        history.append(history.mean_over_ranks(loss, 4))
    history.reduce()
    assert history.to_array().tolist() == [1.5, 3.5]
    assert history._axis.calls == 2  # nothing was left to reduce


def test_steps_in_between_are_reduced_at_their_places(history):
    history.restore(np.array([9.0]))
    for loss, shown in ((1.0, 0.5), (2.0, 1.0)):
        history._axis.size = 2
        mean = history.mean_of_rank(np.array([loss]), 4)
        assert mean == shown
        history.append(mean)
    history._axis.size = 3  # others had more
    history.append(history.mean_over_ranks(np.array([4.0]), 4))
    history.reduce()
    assert history.to_array().tolist() == [9.0, 0.75, 1.5, 3.0]
    history.reduce()
    assert (len(history), history._axis.calls) == (4, 2)


def test_the_array_is_a_copy(history):
    history.append(1.0)
    history.to_array()[0] = 5
    assert history.to_array().tolist() == [1.0]
