"""Whether a method can go on from saved numbers, tried before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpishard.minimizers.limits import Limits
from mpishard.minimizers.method import Method
from mpishard.minimizers.space import LocalSpace


def check_metadata(method: Method, metadata: Mapping[str, Any]) -> None:
    """Raise unless a minimisation by the method can be restored from these numbers: one without elements tries it.

    Not collective.

    Parameters
    ----------
    method : Method
        With the options of now.
    metadata : mapping
        Of `Minimizer.to_metadata`, maybe by a method with other options.

    Raises
    ------
    ValueError
        If something is missing or invalid, or the options do not fit; with both sides.
    """
    nothing = np.zeros(0)
    minimizer = method.make(LocalSpace(0, nothing), np.zeros((len(method.slots), 0)), nothing, Limits())
    try:
        minimizer.restore(metadata)
    except ValueError:
        raise
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:  # of a file that others wrote
        raise ValueError(f"{type(method).__name__}: the saved state cannot be restored: {error!r}") from None
