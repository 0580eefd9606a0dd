"""A method's options about each element, cut down to the elements that this rank updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.data_parallel.full_state import cut_whole
from mpishard.data_parallel.strategy import Strategy
from mpishard.minimizers.elements import whole_limits
from mpishard.minimizers.limits import Limits
from mpishard.minimizers.method import Method

Array = Any


def limits_of(method: Method, strategy: Strategy, precondition: Callable[[Array], Array] | None) -> Limits:
    """This rank's part of the options of a method; `precondition` is a function of this rank's elements.

    Raises ValueError or TypeError if an option does not fit the parameters; the message names the tensor or the
    element.
    """
    parameters = strategy.parameters

    def own(whole: np.ndarray | None) -> Array | None:
        if whole is None:
            return None
        return arrays.on_device_of(cut_whole(whole, parameters, strategy.ownership.own), parameters.like)

    lower, upper, fixed, weights, scaling = map(own, whole_limits(method, parameters.specs, parameters.dtype))
    return Limits(lower, upper, fixed, weights, scaling, precondition)
