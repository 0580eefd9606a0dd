"""Layers with forward and backward written by hand: linear, embeddings, layer norm, GELU, cross-entropy.

A layer knows its tensors by name in one ``FlatParameters``.  ``forward`` leaves in a ``Workspace`` what ``backward``
needs; ``backward`` takes the gradient of the (summed) loss by the layer's output, writes the gradients of the layer's
tensors where ``FlatParameters.gradient`` says, announces each as finished, and returns the gradient by the input.

Where a layer has weights its backward is two calls, ``input_gradient`` and ``weight_gradient``, of which only the
first is on the way to the layer below; a pipeline schedule may put off the second as long as it keeps their operands.

Arrays that a layer returns belong to the workspace and are overwritten by the next pass.  Rows are tokens: n = b * t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.array import module_of
from mpishard.layout import ParameterSpec
from mpishard.nn import formulas, kernels
from mpishard.nn.workspace import Workspace
from mpishard.parameters import FlatParameters
from mpishard.randomness import normal

Array = Any


def operations(array: Array) -> Any:
    """The functions of ``formulas`` for arrays like `array`: compiled for NumPy, as they stand for others."""
    return kernels if isinstance(array, np.ndarray) else formulas


class Layer:
    """Named tensors and the layers inside.

    Parameters
    ----------
    name : str
        Prefix of the names of its tensors, e.g. ``"blocks.0.mlp"``.
    children : sequence of Layer
        Layers inside, in the order of the forward pass.

    Attributes
    ----------
    role : str
        Names its scratch memory; layers of one role share it, and so must not be neighbours.
    """

    def __init__(self, name: str, children: Sequence[Layer] = ()) -> None:
        self.name = self.role = name
        self.children = tuple(children)

    def share_scratch(self, prefix: str) -> None:
        """Drop `prefix` from the roles: several networks of one kind that run in turns then share scratch memory."""
        self.role = self.role.removeprefix(prefix)
        for child in self.children:
            child.share_scratch(prefix)

    def specs(self) -> list[ParameterSpec]:
        """The layer's tensors in the order of the forward pass."""
        return [spec for child in self.children for spec in child.specs()]

    def bind(self, parameters: FlatParameters) -> None:
        """Use the tensors of `parameters`, which must hold all of `specs`."""
        self.parameters = parameters
        self.ops = operations(parameters.flat)
        for child in self.children:
            child.bind(parameters)

    def initialize(self, seed: int) -> None:
        """Fill the tensors with their initial values, a function of `seed` and their names."""
        for child in self.children:
            child.initialize(seed)

    def _gradient_to_add_to(self, name: str) -> Array:
        """The gradient view of `name`, zero if nothing was added to it yet."""
        view, accumulate = self.parameters.gradient(name)
        if not accumulate:
            view.fill(0)
        return view


