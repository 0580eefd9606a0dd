"""The samples of a step and the rank that computes each: a pure function of the seed and of the number before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from mpishard.backend.random import permuted
from mpishard.layout.boxes import split

# Divides over 2, 4, 8 and 16 ranks, whole subtrees of the sum to each.
MICRO_BATCHES = 16


@dataclass(frozen=True)
class Sampler:
    """Every sample once an epoch, in an order that depends on the seed and the epoch alone.

    A pure function of its arguments; no method is collective.

    Parameters
    ----------
    samples : int
        Number of samples in the data set.
    batch_size : int
        Samples a step, over all ranks.  The last batch of an epoch is smaller where they do not divide.
    seed : int
        Another seed gives another order.
    """

    samples: int
    batch_size: int
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch, the smaller last one included."""
        return -(-self.samples // self.batch_size)

    def consumed(self, steps: int) -> int:
        """Samples used by the first `steps` steps of `batch_size`.

        Parameters
        ----------
        steps : int
            0 or more.

        Returns
        -------
        int
            Over all epochs.
        """
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.samples + min(rest * self.batch_size, self.samples)

    def batch(self, step: int) -> np.ndarray:
        """Sample indices of a step if all steps have `batch_size`.

        Parameters
        ----------
        step : int
            Counts from 1.

        Returns
        -------
        ndarray of int64, shape (n,)
            The same on every rank; n is `batch_size`, or less at the end of an epoch.
        """
        return self.following(self.consumed(step - 1), self.batch_size)

    def following(self, consumed: int, size: int) -> np.ndarray:
        """The sample indices after `consumed` samples, no further than the end of the epoch.

        Parameters
        ----------
        consumed : int
            Samples used so far, over all epochs.
        size : int
            How many are wanted.

        Returns
        -------
        ndarray of int64, shape (n,)
            The same on every rank; n is at most `size`.
        """
        epoch, start = divmod(consumed, self.samples)
        positions = np.arange(start, min(start + size, self.samples), dtype=np.int64)
        return permuted(positions, self.samples, self.seed, "epoch", epoch)


def micro_batches(batch: np.ndarray, micro_batch_size: int | None = None) -> list[np.ndarray]:
    """Cut a batch into consecutive micro-batches, the same ones for any number of ranks.

    Not collective.

    Parameters
    ----------
    batch : ndarray, shape (n,)
        Sample indices, at least one.
    micro_batch_size : int, optional
        Samples of each but the last.  Without it there are 16 micro-batches, as even as can be, or as many as there are
        samples.

    Returns
    -------
    list of ndarray
        Views of `batch`.
    """
    if micro_batch_size is not None:
        return [batch[start : start + micro_batch_size] for start in range(0, len(batch), micro_batch_size)]
    cuts = split(len(batch), min(MICRO_BATCHES, len(batch)))
    return [batch[start:stop] for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]


def share(batch: np.ndarray, rank: int, size: int, micro_batch_size: int | None = None) -> list[np.ndarray]:
    """The micro-batches of one rank; all ranks get lists of one length, some entries empty.

    The batch is cut into micro-batches first, the same ones for any number of ranks, and these are dealt out in runs.
    Not collective.

    Parameters
    ----------
    batch : ndarray, shape (n,)
        Sample indices, the same on every rank.
    rank, size : int
        The rank, from 0 on, and the number of ranks.
    micro_batch_size : int, optional
        Samples of each micro-batch but the last.  Without it each rank has one, its share of the batch.

    Returns
    -------
    list of ndarray
        Views of `batch`.
    """
    if micro_batch_size is None:
        cuts = split(len(batch), size)
        return [batch[cuts[rank] : cuts[rank + 1]]]
    micro = micro_batches(batch, micro_batch_size)
    cuts = split(len(micro), size)
    mine = micro[cuts[rank] : cuts[rank + 1]]
    rounds = -(-len(micro) // size)
    return mine + [batch[:0]] * (rounds - len(mine))


def balanced_cuts(costs: Sequence[float], ranks: int) -> list[int]:
    """Cut terms into one run for each rank, so that the largest sum of costs in a run is as small as can be.

    Returns ``ranks + 1`` indices, as `mpishard.layout.boxes.split` does; a run may be empty.  Costs are at least 0.
    """
    ends = np.cumsum([0.0, *costs])
    low, high = max(float(ends[-1]) / ranks, max(costs, default=0.0)), float(ends[-1])
    best = _cuts_below(ends, ranks, high)
    # Every halving brings the limit closer to the least that works; 40 of them leave less than a measured time has.
    for _ in range(40):
        limit = (low + high) / 2
        cuts = _cuts_below(ends, ranks, limit)
        if cuts[-1] == len(costs):
            best, high = cuts, limit
        else:
            low = limit
    best[-1] = len(costs)
    return best


def _cuts_below(ends: np.ndarray, ranks: int, limit: float) -> list[int]:
    """Cuts of runs that cost at most `limit` each, taken from the first term on; the last may be too early."""
    cuts = [0]
    for _ in range(ranks):
        start = cuts[-1]
        last = int(np.searchsorted(ends, ends[start] + limit, side="right")) - 1
        cuts.append(max(start, last))
    return cuts


class TermCosts:
    """The cost of each term of a step that is repeated, by which terms are dealt out in runs of about equal cost.

    Costs decide who computes a term, never the order in which terms are added; so they change no bit of a result.
    `seconds`, float64 (terms,), are of the last step: those of this rank until they are summed over the ranks, then
    those of all.
    """

    # Cuts that promise less are not worth it: times vary from step to step.
    _GAIN = 0.05

    def __init__(self) -> None:
        self.seconds = np.empty(0)
        self._cuts: tuple[int, ...] | None = None

    def cuts(self, ranks: int) -> tuple[int, ...] | None:
        """The cuts of the next step for this number of ranks; None before costs are known.  The same on all ranks."""
        if not (self.seconds.size and self.seconds.all()):
            return None
        wanted = balanced_cuts(self.seconds.tolist(), ranks)
        if self._cuts is None or self._most(wanted) < (1 - self._GAIN) * self._most(self._cuts):
            self._cuts = tuple(wanted)
        return self._cuts

    def begin(self, terms: int) -> None:
        """Begin a step of `terms` terms."""
        self.seconds = np.zeros(terms)

    @contextmanager
    def timed(self, term: int) -> Iterator[None]:
        """Measure a term of this rank."""
        began = time.perf_counter()
        yield
        self.seconds[term] = max(time.perf_counter() - began, 1e-9)  # 0 means unknown

    def _most(self, cuts: Sequence[int]) -> float:
        return max(float(self.seconds[start:stop].sum()) for start, stop in zip(cuts[:-1], cuts[1:], strict=True))
