"""The loss of each step of a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpishard.comm.axis import Axis
from mpishard.reduction.tree_sum import tree_sum


class _Unreduced(NamedTuple):
    """A step without synchronization: its index in the history, this rank's sum, and the terms of all ranks."""

    step: int
    loss_sum: float
    terms: int


class LossHistory:
    """Mean losses, one for each step; in steps without synchronization they are this rank's estimates until `reduce`.

    Parameters
    ----------
    axis : Axis
        The ranks over which losses are summed.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._means: list[float] = []
        self._unreduced: list[_Unreduced] = []

    def __len__(self) -> int:
        return len(self._means)

    def to_array(self) -> np.ndarray:
        """A copy of all losses, float64."""
        return np.array(self._means)

    def restore(self, losses: np.ndarray) -> None:
        """Continue from these losses."""
        self._means = losses.tolist()

    def append(self, loss: float) -> None:
        """Add the mean loss of a finished step."""
        self._means.append(loss)

    def mean_over_ranks(self, losses: np.ndarray, terms: int, riders: np.ndarray | None = None) -> float:
        """The mean loss of the next step, with `terms` terms over all ranks; overwrites `losses`.  Collective.

        `riders` are further numbers that are summed over the ranks in the same call, in place.
        """
        if riders is None:
            self._axis.all_reduce(losses, label="loss")
        else:
            both = self._axis.all_reduce(np.concatenate([losses, riders]), label="loss")
            losses[...], riders[...] = both[: len(losses)], both[len(losses) :]
        return tree_sum(losses.tolist()) / terms

    def mean_of_rank(self, losses: np.ndarray, terms: int) -> float:
        """An estimate without communication, as if every rank had this rank's loss; `reduce` corrects it."""
        loss_sum = float(losses[0])
        self._unreduced.append(_Unreduced(len(self), loss_sum, terms))
        return loss_sum * self._axis.size / terms

    def reduce(self) -> None:
        """Replace the estimates of steps without synchronization by means over all ranks.  Collective."""
        if not self._unreduced:
            return
        sums = self._axis.all_reduce(np.array([each.loss_sum for each in self._unreduced]), label="loss")
        for each, loss_sum in zip(self._unreduced, sums.tolist(), strict=True):
            self._means[each.step] = loss_sum / each.terms
        self._unreduced.clear()
