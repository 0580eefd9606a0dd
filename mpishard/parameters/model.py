"""The interface of every model for those who train it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpishard.parameters.flat import FlatParameters


class Model(Protocol):
    """A model: its parameters, and a function of a batch that writes their gradients.

    ``loss_and_gradient(*batch)`` returns the loss summed over the batch. It writes the gradients to the views that
    ``parameters.gradient(name)`` returns, or adds to them.
    """

    @property
    def parameters(self) -> FlatParameters:
        """The parameters that an optimizer trains."""
        ...

    @property
    def loss_and_gradient(self) -> Callable[..., float]:
        """The function of a batch."""
        ...


class PipelinedModel(Protocol):
    """A model that takes several micro-batches in one call, and keeps them apart, as a pipeline does.

    With ``reproducible=True`` a training loop then passes all micro-batches of a rank through the pipeline together. A
    model without this method is called once a micro-batch.
    """

    def losses_and_gradient(self, batches: Sequence[tuple[Any, ...]]) -> Sequence[float]:
        """The losses of several batches, each summed over its samples: a micro-batch of each virtual stage.

        In the backward pass each virtual stage calls ``parameters.gradients.begin_virtual_stage`` and
        `end_virtual_stage` for each of them, in their order, as `mpishard.pipeline.runtime.Pipeline.train_each` does.
        """
        ...
