"""Whether a function only reads the parameters and the sample indices that it is given.

What it changes there would be wrong without a word.  They are no read-only views: Cython, Numba, PyTorch and JAX take
those with a warning or not at all, where a function that only reads is right.
"""

from __future__ import annotations

import numpy as np

from mpishard.parameters.flat import FlatParameters


class Untouched:
    """Looks at one call of a function, from creation to `problem`.

    Parameters
    ----------
    parameters : FlatParameters
    samples : ndarray
        What the function gets.
    """

    def __init__(self, parameters: FlatParameters, samples: np.ndarray) -> None:
        self._parameters = parameters
        self._samples = samples
        self._before = parameters.digest(), samples.copy()

    def problem(self) -> ValueError | None:
        """What the function has changed, if anything."""
        values, samples = self._before
        if self._parameters.digest() != values:
            what, how = "parameters", "the optimizer changes them; for intermediate values take parameters.copy()"
        elif not np.array_equal(self._samples, samples):
            what, how = "sample indices", "for others take samples.copy()"
        else:
            return None
        return ValueError(f"the function changes the {what} that it is given, and must only read them: {how}")
