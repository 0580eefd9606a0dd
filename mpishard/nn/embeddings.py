"""Tables of rows: token embeddings, split over the tensor axis by rows, and position embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.layout.tensors import ParameterSpec
from mpishard.nn.layers import Layer
from mpishard.nn.workspace import Workspace

Array = Any


class Embedding(Layer):
    """One row of a (count, width) table for each index.

    If the table is split by rows (`split` 0, Shoeybi et al., 2019), a rank returns zeros for indices in the slices of
    other ranks.  The caller takes the sum over the ranks.

    Not collective.

    Parameters
    ----------
    name : str
        Its tensor is ``name.weight``.
    count, width : int
        Shape of the table.
    scale : float
        Standard deviation of the initial values.
    split : 0 or None
        Dimension that tensor parallelism splits.
    """

    def __init__(self, name: str, count: int, width: int, *, scale: float = 0.02, split: int | None = None) -> None:
        super().__init__(name)
        self.count: int = count
        self.width: int = width
        self.scale: float = scale
        self.split: int | None = split
        self.weight_name: str = f"{name}.weight"

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(self.weight_name, (self.count, self.width), tensor_dim=self.split)]

    def initialize(self, seed: int) -> None:
        self._draw(seed, self.weight_name, (self.count, self.width), self.scale)

    @property
    def first(self) -> int:
        """Number of the first row that this rank holds."""
        return self.parameters.box(self.weight_name)[0][0]

    def forward(self, indices_n: Array, work: Workspace, out_nc: Array | None = None) -> Array:
        """Rows of the table.

        Parameters
        ----------
        indices_n : array of int64, shape (n,)
            Checked by the caller; they must stay as they are until `backward`.
        work : Workspace
            Memory of the micro-batch.
        out_nc : array, shape (n, width), optional
            Memory for the result; default: saved in `work`.

        Returns
        -------
        array, shape (n, width)
            Zeros for indices of which another rank has the row.
        """
        work.kept[self.role] = indices_n
        if out_nc is None:
            out_nc = work.save(f"{self.role}.y", len(indices_n), self.width)
        self.ops.lookup(self.parameters[self.weight_name], indices_n, out_nc, self.first)
        return out_nc

    def backward(self, dy_nc: Array, work: Workspace) -> None:
        """Add each row of `dy` to the gradient of the row that it came from; indices have no gradient.

        Parameters
        ----------
        dy_nc : array, shape (n, width)
            Gradient of the loss by the output.
        work : Workspace
            That of the forward pass.
        """
        dweight_vc = self._gradient_to_add_to(self.weight_name)
        self.ops.scatter_add(dy_nc, work.kept[self.role], dweight_vc, self.first)
        self._finished(self.weight_name, work)


class PositionEmbedding(Embedding):
    """A learned row for each position of a sequence, added to an array.

    Not collective.

    Parameters
    ----------
    name : str
        Its tensor is ``name.weight``.
    count, width : int
        Longest sequence, and channels.
    scale : float
        Standard deviation of the initial values.
    split : 0 or None
        None: every tensor rank holds all of it.
    """

    def add_to(self, x_btc: Array, starts: Sequence[int] | None = None) -> None:
        """Add the row of each position, in place.

        Parameters
        ----------
        x_btc : array, shape (b, t, width)
            Sequences of t tokens.
        starts : sequence of int, optional
            The position of the first token of each sequence; default: 0.
        """
        length = x_btc.shape[1]
        if starts is None and self.module is not np:
            x_btc += self.parameters[self.weight_name][:length]
            return
        # Sequence by sequence: NumPy takes memory for an operation on three axes of which one is broadcast or reduced.
        for x_tc, first in zip(x_btc, starts or [0] * len(x_btc), strict=True):
            x_tc += self.parameters[self.weight_name][first : first + length]

    def backward_positions(self, dx_btc: Array, work: Workspace) -> None:
        """The adjoint of `add_to`: sums over the sequences; positions beyond them get nothing.

        Parameters
        ----------
        dx_btc : array, shape (b, t, width)
            Gradient of the loss by the sum.
        work : Workspace
            That of the forward pass.
        """
        rows_tc = self._gradient_to_add_to(self.weight_name)[: dx_btc.shape[1]]
        if self.module is not np:
            rows_tc += dx_btc.sum(axis=0)
        else:
            for dx_tc in dx_btc:
                rows_tc += dx_tc
        self._finished(self.weight_name, work)
