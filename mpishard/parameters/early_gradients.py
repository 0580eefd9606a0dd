"""Gradients that a micro-batch writes while those of the micro-batch before are not complete."""

from __future__ import annotations

from collections import deque
from typing import Any

from mpishard.backend import array as arrays

Array = Any


class EarlyGradients:
    """Keeps what input gradients write until the weight gradients of their micro-batch, for reproducible runs.

    A schedule such as ZB-H1 does the input gradient of a micro-batch before the weight gradients of earlier ones.
    Layers write small gradients, those of biases and norms, in the first of the two.  Where micro-batches are kept
    apart, these gradients wait here, in memory of their own, and are copied when the weight gradients begin.

    Parameters
    ----------
    like : array
        An array of the dtype and device of the gradients.

    Attributes
    ----------
    writing : bool
        Whether a micro-batch writes to this memory now.
    """

    def __init__(self, like: Array) -> None:
        self.writing: bool = False
        self._like = like
        # By virtual stage: what each micro-batch has written here since its input gradient, oldest first.  None: it
        # wrote to the usual memory, since no other micro-batch was before it.
        self._waiting: dict[int, deque[dict[str, Array] | None]] = {}
        self._open: dict[str, Array] = {}
        self._free: dict[str, list[Array]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = [array for free in self._free.values() for array in free]
        held += [array for queue in self._waiting.values() for written in queue for array in (written or {}).values()]
        return sum(int(array.nbytes) for array in held)

    def begin(self, virtual_stage: int) -> None:
        """Begin the input gradient of the next micro-batch of a virtual stage."""
        queue = self._waiting.setdefault(virtual_stage, deque())
        self.writing = bool(queue)
        self._open = {}
        queue.append(self._open if self.writing else None)

    def end(self) -> None:
        """End an input gradient."""
        self.writing = False

    def view(self, name: str, shape: tuple[int, ...]) -> tuple[Array, bool]:
        """Memory for a gradient of the micro-batch under way, and whether it has content."""
        known = name in self._open
        if not known:
            free = self._free.get(name)
            self._open[name] = free.pop() if free else arrays.empty(shape, self._like.dtype, like=self._like)
        return self._open[name], known

    def take(self, virtual_stage: int) -> dict[str, Array]:
        """The gradients of the oldest micro-batch of a virtual stage; its weight gradients begin now."""
        queue = self._waiting.get(virtual_stage)
        written = (queue.popleft() if queue else None) or {}
        for name, array in written.items():
            self._free.setdefault(name, []).append(array)
        return written

    def forget(self) -> None:
        """Forget what waits, after an exception or a step."""
        self._waiting.clear()
        self._open = {}
        self.writing = False
