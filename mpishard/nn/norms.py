"""Norms of rows (layer norm, root mean square norm), and of the queries and keys of each head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from mpishard.layout.tensors import ParameterSpec
from mpishard.nn.layers import Layer
from mpishard.nn.workspace import Workspace

Array = Any


class Norm(Layer, ABC):
    """Rows normed, then scaled by a tensor that starts at 1; perhaps shifted by one that starts at 0."""

    backward_kernel: ClassVar[str]

    def __init__(self, name: str, width: int, *, epsilon: float = 1e-5, sequence_parallel: bool = False) -> None:
        super().__init__(name)
        self.width: int = width
        self.epsilon: float = epsilon
        self.sequence_parallel: bool = sequence_parallel
        self.weight_name: str = f"{name}.weight"
        self.names: tuple[str, ...] = (self.weight_name,)

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(name, (self.width,), partial=self.sequence_parallel) for name in self.names]

    def initialize(self, seed: int) -> None:
        for name in self.names:
            self._fill(name, float(name == self.weight_name))

    @abstractmethod
    def forward(self, x_nc: Array, work: Workspace) -> Array:
        """Norm each row, and scale it.

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

    def backward(self, dy_nc: Array, work: Workspace, residual_nc: Array | None = None) -> Array:
        """Gradient with respect to `x`, plus `residual` where given: the gradient that reaches `x` around the norm.

        Parameters
        ----------
        dy_nc : array, shape (n, width)
            Gradient of the loss with respect to the output.
        work : Workspace
            That of the forward pass.
        residual_nc : array, shape (n, width), optional
            Overwritten by the result.

        Returns
        -------
        array, shape (n, width)
            `residual_nc`, or memory of `work`.
        """
        kept = work.kept[self.role]
        if residual_nc is None:
            residual_nc = work.borrow(f"{self.role}.dx", *kept[0].shape)
            residual_nc.fill(0)
        weight, kernel = self.parameters[self.weight_name], getattr(self.ops, self.backward_kernel)
        if not self.tensor.slices.ordered:
            kernel(dy_nc, *kept, weight, residual_nc, *map(self._gradient_to_add_to, self.names))
        else:

            def sum_block(block: slice, sums_pc: Array) -> None:
                sums_pc.fill(0)
                kernel(dy_nc[block], *(each[block] for each in kept), weight, residual_nc[block], *sums_pc)

            sums_pc = self.tensor.sum_row_blocks(
                work.rows, sum_block, lambda depth: work.borrow(f"row sums {depth}", len(self.names), self.width)
            )
            for name, sum_c in zip(self.names, sums_pc, strict=True):
                self._add_to_gradient(name, sum_c)
        for name in reversed(self.names):
            self._finished(name, work)
        return residual_nc


class LayerNorm(Norm):
    """Rows brought to mean 0 and variance 1, then scaled and shifted (Ba, Kiros and Hinton, 2016).

    Each rank computes with its own rows.  `backward` is collective over the tensor axis where rows are split in a model
    of several shards.

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

    backward_kernel = "layer_norm_backward"

    def __init__(self, name: str, width: int, *, epsilon: float = 1e-5, sequence_parallel: bool = False) -> None:
        super().__init__(name, width, epsilon=epsilon, sequence_parallel=sequence_parallel)
        self.bias_name: str = f"{name}.bias"
        self.names = (self.weight_name, self.bias_name)

    def forward(self, x_nc: Array, work: Workspace) -> Array:
        rows = len(x_nc)
        y_nc = self._save_result(work, rows, self.width)
        mean_n = work.save(f"{self.role}.mean", rows, exact=True)
        scale_n = work.save(f"{self.role}.scale", rows, exact=True)
        work.kept[self.role] = x_nc, mean_n, scale_n
        weight, bias = self.parameters[self.weight_name], self.parameters[self.bias_name]
        self.ops.layer_norm(x_nc, weight, bias, y_nc, mean_n, scale_n, self.epsilon)
        return y_nc


class RMSNorm(Norm):
    """Rows divided by their root mean square, then scaled (Zhang and Sennrich, 2019).

    Each rank computes with its own rows.  `backward` is collective over the tensor axis where rows are split in a model
    of several shards.

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

    backward_kernel = "rms_norm_backward"

    def forward(self, x_nc: Array, work: Workspace) -> Array:
        y_nc = self._save_result(work, len(x_nc), self.width)
        scale_n = work.save(f"{self.role}.scale", len(x_nc), exact=True)
        work.kept[self.role] = x_nc, scale_n
        self.ops.rms_norm(x_nc, self.parameters[self.weight_name], y_nc, scale_n, self.epsilon)
        return y_nc


