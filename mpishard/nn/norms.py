"""Norms of rows: layer norm, and root mean square norm."""

from __future__ import annotations

from typing import Any

from mpishard.layout.specs import ParameterSpec
from mpishard.nn.layers import Layer
from mpishard.nn.workspace import Workspace

Array = Any


class LayerNorm(Layer):
    """Rows brought to mean 0 and variance 1, then scaled and shifted (Ba, Kiros and Hinton, 2016).

    Each rank computes with its own rows.  Not collective, but `backward` is, over the tensor axis, where rows are split
    in a model of several shards.

    Parameters
    ----------
    name : str
        Its tensors are ``name.weight`` (starts at 1) and ``name.bias`` (starts at 0).
    width : int
        Length of a row.
    epsilon : float
        Added to the variance.
    sequence_parallel : bool
        Whether ranks hold some rows each and do not sum the gradients, which are then partial; False for several
        shards, of which `backward` takes the sums.
    """

    def __init__(self, name: str, width: int, *, epsilon: float = 1e-5, sequence_parallel: bool = False) -> None:
        super().__init__(name)
        self.width: int = width
        self.epsilon: float = epsilon
        self.sequence_parallel: bool = sequence_parallel
        self.weight_name: str = f"{name}.weight"
        self.bias_name: str = f"{name}.bias"

    def specs(self) -> list[ParameterSpec]:
        names = self.weight_name, self.bias_name
        return [ParameterSpec(name, (self.width,), partial=self.sequence_parallel) for name in names]

    def initialize(self, seed: int) -> None:
        self._fill(self.weight_name, 1)
        self._fill(self.bias_name, 0)

    def forward(self, x_nc: Array, work: Workspace) -> Array:
        """Bring each row to mean 0 and variance 1, scale it and shift it.

        Parameters
        ----------
        x_nc : array, shape (n, width)
            Kept; it must stay as it is until `backward`.
        work : Workspace
            Memory of the micro-batch.

        Returns
        -------
        array, shape (n, width)
            In the memory of `work`; uint16, the bits of bfloat16, if products round it and `gives_bits` is set.
        """
        rows = len(x_nc)
        y_nc = self._save_result(work, rows, self.width)
        mean_n = work.save_statistics(f"{self.role}.mean", rows)
        scale_n = work.save_statistics(f"{self.role}.scale", rows)
        work.kept[self.role] = x_nc, mean_n, scale_n
        weight, bias = self.parameters[self.weight_name], self.parameters[self.bias_name]
        self.ops.layer_norm(x_nc, weight, bias, y_nc, mean_n, scale_n, self.epsilon)
        return y_nc

    def backward(self, dy_nc: Array, work: Workspace, residual_nc: Array | None = None) -> Array:
        """Gradient by `x`, plus `residual` where given: the gradient that reaches `x` around the norm.

        Parameters
        ----------
        dy_nc : array, shape (n, width)
            Gradient of the loss by the output.
        work : Workspace
            That of the forward pass.
        residual_nc : array, shape (n, width), optional
            Overwritten by the result.

        Returns
        -------
        array, shape (n, width)
            `residual_nc`, or memory of `work`.
        """
        x_nc, mean_n, scale_n = work.kept[self.role]
        if residual_nc is None:
            residual_nc = work.borrow(f"{self.role}.dx", *x_nc.shape)
            residual_nc.fill(0)
        weight = self.parameters[self.weight_name]
        if not self.tensor.slices.ordered:
            dweight, dbias = (self._gradient_to_add_to(name) for name in (self.weight_name, self.bias_name))
            self.ops.layer_norm_backward(dy_nc, x_nc, mean_n, scale_n, weight, residual_nc, dweight, dbias)
        else:

            def sum_block(block: slice, sums_2c: Array) -> None:
                sums_2c.fill(0)
                rows = dy_nc[block], x_nc[block], mean_n[block], scale_n[block]
                self.ops.layer_norm_backward(*rows, weight, residual_nc[block], *sums_2c)

            sums_2c = self.tensor.sum_row_blocks(
                work.rows, sum_block, lambda depth: work.borrow(f"row sums {depth}", 2, self.width)
            )
            self._add_to_gradient(self.weight_name, sums_2c[0])
            self._add_to_gradient(self.bias_name, sums_2c[1])
        self._finished(self.bias_name, work)
        self._finished(self.weight_name, work)
        return residual_nc


class RMSNorm(Layer):
    """Rows divided by their root mean square, then scaled (Zhang and Sennrich, 2019).

    Each rank computes with its own rows.  Not collective, but `backward` is, over the tensor axis, where rows are split
    in a model of several shards.

    Parameters
    ----------
    name : str
        Its tensor is ``name.weight`` (starts at 1).
    width : int
        Length of a row.
    epsilon : float
        Added to the mean square.
    sequence_parallel : bool
        As for `LayerNorm`.
    """

    def __init__(self, name: str, width: int, *, epsilon: float = 1e-5, sequence_parallel: bool = False) -> None:
        super().__init__(name)
        self.width: int = width
        self.epsilon: float = epsilon
        self.sequence_parallel: bool = sequence_parallel
        self.weight_name: str = f"{name}.weight"

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(self.weight_name, (self.width,), partial=self.sequence_parallel)]

    def initialize(self, seed: int) -> None:
        self._fill(self.weight_name, 1)

    def forward(self, x_nc: Array, work: Workspace) -> Array:
        """Divide each row by its root mean square, and scale it.

        Parameters
        ----------
        x_nc : array, shape (n, width)
            Kept; it must stay as it is until `backward`.
        work : Workspace
            Memory of the micro-batch.

        Returns
        -------
        array, shape (n, width)
            In the memory of `work`; uint16, the bits of bfloat16, if products round it and `gives_bits` is set.
        """
        y_nc = self._save_result(work, len(x_nc), self.width)
        scale_n = work.save_statistics(f"{self.role}.scale", len(x_nc))
        work.kept[self.role] = x_nc, scale_n
        self.ops.rms_norm(x_nc, self.parameters[self.weight_name], y_nc, scale_n, self.epsilon)
        return y_nc

    def backward(self, dy_nc: Array, work: Workspace, residual_nc: Array | None = None) -> Array:
        """Gradient by `x`, plus `residual` where given: the gradient that reaches `x` around the norm.

        Parameters
        ----------
        dy_nc : array, shape (n, width)
            Gradient of the loss by the output.
        work : Workspace
            That of the forward pass.
        residual_nc : array, shape (n, width), optional
            Overwritten by the result.

        Returns
        -------
        array, shape (n, width)
            `residual_nc`, or memory of `work`.
        """
        x_nc, scale_n = work.kept[self.role]
        if residual_nc is None:
            residual_nc = work.borrow(f"{self.role}.dx", *x_nc.shape)
            residual_nc.fill(0)
        weight = self.parameters[self.weight_name]
        if not self.tensor.slices.ordered:
            dweight = self._gradient_to_add_to(self.weight_name)
            self.ops.rms_norm_backward(dy_nc, x_nc, scale_n, weight, residual_nc, dweight)
        else:

            def sum_block(block: slice, sums_c: Array) -> None:
                sums_c.fill(0)
                rows = dy_nc[block], x_nc[block], scale_n[block]
                self.ops.rms_norm_backward(*rows, weight, residual_nc[block], sums_c)

            sums_c = self.tensor.sum_row_blocks(
                work.rows, sum_block, lambda depth: work.borrow(f"row sums {depth}", self.width)
            )
            self._add_to_gradient(self.weight_name, sums_c)
        self._finished(self.weight_name, work)
        return residual_nc


Norm = LayerNorm | RMSNorm
