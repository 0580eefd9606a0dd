"""Which samples a step uses, and which rank computes them: a pure function of the seed and of how many came before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpishard.backend.random import permuted
from mpishard.layout.boxes import split

# Divides over 2, 4, 8 and 16 ranks, whole subtrees of the sum to each.
MICRO_BATCHES = 16


@dataclass(frozen=True)
class Sampler:
    """Every sample once an epoch, in an order that depends on the seed and the epoch alone.

    A pure function of its arguments; no method is collective.

    Parameters
    ----------
    samples : int
        Number of samples in the data set.
    batch_size : int
        Samples a step, over all ranks.  The last batch of an epoch is smaller where they do not divide.
    seed : int
        Another seed gives another order.
    """

    samples: int
    batch_size: int
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch, the smaller last one included."""
        return -(-self.samples // self.batch_size)

    def consumed(self, steps: int) -> int:
        """Samples used by the first `steps` steps of `batch_size`.

        Parameters
        ----------
        steps : int
            0 or more.

        Returns
        -------
        int
            Over all epochs.
        """
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.samples + min(rest * self.batch_size, self.samples)

    def batch(self, step: int) -> np.ndarray:
        """Sample indices of a step if all steps have `batch_size`.

        Parameters
        ----------
        step : int
            Counts from 1.

        Returns
        -------
        ndarray of int64, shape (n,)
            The same on every rank; n is `batch_size`, or less at the end of an epoch.
        """
        return self.following(self.consumed(step - 1), self.batch_size)

    def following(self, consumed: int, size: int) -> np.ndarray:
        """The next sample indices after so many, no further than the end of the epoch.

        Parameters
        ----------
        consumed : int
            Samples used so far, over all epochs.
        size : int
            How many are wanted.

        Returns
        -------
        ndarray of int64, shape (n,)
            The same on every rank; n is at most `size`.
        """
        epoch, start = divmod(consumed, self.samples)
        positions = np.arange(start, min(start + size, self.samples), dtype=np.int64)
        return permuted(positions, self.samples, self.seed, "epoch", epoch)


def micro_batches(batch: np.ndarray, micro_batch_size: int | None = None) -> list[np.ndarray]:
    """Cut a batch into consecutive micro-batches, the same ones for any number of ranks.

    Not collective.

    Parameters
    ----------
    batch : ndarray, shape (n,)
        Sample indices, at least one.
    micro_batch_size : int, optional
        Samples of each but the last.  Without it there are 16 micro-batches, as even as can be, or as many as there are
        samples.

    Returns
    -------
    list of ndarray
        Views of `batch`.
    """
    if micro_batch_size is not None:
        return [batch[start : start + micro_batch_size] for start in range(0, len(batch), micro_batch_size)]
    cuts = split(len(batch), min(MICRO_BATCHES, len(batch)))
    return [batch[start:stop] for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]


def share(batch: np.ndarray, rank: int, size: int, micro_batch_size: int | None = None) -> list[np.ndarray]:
    """The micro-batches of one rank; all ranks get lists of one length, some entries empty.

    The batch is cut into micro-batches first, the same ones for any number of ranks, and these are dealt out in runs.
    Not collective.

    Parameters
    ----------
    batch : ndarray, shape (n,)
        Sample indices, the same on every rank.
    rank, size : int
        The rank, from 0 on, and the number of ranks.
    micro_batch_size : int, optional
        Samples of each micro-batch but the last.  Without it each rank has one, its share of the batch.

    Returns
    -------
    list of ndarray
        Views of `batch`.
    """
    if micro_batch_size is None:
        cuts = split(len(batch), size)
        return [batch[cuts[rank] : cuts[rank + 1]]]
    micro = micro_batches(batch, micro_batch_size)
    cuts = split(len(micro), size)
    mine = micro[cuts[rank] : cuts[rank + 1]]
    rounds = -(-len(micro) // size)
    return mine + [batch[:0]] * (rounds - len(mine))