# Norms of the queries and keys of each head, as Qwen3 has them.


class HeadNorms(Layer):
    """Queries and keys divided by their root mean square, and scaled, with one weight for all query or key heads.

    The weights ``name.query_norm.weight`` and ``name.key_norm.weight`` start at 1. Tensor ranks have separate heads, so
    that their gradients are terms of a sum: in a model of several shards `backward` takes it, and is collective over
    the tensor axis.
    """

    def __init__(self, name: str, head_width: int, epsilon: float) -> None:
        super().__init__(name)
        self.head_width: int = head_width
        self.epsilon: float = epsilon
        self.weight_names: tuple[str, str] = (f"{name}.query_norm.weight", f"{name}.key_norm.weight")

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(name, (self.head_width,), partial=True) for name in self.weight_names]

    def initialize(self, seed: int) -> None:
        for name in self.weight_names:
            self._fill(name, 1)

    def forward(self, heads_lsbhtd: Array, work: Workspace) -> None:
        """Norm all queries and keys, in place; `heads` has, by slice of this rank, queries of all kinds, keys,
        values.
        """
        slices, kinds, *rest = heads_lsbhtd.shape
        raw_lsbhtd = work.save(f"{self.role}.raw", slices, kinds - 1, *rest)
        scale_lsbht = work.save(f"{self.role}.raw scale", slices, kinds - 1, *rest[:3], exact=True)
        work.kept[f"{self.role}.norms"] = raw_lsbhtd, scale_lsbht
        raw_lsbhtd[...] = heads_lsbhtd[:, :-1]
        weights = [self.parameters[name] for name in self.weight_names]
        for raw, scale, heads in zip(raw_lsbhtd, scale_lsbht, heads_lsbhtd, strict=True):
            for weight, kind in zip(weights, self._kinds(kinds), strict=True):
                x_nd, y_nd = (each[kind].reshape(-1, self.head_width) for each in (raw, heads))
                self.ops.rms_norm(x_nd, weight, y_nd, scale[kind].reshape(-1), self.epsilon)

    def backward(self, dheads_lsbhtd: Array, work: Workspace) -> None:
        """Replace the gradients of the queries and keys after the norm by those before it; axes as for `forward`."""
        slices = self.tensor.slices
        if not slices.ordered:
            self._backward_of_slice(0, dheads_lsbhtd, [self._gradient_to_add_to(n) for n in self.weight_names], work)
        else:

            def term(index: int, sums_2d: Array) -> None:
                sums_2d.fill(0)
                self._backward_of_slice(index, dheads_lsbhtd, sums_2d, work)

            partial = slices.add(term, lambda depth: work.borrow(f"sums over heads {depth}", 2, self.head_width))
            for name, sums_d in zip(self.weight_names, slices.all_reduce(partial, "gradients"), strict=True):
                self._add_to_gradient(name, sums_d)
        for name in reversed(self.weight_names):
            self._finished(name, work)

    def _backward_of_slice(self, index: int, dheads_lsbhtd: Array, dweights: Sequence[Array], work: Workspace) -> None:
        """The gradients of one slice; adds those of the weights to `dweights`."""
        raw, scale = (each[index] for each in work.kept[f"{self.role}.norms"])
        dheads = dheads_lsbhtd[index]
        dx_sbhtd = work.borrow("gradients before norms", *raw.shape)
        dx_sbhtd.fill(0)
        for name, dweight, kind in zip(self.weight_names, dweights, self._kinds(len(dheads)), strict=True):
            dy_nd, x_nd, dx_nd = (each[kind].reshape(-1, self.head_width) for each in (dheads, raw, dx_sbhtd))
            weight = self.parameters[name]
            self.ops.rms_norm_backward(dy_nd, x_nd, scale[kind].reshape(-1), weight, dx_nd, dweight)
        dheads[:-1] = dx_sbhtd

    @staticmethod
    def _kinds(kinds: int) -> tuple[slice, slice]:
        """Where the queries, and the keys, are among all kinds."""
        return slice(0, kinds - 2), slice(kinds - 2, kinds - 1)
