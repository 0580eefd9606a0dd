"""The values of an optimization problem: what is minimised, over which samples, and how far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypedDict

import numpy as np

from mpishard.arguments import integer, mapping, number
from mpishard.data_parallel.results import P
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.flat_arrays import check_flat


class ObjectiveOptions(TypedDict, total=False):
    """Optional values of an `Objective` by name, for functions that pass them on.  Not collective."""

    micro_batch_size: int | None
    steps: int | None
    tolerance: float | None
    seconds: float | None
    seed: int
    tokens_per_sample: int


@dataclass(frozen=True)
class Objective(Generic[P]):
    """The values of an `OptimizationProblem` that the training loop reads; its docstring explains each value.

    Parameters
    ----------
    function : callable
        What is minimised.
    start : 1-D array or FlatParameters
        Where it begins.
    samples, batch_size : int
        All samples, and those of a step.
    micro_batch_size : int, optional
        Samples of one call of the function.
    steps : int, optional
        The run stops after them.
    tolerance : float, optional
        It stops at a gradient norm of at most this.
    seconds : float, optional
        It stops after this time.
    seed : int
        Of the order of the samples.
    tokens_per_sample : int
        For the record.
    facts : mapping
        What checkpoints keep besides.
    product : callable, optional
        Hessian times a vector.
    several : callable, optional
        The function for several micro-batches in one call.
    expect : callable, optional
        Told which micro-batches follow.
    model : model, optional
        Whose loss it is.

    Attributes
    ----------
    averages : bool
        Whether the mean of all terms is minimised; if not, their sum.  Of the class, as the next one.
    may_idle : bool
        Whether ranks may have no sample, where there are fewer samples than ranks.
    everywhere : bool
        Whether these ranks call the function too, with none.

    Raises
    ------
    TypeError, ValueError
        If a value is invalid.
    """

    averages: ClassVar[bool] = True
    may_idle: ClassVar[bool] = False
    everywhere: ClassVar[bool] = False

    # More fields than other classes: this is the one value that groups them, by the names that users write.
    function: Callable[[Any, np.ndarray, Any], float]
    start: P
    samples: int
    batch_size: int
    micro_batch_size: int | None = field(default=None, kw_only=True)
    steps: int | None = field(default=None, kw_only=True)
    tolerance: float | None = field(default=None, kw_only=True)
    seconds: float | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    tokens_per_sample: int = field(default=1, kw_only=True)
    facts: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    product: Callable[[Any, Any, np.ndarray, Any], object] | None = field(default=None, kw_only=True)
    several: Callable[[Any, Sequence[np.ndarray], Any], Sequence[float]] | None = field(default=None, kw_only=True)
    expect: Callable[[Sequence[np.ndarray]], object] | None = field(default=None, kw_only=True)
    model: Any = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be callable, got {type(self.function).__name__}")
        for name in ("product", "several", "expect"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise TypeError(f"{name} must be callable, got {type(getattr(self, name)).__name__}")
        start: Any = self.start
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
        """By what the sums over so many samples are divided.

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
