"""The values of an optimization problem: what is minimised, over which samples, with which options, and until when.

`Batches` has the samples of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypedDict

import numpy as np

from mpishard.arguments import integer, mapping, number
from mpishard.comm.axis import Axis
from mpishard.data.evaluation import EarlyStopping, Evaluation
from mpishard.data.sampling import Sampler
from mpishard.data_parallel.results import P, TrainingState
from mpishard.parameters.flat import FlatParameters, check_flat
from mpishard.record import RunRecord

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints  # with h5py: only for those who have checkpoints


class ObjectiveOptions(TypedDict, total=False):
    """Optional values of an `Objective` by name, for functions that pass them on."""

    micro_batch_size: int | None
    steps: int | None
    tolerance: float | None
    seconds: float | None
    seed: int
    tokens_per_sample: int


@dataclass(frozen=True)
class Objective(Generic[P]):
    """The values of an `OptimizationProblem` that the training loop reads; its docstring explains each value.

    Creation raises TypeError or ValueError if a value is invalid.
    """

    averages: ClassVar[bool] = True  # the mean of all terms is minimised; if not, their sum
    may_idle: ClassVar[bool] = False  # ranks may have no sample, where there are fewer samples than ranks
    everywhere: ClassVar[bool] = False  # these ranks call the function too, with none

    function: Callable[[Any, np.ndarray, Any], float]
    start: P
    samples: int
    batch_size: int
    micro_batch_size: int | None = field(default=None, kw_only=True)
    steps: int | None = field(default=None, kw_only=True)
    tolerance: float | None = field(default=None, kw_only=True)
    seconds: float | None = field(default=None, kw_only=True)  # it stops after this time
    seed: int = field(default=0, kw_only=True)  # of the order of the samples
    tokens_per_sample: int = field(default=1, kw_only=True)  # for the record
    facts: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # what checkpoints keep besides
    # Hessian times a vector.
    product: Callable[[Any, Any, np.ndarray, Any], object] | None = field(default=None, kw_only=True)
    # The function for several micro-batches in one call.
    several: Callable[[Any, Sequence[np.ndarray], Any], Sequence[float]] | None = field(default=None, kw_only=True)
    # Called with the micro-batches that follow.
    expect: Callable[[Sequence[np.ndarray]], object] | None = field(default=None, kw_only=True)
    model: Any = field(default=None, kw_only=True, repr=False)  # whose loss it is

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be callable, got {type(self.function).__name__}")
        for name in ("product", "several", "expect"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise TypeError(f"{name} must be callable, got {type(getattr(self, name)).__name__}")
        start: Any = self.start
        if isinstance(start, Mapping | list | tuple) and not isinstance(start, FlatParameters):
            raise TypeError(
                f"start must be a flat array or a FlatParameters, got {type(start).__name__}; give "
                "mpishard.FlatParameters.of(arrays by name), or minimize it by mpishard.minimize, which takes trees"
            )
        if not isinstance(start, FlatParameters):
            check_flat("start", start)
        if not (sum(spec.size for spec in start.specs) if isinstance(start, FlatParameters) else start.size):
            raise ValueError("start is empty: there is nothing to optimize; give it at least one parameter")
        for name, least in (("samples", 1), ("batch_size", 1), ("tokens_per_sample", 1), ("seed", None)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=least))
        for name, least in (("micro_batch_size", 1), ("steps", 0)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, integer(name, getattr(self, name), least=least))
        for name in ("tolerance", "seconds"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, number(name, getattr(self, name), least=0, finite=False))
        mapping("facts", self.facts, "names and values")
        if self.batch_size > self.samples:
            raise ValueError(
                f"batch_size={self.batch_size} is more than samples={self.samples}, and a step takes each sample once; "
                f"batch_size={self.samples} takes all of them in every step"
            )

    def terms(self, samples: int) -> int:
        """The divisor of sums over this number of samples.

        Not collective.

        Parameters
        ----------
        samples : int
            Of all ranks.

        Returns
        -------
        int
            The number of their terms, or 1.
        """
        return samples * self.tokens_per_sample if self.averages else 1

    @property
    def settings(self) -> dict[str, Any]:
        """The values that must be the same on all ranks, without the start."""
        names = ("samples", "batch_size", "micro_batch_size", "steps", "tolerance", "seed", "tokens_per_sample")
        return {name: getattr(self, name) for name in names}


# The learning rate is proportional to this power of the batch size.
_POWERS = {"constant": 0.0, "linear": 1.0, "square_root": 0.5}


@dataclass(frozen=True)
class Scaling:
    """A scaling policy, and the number of workers that it starts from.

    No method is collective.

    Parameters
    ----------
    policy : {"constant", "linear", "square_root"}
        "constant": batch size and learning rate stay the same.  Otherwise the batch size is proportional to the number
        of workers, and the learning rate to the batch size ("linear"; Goyal et al. 2017, section 2.1) or to its square
        root ("square_root"; Krizhevsky 2014, section 5; for Adam Malladi et al. 2022).
    first : int
        The number of workers for which the problem's batch size and the rule's learning rate are given.

    Raises
    ------
    ValueError
        If the policy is unknown.
    """

    policy: str
    first: int

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or self.policy not in _POWERS:
            known = ", ".join(map(repr, _POWERS))
            raise ValueError(f"scaling={self.policy!r} is none of {known}")

    def batch_size(self, given: int, workers: int) -> int:
        """Samples in a step, over all workers, rounded down.

        Parameters
        ----------
        given : int
            The problem's batch size.
        workers : int
            Workers that train now.

        Returns
        -------
        int
            At least 1.
        """
        return given if self.policy == "constant" else max(1, given * workers // self.first)

    def rate_factor(self, growth: float) -> float:
        """The factor on the learning rate.

        Parameters
        ----------
        growth : float
            The batch divided by the problem's batch.

        Returns
        -------
        float
            1 with "constant".
        """
        return growth ** _POWERS[self.policy]


@dataclass(frozen=True)
class RunOptions:
    """The checked options of a run, which `ShardedOptimizer.optimize` explains."""

    callback: Callable[[TrainingState[Any]], bool | None] | None
    progress: bool
    watching: bool  # any rank has a callback or a time limit
    checkpoints: Checkpoints | None
    resume: bool
    record: RunRecord | None
    evaluate: Evaluation | None = None
    stop_early: EarlyStopping | None = None


class StopRequest(IntEnum):
    """The reason of a rank's request to stop; the largest of several requests counts."""

    NONE = 0
    SECONDS = 1
    CALLBACK = 2
    SIGNAL = 3
    FAILED = 4


