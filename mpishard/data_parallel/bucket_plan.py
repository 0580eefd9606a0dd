"""Where the buckets of a model are cut; used to sum gradients, and to count the bytes of such sums."""

from __future__ import annotations

from dataclasses import replace

from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.gradient_buckets import Run


def bucket_layout(
    parameters: FlatParameters, *, compressed: bool, by_unit: bool = False, ties_apart: bool = False
) -> tuple[list[Run], list[int]]:
    """Runs of tensors that no bucket may span, and the sizes of tensors that decide where buckets are cut.

    Parameters
    ----------
    parameters : FlatParameters
    compressed : bool
        Whether gradients are compressed.  On a mesh with tensor ranks, either all tensors of a bucket are then whole on
        every tensor rank, or none is.
    by_unit : bool
        Whether to cut buckets at the units of ``parameters.units``.
    ties_apart : bool
        As for `TensorLayout.gradient_runs`.
    """
    apart = compressed and parameters.place.tensor_size > 1
    # With an uneven cut, slices differ in size between tensor ranks.  Tensor ranks sum partial gradients bucket by
    # bucket and need the same cuts, so that all of them use the sizes of tensor rank 0.
    first = replace(parameters.place, tensor_rank=0).holding(parameters.specs)
    runs = parameters.layout.gradient_runs(by_unit=by_unit, copies_apart=apart, ties_apart=ties_apart)
    return runs, [piece.size for piece in first]
