"""Experts of a mixture that ranks have dealt out: each has some, whole, and their tokens come to it and go back.

Lepikhin et al., "GShard" (2020), section 3.  Axes: n tokens of a rank, k experts of a token, c channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mpishard.comm.axis import Axis
from mpishard.torch.tensor_ops import sent


@dataclass(frozen=True)
class Dealt:
    """Where the tokens of a pass go: rank r of an axis has the experts ``[offsets[r], offsets[r + 1])``.

    A token goes once to each of its experts. `counts` has those of every rank for every expert, and `order` sorts this
    rank's by experts.
    """

    axis: Axis
    offsets: tuple[int, ...]
    shape: tuple[int, int]
    order: Any
    counts: np.ndarray

    @classmethod
    def of(cls, index_nk: Any, axis: Axis, offsets: tuple[int, ...]) -> Dealt:
        """By the experts of each of this rank's tokens. Collective."""
        chosen = index_nk.reshape(-1)
        own = torch.bincount(chosen, minlength=offsets[-1]).cpu().numpy()
        counts = axis.all_gather(np.empty(axis.size * len(own), own.dtype), own, label="control")
        return cls(axis, offsets, tuple(index_nk.shape), chosen.argsort(stable=True), counts.reshape(axis.size, -1))

    @property
    def tokens(self) -> np.ndarray:
        """Those that come to each rank, an expert's each; int64, of shape (ranks,)."""
        return self._to_ranks.sum(0)

    @property
    def _to_ranks(self) -> np.ndarray:
        return np.add.reduceat(self.counts, self.offsets[:-1], axis=1)

    def compute(self, experts: Callable[..., Any], x_nc: Any, weights_nk: Any) -> Any:
        """The weighted sum of what its experts make of each token. Collective.

        ``experts(tokens, index, weights)`` computes those of this rank, which it numbers from 0.
        """
        rank = self.axis.rank
        first, stop = self.offsets[rank : rank + 2]
        leave, come = self._to_ranks[rank].tolist(), self._to_ranks[:, rank].tolist()
        rows_nc = sent(x_nc[self.order // self.shape[1]], self.axis, leave, come)
        own = np.tile(np.arange(stop - first), self.axis.size).repeat(self.counts[:, first:stop].reshape(-1))
        index = torch.from_numpy(own).to(x_nc.device)
        if not len(rows_nc):  # a row of zeros, so that all ranks have a backward pass of the same operations
            rows_nc, index = rows_nc.sum(0, keepdim=True), index.new_zeros(1)
        found_nc = experts(rows_nc, index[:, None], rows_nc.new_ones(len(rows_nc), 1))[: sum(come)]
        found_nc = sent(found_nc, self.axis, come, leave)[self.order.argsort()]
        return (found_nc.unflatten(0, self.shape) * weights_nk[..., None]).sum(1).to(x_nc.dtype)
