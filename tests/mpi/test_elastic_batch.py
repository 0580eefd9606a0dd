"""Batches and learning rates that go with the number of workers, by a named policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scaled import BATCH, SAMPLES, SCHEDULE, STEPS, bits, configuration, expected, loss, plain, problem
from steps import STRATEGIES

from mpishard import AdamW, Checkpoints, ElasticOptimizer, ZeRO2Optimizer
from mpishard.elastic.transactions import Transactions
from mpishard.training.checkpoints import RunProgress

pytestmark = pytest.mark.pairs(1)


class Run:
    """An elastic run; `taken` has the samples that this rank computed, by step."""

    def __init__(self, mesh, scaling, strategy=STRATEGIES[1], lr=SCHEDULE, **options):
        inner = strategy(AdamW(lr=lr), configuration(mesh))
        self.mesh = mesh
        self.elastic = ElasticOptimizer(inner, scaling=scaling, **options)
        self.taken, self.rates = {}, {}

    def go(self, resizes, steps=STEPS, **options):
        def function(parameters, samples, gradients):
            self.taken.setdefault(self.elastic.optimizer.clock + 1, []).extend(samples.tolist())
            return loss(parameters, samples, gradients)

        def callback(state):
            self.rates[state.step] = state.learning_rate
            if state.step in resizes:
                self.elastic.resize(resizes[state.step])

        self.result = self.elastic.optimize(problem(function, steps), callback=callback, progress=False, **options)
        return self.result

    def samples_by_step(self):
        """Of all ranks; collective."""
        gathered = self.mesh.world.comm.allgather(self.taken)
        return {step: sorted(sum((each.get(step, []) for each in gathered), [])) for step in set().union(*gathered)}


def workers_by_step(begin, resizes):
    found, now = [], begin
    for step in range(1, STEPS + 1):
        found.append(now)
        now = resizes.get(step, now)
    return found


def check(run, taken, rates):
    """That an elastic run was the plain one, which takes every sample once an epoch."""
    assert run.samples_by_step() == {step: sorted(batch.tolist()) for step, batch in enumerate(taken, 1)}
    assert run.result.samples == sum(map(len, taken))
    consumed = np.concatenate(taken)
    for epoch in range(len(consumed) // SAMPLES):
        assert Counter(consumed[epoch * SAMPLES : (epoch + 1) * SAMPLES].tolist()) == Counter(range(SAMPLES))
    assert bits(run.result) == plain(taken, rates)


@pytest.mark.parametrize(
    ("scaling", "strategy"), [*(("linear", strategy) for strategy in STRATEGIES), ("square_root", STRATEGIES[1])]
)
def test_batch_and_rate_go_with_the_workers(mesh, scaling, strategy):
    ranks = mesh.size
    resizes = {1: 1, 3: ranks, 6: max(1, ranks - 1), 9: (ranks + 1) // 2}
    taken, rates = expected(scaling, workers_by_step(ranks, resizes), ranks)
    run = Run(mesh, scaling, strategy)
    run.go(resizes)
    check(run, taken, rates)
    assert run.rates == {step: rates[step - 1] for step in run.rates}
    assert mesh.rank > 0 or len(run.rates) == STEPS


def test_more_workers_than_at_the_beginning(mesh):
    """A batch is at most an epoch, and the learning rate follows the batch."""
    first = (mesh.size + 3) // 4
    taken, rates = expected("linear", workers_by_step(first, {1: mesh.size}), first)
    run = Run(mesh, "linear", max_workers=first)
    run.elastic.max_workers = mesh.size
    run.go({1: mesh.size})
    check(run, taken, rates)
    if mesh.size == 4:
        assert len(taken[2]) == SAMPLES
        assert max(rates) == pytest.approx(0.05 * SAMPLES / BATCH)


def test_a_number_is_scaled_too(mesh):
    run = Run(mesh, "linear", lr=0.25)
    run.go({1: 1}, steps=4)
    assert mesh.rank > 0 or list(run.rates.values()) == [0.25] + [0.25 * (BATCH // mesh.size) / BATCH] * 3


def test_a_run_that_goes_on_knows_where_it_began(mesh, folder):
    """Samples, and the number of workers that the batch size is for, are in the checkpoint."""
    first = max(1, mesh.size - 1)
    before, after = {2: 1}, {8: 1, 10: mesh.size}
    workers = [first] * 2 + [1] * 3 + [mesh.size] * 3 + [1] * 2 + [mesh.size] * 2
    taken, rates = expected("linear", workers, first)
    begun = Run(mesh, "linear", max_workers=first)
    with Checkpoints(folder, mesh, every=2) as checkpoints:
        begun.go(before, steps=5, checkpoints=checkpoints)
        run = Run(mesh, "linear", STRATEGIES[3])
        run.go(after, checkpoints=checkpoints, resume=True)
    assert run.result.resumed_steps == 5
    run.taken |= begun.taken
    check(run, taken, rates)


def test_a_fixed_run_goes_on_as_an_elastic_one(mesh, folder):
    taken, rates = expected("linear", [mesh.size] * 5 + [1] * 7, mesh.size)
    with Checkpoints(folder, mesh) as checkpoints:
        fixed = ZeRO2Optimizer(AdamW(lr=SCHEDULE), configuration(mesh))
        fixed.optimize(problem(steps=5), progress=False, checkpoints=checkpoints)
        run = Run(mesh, "linear", max_workers=1)
        run.go({}, checkpoints=checkpoints, resume=True)
    assert bits(run.result) == plain(taken, rates)


def test_a_checkpoint_that_does_not_say_how_many_workers_began(mesh, folder, monkeypatch):
    def silent(progress):
        metadata = metadata_of(progress)
        del metadata["first_workers"]
        return metadata

    metadata_of = RunProgress.to_metadata
    monkeypatch.setattr(RunProgress, "to_metadata", silent)
    taken, rates = expected("linear", [mesh.size] * 8 + [1] * 4, mesh.size)
    with Checkpoints(folder, mesh) as checkpoints:
        Run(mesh, "constant").go({3: 1}, steps=5, checkpoints=checkpoints)
        run = Run(mesh, "linear")
        run.go({8: 1}, checkpoints=checkpoints, resume=True)
    assert bits(run.result) == plain(taken, rates)


def test_a_step_that_is_taken_back_takes_its_samples_again(mesh, monkeypatch):
    """As all survivors do if somebody dies before a step is committed."""
    compute = Transactions.compute

    def twice(transactions):
        if transactions.status.committed_step in (3, 7):
            compute(transactions)
            transactions.rollback()
        compute(transactions)

    resizes = {3: 1, 7: mesh.size}
    taken, rates = expected("linear", workers_by_step(mesh.size, resizes), mesh.size)
    monkeypatch.setattr(Transactions, "compute", twice)
    run = Run(mesh, "linear")
    run.go(resizes)
    assert bits(run.result) == plain(taken, rates)
    assert run.result.samples == sum(map(len, taken))


def test_spares_need_no_sample(mesh):
    """A batch that is too small for all processes, but not for those that train."""
    few = max(1, mesh.size - 1)
    small = replace(problem(steps=2), batch_size=few)
    options = {"max_workers": few, "min_workers": 1}
    result = Run(mesh, "constant", **options).elastic.optimize(small, progress=False)
    assert result.samples == 2 * few
    if mesh.size > 1:
        with pytest.raises(ValueError, match=f"batch_size={few} .*the {mesh.size} "):
            Run(mesh, "constant").elastic.optimize(small, progress=False)


def test_what_has_no_sense_is_refused(mesh):
    with pytest.raises(ValueError, match="scaling='cubic' .*'square_root'"):
        Run(mesh, "cubic")
    with pytest.raises(ValueError, match="scaling=None"):
        Run(mesh, None)