@dataclass(frozen=True)
class StopCondition:
    """The reason why a run stops after a step, in the words of `OptimizationResult.stop_reason`; empty if it continues.

    It follows from what all ranks know equally.  Goals are the `steps` and `tolerance` of the problem; `stop_early`
    stops when the validation loss no longer falls.
    """

    problem: Objective[Any]
    stop_early: EarlyStopping | None = None

    def reason(self, request: int, steps: int, norm: float, *, ended: str = "", validated: Iterable[float] = ()) -> str:
        """The reason after `steps` steps, with the last gradient's norm and the largest request of all ranks.

        The end of a method comes first; the last is that the validation losses no longer fall.
        """
        requested = StopRequest(request).name.lower() if request else ""
        if reason := ended or requested or self.goal(steps, norm):
            return reason
        return "patience" if self.stop_early is not None and self.stop_early.stops(validated) else ""

    def goal(self, steps: int, norm: float) -> str:
        """The goal that is reached, or empty."""
        if self.problem.tolerance is not None and norm <= self.problem.tolerance:
            return "tolerance"
        return "steps" if self.problem.steps is not None and steps >= self.problem.steps else ""

    def described(self, reason: str) -> str:
        """A goal with its value, as the user has given it."""
        return f"{reason}={getattr(self.stop_early if reason == 'patience' else self.problem, reason)}"


class Batches:
    """The position of a run in its samples, and the size of the next batch.

    The ranks of `axis`, the data axis, are the workers; `scaling` says how the batch follows their number.  With
    `in_order` a batch of all samples has them in their order, the same in each step.

    `problem` may be replaced by the same one for another mesh.  `position` is the number of samples before the next
    step; in the middle of a step, before that step.  `current` has the sample indices of the last batch, int64.
    """

    def __init__(self, problem: Objective[Any], axis: Axis, scaling: Scaling, *, in_order: bool) -> None:
        self._full = in_order and problem.batch_size == problem.samples
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