class Linear(Layer):
    """``y = x W + b``, with W stored (inputs, outputs).

    Parameters
    ----------
    name : str
        Its tensors are ``name.weight`` and ``name.bias``.
    inputs, outputs : int
        Widths.
    scale : float
        Standard deviation of the initial weights; the bias starts at 0.
    bias : bool
        Without: ``y = x W``.
    split : int or None
        Dimension of the weight that tensor parallelism splits: 1 by outputs (and the bias with them), 0 by inputs.
    """

    def __init__(
        self, name: str, inputs: int, outputs: int, *, scale: float = 0.02, bias: bool = True, split: int | None = None
    ) -> None:
        super().__init__(name)
        self.inputs, self.outputs, self.scale, self.split = inputs, outputs, scale, split
        self.weight_name = f"{name}.weight"
        self.bias_name = f"{name}.bias" if bias else None

    def specs(self) -> list[ParameterSpec]:
        specs = [ParameterSpec(self.weight_name, (self.inputs, self.outputs), tensor_dim=self.split)]
        if self.bias_name:
            specs.append(ParameterSpec(self.bias_name, (self.outputs,), tensor_dim=0 if self.split == 1 else None))
        return specs

    def bind(self, parameters: FlatParameters) -> None:
        super().bind(parameters)
        self.weight = parameters[self.weight_name]
        self.bias = parameters[self.bias_name] if self.bias_name else None

    def initialize(self, seed: int) -> None:
        self.weight[...] = _as(self.weight, normal(seed, self.weight_name, self.weight.shape, self.scale, np.float64))
        if self.bias is not None:
            self.bias.fill(0)

    def product(self, x_ni: Array, out_no: Array) -> Array:
        """``x W`` into `out`, without the bias (for callers that fuse it with what comes next)."""
        return np.matmul(x_ni, self.weight, out=out_no)

    def forward(self, x_ni: Array, work: Workspace, residual_no: Array | None = None) -> Array:
        """``x W + b``, plus `residual` where given; keeps `x`, which must stay as it is until `backward`."""
        work.kept[self.name] = x_ni
        y_no = self.product(x_ni, work.save(f"{self.name}.y", len(x_ni), self.outputs))
        if self.bias is not None and residual_no is not None:
            self.ops.add_bias(y_no, self.bias, residual_no)
        elif self.bias is not None:
            np.add(y_no, self.bias, out=y_no)
        elif residual_no is not None:
            np.add(y_no, residual_no, out=y_no)
        return y_no

    def backward(self, dy_no: Array, work: Workspace) -> Array:
        """Gradient by `x`."""
        x_ni = work.kept[self.name]
        dx_ni = self.input_gradient(dy_no, work.borrow(f"{self.role}.dx", len(x_ni), self.inputs))
        self.weight_gradient(x_ni, dy_no, work)
        return dx_ni

    def input_gradient(self, dy_no: Array, out_ni: Array) -> Array:
        """``dy W^T`` into `out`."""
        return np.matmul(dy_no, self.weight.T, out=out_ni)

    def weight_gradient(self, x_ni: Array, dy_no: Array, work: Workspace, *, with_bias: bool = True) -> None:
        """``x^T dy`` and the column sums of `dy`, into the gradient buffer.

        `with_bias` False: the caller has the column sums already and wrote them.
        """
        if with_bias and self.bias_name:
            view, accumulate = self.parameters.gradient(self.bias_name)
            ones = work.scratch("ones", (len(dy_no),), work.dtype)
            ones.fill(1)
            _product_into(ones, dy_no, view, accumulate, work)
            self.parameters.finished(self.bias_name)
        view, accumulate = self.parameters.gradient(self.weight_name)
        _product_into(x_ni.T, dy_no, view, accumulate, work)
        self.parameters.finished(self.weight_name)


def _product_into(a: Array, b: Array, out: Array, accumulate: bool, work: Workspace) -> None:
    """``out = a b``, or ``out += a b``."""
    if not accumulate:
        np.matmul(a, b, out=out)
        return
    product = work.scratch("product", (out.size,), work.dtype).reshape(out.shape)
    np.matmul(a, b, out=product)
    np.add(out, product, out=out)


def _as(array: Array, values: np.ndarray) -> Array:
    """`values`, drawn on the host, as an array of the module and dtype of `array`."""
    return module_of(array).asarray(values.astype(array.dtype))


class Embedding(Layer):
    """One row of a (count, width) table for each index.

    Parameters
    ----------
    name : str
        Its tensor is ``name.weight``.
    count, width : int
        Shape of the table.
    scale : float
        Standard deviation of the initial values.
    split : int or None
        Dimension that tensor parallelism splits.
    """

    def __init__(self, name: str, count: int, width: int, *, scale: float = 0.02, split: int | None = None) -> None:
        super().__init__(name)
        self.count, self.width, self.scale, self.split = count, width, scale, split
        self.weight_name = f"{name}.weight"

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(self.weight_name, (self.count, self.width), tensor_dim=self.split)]

    def bind(self, parameters: FlatParameters) -> None:
        super().bind(parameters)
        self.weight = parameters[self.weight_name]

    def initialize(self, seed: int) -> None:
        self.weight[...] = _as(self.weight, normal(seed, self.weight_name, self.weight.shape, self.scale, np.float64))

    def forward(self, indices_n: Array, work: Workspace) -> Array:
        """Rows of the table; `indices` (int64, checked by the caller) must stay as they are until `backward`."""
        work.kept[self.name] = indices_n
        out_nc = work.save(f"{self.name}.y", len(indices_n), self.width)
        self.ops.lookup(self.weight, indices_n, out_nc)
        return out_nc

    def backward(self, dy_nc: Array, work: Workspace) -> None:
        """Adds each row of `dy` to the gradient of the row that it came from; indices have no gradient."""
        self.ops.scatter_add(dy_nc, work.kept[self.name], self._gradient_to_add_to(self.weight_name))
        self.parameters.finished(self.weight_name)


