"""Experts of a mixture that ranks have dealt out: each has some, whole, to which tokens come from all ranks.

Lepikhin et al., "GShard" (2020), section 3.  Axes: n tokens of a rank, k experts of a token, c channels.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mpishard.comm.axis import Axis
from mpishard.layout.boxes import split
from mpishard.nn.tensor_parallel import GatherColumns, ScatterColumns
from mpishard.torch.tensor_ops import moved, sent

Experts = Callable[[Any, Any, Any], Any]  # takes tokens, their experts and weights, as those of transformers


def dealt(
    experts: Experts, x_nc: Any, index_nk: Any, weights_nk: Any, axis: Axis, offsets: tuple[int, ...]
) -> tuple[Any, np.ndarray]:
    """The weighted sum of what its experts make of each token, and the number of tokens that came to each rank.

    Rank r of the axis has the experts ``[offsets[r], offsets[r + 1])``, and its `experts` count from 0. A token goes
    once to each of its experts. Collective.
    """
    rank, chosen = axis.rank, index_nk.reshape(-1)
    own = torch.bincount(chosen, minlength=offsets[-1]).cpu().numpy()
    axis.meet()
    counts = axis.all_gather(np.empty(axis.size * len(own), own.dtype), own, label="control").reshape(axis.size, -1)
    to_ranks = np.add.reduceat(counts, offsets[:-1], axis=1)
    leave, come = to_ranks[rank].tolist(), to_ranks[:, rank].tolist()
    order = chosen.argsort(stable=True)
    rows_nc = sent(x_nc[order // index_nk.shape[1]], axis, leave, come)
    of_experts = counts[:, slice(*offsets[rank : rank + 2])]
    index = np.tile(np.arange(of_experts.shape[1]), axis.size).repeat(of_experts.reshape(-1))
    index_n1 = torch.from_numpy(index[:, None]).to(x_nc.device)
    if not len(index):  # a row of zeros, so that all ranks have a backward pass of the same operations
        rows_nc, index_n1 = rows_nc.sum(0, keepdim=True), index_n1.new_zeros(1, 1)
    found_nc = experts(rows_nc, index_n1, rows_nc.new_ones(index_n1.shape))[: len(index)]
    found_nc = sent(found_nc, axis, come, leave)[order.argsort()]
    y_nc = (found_nc.unflatten(0, index_nk.shape) * weights_nk[..., None]).sum(1)
    return y_nc.to(x_nc.dtype), to_ranks.sum(0)


def dealt_of_all(
    experts: Experts, x_nc: Any, index_nk: Any, weights_nk: Any, axis: Axis, offsets: tuple[int, ...]
) -> tuple[Any, np.ndarray]:
    """`dealt` of tokens that all ranks have: each brings some of them, and all get the sums. Collective."""
    count = len(x_nc)
    x_nc, weights_nk = (moved(each.t(), ScatterColumns(axis, count)).t() for each in (x_nc, weights_nk))
    own = slice(*list(pairwise(split(count, axis.size)))[axis.rank])
    y_nc, tokens = dealt(experts, x_nc, index_nk[own], weights_nk, axis, offsets)
    return moved(y_nc.t(), GatherColumns(axis, count)).t(), tokens
