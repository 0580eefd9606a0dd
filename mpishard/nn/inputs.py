"""The tokens of a batch: checked, moved to where the model computes, and cut into micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend.array import copy_to_device, is_array, to_host
from mpishard.layout.boxes import split
from mpishard.nn.architecture import Architecture
from mpishard.nn.units import Batch
from mpishard.nn.workspace import Pool

Array = Any


class Inputs:
    """Owns the memory of a model's tokens and targets, which is used again from step to step.

    Parameters
    ----------
    architecture : Architecture
        What tokens are valid.
    module : module
        ``numpy`` or ``cupy``: where the model computes.
    """

    def __init__(self, architecture: Architecture, module: Any) -> None:
        self._architecture = architecture
        self._host = Pool()
        # Where they are computed with.
        self._moved = None if module is np else Pool(module)

    @property
    def nbytes(self) -> int:
        """Bytes held where the model computes."""
        return (self._host if self._moved is None else self._moved).nbytes

    def micro_batches(self, tokens: Array, targets: Array, count: int) -> list[Batch]:
        """A batch, cut into `count` micro-batches; TypeError or ValueError if it is none."""
        if np.shape(tokens) != np.shape(targets):
            raise ValueError(f"tokens have shape {np.shape(tokens)}, but targets {np.shape(targets)}")
        tokens_n, targets_n = self.checked("tokens", tokens), self.checked("targets", targets)
        size, length = np.shape(tokens)
        cuts = [length * cut for cut in split(size, count)]
        return [
            Batch(tokens_n[first:last], targets_n[first:last], length)
            for first, last in zip(cuts[:-1], cuts[1:], strict=True)
        ]

    def checked(self, what: str, tokens: Array) -> Array:
        """`tokens` as a flat int64 array where the model computes; TypeError or ValueError if they are not valid."""
        vocabulary_size, context_length = self._architecture.vocabulary_size, self._architecture.context_length
        tokens = np.asarray(to_host(tokens) if is_array(tokens) else tokens)
        if tokens.dtype.kind not in "iu":
            raise TypeError(f"{what} must be integers, got {tokens.dtype}")
        if tokens.ndim != 2:
            raise ValueError(f"{what} must have shape (batch, length), got {tokens.shape}")
        if tokens.shape[1] > context_length:
            raise ValueError(
                f"{what} are sequences of {tokens.shape[1]}, but the model's context_length is {context_length}"
            )
        if tokens.shape[1] == 0:
            raise ValueError(f"{what} of shape {tokens.shape} are sequences of no token")
        low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
        if low < 0 or high >= vocabulary_size:
            raise ValueError(
                f"{what} range from {low} to {high}, but the model's vocabulary_size is {vocabulary_size}: "
                f"valid tokens are 0 to {vocabulary_size - 1}"
            )
        flat = self._host(what, (tokens.size,), np.int64)
        flat.reshape(tokens.shape)[...] = tokens
        if self._moved is None:
            return flat
        moved = self._moved(what, flat.shape, flat.dtype)
        copy_to_device(flat, moved)
        return moved
