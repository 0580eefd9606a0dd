"""Minimisations over ranks that are threads: the sums of a real space, without a launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mpishard.minimizers.space import Space


class Team:
    """So many threads, which meet to reduce arrays in place, and to put vectors together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[Any] = [None] * size

    def gather(self, rank: int, thing: Any) -> list[Any]:
        """What each rank has given, on every rank."""
        self.given[rank] = thing
        self.barrier.wait()
        things = [np.copy(each) for each in self.given]
        self.barrier.wait()
        return things

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """``work(rank)`` on every rank; the results by rank."""

        def guarded(rank: int) -> Any:
            try:
                return work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return [future.result() for future in [pool.submit(guarded, rank) for rank in range(self.size)]]


class ThreadSpace(Space):
    """Vectors of which this thread has the elements from `cuts[rank]` to `cuts[rank + 1]`; counts its all-reduces."""

    def __init__(self, team: Team, rank: int, cuts: Sequence[int], like: np.ndarray) -> None:
        self.team, self.rank, self.all_reduces = team, rank, 0
        self.part = slice(cuts[rank], cuts[rank + 1])
        size = cuts[rank + 1] - cuts[rank]
        super().__init__(size, cuts[-1], like[:0], [(0, size)])

    def add(self, numbers: np.ndarray) -> None:
        self.all_reduces += 1
        numbers[...] = sum(self.team.gather(self.rank, numbers))

    def maximize(self, numbers: np.ndarray) -> None:
        self.all_reduces += 1
        numbers[...] = np.max(self.team.gather(self.rank, numbers), axis=0)

    def whole(self, vector: np.ndarray) -> np.ndarray:
        return np.concatenate(self.team.gather(self.rank, vector))

    def own(self, whole: np.ndarray) -> np.ndarray:
        return whole[self.part].copy()

    def numbers(self) -> np.ndarray:
        return np.arange(self.part.start, self.part.stop)
