"""How terms that cost differently are dealt out: in runs of neighbours that cost about the same."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np


def balanced_cuts(costs: Sequence[float], ranks: int) -> list[int]:
    """Cut terms into one run for each rank, so that the largest sum of costs in a run is as small as can be.

    Not collective.

    Parameters
    ----------
    costs : sequence of float
        Of each term, at least 0.
    ranks : int
        Number of runs.

    Returns
    -------
    list of int
        Of ``ranks + 1`` indices, as `mpishard.layout.boxes.split` returns them; a run may be empty.
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
    """What each term of a step that is repeated has cost, and how to deal the terms out.

    Costs decide who computes a term, never the order in which terms are added; so they change no bit of a result.

    Attributes
    ----------
    seconds : ndarray, float64 (terms,)
        Of the last step: those of this rank until they are summed over the ranks, then those of all.
    """

    # Cuts that promise less are not worth it: times vary from step to step.
    _GAIN = 0.05

    def __init__(self) -> None:
        self.seconds = np.empty(0)
        self._cuts: tuple[int, ...] | None = None

    def cuts(self, ranks: int) -> tuple[int, ...] | None:
        """The cuts of the next step for so many ranks; None before costs are known.  The same on all ranks."""
        if not (self.seconds.size and self.seconds.all()):
            return None
        wanted = balanced_cuts(self.seconds.tolist(), ranks)
        if self._cuts is None or self._most(wanted) < (1 - self._GAIN) * self._most(self._cuts):
            self._cuts = tuple(wanted)
        return self._cuts

    def begin(self, terms: int) -> None:
        """Begin a step of so many terms."""
        self.seconds = np.zeros(terms)

    @contextmanager
    def timed(self, term: int) -> Iterator[None]:
        """Measure a term of this rank."""
        began = time.perf_counter()
        yield
        self.seconds[term] = max(time.perf_counter() - began, 1e-9)  # 0 means unknown

    def _most(self, cuts: Sequence[int]) -> float:
        return max(float(self.seconds[start:stop].sum()) for start, stop in zip(cuts[:-1], cuts[1:], strict=True))
