"""Parts of a run: samples and their balance, scaling, goals, progress and losses."""

from __future__ import annotations

import errno
import io
import itertools
import math
import os
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpishard import LAMB, SGD, Adagrad, Adam, AdamW, Lion, RMSprop, cosine
from mpishard.backend.random import normal, permuted
from mpishard.data.evaluation import EarlyStopping
from mpishard.data.sampling import Sampler, TermCosts, balanced_cuts, micro_batches, share
from mpishard.layout.boxes import split
from mpishard.training import Scaling, metrics
from mpishard.training.checkpoints import RunProgress
from mpishard.training.metrics import LossHistory
from mpishard.training.objective import Objective, StopCondition, StopRequest
from mpishard.training.step_runner import StepRunner

# Why a run stops: requests of ranks come before goals.


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
    assert stop.goal(steps, norm) == stop.reason(StopRequest.NONE, steps, norm) == goal


def test_the_end_of_a_method_comes_first_then_the_strongest_request_a_goal_and_patience():
    stop = StopCondition(condition(steps=3).problem, EarlyStopping(patience=2))
    worse = [1.0, 2.0, 1.0]
    assert stop.reason(StopRequest.SIGNAL, 3, math.nan, ended="ftol", validated=worse) == "ftol"
    for strongest, reason in enumerate(("steps", "seconds", "callback", "signal")):
        assert stop.reason(strongest, 3, math.nan, validated=worse) == reason
    assert sorted(StopRequest)[-2:] == [StopRequest.SIGNAL, StopRequest.FAILED]
    assert stop.reason(StopRequest.NONE, 2, math.nan, validated=worse) == "patience"
    assert stop.reason(StopRequest.NONE, 2, math.nan, validated=worse[:2]) == ""
    assert [stop.described(reason) for reason in ("steps", "patience")] == ["steps=3", "patience=2"]


# Batch and learning rate by the number of workers: the policies, and rules with another rate.

RULES = [SGD(0.25, momentum=0.9), Adam(0.25), AdamW(0.25, weight_decay=0.5), RMSprop(0.25), Adagrad(0.25), Lion(0.25)]


@pytest.mark.parametrize(
    ("policy", "sizes", "factor"),
    [("constant", [16, 16, 16], 1.0), ("linear", [5, 10, 64], 4.0), ("square_root", [5, 10, 64], 2.0)],
)
def test_policies(policy, sizes, factor):
    scaling = Scaling(policy, 3)
    assert [scaling.batch_size(16, workers) for workers in (1, 2, 12)] == sizes
    assert (scaling.rate_factor(1.0), scaling.rate_factor(4.0)) == (1.0, factor)
    assert Scaling(policy, 8).batch_size(4, 1) == (4 if policy == "constant" else 1)  # not empty


@pytest.mark.parametrize("policy", ["cubic", None])
def test_other_policies_are_refused(policy):
    with pytest.raises(ValueError, match="'constant', 'linear', 'square_root'"):
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


# How far a run has come, as its checkpoints keep it.

SAMPLER = Sampler(10, 4)  # steps of 4, 4 and 2 samples
LOSSES = np.array([3.0, 2.0, 1.0])
KEPT = RunProgress(LOSSES, 12, 2, 2, 0, 1, 9).to_metadata()
NUMBERS = "samples_consumed first_workers steps_before skipped_before resumed_steps samples_before".split()


def resumed(**facts):
    return RunProgress.from_metadata({"steps": 4, "skipped_steps": 1, **facts}, SAMPLER, first_workers=7, batches=5)