class PositionEmbedding(Embedding):
    """A learned row for each position of a sequence, added to what is there."""

    def add_to(self, x_btc: Array) -> None:
        """``x[:, t] += weight[t]`` in place."""
        rows_tc = self.weight[: x_btc.shape[1]]
        # Sequence by sequence: NumPy takes memory for an operation on three axes of which one is broadcast or reduced.
        for x_tc in x_btc:
            np.add(x_tc, rows_tc, out=x_tc)

    def backward_positions(self, dx_btc: Array) -> None:
        """The adjoint of ``add_to(x)``: sums over the sequences; positions beyond them get nothing."""
        view, accumulate = self.parameters.gradient(self.weight_name)
        if not accumulate:
            view.fill(0)
        rows_tc = view[: dx_btc.shape[1]]
        for dx_tc in dx_btc:
            np.add(rows_tc, dx_tc, out=rows_tc)
        self.parameters.finished(self.weight_name)


class LayerNorm(Layer):
    """Rows brought to mean 0 and variance 1, then scaled and shifted (Ba, Kiros and Hinton, 2016).

    Parameters
    ----------
    name : str
        Its tensors are ``name.weight`` (starts at 1) and ``name.bias`` (starts at 0).
    width : int
        Length of a row.
    epsilon : float
        Added to the variance.
    """

    def __init__(self, name: str, width: int, *, epsilon: float = 1e-5) -> None:
        super().__init__(name)
        self.width, self.epsilon = width, epsilon
        self.weight_name, self.bias_name = f"{name}.weight", f"{name}.bias"

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(self.weight_name, (self.width,)), ParameterSpec(self.bias_name, (self.width,))]

    def bind(self, parameters: FlatParameters) -> None:
        super().bind(parameters)
        self.weight, self.bias = parameters[self.weight_name], parameters[self.bias_name]

    def initialize(self, seed: int) -> None:
        self.weight.fill(1)
        self.bias.fill(0)

    def forward(self, x_nc: Array, work: Workspace) -> Array:
        """Keeps `x`, which must stay as it is until `backward`."""
        rows = len(x_nc)
        y_nc = work.save(f"{self.name}.y", rows, self.width)
        mean_n, scale_n = work.save(f"{self.name}.mean", rows), work.save(f"{self.name}.scale", rows)
        work.kept[self.name] = x_nc, mean_n, scale_n
        self.ops.layer_norm(x_nc, self.weight, self.bias, y_nc, mean_n, scale_n, self.epsilon)
        return y_nc

    def backward(self, dy_nc: Array, work: Workspace, residual_nc: Array | None = None) -> Array:
        """Gradient by `x`, plus `residual` where given: the gradient that reaches `x` around the norm.

        With `residual` the result overwrites it.
        """
        x_nc, mean_n, scale_n = work.kept[self.name]
        if residual_nc is None:
            residual_nc = work.borrow(f"{self.role}.dx", *x_nc.shape)
            residual_nc.fill(0)
        self.ops.layer_norm_backward(
            dy_nc,
            x_nc,
            mean_n,
            scale_n,
            self.weight,
            residual_nc,
            self._gradient_to_add_to(self.weight_name),
            self._gradient_to_add_to(self.bias_name),
        )
        self.parameters.finished(self.bias_name)
        self.parameters.finished(self.weight_name)
        return residual_nc


class GELU(Layer):
    """Gaussian error linear unit in its tanh form (Hendrycks and Gimpel, 2016), with the bias of what comes before."""

    def forward(self, x_nc: Array, work: Workspace, bias_c: Array | None = None) -> Array:
        """``GELU(x + bias)``.  Overwrites `x` with the derivative, which `backward` needs."""
        if bias_c is None:
            bias_c = work.scratch("no bias", (x_nc.shape[1],), work.dtype)
            bias_c.fill(0)
        y_nc = work.save(f"{self.name}.y", *x_nc.shape)
        work.kept[self.name] = x_nc
        self.ops.gelu(x_nc, bias_c, y_nc)
        return y_nc

    def backward(self, dy_nc: Array, work: Workspace, dbias_c: Array | None = None) -> Array:
        """Gradient by `x`, in place of `dy`; its column sums are added into `dbias`."""
        if dbias_c is None:
            dbias_c = work.scratch("no bias", (dy_nc.shape[1],), work.dtype)
            dbias_c.fill(0)
        self.ops.gelu_backward(dy_nc, work.kept[self.name], dbias_c)
        return dy_nc


def cross_entropy(logits_nv: Array, targets_n: Array) -> float:
    """Summed cross-entropy in nats of float logits and int64 targets; `logits` becomes the gradient of the sum.

    The sum is taken in float64.  Forward and backward are one call, since the loss is where the backward starts.
    """
    return operations(logits_nv).cross_entropy(logits_nv, targets_n)
