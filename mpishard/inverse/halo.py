"""Rows of the neighbours of a slab, for fields that are cut along their first dimension over the tensor axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis

Array = Any
_TAG = 7


def exchange_rows(axis: Axis, slab: Array, rows: int) -> tuple[Array | None, Array | None]:
    """The last rows of the slab before and the first rows of the slab after.

    Collective over the axis.

    Parameters
    ----------
    axis : Axis
        Its ranks have the slabs in order.
    slab : array
        At least `rows` rows on every rank, unless the rank is the only one.
    rows : int
        How many rows.

    Returns
    -------
    (array or None, array or None)
        New arrays; None where there is no neighbour.

    Raises
    ------
    ValueError
        On all ranks, if a rank has fewer rows.
    """
    if axis.size == 1 or not rows:
        return None, None
    problem = None
    if len(slab) < rows:
        problem = ValueError(
            f"rank {axis.rank} of {axis.size} on the tensor axis has {len(slab)} rows of the field, and its neighbours "
            f"need {rows} of them; take fewer tensor ranks"
        )
    axis.raise_if_any(problem)
    module = arrays.module_of(slab)
    sent = []
    found: list[Array | None] = []
    for other, own in ((axis.rank - 1, slab[:rows]), (axis.rank + 1, slab[-rows:])):
        if 0 <= other < axis.size:
            sent.append(axis.start_send(module.ascontiguousarray(own).reshape(-1), other, _TAG, label="halo"))
    for other in (axis.rank - 1, axis.rank + 1):
        if not 0 <= other < axis.size:
            found.append(None)
            continue
        buffer = arrays.empty(rows * int(np.prod(slab.shape[1:])), slab.dtype, like=slab)
        axis.recv(buffer, other, _TAG, label="halo")
        found.append(buffer.reshape(rows, *slab.shape[1:]))
    for request in sent:
        request.wait()
    return found[0], found[1]
