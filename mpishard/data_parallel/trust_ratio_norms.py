"""LAMB's norms: of each whole tensor, which may be split over ranks; its trust ratios come from them.

The global norm of the gradients, for clipping, is in `mpishard.data_parallel.gradient_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.backend import exact_norm
from mpishard.comm.axis import Axis
from mpishard.comm.model_parallel_group import ModelParallelGroup
from mpishard.data_parallel.owned_parts import OwnedPart
from mpishard.layout.specs import ParameterSpec

Array = Any


def norms(
    axis: Axis | ModelParallelGroup, specs: Sequence[ParameterSpec], parts: Sequence[OwnedPart], arrays: Sequence[Array]
) -> list[float]:
    """The 2-norm of every tensor over all ranks, with the same bits for any cut into parts.

    Every element must be in `parts` on exactly one rank of the axis; `arrays` has one array for each owned range.
    Collective over `axis`, the team of a strategy.
    """
    tops = np.zeros(len(specs))
    for tensor, owned, start, stop in parts:
        tops[tensor] = max(tops[tensor], exact_norm.largest(arrays[owned][start:stop]))
    axis.all_reduce(tops, op="max", label="norms")
    sums = np.zeros((len(specs), 2))
    for tensor, owned, start, stop in parts:
        part = arrays[owned][start:stop]
        sums[tensor] += exact_norm.sum_of_squares(part, float(tops[tensor]), specs[tensor].size)
    axis.all_reduce(sums, label="norms")
    return [exact_norm.norm(pair, float(top)) for pair, top in zip(sums, tops, strict=True)]
