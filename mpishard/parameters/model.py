"""What every model has, for those who train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mpishard.parameters.flat import FlatParameters


class Model(Protocol):
    """A model: its parameters, and a function of a batch that writes their gradients.

    ``loss_and_gradient(*batch)`` returns the loss summed over the batch.  It writes the gradients to the views that
    ``parameters.gradient(name)`` returns, or adds to them.

    No method is collective, except as a model says of its own.
    """

    @property
    def parameters(self) -> FlatParameters:
        """What an optimizer trains."""
        ...

    @property
    def loss_and_gradient(self) -> Callable[..., float]:
        """The function of a batch."""
        ...
