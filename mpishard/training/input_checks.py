"""Checks that a function only reads its parameters and sample indices.

Without the check, such a change would silently give wrong results.  Read-only views are no alternative: Cython, Numba,
PyTorch and JAX accept them with a warning or not at all, even in a correct function that only reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpishard.arguments import shown
from mpishard.data import ReadAhead, TokenData
from mpishard.data.text import Windows
from mpishard.nn.decoder import Decoder
from mpishard.parameters.flat import FlatParameters


class Untouched:
    """Checks one call of a function: create it before the call, and read `problem` after it.

    Parameters
    ----------
    parameters : FlatParameters
        The parameters that the function gets.
    samples : ndarray
        The sample indices that the function gets.
    """

    def __init__(self, parameters: FlatParameters, samples: np.ndarray) -> None:
        self._parameters = parameters
        self._samples = samples
        self._before = parameters.digest(), samples.copy()

    def problem(self) -> ValueError | None:
        """The error for inputs that the function has changed, or None."""
        values, samples = self._before
        if self._parameters.digest() != values:
            what, how = "parameters", "the optimizer changes them; for intermediate values take parameters.copy()"
        elif not np.array_equal(self._samples, samples):
            what, how = "sample indices", "for others take samples.copy()"
        else:
            return None
        return ValueError(f"the function changes the {what} that it is given, and must only read them: {how}")


def check_data(model: Any, batch: Any, samples: int) -> None:
    """Raise ValueError if data of this package has fewer samples, or does not fit a model of this package.

    Not collective.

    Parameters
    ----------
    model : model
        Of a problem; it may be a distributed one.
    batch : callable
        What reads its samples, maybe by a `ReadAhead`.
    samples : int
        Number of samples that the problem, or the evaluation, has.

    Raises
    ------
    ValueError
        With both sides.
    """
    model = getattr(model, "model", model)
    data = getattr(batch.batch if isinstance(batch, ReadAhead) else batch, "__self__", None)
    if isinstance(data, TokenData | Windows) and samples > len(data):
        raise ValueError(f"samples={samples}, but the data has {len(data)}: give samples=len(data), or less")
    if isinstance(model, Decoder) and isinstance(data, TokenData):
        data.check_model(model.vocabulary_size, model.context_length)


def arguments_of_loss(batch: Any, samples: np.ndarray) -> tuple[Any, ...]:
    """What a user's ``batch(samples)`` returns; TypeError if that is no tuple of arguments.

    Not collective.

    Parameters
    ----------
    batch : callable
        Of a problem or an evaluation.
    samples : ndarray
        Indices of samples.

    Returns
    -------
    tuple
        The arguments of a model's loss.
    """
    found = batch(samples)
    if not isinstance(found, Iterable):
        raise TypeError(
            f"batch(samples) must return the arguments of the model's loss, as (tokens, targets), got {shown(found)}"
        )
    return tuple(found)
