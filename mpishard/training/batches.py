"""The samples of each step of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mpishard.comm.axis import Axis
from mpishard.data.sampling import Sampler
from mpishard.minimizers import Method
from mpishard.training.objective import Objective, Scaling


class Batches:
    """The position of a run in its samples, and the size of the next batch.

    The ranks of `axis`, the data axis, are the workers; `scaling` says how the batch follows their number.  `method`,
    if one takes the steps in place of a rule, makes evaluations, which have the same samples until an iteration has
    ended; ValueError if it minimises one function only, and the batch is not all samples.

    `problem` may be replaced by the same one for another mesh.  `position` is the number of samples before the next
    step; in the middle of a step, before that step.  `current` has the sample indices of the last batch, int64.
    """

    def __init__(self, problem: Objective[Any], axis: Axis, scaling: Scaling, *, method: Method | None) -> None:
        full = problem.batch_size == problem.samples
        if method is not None and scaling.policy != "constant":
            raise ValueError(
                f"scaling={scaling.policy!r} changes the learning rate, which {type(method).__name__} has not"
            )
        if method is not None and not (full or method.takes_batches):
            raise ValueError(
                f"batch_size={problem.batch_size} of samples={problem.samples}: {type(method).__name__} needs one "
                f"function, the same in every evaluation; give batch_size={problem.samples}"
            )
        self._full = method is not None and full
        self.sampler = Sampler(problem.samples, problem.batch_size, problem.seed)
        self.position: int = 0
        self.current = np.empty(0, np.int64)
        self.problem: Objective[Any] = problem
        self._axis = axis
        self._scaling = scaling

    def begin_after(self, batches: int) -> None:
        """Begin after `batches` batches, those of the optimizer's steps before the run."""
        self.position = self.sampler.consumed(batches)

    def check(self, workers: int) -> None:
        """Raise ValueError if the batch of this number of workers gives some of them no sample."""
        given = self.problem.batch_size
        if self._scaling.batch_size(given, workers) < workers and not self.problem.may_idle:
            raise ValueError(
                f"batch_size={given} gives some of the {workers} data-parallel ranks no sample; "
                f"use at least {workers}, or fewer ranks"
            )

    def restore(self, position: int, first_workers: int) -> None:
        """Continue at a position, with the batch size and learning rate given for `first_workers` workers."""
        self.position = position
        self._scaling = replace(self._scaling, first=first_workers)

    def following(self) -> np.ndarray:
        """The samples of the next step; the position stays, so that a step can be taken again."""
        if self._full:
            self.current = np.arange(self.problem.samples)
        else:
            self.current = self.sampler.following(self.position, self.size)
        return self.current

    def coming(self, steps: int) -> list[np.ndarray]:
        """The samples of the next steps, the current one first, if nothing changes the size of the batch."""
        if self._full:
            return [self.current]
        batches, position = [], self.position
        for _ in range(steps):
            batches.append(self.sampler.following(position, self.size))
            position += len(batches[-1])
        return batches

    def advance(self) -> None:
        """Count the current batch: its step is finished, and the next one has others."""
        self.position += len(self.current)

    @property
    def first_workers(self) -> int:
        """The number of workers for which batch size and learning rate are given."""
        return self._scaling.first

    @property
    def size(self) -> int:
        """Current number of samples in a step, over all ranks; a step at the end of an epoch may have fewer."""
        return self._scaling.batch_size(self.problem.batch_size, self._axis.size)

    @property
    def rate_factor(self) -> float:
        """The current factor on the learning rate."""
        most = self.problem.samples
        return self._scaling.rate_factor(min(self.size, most) / min(self.problem.batch_size, most))

    @property
    def order(self) -> dict[str, int | str]:
        """The values that decide the samples of each step."""
        seed = int(self.problem.seed)
        return {
            "samples": self.problem.samples,
            "batch_size": self.problem.batch_size,
            "seed": seed if seed.bit_length() < 64 else str(seed),  # attributes of HDF5 end at 64 bits
        }
