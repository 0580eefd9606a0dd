"""Matrix products: whole, column-parallel, row-parallel, and with the table of an embedding.

Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

import functools
from typing import Any

from mpishard.layout.specs import ParameterSpec
from mpishard.nn.layers import Layer
from mpishard.nn.products import Matmul, make_matmul
from mpishard.nn.tensor_parallel import Memory
from mpishard.nn.workspace import Workspace

Array = Any


class Linear(Layer):
    """``y = x W + b``, with W stored (inputs, outputs).

    If `split` is given, all methods that compute but `apply`, `apply_adjoint` and `bias_gradient` are collective over
    the tensor axis.

    Parameters
    ----------
    name : str
        Its tensors are ``name.weight`` and ``name.bias``.
    inputs, outputs : int
        Widths of the whole layer.
    scale : float
        Standard deviation of the initial weights; the bias starts at 0.
    bias : bool
        Whether there is a bias; else ``y = x W``.
    split : int or None
        Dimension of the weight that tensor parallelism splits.  1, column-parallel: by outputs, and the bias with
        them; it takes the rows that a rank holds and returns its columns of all rows.  0, row-parallel: by inputs; it
        takes its columns of all rows, and returns the rows that a rank holds, summed over the ranks.
    sequence_parallel : bool
        Whether ranks hold some rows each; then the bias of a row-parallel layer has partial gradients.
    """

    # Longer than other classes: half of it is docstrings with shapes, and whole, column- and row-parallel products are
    # one class since they differ only in what they exchange before and after the same product.

    # The dimensions of the weight.
    _inputs_dim, _outputs_dim = 0, 1

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        scale: float = 0.02,
        bias: bool = True,
        split: int | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(name)
        self.inputs: int = inputs
        self.outputs: int = outputs
        self.scale: float = scale
        self.split: int | None = split
        self.sequence_parallel = sequence_parallel
        self.weight_name: str = f"{name}.weight"
        self.bias_name: str | None = f"{name}.bias" if bias else None

    def specs(self) -> list[ParameterSpec]:
        specs = [ParameterSpec(self.weight_name, (self.inputs, self.outputs), tensor_dim=self.split)]
        if self.bias_name:
            # The rank with an output adds its bias; after a sum over ranks each adds the bias to its own rows.
            dim = 0 if self.split == 1 else None
            partial = self.sequence_parallel and self.split == 0
            specs.append(ParameterSpec(self.bias_name, (self.outputs,), tensor_dim=dim, partial=partial))
        return specs

    def initialize(self, seed: int) -> None:
        self._draw(seed, self.weight_name, (self.inputs, self.outputs), self.scale)
        if self.bias_name:
            self._fill(self.bias_name, 0)

    @property
    def bias(self) -> Array | None:
        """This rank's slice of the bias."""
        return self.parameters[self.bias_name] if self.bias_name else None

    @property
    def first_output(self) -> int:
        """Number of the first output that this rank computes."""
        return self.parameters.box(self.weight_name)[self._outputs_dim][0]

    @property
    def local_outputs(self) -> int:
        """Number of outputs that this rank computes."""
        start, stop = self.parameters.box(self.weight_name)[self._outputs_dim]
        return stop - start

    @property
    def local_inputs(self) -> int:
        """Number of inputs that this rank takes."""
        start, stop = self.parameters.box(self.weight_name)[self._inputs_dim]
        return stop - start

    def apply(self, x_ni: Array, out_no: Array) -> Array:
        """``x W`` with this rank's slice of W and no communication.

        Parameters
        ----------
        x_ni : array, shape (n, local_inputs)
            The inputs.
        out_no : array, shape (n, local_outputs)
            Overwritten.

        Returns
        -------
        array, shape (n, local_outputs)
            `out_no`.
        """
        return self.matmul(x_ni, self.parameters[self.weight_name], out=out_no)

    def product(self, x_ni: Array, work: Workspace, memory: Memory | None = None) -> Array:
        """``x W`` without the bias, for callers that fuse it with what comes next.

        Parameters
        ----------
        x_ni : array, shape (n, local_inputs)
            If column-parallel the rows that this rank holds, else all rows.
        work : Workspace
            Memory of the micro-batch.
        memory : callable, optional
            ``memory(*shape)`` gives the array of the result; default: saved in `work`.

        Returns
        -------
        array, shape (n, local_outputs)
            If row-parallel the rows that this rank holds, else all rows.
        """
        if self.split == 1:
            x_ni = self._all_rows(x_ni, work)
        if memory is None:
            memory = functools.partial(work.save, f"{self.role}.y")
        if self.split != 0:
            return self.apply(x_ni, memory(len(x_ni), self.local_outputs))
        shape = (len(x_ni), self.outputs)
        terms_no = self.apply(x_ni, work.borrow("terms", *shape) if self.tensor.splits_rows else memory(*shape))
        return self.tensor.leave.forward(terms_no, work.rows, memory)

    def forward(self, x_ni: Array, work: Workspace, residual_no: Array | None = None) -> Array:
        """``x W + b``, plus `residual` where given.

        Parameters
        ----------
        x_ni : array, shape (n, local_inputs)
            If column-parallel the rows that this rank holds, else all rows.  Kept; it must stay as it is until
            `backward`.
        work : Workspace
            Memory of the micro-batch.
        residual_no : array, optional
            Of the shape of the result, which it is added to.

        Returns
        -------
        array, shape (n, local_outputs)
            If row-parallel the rows that this rank holds, else all rows; in the memory of `work`.
        """
        work.kept[self.role] = x_ni
        y_no = self.product(x_ni, work)
        bias = self.bias
        if bias is not None and residual_no is not None:
            self.ops.add_bias(y_no, bias, residual_no)
        elif bias is not None:
            y_no += bias
        elif residual_no is not None:
            y_no += residual_no
        return y_no

    def backward(self, dy_no: Array, work: Workspace) -> Array:
        """Gradient by `x`; the gradients of weight and bias go to the gradient buffer.

        Parameters
        ----------
        dy_no : array
            Gradient of the loss by the output, of its shape.
        work : Workspace
            That of the forward pass.

        Returns
        -------
        array
            Of the shape of `x`, in the memory of `work`.
        """
        all_no = dy_no
        if self.split == 0:
            all_no = self.tensor.leave.backward(dy_no, work.rows, functools.partial(work.borrow, "all rows"))
        dx_ni = self.input_gradient(all_no, work)
        self.bias_gradient(dy_no, work)
        self.weight_gradient(work.kept[self.role], all_no, work)
        return dx_ni

    def input_gradient(self, dy_no: Array, work: Workspace) -> Array:
        """``dy W^T``.

        Parameters
        ----------
        dy_no : array, shape (n, local_outputs)
            All rows; if column-parallel this rank's columns of them.
        work : Workspace
            That of the forward pass.

        Returns
        -------
        array, shape (n, local_inputs)
            If column-parallel summed over the ranks, the rows that this rank holds.
        """
        dx_ni = self.apply_adjoint(dy_no, work.borrow(f"{self.role}.dx", len(dy_no), self.local_inputs))
        if self.split == 1:
            memory = functools.partial(work.borrow, f"{self.role}.dx of own rows")
            return self.tensor.enter.backward(dx_ni, work.rows, memory)
        return dx_ni

    def apply_adjoint(self, dy_no: Array, out_ni: Array) -> Array:
        """``dy W^T`` with this rank's slice of W and no communication.

        Parameters
        ----------
        dy_no : array, shape (n, local_outputs)
            The gradient by the output.
        out_ni : array, shape (n, local_inputs)
            Overwritten.

        Returns
        -------
        array, shape (n, local_inputs)
            `out_ni`.
        """
        return self.matmul(dy_no, self.parameters[self.weight_name].T, out=out_ni)

    def bias_gradient(self, dy_no: Array, work: Workspace) -> None:
        """Column sums of `dy`, into the gradient buffer.

        Parameters
        ----------
        dy_no : array, shape (n, local_outputs)
            The rows to whose outputs this rank has added the bias.
        work : Workspace
            That of the forward pass.
        """
        if self.bias_name:
            view, accumulate = self.parameters.gradient(self.bias_name)
            ones = work.scratch("ones", (len(dy_no),), work.dtype)
            ones.fill(1)
            _product_into(make_matmul(self.module), ones, dy_no, view, accumulate, work)
            self._finished(self.bias_name, work)

    def weight_gradient(self, x_ni: Array, dy_no: Array, work: Workspace) -> None:
        """``x^T dy`` into the gradient buffer, or deferred.

        Parameters
        ----------
        x_ni : array, shape (n, local_inputs)
            As for `forward`.
        dy_no : array, shape (n, local_outputs)
            Of all rows.
        work : Workspace
            That of the forward pass; where its `deferred` is a list, the product is done later.
        """
        if work.deferred is None or not work.defers_products:
            self._add_product(x_ni, dy_no, work)
            self._finished(self.weight_name, work)
            return
        # The memory of x belongs to this micro-batch, that of dy is used again by the layers below.
        kept_no = work.save(f"{self.role}.dy", *dy_no.shape)
        kept_no[...] = dy_no
        work.deferred.append(functools.partial(self._add_product, x_ni, kept_no, work))
        self._finished(self.weight_name, work)

    def _add_product(self, x_ni: Array, dy_no: Array, work: Workspace) -> None:
        if self.split == 1:
            # Only the own rows are kept, or sequence parallelism would save no memory here.
            x_ni = self._all_rows(x_ni, work)
        view, accumulate = self.parameters.gradient(self.weight_name)
        self._product_into(x_ni, dy_no, view, accumulate, work)

    def _product_into(self, x_ni: Array, dy_no: Array, out: Array, accumulate: bool, work: Workspace) -> None:
        _product_into(self.matmul, x_ni.T, dy_no, out, accumulate, work)

    def _all_rows(self, x_ni: Array, work: Workspace) -> Array:
        return self.tensor.enter.forward(x_ni, work.rows, functools.partial(work.borrow, "all rows"))


