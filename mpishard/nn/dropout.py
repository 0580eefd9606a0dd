"""Dropout (Srivastava et al., 2014), with masks that are a function of the seed, the step, the sample and the layer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arguments import number
from mpishard.backend.random import key
from mpishard.nn.layers import Layer
from mpishard.nn.workspace import Workspace

Array = Any


@dataclass(frozen=True)
class Draws:
    """What the masks of a micro-batch depend on, besides the layer.

    Parameters
    ----------
    seed : int
        Of the model.
    step : int
        Of the run.
    samples : tuple of int
        The number of each sequence in the data.
    length : int
        Tokens of a sequence.
    """

    seed: int
    step: int
    samples: tuple[int, ...]
    length: int


class Dropout(Layer):
    """Sets a random part of the channels to 0, and multiplies the others so that the mean stays.

    The mask of a sequence is keyed by seed, step, number of the sample, and name, and counted by position and channel:
    it is the same in every layout, in whatever order samples come, and after a resume.  No mask is stored.

    Not collective: each rank computes with its own rows.

    Parameters
    ----------
    name : str
        Its key, and the prefix of its memory in a workspace; it has no tensors.
    rate : float
        The part that becomes 0, at least 0 and below 1.

    Raises
    ------
    TypeError, ValueError
        If the rate is no such number.
    """

    def __init__(self, name: str, rate: float) -> None:
        super().__init__(name)
        self.rate: float = checked_rate(rate)

    def apply(self, x_nc: Array, work: Workspace) -> Array:
        """Drop channels, in place: the same function forward and backward, since it is linear and its own adjoint.

        Parameters
        ----------
        x_nc : array, shape (n, width)
            The rows that this rank holds.
        work : Workspace
            Of the micro-batch; without `Workspace.draws`, as outside of training, nothing is dropped.

        Returns
        -------
        array, shape (n, width)
            `x_nc` itself.
        """
        draws: Draws | None = work.draws
        if draws is None or not self.rate:
            return x_nc
        first = self.tensor.first_row(work.rows)
        # Most samples have many rows: one key each.
        keys_b = np.array(
            [key(draws.seed, "dropout", draws.step, each, self.name) for each in draws.samples], np.uint64
        )
        samples_n, positions_n = _places(first, first + len(x_nc), draws.length, self.module)
        self.ops.drop(x_nc, self.module.asarray(keys_b.view(np.int64))[samples_n], positions_n, self.rate)
        return x_nc


# One entry serves all layers of a model, forward and backward.
@functools.lru_cache(maxsize=16)
def _places(start: int, stop: int, length: int, module: Any) -> tuple[Array, Array]:
    """For the rows from `start` to `stop`: the number of the sequence, and the position in it."""
    rows_n = np.arange(start, stop)
    return module.asarray(rows_n // length), module.asarray(rows_n % length)


def checked_rate(rate: Any) -> float:
    """`rate` as a float of at least 0 and below 1; raises TypeError or ValueError if it is not."""
    return number("dropout", rate, least=0, below=1)
