"""The next micro-batches, read by a thread while a step computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from mpishard.arguments import integer, shown

Batch = Callable[[np.ndarray], tuple[Any, ...]]


class ReadAhead:
    """Reads the next micro-batches in a thread, so that a step finds them ready.

    Takes the place of the callable that reads a micro-batch, and returns the same.  `OptimizationProblem.for_model`
    announces before each step which samples this rank will ask for; others are read when they are asked for.  What is
    read never depends on what is ready.  No method is collective.

    Parameters
    ----------
    batch : callable
        ``batch(samples)`` returns a tuple of arrays, such as `TokenData.batch`.  The thread calls it, too.
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
        if isinstance(found, Exception):
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
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
                size = sum(int(getattr(array, "nbytes", 0)) for array in found)
            except Exception as error:  # the caller raises it
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
