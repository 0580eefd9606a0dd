"""A trial of saved numbers: can a method resume from them? Asked before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpishard.minimizers.limits import Limits
from mpishard.minimizers.method import Method
from mpishard.minimizers.space import LocalSpace

ELEMENTS = "elements"  # in the metadata: a hash of bounds, fixed elements, inner product and preconditioner


def check_metadata(method: Method, metadata: Mapping[str, Any], elements: str) -> None:
    """Raise ValueError, with both sides, unless a minimisation by the method can be restored from this metadata.

    A minimisation without elements tries it. `metadata` is of `Minimizer.to_metadata`, possibly with other options, and
    of a hash of those about elements, which must be equal to `elements`.
    """
    if metadata.get(ELEMENTS, elements) != elements:
        raise ValueError(
            "the state is of a run with other bounds, fixed elements, inner_product or preconditioner, which what "
            f"{type(method).__name__} has learned depends on; give those, or leave its state and take the parameters "
            "alone as a start"
        )
    nothing = np.zeros(0)
    minimizer = method.make(LocalSpace(0, nothing), np.zeros((len(method.slots), 0)), nothing, Limits())
    try:
        minimizer.restore(metadata)
    except ValueError:
        raise
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:  # of a file that others wrote
        raise ValueError(f"{type(method).__name__}: the saved state cannot be restored: {error!r}") from None
