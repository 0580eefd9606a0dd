"""The sums of one model's gradients that each kind of compressor makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpishard.comm.axis import Axis
from mpishard.compression import PieceCompressor, PowerSGDCompressor
from mpishard.layout.local_layout import Piece
from mpishard.parameters.gradient_buckets import Bucket
from mpishard.reduction.compressed import PieceSums
from mpishard.reduction.error_feedback import CompressedSums
from mpishard.reduction.low_rank import LowRankSums

Array = Any


@dataclass(frozen=True)
class CompressedReducers:
    """Makes the `CompressedSums` of a model: ``compressor.make_reducer(CompressedReducers(...))``.

    Parameters
    ----------
    axis, buckets, counts, like, scale
        As for `CompressedSums`.
    pieces : sequence of Piece
        The tensors of all buckets.
    gathers : bool
        Whether all ranks get the sums, as for `LowRankSums`.
    """

    axis: Axis
    buckets: Sequence[Bucket]
    counts: Sequence[Sequence[int]]
    like: Array
    scale: float
    pieces: Sequence[Piece] = ()
    gathers: bool = True

    def of_pieces(self, compressor: PieceCompressor) -> CompressedSums:
        return PieceSums(compressor, **self._layout)

    def of_low_rank(self, compressor: PowerSGDCompressor) -> CompressedSums:
        return LowRankSums(compressor, self.pieces, self.gathers, **self._layout)

    @property
    def _layout(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("axis", "buckets", "counts", "like", "scale")}