@pytest.mark.parametrize(
    ("facts", "losses", "numbers"),
    [
        (KEPT, [3, 2, 1], [12, 2, 2, 1, 3, 9]),
        ({"samples_consumed": 12, "loss": LOSSES}, [3, 2, 1], [12, 7, 2, 1, 3, SAMPLER.consumed(2)]),  # first workers?
        *(
            (other_loop, [math.nan] * 5, [SAMPLER.consumed(5), 7, 0, 1, 5, 0])
            for other_loop in ({}, {"loss": 0.5}, {"loss": LOSSES}, {"samples_consumed": 3}, {"first_workers": 3})
        ),
    ],
)
def test_what_a_checkpoint_keeps_and_another_training_loop_does_not(facts, losses, numbers):
    assert list(KEPT) == ["samples_consumed", "samples_before", "first_workers", "loss"]
    found = resumed(**facts)
    assert np.array_equal(found.losses, losses, equal_nan=True)
    assert [getattr(found, name) for name in NUMBERS] == numbers


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"samples_consumed": -1}, "samples_consumed=-1"),
        ({"samples_consumed": "x"}, "samples_consumed=x"),
        ({"first_workers": 0}, "first_workers=0"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"samples_consumed": 8, "loss": np.zeros(6)}, "6 losses of 5 steps"),
    ],
)
def test_wrong_numbers_are_refused(facts, message):
    with pytest.raises(ValueError, match=message):
        resumed(**facts)


