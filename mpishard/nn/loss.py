"""Cross-entropy of logits whose vocabulary may be split over the tensor axis (Shoeybi et al., 2019, section 3)."""

from __future__ import annotations

from typing import Any

from mpishard.nn.layers import operations
from mpishard.nn.tensor_parallel import ALONE, FORWARD, TensorParallel
from mpishard.nn.workspace import Workspace

Array = Any


def cross_entropy(
    logits_nv: Array,
    targets_n: Array,
    tensor: TensorParallel = ALONE,
    first: int = 0,
    work: Workspace | None = None,
) -> float:
    """Summed cross-entropy in nats of float logits and int64 targets; `logits` becomes the gradient of the sum.

    The sum is taken in float64.  Forward and backward are one call, since the loss is where the backward starts.

    Parameters
    ----------
    logits_nv : float array, shape (n, v)
        This rank's columns of the logits; overwritten by the gradient.
    targets_n : int64 array, shape (n,)
        Numbers of the right columns, of the whole vocabulary.
    tensor : TensorParallel
        With several ranks the call is collective: a maximum and two sums per row are reduced, never logits.  All ranks
        return the same loss.
    first : int
        Number of this rank's first column.
    work : Workspace, optional
        Memory for one maximum and two sums per row; needed with several ranks.

    Returns
    -------
    float
        In nats, summed over the rows.
    """
    ops = operations(logits_nv)
    if tensor.size == 1:
        return ops.cross_entropy(logits_nv, targets_n)
    assert work is not None
    rows = len(targets_n)
    top_n = work.borrow("largest logits", rows)
    ops.row_maximum(logits_nv, top_n)
    tensor.axis.all_reduce(top_n, op="max", label=FORWARD)
    sums_2n = work.borrow("sums of exponentials, and targets", 2, rows)
    ops.exponentials(logits_nv, targets_n, top_n, sums_2n[0], sums_2n[1], first)
    tensor.axis.all_reduce(sums_2n, label=FORWARD)
    return ops.cross_entropy_of_sums(logits_nv, targets_n, sums_2n[0], sums_2n[1], first)
