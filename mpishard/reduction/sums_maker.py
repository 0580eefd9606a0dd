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
    """Makes the `CompressedSums` of a model: ``compressor.make_sums(CompressedSumsMaker(...))``.

    No method is collective.

    Parameters
    ----------
    axis : Axis
        The ranks whose gradients are summed.
    buckets : sequence of Bucket
        They cover the flat gradient.
    counts : sequence of sequence of int
        By bucket and rank, the number of elements that the rank owns.
    like : array
        An array of the dtype and device of the gradients.
    scale : float
        The loss scale that the first gradients contain.
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
        """Sums of gradients that are compressed piece by piece.

        Parameters
        ----------
        compressor : PieceCompressor
            Works on any run of elements.

        Returns
        -------
        PieceSums
            Without errors yet.
        """
        return PieceSums(compressor, **self._layout)

    def of_low_rank(self, compressor: PowerSGDCompressor) -> CompressedSums:
        """Sums of low-rank approximations of gradients.

        Parameters
        ----------
        compressor : PowerSGDCompressor
            Decides which tensors are compressed.

        Returns
        -------
        LowRankSums
            Without errors yet.
        """
        return LowRankSums(compressor, self.pieces, self.gathers, **self._layout)

    @property
    def _layout(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("axis", "buckets", "counts", "like", "scale")}
