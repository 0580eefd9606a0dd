"""Where the buckets of a model are cut, by those that sum them and by those that count what that sends."""

from __future__ import annotations

from dataclasses import replace

from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.gradient_buckets import Run


def bucket_layout(
    parameters: FlatParameters, *, compressed: bool, by_unit: bool = False
) -> tuple[list[Run], list[int]]:
    """Runs of tensors that no bucket may span, and the sizes of tensors that decide where buckets are cut.

    Parameters
    ----------
    parameters : FlatParameters
    compressed : bool
        Whether anything compresses the gradients.  On a mesh with tensor ranks, a bucket then has either tensors that
        all of these hold whole, or none.
    by_unit : bool
        No bucket spans two units of ``parameters.units``.
    """
    apart = compressed and parameters.place.tensor_size > 1
    # Slices of an uneven cut differ in size between tensor ranks, which sum partial gradients bucket by bucket: all of
    # them cut buckets by the slices of the first.
    first = replace(parameters.place, tensor_rank=0).holding(parameters.specs)
    return parameters.gradient_runs(by_unit=by_unit, replicas_apart=apart), [piece.size for piece in first]
