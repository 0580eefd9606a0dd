"""LAMB's norms: of each whole tensor, which may be split over ranks; its trust ratios come from them.

The global norm of the gradients, for clipping, is in `mpishard.data_parallel.gradient_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.backend import exact_norm
from mpishard.backend.ranges import Ranges
from mpishard.comm.axis import Axis
from mpishard.comm.model_parallel_group import ModelParallelGroup
from mpishard.layout.specs import ParameterSpec

Array = Any


def norms(
    axis: Axis | ModelParallelGroup, specs: Sequence[ParameterSpec], parts: Ranges, arrays: Sequence[Array]
) -> list[float]:
    """The 2-norm of every tensor over all ranks, with the same bits for any cut into parts.

    Every element must be in `parts` on exactly one rank of the axis, and chooses the number of its tensor; `arrays` has
    one array for each owned range.  On a device the host waits twice, whatever the number of tensors.  Collective over
    `axis`, the team of a strategy.
    """
    tops = np.zeros(len(specs))
    for part, top in zip(parts.all, exact_norm.largest_of(arrays, parts), strict=True):
        tops[part.choice] = max(tops[part.choice], top)
    axis.all_reduce(tops, op="max", label="norms")
    sums = np.zeros((len(specs), 2))
    found = exact_norm.sums_of_squares(arrays, parts, tops.tolist(), [spec.size for spec in specs])
    for part, squares in zip(parts.all, found, strict=True):
        sums[part.choice] += squares
    axis.all_reduce(sums, label="norms")
    return [exact_norm.norm(pair, float(top)) for pair, top in zip(sums, tops, strict=True)]
