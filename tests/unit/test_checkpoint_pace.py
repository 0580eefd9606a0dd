"""When saves are due that may take a share of the time, on clocks of the tests' own."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mpishard.checkpoint.checkpoints import Measured, Pace, save_interval


class Ranks:
    """Ranks with a clock each, which take steps and save when it is due."""

    def __init__(self, share, clocks):
        self.now = list(clocks)
        self.paces = [Pace(share, lambda rank=rank: self.now[rank]) for rank in range(len(clocks))]
        self.asked, self.saved = [], []

    def due(self, step):
        asks = {pace.asks(step) for pace in self.paces}
        assert len(asks) == 1  # else some would wait for the others
        if not asks.pop():
            return False
        self.asked.append(step)
        all_measured = [pace.measured(step) for pace in self.paces]
        answers = {pace.decide(step, all_measured) for pace in self.paces}
        assert len(answers) == 1
        return answers.pop()

    def step(self, step, seconds, stalls):
        """Take a step, and save if that is due, which keeps each rank for so long."""
        self.now = [now + seconds for now in self.now]
        if self.due(step):
            began = list(self.now)
            self.now = [now + stall for now, stall in zip(self.now, stalls, strict=True)]
            for pace, moment in zip(self.paces, began, strict=True):
                pace.note(step, moment)
            self.saved.append(step)
            assert not self.due(step)  # never twice


def test_the_first_save_follows_the_first_step_and_the_slowest_rank_counts():
    ranks = Ranks(0.25, [0.0, 100.0, -7.0])
    for step in range(1, 41):
        ranks.step(step, 1.0, [0.5, 1.5, 1.0])
    # After a save of 1.5 s at 0.25 six seconds have to pass: the next one is due in the fifth or sixth step, by the
    # clock of the rank that waited least.
    assert ranks.saved[0] == 1
    assert {later - earlier for earlier, later in zip(ranks.saved, ranks.saved[1:], strict=False)} == {6}


def test_saves_that_take_longer_are_fewer():
    ranks = Ranks(0.1, [0.0])
    for step in range(1, 201):
        ranks.step(step, 1.0, [0.4 if step < 50 else 2.0])
    gaps = [later - earlier for earlier, later in zip(ranks.saved, ranks.saved[1:], strict=False)]
    assert gaps[:12] == [4] * 12 and set(gaps[13:]) == {18}  # 18 steps and a save are 20 s


def test_ranks_ask_each_other_seldom():
    ranks = Ranks(0.02, [0.0, 5.0])
    for step in range(1, 15001):
        ranks.step(step, 1 / 64, [2.0, 1.0])  # every 100 s, 99 of them for steps on the rank that waits least
    assert ranks.saved == [1, 6337, 12673]
    assert len(ranks.asked) < 180


def test_slow_steps_are_noticed():
    ranks = Ranks(0.02, [0.0])
    for step in range(1, 1001):
        ranks.step(step, 0.01 if step < 300 else 1.0, [1.0])
    # Of the 50 s that had to pass, fast steps were 3; the ranks did not ask each other in between.
    assert 345 < ranks.saved[1] <= 402


@given(
    st.sampled_from([0.01, 0.02, 0.1, 0.5, 0.9]),
    st.lists(st.tuples(st.floats(1e-3, 2), st.floats(1e-3, 5), st.floats(1e-3, 5)), min_size=1, max_size=300),
)
def test_all_saves_but_the_last_take_no_more_than_the_share(share, history):
    ranks = Ranks(share, [0.0, 1000.0])
    stalls = []
    for step, (seconds, one, other) in enumerate(history, 1):
        before = len(ranks.saved)
        ranks.step(step, seconds, [one, other])
        if len(ranks.saved) > before:
            stalls.append(max(one, other))
    run = min(ranks.now[0], ranks.now[1] - 1000)
    assert ranks.saved[0] == 1
    assert sum(stalls[:-1]) <= share * run * (1 + 1e-9)


def test_other_ranks_than_before():
    """Those who were in no save follow those who were, and if nobody was, the next step is saved."""
    old, new = Pace(0.5, lambda: 10.0), Pace(0.5, lambda: 3.0)
    old.note(7, began=8.0)
    assert not old.asks(7) and new.asks(8)
    old.ranks_changed()
    new.ranks_changed()
    all_measured = [new.measured(8), old.measured(8)]
    assert all_measured == [None, Measured(stall=2.0, elapsed=2.0, step=0.0)]
    assert [pace.decide(8, all_measured) for pace in (new, old)] == [False, False]
    assert [pace.asks(9) for pace in (new, old)] == [True, True]
    assert new.decide(8, [None, None])


def test_another_run_of_the_loop_counts_its_steps_from_the_beginning():
    ranks = Ranks(0.25, [0.0])
    for step in range(1, 100):
        ranks.step(step, 1.0, [1.5])
    before, ranks.saved = ranks.saved[-1], []
    for step in range(1, 20):
        ranks.step(step, 1.0, [1.5])
    assert ranks.saved == [step for step in range(1, 20) if (99 - before + step) % 5 == 0]


@pytest.mark.parametrize("elapsed", [4.0, 9.0])
def test_exactly_due(elapsed):
    assert Pace(0.5).decide(3, [Measured(2.0, elapsed, 1.0)])
    assert not Pace(0.5).decide(3, [Measured(2.0, 3.999, 1.0)])


def test_steps_between_saves_need_no_communication():
    due = [step for step in range(10) if save_interval(3).due(step, None)]
    assert due == [3, 6, 9]
    assert not any(save_interval(None).due(step, None) for step in range(10))


@pytest.mark.parametrize("every", [0, -1, 1.0, 0.0, -0.5, float("nan"), True, "2"])
def test_neither_steps_nor_a_share(every):
    with pytest.raises(ValueError, match=f"every={every!r} must be a whole number of steps of at least 1, a share"):
        save_interval(every)
