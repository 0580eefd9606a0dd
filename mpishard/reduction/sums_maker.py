"""Makes the sums of one model's gradients for each kind of compressor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpishard.comm.axis import Axis
from mpishard.compression import PieceCompressor, PowerSGDCompressor
from mpishard.layout.tensors import Piece
from mpishard.parameters.buckets import Bucket
from mpishard.reduction.compressed import PieceSums
from mpishard.reduction.error_feedback import CompressedSums
from mpishard.reduction.low_rank import LowRankSums

Array = Any


@dataclass(frozen=True)
class CompressedSumsMaker:
    """Makes the `CompressedSums` of a model: ``compressor.make_sums(CompressedSumsMaker(...))``."""

    axis: Axis
    buckets: Sequence[Bucket]
    counts: Sequence[Sequence[int]]  # by bucket and rank, the number of elements that the rank owns
    like: Array  # has the dtype and device of the gradients
    scale: float  # the loss scale that the first gradients contain
    pieces: Sequence[Piece] = ()  # the tensors of all buckets
    gathers: bool = True  # all ranks get the sums, as for `LowRankSums`

    def of_pieces(self, compressor: PieceCompressor) -> CompressedSums:
        """Sums of gradients that are compressed piece by piece, without errors yet."""
        return PieceSums(compressor, **self._layout)

    def of_low_rank(self, compressor: PowerSGDCompressor) -> CompressedSums:
        """Sums of low-rank approximations of gradients, without errors yet."""
        return LowRankSums(compressor, self.pieces, self.gathers, **self._layout)

    @property
    def _layout(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("axis", "buckets", "counts", "like", "scale")}