def _product_into(matmul: Matmul, a: Array, b: Array, out: Array, accumulate: bool, work: Workspace) -> None:
    """``out = a b``, or ``out += a b``."""
    if not accumulate:
        matmul(a, b, out=out)
        return
    product = work.scratch("product", (out.size,), work.dtype).reshape(out.shape)
    matmul(a, b, out=product)
    out += product


class TiedLinear(Linear):
    """``y = x W^T`` with the (outputs, inputs) table W of an embedding, split by its rows, which are the outputs.

    Collective over the tensor axis as a column-parallel `Linear`.

    Parameters
    ----------
    name : str
        Of the layer; it has no tensor of its own.
    weight_name : str
        Of the table.
    inputs, outputs : int
        Widths of the whole layer: columns and rows of the table.
    scale : float
        Standard deviation of the initial values, as for the embedding.
    """

    _inputs_dim, _outputs_dim = 1, 0

    def __init__(self, name: str, weight_name: str, inputs: int, outputs: int, *, scale: float = 0.02) -> None:
        super().__init__(name, inputs, outputs, scale=scale, bias=False, split=1)
        self.weight_name = weight_name
        # If the embedding is on the same rank, its backward comes last and marks the gradient of both ready.
        self.announces = True

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(self.weight_name, (self.outputs, self.inputs), tensor_dim=0)]

    def initialize(self, seed: int) -> None:
        self._draw(seed, self.weight_name, (self.outputs, self.inputs), self.scale)

    def apply(self, x_ni: Array, out_no: Array) -> Array:
        return self.matmul(x_ni, self.parameters[self.weight_name].T, out=out_no)

    def apply_adjoint(self, dy_no: Array, out_ni: Array) -> Array:
        return self.matmul(dy_no, self.parameters[self.weight_name], out=out_ni)

    def _product_into(self, x_ni: Array, dy_no: Array, out: Array, accumulate: bool, work: Workspace) -> None:
        _product_into(self.matmul, dy_no.T, x_ni, out, accumulate, work)

    def _finished(self, name: str, work: Workspace) -> None:
        if self.announces:
            super()._finished(name, work)
