"""A data set that is evaluated while a run trains, and when its losses end the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpishard.arguments import flag, integer, number


@dataclass(frozen=True)
class Evaluation:
    """A validation set, and how often a run computes its mean loss, the validation loss.

    All ranks take part, and each sample counts once.  Micro-batches and the order of their sum do not depend on the
    ranks: a function that gives the same bits for a micro-batch gives the same validation loss in any layout.

    Parameters
    ----------
    function : callable
        ``function(parameters, samples) -> loss``: the summed loss of the validation samples with these indices (int64),
        without gradients.  Parameters are as the problem's function gets them; it must only read them.  If ranks wait
        for each other inside a model (ZeRO-3, tensor or pipeline ranks), all ranks call it equally often: one that has
        no samples left is given some of another rank, and its loss is dropped.
    samples : int
        Number of samples in the set.  It may be smaller than the number of ranks.
    every : int
        Steps between two evaluations: after each step whose number it divides.
    micro_batch_size : int, optional
        Maximum number of samples in one call.  Default: that of the problem, or else a sixteenth of its batch.
    tokens_per_sample : int
        Number of equal terms in the loss of one sample; the validation loss is the mean over all terms.
    averaged : bool
        Evaluate the exponential moving average of the parameters that the rule keeps (`ema_decay`).

    Attributes
    ----------
    of_batches : bool
        Whether `function` makes the arguments of a model's loss, see `for_model`.

    Raises
    ------
    TypeError, ValueError
        If a number is no whole number of at least 1, `averaged` is no flag, or `function` cannot be called.
    """

    function: Callable[..., Any]
    samples: int
    every: int = field(kw_only=True)
    micro_batch_size: int | None = field(default=None, kw_only=True)
    tokens_per_sample: int = field(default=1, kw_only=True)
    averaged: bool = field(default=False, kw_only=True)
    of_batches: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Evaluation: function must be callable, got {type(self.function).__name__}")
        for name in ("samples", "every", "micro_batch_size", "tokens_per_sample"):
            value = getattr(self, name)
            if value is not None or name != "micro_batch_size":
                object.__setattr__(self, name, integer(f"Evaluation: {name}", value, least=1))
        object.__setattr__(self, "averaged", flag("Evaluation: averaged", self.averaged))

    @classmethod
    def for_model(
        cls,
        batch: Callable[[np.ndarray], tuple[Any, ...]],
        samples: int,
        *,
        every: int,
        micro_batch_size: int | None = None,
        tokens_per_sample: int = 1,
        averaged: bool = False,
    ) -> Evaluation:
        """The evaluation of the model of a problem that `OptimizationProblem.for_model` has made.  Not collective.

        The model needs ``loss(*batch)``, which returns the loss summed over the batch, as `mpishard.nn.GPT` has it.

        Parameters
        ----------
        batch : callable
            ``batch(samples)`` returns the arguments of ``model.loss`` for these validation samples.
        samples, every, micro_batch_size, tokens_per_sample : int
            As for the class.
        averaged : bool
            As for the class.

        Returns
        -------
        Evaluation
            In a run that changes its mesh it is that of the model of the day.
        """
        made = cls(
            batch,
            samples,
            every=every,
            micro_batch_size=micro_batch_size,
            tokens_per_sample=tokens_per_sample,
            averaged=averaged,
        )
        object.__setattr__(made, "of_batches", True)
        return made

    @property
    def settings(self) -> dict[str, Any]:
        """The values that must be the same on all ranks."""
        return {"every": self.every, "micro_batch_size": self.micro_batch_size, **self.identity}

    @property
    def identity(self) -> dict[str, Any]:
        """The values that decide whether the losses of two runs may be compared."""
        names = ("samples", "tokens_per_sample", *(("averaged",) if self.averaged else ()))
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run whose validation loss no longer falls.

    Parameters
    ----------
    patience : int
        The run stops after this many evaluations in a row of which none was better.
    min_delta : float
        A loss is better if it is below the best one by more than this.

    Raises
    ------
    TypeError, ValueError
        If `patience` is no whole number of at least 1, or `min_delta` no finite number of at least 0.
    """

    patience: int
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "patience", integer("EarlyStopping: patience", self.patience, least=1))
        object.__setattr__(self, "min_delta", number("EarlyStopping: min_delta", self.min_delta, least=0))

    def stops(self, losses: Iterable[float]) -> bool:
        """Return True if a run stops after these validation losses.

        Not collective: it follows from the losses alone.

        Parameters
        ----------
        losses : iterable of float
            In order of the steps.

        Returns
        -------
        bool
            Whether the last `patience` of them were not better than the best before.
        """
        return self.waited(losses) >= self.patience

    def waited(self, losses: Iterable[float]) -> int:
        """How many of the last losses in a row were not better than the best before.

        Not collective.

        Parameters
        ----------
        losses : iterable of float
            In order of the steps.

        Returns
        -------
        int
            0 if the last one is the best.
        """
        best, worse = math.inf, 0
        for loss in losses:
            if loss < best - self.min_delta:
                best, worse = loss, 0
            else:
                worse += 1
        return worse
