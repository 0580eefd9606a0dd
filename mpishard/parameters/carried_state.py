"""State that comes with the parameters of a model, such as the buffers of a PyTorch module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mpishard.comm.axis import Axis


class CarriedState(Protocol):
    """State of a model besides its parameters, which no optimizer changes and which a run needs to go on.

    It is small: its values are facts of a `RunState`, the same on all ranks after `synchronize`.
    """

    @property
    def facts(self) -> Mapping[str, Any]:
        """Copies of its values, as facts of a `RunState`.  Not collective."""
        ...

    @property
    def arithmetic(self) -> Mapping[str, str]:
        """What its library adds to the facts on which bits depend, see `mpishard.backend.arithmetic`.  Not collective.

        Empty where NumPy and BLAS say all.
        """
        ...

    def check_intact(self) -> None:
        """Raise ValueError if the model was changed so that its parameters are not the optimizer's any more.

        Not collective: `step` compares the ranks.
        """
        ...

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless `restore` can read these facts.  Not collective.

        Parameters
        ----------
        facts : mapping
            Of a saved state.
        """
        ...

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take the values from facts.  Not collective.

        Parameters
        ----------
        facts : mapping
            Of a saved state.
        """
        ...

    def spread(self, axis: Axis) -> None:
        """Copy the values, and what else the model has besides its parameters, from rank 0 to the other ranks.

        Collective over the axis.

        Parameters
        ----------
        axis : Axis
            The data axis.
        """
        ...

    def synchronize(self, axis: Axis) -> None:
        """Make the values equal on all ranks, after each update that all take together.  Collective over the axis.

        Parameters
        ----------
        axis : Axis
            The data axis.
        """
        ...

    def consolidate(self, axis: Axis) -> None:
        """Make the values equal on all ranks before a save, and change none that are.  Collective over the axis.

        Parameters
        ----------
        axis : Axis
            The data axis.
        """
        ...
