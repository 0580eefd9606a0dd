"""The samples of a step and the rank that computes each: a pure function of the seed and of the number before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arguments import integer, shown
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


Batch = Callable[[np.ndarray], tuple[Any, ...]]


class ReadAhead:
    """Reads the next micro-batches in a thread, so that a step finds them ready.

    Takes the place of the callable that reads a micro-batch, and returns the same.  `OptimizationProblem.for_model`
    announces before each step which samples this rank will ask for; others are read when they are asked for.  What is
    read never depends on what is ready.  No method is collective.

    Parameters
    ----------
    batch : callable
        ``batch(samples)`` returns a tuple of arrays, as `TokenData.batch` does, or of dictionaries and lists of arrays.
        The thread calls it, too.
    max_bytes : int
        Of all micro-batches that wait to be used.  One whose size would go beyond this is not read ahead; sizes are
        taken from those read before, so that the first may.

    Attributes
    ----------
    batch : callable
        As given.
    calls, waits : int
        How often a micro-batch was asked for, and how often it was not ready.
    seconds_waited : float
        Time in which it was not.
    most_bytes : int
        The most that waited to be used at one time.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    """

    def __init__(self, batch: Batch, *, max_bytes: int = 64 * 1024**2) -> None:
        if not callable(batch):
            raise TypeError(f"batch={shown(batch)} must be a function of sample indices, such as TokenData(...).batch")
        self.batch: Batch = batch
        self._max_bytes = integer("max_bytes", max_bytes, least=0)
        self.calls = self.waits = self.most_bytes = 0
        self.seconds_waited = 0.0
        self._changed = threading.Condition()
        self._wanted: dict[bytes, np.ndarray] = {}  # in the order in which they will be asked for
        self._coming: set[bytes] = set()  # all that is expected, read or not
        self._ready: dict[bytes, tuple[Any, int]] = {}  # a micro-batch or the error of reading it, and its bytes
        self._reading: bytes | None = None
        self._bytes_per_sample = 0.0
        self._closed = False
        self._thread: threading.Thread | None = None

    def expect(self, micro_batches: Sequence[np.ndarray]) -> None:
        """Say which micro-batches will be asked for, in this order; others that are ready are dropped.

        Parameters
        ----------
        micro_batches : sequence of ndarray
            Sample indices of each.
        """
        coming = {_key(samples): samples.copy() for samples in micro_batches}
        with self._changed:
            self._coming = set(coming)
            self._ready = {key: found for key, found in self._ready.items() if key in coming}
            self._wanted = {
                key: samples for key, samples in coming.items() if key not in self._ready and key != self._reading
            }
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._read, name="mpishard read ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def __call__(self, samples: np.ndarray) -> tuple[Any, ...]:
        """The micro-batch of some samples, read before or now, as the given function returns it, or its error."""
        key, began = _key(samples), time.perf_counter()
        with self._changed:
            self.calls += 1
            found, _ = self._ready.pop(key, (None, 0))
            ready = found is not None
            self._wanted.pop(key, None)
            while found is None and self._reading == key:
                self._changed.wait()
                found, _ = self._ready.pop(key, (None, 0))
            self._changed.notify_all()
        if found is None:
            found = self.batch(samples)
        if not ready:
            self.waits += 1
            self.seconds_waited += time.perf_counter() - began
        if isinstance(found, BaseException):
            raise found
        micro_batch: tuple[Any, ...] = found
        return micro_batch

    def close(self) -> None:
        """End the thread and drop what is ready; later calls read at once."""
        with self._changed:
            self._closed = True
            self._wanted, self._ready = {}, {}
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._ready = {}

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self) -> None:
        """The thread: read what is wanted next as soon as there is room for it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_room())
                if self._closed:
                    return
                self._reading = key = next(iter(self._wanted))
                samples = self._wanted.pop(key)
            try:
                found: Any = self.batch(samples)
                size = _nbytes(found)
            except BaseException as error:  # the caller raises it; extensions in Rust have some that are no Exception
                found, size = error, 0
            with self._changed:
                self._reading = None
                if key in self._coming:  # still
                    self._ready[key] = found, size
                self._bytes_per_sample = max(self._bytes_per_sample, size / max(1, len(samples)))
                self.most_bytes = max(self.most_bytes, self._held())
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Return True if something is wanted, and there is room for the next of it."""
        if not self._wanted:
            return False
        samples = next(iter(self._wanted.values()))
        return self._held() + len(samples) * self._bytes_per_sample <= self._max_bytes

    def _held(self) -> int:
        return sum(size for _, size in self._ready.values())


def _key(samples: np.ndarray) -> bytes:
    return np.ascontiguousarray(samples, np.int64).tobytes()


def _nbytes(batch: Any) -> int:
    """The bytes of the arrays of a micro-batch, also of those within dictionaries, lists and tuples."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return sum(map(_nbytes, batch)) if isinstance(batch, list | tuple) else int(getattr(batch, "nbytes", 0))
