"""Cross-entropy of logits whose vocabulary may be split over the tensor axis (Shoeybi et al., 2019, section 3)."""

from __future__ import annotations

from typing import Any, SupportsFloat

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
    vocabulary_size: int | None = None,
) -> float:
    """Summed cross-entropy in nats of float logits and int64 targets; `logits` becomes the gradient of the sum.

    The sum is taken in float64.  Forward and backward are one call, since the loss is where the backward starts.

    Parameters
    ----------
    logits_nv : float array, shape (n, v)
        This rank's columns of the logits, slice by slice (`mpishard.nn.slices`); overwritten by the gradient.
    targets_n : int64 array, shape (n,)
        Numbers of the right columns, of the whole vocabulary.
    tensor : TensorParallel
        With several ranks the call is collective: a maximum and two sums per row are reduced, never logits.  All ranks
        return the same loss.
    first : int
        Number of this rank's first column.
    work : Workspace, optional
        Memory for one maximum and two sums per row; needed with several ranks or slices.
    vocabulary_size : int, optional
        Columns of all ranks; needed with several slices a rank.

    Returns
    -------
    float
        In nats, summed over the rows.
    """
    return float(queue_cross_entropy(logits_nv, targets_n, tensor, first, work, vocabulary_size))


def queue_cross_entropy(
    logits_nv: Array,
    targets_n: Array,
    tensor: TensorParallel,
    first: int,
    work: Workspace | None,
    vocabulary_size: int | None,
) -> SupportsFloat:
    """`cross_entropy`, whose host does not wait for a device: there it is a `PendingNumber`."""
    ops = operations(logits_nv)
    slices = tensor.slices
    if slices.total == 1:
        return ops.cross_entropy(logits_nv, targets_n)
    assert work is not None
    rows = len(targets_n)
    columns = logits_nv.shape[1] if vocabulary_size is None else vocabulary_size
    logits_snv = slices.apart(logits_nv, columns)
    starts = [first + offset for offset in slices.offsets(columns)] if len(logits_snv) > 1 else [first]
    top_n = work.borrow("largest logits", rows)
    ops.row_maximum(logits_snv[0], top_n)
    for part_nv in logits_snv[1:]:
        other_n = work.borrow("largest logits of a slice", rows)
        ops.row_maximum(part_nv, other_n)
        work.module.maximum(top_n, other_n, out=top_n)
    if tensor.size > 1:
        tensor.axis.all_reduce(top_n, op="max", label=FORWARD)
    sums_2n = slices.all_reduce(
        slices.add(
            lambda index, out_2n: ops.exponentials(logits_snv[index], targets_n, top_n, *out_2n, starts[index]),
            lambda depth: work.borrow(f"sums of exponentials, and targets {depth}", 2, rows),
        ),
        FORWARD,
    )
    # Each of these calls returns the whole loss.
    losses = [
        ops.cross_entropy_of_sums(part_nv, targets_n, *sums_2n, start)
        for part_nv, start in zip(logits_snv, starts, strict=False)
    ]
    return losses[0]