def test_lines_of_a_day_in_a_log(monkeypatch, capsys):
    """Often enough to see that the run continues, and seldom enough to be read."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    bar = metrics.ProgressBar(86_400, shows=True)
    times, before = [], 0
    for _ in range(86_400):
        now[0] += 1
        bar.advance("loss 1")
        if now[0] < 700 or now[0] > 86_000:
            lines = capsys.readouterr().err
            times += [now[0]] * bool(lines)
            before += len(lines.splitlines())
    bar.close()
    assert times[:5] == [1, 6, 11, 16, 21] and times[-1] == 86_400
    assert before + len(capsys.readouterr().err.splitlines()) < 1600


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_progress_that_cannot_be_written_does_not_end_the_run(monkeypatch):
    for file in (FullDisk(), io.StringIO(), None, object()):  # closed before the start, or of a class of the user's
        monkeypatch.setattr(metrics.sys, "stderr", file)
        bar = metrics.ProgressBar(3, shows=True)
        if type(file) is io.StringIO:
            file.close()
        bar.advance("loss 1")
        bar.close()


# Losses of steps in which ranks do not meet become those of all ranks once they do.


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
def ranks():
    return Ranks(2)


@pytest.fixture
def history(ranks):
    return LossHistory(ranks)


def test_steps_in_which_ranks_meet(history, ranks):
    for loss in (np.array([3.0]), np.array([1.0, 2.0, 4.0])):
        history.append(history.mean_over_ranks(loss, 4))
    history.reduce()
    history.to_array()[0] = 5  # of a copy
    assert history.to_array().tolist() == [1.5, 3.5]
    assert ranks.calls == 2  # nothing was left to reduce


def test_steps_in_between_are_reduced_at_their_places(history, ranks):
    history.restore(np.array([9.0]))
    for loss, shown in ((1.0, 0.5), (2.0, 1.0)):
        mean = history.mean_of_rank(np.array([loss]), 4)
        assert mean == shown
        history.append(mean)
    ranks.size = 3  # others had more
    history.append(history.mean_over_ranks(np.array([4.0]), 4))
    for _ in range(2):
        history.reduce()
        assert history.to_array().tolist() == [9.0, 0.75, 1.5, 3.0]
    assert (len(history), ranks.calls) == (4, 2)


# Terms are cut into runs that cost about the same.


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
    assert most([1.0] * 9, balanced_cuts([1.0] * 9, ranks)) == most([1.0] * 9, split(9, ranks))


def test_costs_are_used_once_all_are_known_and_cuts_stay_while_others_gain_little():
    costs = TermCosts()
    assert costs.cuts(2) is None
    costs.begin(4)
    with costs.timed(0):
        pass
    assert costs.cuts(2) is None
    costs.seconds[:] = [3.0, 1.0, 1.0, 1.0]
    assert (first := costs.cuts(2)) == (0, 1, 4)
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


# Random numbers by name, and samples by step: the same on any number of ranks.


@given(st.integers(1, 3000), st.integers(0, 5))
def test_permuted_is_a_permutation(size, seed):
    order = permuted(np.arange(size), size, seed, "epoch", 0)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_permuted_depends_on_seed_and_name_and_not_on_the_slice():
    whole = permuted(np.arange(1000), 1000, 1, "a")
    assert np.array_equal(permuted(np.arange(300, 400), 1000, 1, "a"), whole[300:400])
    for other in ((2, "a"), (1, "b"), (1, "a", 0)):
        assert (permuted(np.arange(1000), 1000, *other) != whole).mean() > 0.9
    few_of_many = permuted(np.arange(10), 10**15, 0)  # costs as little
    assert len(set(few_of_many.tolist())) == 10 and 0 <= few_of_many.min() and few_of_many.max() < 10**15


def test_permuted_is_even():
    """Where the first of 10 goes, over 4000 seeds: each place within five standard deviations of 400."""
    places = np.bincount([permuted(np.arange(1), 10, seed)[0] for seed in range(4000)], minlength=10)
    assert abs(places - 400).max() < 5 * np.sqrt(400 * 0.9)


def test_normal_is_keyed_by_name():
    one = normal(0, "w", (100, 100), 0.5, np.float64)
    assert np.array_equal(normal(0, "w", (100, 100), 0.5, np.float64), one)
    assert np.array_equal(normal(0, "w", (100, 100), 0.5, np.float32), one.astype(np.float32))
    for key in ((0, "v"), (1, "w")):
        assert not np.array_equal(normal(*key, (100, 100), 0.5, np.float64), one)
    assert abs(one.mean()) < 0.025 and abs(one.std() - 0.5) < 0.025


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 9), st.none() | st.integers(1, 7), st.integers(1, 9))
def test_shares_are_the_batch(samples, batch_size, ranks, micro, step):
    batch = Sampler(samples, batch_size, seed=3).batch(step)
    shares = [share(batch, rank, ranks, micro) for rank in range(ranks)]
    assert len({len(parts) for parts in shares}) == 1
    assert np.array_equal(np.concatenate([part for parts in shares for part in parts]), batch)
    if micro is not None:
        alone = [part.tolist() for part in share(batch, 0, 1, micro)]
        spread = [part.tolist() for parts in shares for part in parts if len(part)]
        assert spread == alone  # the same micro-batches on any number of ranks


@pytest.mark.parametrize(("samples", "sizes"), [(40, [3] * 8 + [2] * 8), (16, [1] * 16), (5, [1] * 5)])
def test_sixteen_micro_batches_by_default(samples, sizes):
    batch = Sampler(samples, samples).batch(1)
    micro = micro_batches(batch)
    assert [len(part) for part in micro] == sizes
    assert np.array_equal(np.concatenate(micro), batch)


@given(st.integers(1, 60), st.integers(1, 20), st.lists(st.integers(1, 80), max_size=30), st.integers(0, 3))
def test_batches_of_any_sizes_take_every_sample_once_an_epoch(samples, batch_size, sizes, seed):
    """In the order of batches of one size, whatever their sizes are; each epoch has another order."""
    sampler = Sampler(samples, batch_size, seed)
    consumed, taken = 0, []
    for size in sizes:
        batch = sampler.following(consumed, size)
        left = samples - consumed % samples
        assert len(batch) == min(size, left)  # an epoch's last batch is cut short
        consumed += len(batch)
        taken += batch.tolist()
    steps = -(-consumed // batch_size) + consumed // samples + 1
    batches = [sampler.batch(step + 1) for step in range(steps)]
    assert [sampler.consumed(step) for step in range(steps + 1)] == [0, *np.cumsum([len(each) for each in batches])]
    assert taken == np.concatenate(batches)[:consumed].tolist()
    epochs = [taken[first : first + samples] for first in range(0, consumed - samples + 1, samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    assert samples < 9 or len(set(map(tuple, epochs))) == len(epochs)
