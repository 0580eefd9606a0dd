"""The tokens of a batch: checked, moved to where the model computes, and cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpishard.backend.array import to_host
from mpishard.backend.streams import queue_copy
from mpishard.layout.boxes import split
from mpishard.nn.architecture import DecoderArchitecture
from mpishard.nn.layers import Draws
from mpishard.nn.units import Batch
from mpishard.nn.workspace import Pool

Array = Any


class Inputs:
    """Owns the memory of a model's tokens and targets, which is used again from step to step; `seed`: of dropout's
    masks.
    """

    def __init__(self, architecture: DecoderArchitecture, module: Any, seed: int) -> None:
        self._architecture = architecture
        self._seed = seed
        self._host = Pool()
        # Where they are computed with.
        self._moved = None if module is np else Pool(module)

    @property
    def nbytes(self) -> int:
        """Bytes held where the model computes."""
        return (self._host if self._moved is None else self._moved).nbytes

    def micro_batches(
        self, tokens: Array, targets: Array, count: int, samples: Array | None = None, step: int = 0
    ) -> list[Batch]:
        """A batch, cut into `count` micro-batches; raises TypeError or ValueError if it is none.

        With the numbers of its samples, and a step, it has what the masks of dropout depend on.
        """
        ((tokens_n, targets_n),) = self._pairs([(tokens, targets)])
        size, length = np.shape(tokens)
        cuts = split(size, count)
        found = []
        for first, last in pairwise(cuts):
            rows = slice(length * first, length * last)
            draws = _draws(self._seed, samples, step, size, length, first, last)
            found.append(Batch(tokens_n[rows], targets_n[rows], length, draws=draws))
        return found

    def each_batch(self, batches: Sequence[tuple[Array, ...]], step: int = 0) -> list[Batch]:
        """Several batches, each as one micro-batch; TypeError or ValueError if one is none."""
        found = []
        for (tokens_n, targets_n), (tokens, _, *samples) in zip(
            self._pairs([each[:2] for each in batches]), batches, strict=True
        ):
            size, length = np.shape(tokens)
            draws = _draws(self._seed, samples[0] if samples else None, step, size, length, 0, size)
            found.append(Batch(tokens_n, targets_n, length, draws=draws))
        return found

    def checked(self, what: str, tokens: Array) -> Array:
        """`tokens` as a flat int64 array where the model computes; TypeError or ValueError if they are not valid."""
        return self._moved_each(what, [self._valid(what, tokens)])[0]

    def _pairs(self, batches: Sequence[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
        """Tokens and targets of batches, checked, as flat arrays where the model computes."""
        valid: list[tuple[np.ndarray, np.ndarray]] = []
        for tokens, targets in batches:
            if np.shape(tokens) != np.shape(targets):
                raise ValueError(f"tokens have shape {np.shape(tokens)}, but targets {np.shape(targets)}")
            valid.append((self._valid("tokens", tokens), self._valid("targets", targets)))
        moved = [
            self._moved_each(what, [pair[index] for pair in valid]) for index, what in enumerate(("tokens", "targets"))
        ]
        return list(zip(*moved, strict=True))

    def _valid(self, what: str, tokens: Array) -> np.ndarray:
        """`tokens` on the host; TypeError or ValueError if they are not valid."""
        vocabulary_size, context_length = self._architecture.vocabulary_size, self._architecture.context_length
        tokens = np.asarray(to_host(tokens))
        check_tokens(what, tokens, vocabulary_size)
        if tokens.ndim != 2:
            raise ValueError(f"{what} must have shape (batch, length), got {tokens.shape}")
        if tokens.shape[1] > context_length:
            raise ValueError(
                f"{what} are sequences of {tokens.shape[1]}, but the model's context_length is {context_length}"
            )
        if tokens.shape[1] == 0:
            raise ValueError(f"{what} of shape {tokens.shape} are sequences of no token")
        return tokens

    def _moved_each(self, what: str, parts: Sequence[np.ndarray]) -> list[Array]:
        """Arrays as flat int64 arrays where the model computes, end to end in memory that is used again."""
        cuts = [0]
        for part in parts:
            cuts.append(cuts[-1] + part.size)
        flat: Array = self._host(what, (cuts[-1],), np.int64)
        for part, (first, last) in zip(parts, pairwise(cuts), strict=True):
            flat[first:last].reshape(part.shape)[...] = part
        if self._moved is not None:
            moved = self._moved(what, flat.shape, flat.dtype)
            queue_copy(flat, moved)
            flat = moved
        return [flat[first:last] for first, last in pairwise(cuts)]


def _draws(seed: int, samples: Any, step: int, size: int, length: int, first: int, last: int) -> Draws | None:
    """The key of the dropout masks of some sequences of a batch; None if no samples are given."""
    if samples is None:
        return None
    samples = np.asarray(to_host(samples))
    if samples.shape != (size,):
        raise ValueError(f"samples has shape {samples.shape}, but there are {size} sequences: give one number each")
    if size and samples.dtype.kind not in "iu":
        raise TypeError(f"samples must be integers, got {samples.dtype}")
    return Draws(seed, step, tuple(samples[first:last].tolist()), length)


def check_tokens(what: str, tokens: np.ndarray, vocabulary_size: int) -> None:
    """Raise TypeError or ValueError unless `tokens`, called `what` in the message, are integers of the vocabulary."""
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"{what} must be integers, got {tokens.dtype}")
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    if low < 0 or high >= vocabulary_size:
        raise ValueError(
            f"{what} range from {low} to {high}, but the model's vocabulary_size is {vocabulary_size}: "
            f"valid tokens are 0 to {vocabulary_size - 1}"
            + ("; none is ignored, as by torch's -100: cut sequences so that all their targets count" * (low == -100))
        )
