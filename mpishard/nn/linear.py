"""Matrix products: whole, column-parallel, row-parallel, and with the table of an embedding.

Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mpishard.layout.tensors import ParameterSpec
from mpishard.nn.layers import Layer
from mpishard.nn.products import (
    DeviceProduct,
    Matmul,
    make_matmul,
    multiply_into,
    padded_extent,
    rounded_weight,
    shared_operand,
)
from mpishard.nn.tensor_parallel import Memory
from mpishard.nn.workspace import Workspace

Array = Any


class Linear(Layer):
    """``y = x W + b``, with W stored (inputs, outputs).

    If `split` is given, all methods that compute but `apply` are collective over the tensor axis.  What is split by
    columns lies in memory slice by slice, see `mpishard.nn.tensor_parallel`.

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
        Ranks hold some rows each and do not sum the gradients over rows; then the bias of a row-parallel layer
        has partial gradients.  False for several shards, of which `bias_gradient` takes the sums.
    """

    only_multiplies = True

    # The dimensions of the weight.
    _inputs_dim, _outputs_dim = 0, 1
    # Whether another layer may use the weight too, before this one.
    _second_use = False

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
        """This rank's part of the bias."""
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

    @property
    def padded_outputs(self) -> int:
        """More than `local_outputs` where products of a device are faster with some columns of zeros.

        It takes an array with as many columns in the place of one with `local_outputs`, as result and as gradient.
        """
        pads = isinstance(self.matmul, DeviceProduct) and self.matmul.rounded_dtype is not None
        pads = pads and self.tensor.slices.total == 1
        return padded_extent(self.local_outputs) if pads else self.local_outputs

    def apply(self, x_ni: Array, out_no: Array) -> Array:
        """``x W`` with this rank's slices of W and no communication, unless row-parallel.

        Parameters
        ----------
        x_ni : array, shape (n, inputs)
            The inputs.
        out_no : array, shape (n, local_outputs)
            Overwritten.  With `padded_outputs` columns those behind the outputs become 0.

        Returns
        -------
        array, shape (n, local_outputs)
            `out_no`; split by columns if column-parallel.
        """
        weights = self._weights(len(x_ni), out_no.shape[1])
        for weight_io, y_no in zip(weights, self._outputs_apart(out_no), strict=True):
            self.matmul(x_ni, weight_io, out=y_no)
        return out_no

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
            If row-parallel the rows that this rank holds, else all rows; split by columns if column-parallel.
        """
        if self.split == 1:
            x_ni = self._all_rows(x_ni, work)
        if memory is None:
            memory = functools.partial(work.save, f"{self.role}.y")
        if self.split != 0:
            return self.apply(x_ni, memory(len(x_ni), self.local_outputs))
        shape = (len(x_ni), self.outputs)
        first_no = work.borrow("terms", *shape) if self.tensor.splits_rows else memory(*shape)
        terms_no = self._sums(self._inputs_apart(x_ni), self._weights(len(x_ni)), first_no, work)
        return self.tensor.leave.forward(terms_no, work.rows, memory)

    def forward(
        self, x_ni: Array, work: Workspace, residual_no: Array | None = None, memory: Memory | None = None
    ) -> Array:
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
        memory : callable, optional
            As for `product`.

        Returns
        -------
        array, shape (n, local_outputs)
            If row-parallel the rows that this rank holds, else all rows; in the memory of `work`.
        """
        work.kept[self.role] = x_ni
        y_no = self.product(x_ni, work, memory)
        if self.bias_name:
            biases = self._cut_bias(self.parameters[self.bias_name])
            residuals = (None,) * len(biases) if residual_no is None else self._outputs_apart(residual_no)
            for y, bias, residual in zip(self._outputs_apart(y_no), biases, residuals, strict=True):
                if residual is None:
                    y += bias
                else:
                    self.ops.add_bias(y, bias, residual)
        elif residual_no is not None:
            y_no += residual_no
        return y_no

    def backward(
        self, dy_no: Array, work: Workspace, input_gradient: Callable[[Array, Workspace], Array] | None = None
    ) -> Array:
        """Gradient with respect to `x`; the gradients of weight and bias go to the gradient buffer.

        Parameters
        ----------
        dy_no : array
            Gradient of the loss with respect to the output, of its shape.
        work : Workspace
            That of the forward pass.
        input_gradient : callable, optional
            In the place of the method of that name, for callers that fuse it with what comes before the layer.

        Returns
        -------
        array
            Of the shape of `x`, in the memory of `work`.
        """
        all_no = dy_no
        if self.split == 0:
            all_no = self.tensor.leave.backward(dy_no, work.rows, functools.partial(work.borrow, "all rows"))
        shared_no = self.shared(all_no, work)
        dx_ni = (input_gradient or self.input_gradient)(shared_no, work)
        self.bias_gradient(dy_no, work)
        self.weight_gradient(work.kept[self.role], shared_no, work)
        return dx_ni

    def shared(self, dy_no: Array, work: Workspace) -> Array:
        """`dy` as both `input_gradient` and `weight_gradient` may take it, rounded once for both if they round it.

        Parameters
        ----------
        dy_no : array, shape (n, local_outputs)
            All rows.
        work : Workspace
            That of the forward pass.

        Returns
        -------
        array, shape (n, local_outputs)
            `dy`, or its numbers in half precision, in memory that the next call overwrites.
        """
        # A product that is done later takes it from other memory.
        return shared_operand(self.matmul, dy_no) if work.deferred is None else dy_no

    def input_gradient(self, dy_no: Array, work: Workspace, dx_ni: Array | None = None) -> Array:
        """``dy W^T``.

        Parameters
        ----------
        dy_no : array, shape (n, local_outputs)
            All rows; if column-parallel this rank's columns of them.
        work : Workspace
            That of the forward pass.
        dx_ni : array, shape (n, local_inputs), optional
            Memory for the result, which may be in half precision, unless the layer is column-parallel.

        Returns
        -------
        array, shape (n, local_inputs)
            If column-parallel summed over the ranks, the rows that this rank holds.
        """
        if dx_ni is None:
            dx_ni = work.borrow(f"{self.role}.dx", len(dy_no), self.local_inputs)
        weights_oi = [weight_io.T for weight_io in self._weights(len(dy_no), dy_no.shape[1])]
        if self.split == 1:
            memory = functools.partial(work.borrow, f"{self.role}.dx of own rows")
            terms_ni = self._sums(self._outputs_apart(dy_no), weights_oi, dx_ni, work)
            return self.tensor.enter.backward(terms_ni, work.rows, memory)
        for weight_oi, part_ni in zip(weights_oi, self._inputs_apart(dx_ni), strict=True):
            self.matmul(dy_no, weight_oi, out=part_ni)
        return dx_ni

    def bias_gradient(self, dy_no: Array, work: Workspace) -> None:
        """Column sums of `dy`, into the gradient buffer.

        Parameters
        ----------
        dy_no : array, shape (n, local_outputs)
            The rows to whose outputs this rank has added the bias; they may be rounded.
        work : Workspace
            That of the forward pass.
        """
        if not self.bias_name:
            return
        # What is rounded already is added up as it is.
        matmul = make_matmul(self.module) if dy_no.dtype == work.dtype else self.matmul
        ones = work.scratch.ones(len(dy_no), work.dtype)
        if self.split == 0 and self.tensor.slices.ordered:

            def sum_block(block: slice, sums_o: Array) -> None:
                matmul(ones[block], dy_no[block], out=sums_o)

            sums_o = self.tensor.sum_row_blocks(
                work.rows, sum_block, lambda depth: work.borrow(f"row sums {depth}", self.outputs)
            )
            self._add_to_gradient(self.bias_name, sums_o)
        else:
            view, accumulate = self.parameters.gradient(self.bias_name)
            for dy, part in zip(self._outputs_apart(dy_no), self._cut_bias(view), strict=True):
                _product_into(matmul, ones, dy, part, accumulate, work)
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
        kept_no = work.saved(f"{self.role}.dy", dy_no.shape, dy_no.dtype)
        kept_no[...] = dy_no
        work.deferred.append(functools.partial(self._add_product, x_ni, kept_no, work))
        self._finished(self.weight_name, work)

    def _add_product(self, x_ni: Array, dy_no: Array, work: Workspace) -> None:
        # Only the own rows are kept, or sequence parallelism would save no memory here.
        self._add_product_of_rows(self._all_rows(x_ni, work) if self.split == 1 else x_ni, dy_no, work)

    def _add_product_of_rows(self, x_ni: Array, dy_no: Array, work: Workspace) -> None:
        view, accumulate = self.parameters.gradient(self.weight_name, self._second_use)
        views = self._cut(view, self._split_dim)
        if self.split == 1:
            dy_no = dy_no[:, : self.local_outputs]  # without padding
        inputs, outputs = self._inputs_apart(x_ni), self._outputs_apart(dy_no)
        for index, part in enumerate(views):
            x, dy = inputs[index % len(inputs)], outputs[index % len(outputs)]
            self._product_into(x, dy, part, accumulate, work)

    def _product_into(self, x_ni: Array, dy_no: Array, out: Array, accumulate: bool, work: Workspace) -> None:
        _product_into(self.matmul, x_ni.T, dy_no, out, accumulate, work)

    # -- slices -----------------------------------------------------------------------------------------------------

    @property
    def _split_dim(self) -> int:
        """The dimension of the weight that is split."""
        return self._outputs_dim if self.split == 1 else self._inputs_dim

    def _cut(self, array: Array, dim: int) -> Sequence[Array]:
        """The slices of this rank's part of a tensor; the whole tensor if it is not split."""
        if self.split is None:
            return (array,)
        return self.tensor.slices.cut(array, self.outputs if self.split == 1 else self.inputs, dim)

    def _cut_bias(self, array: Array) -> Sequence[Array]:
        """The slices of this rank's part of the bias, which is split by outputs only."""
        return self._cut(array, 0) if self.split == 1 else (array,)

    def _weights(self, rows: int, outputs: int = 0) -> Sequence[Array]:
        """The slices of the weight, each of shape (inputs, outputs), for products with `rows` rows.

        `outputs` may be `padded_outputs`.
        """
        weights = self._cut(self.parameters[self.weight_name], self._split_dim)
        if rows == 1 and self.tensor.slices.ordered:
            # OpenBLAS's products of a matrix and a vector, unlike others, have other bits for a strided matrix.
            return [self.module.ascontiguousarray(weight) for weight in weights]
        padded = self._outputs_dim if outputs > self.local_outputs else None
        return [rounded_weight(self.matmul, weight, padded) for weight in weights]

    def _inputs_apart(self, x_ni: Array) -> Sequence[Array]:
        """The slices of an array of inputs; the array if they are not split."""
        return self.tensor.slices.column_slices(x_ni, self.inputs) if self.split == 0 else (x_ni,)

    def _outputs_apart(self, y_no: Array) -> Sequence[Array]:
        """The slices of an array of outputs; the array if they are not split."""
        return self.tensor.slices.column_slices(y_no, self.outputs) if self.split == 1 else (y_no,)

    def _sums(
        self, x_sni: Sequence[Array], weight_sio: Sequence[Array], first_no: Array, work: Workspace
    ) -> Sequence[Array]:
        """The products of slices, added up; the first sum is in `first_no`."""
        return self.tensor.slices.add(
            lambda index, out_no: self.matmul(x_sni[index], weight_sio[index], out=out_no),
            lambda depth: work.borrow(f"terms {depth}", *first_no.shape) if depth else first_no,
        )

    def _all_rows(self, x_ni: Array, work: Workspace) -> Array:
        return self.tensor.enter.forward(x_ni, work.rows, functools.partial(work.borrow, "all rows"))


def _product_into(matmul: Matmul, a: Array, b: Array, out: Array, accumulate: bool, work: Workspace) -> None:
    """``out = a b``, or ``out += a b``."""
    multiply_into(
        matmul, a, b, out, accumulate, lambda: work.scratch("product", (out.size,), work.dtype).reshape(out.shape)
    )


class TiedLinear(Linear):
    """``y = x W^T`` with the (outputs, inputs) table W of an embedding, split by its rows, which are the outputs.

    Collective over the tensor axis as a column-parallel `Linear`.

    Parameters
    ----------
    name : str
        Of the layer, which has no tensor itself.
    weight_name : str
        Of the table.
    inputs, outputs : int
        Widths of the whole layer: columns and rows of the table.
    scale : float
        Standard deviation of the initial values, as for the embedding.
    """

    _inputs_dim, _outputs_dim = 1, 0
    _second_use = True

    def __init__(self, name: str, weight_name: str, inputs: int, outputs: int, *, scale: float = 0.02) -> None:
        super().__init__(name, inputs, outputs, scale=scale, bias=False, split=1)
        self.weight_name = weight_name
        # If the embedding is on the same rank, its backward comes last and marks the gradient of both ready.
        self.marks_ready = True

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(self.weight_name, (self.outputs, self.inputs), tensor_dim=0)]

    def initialize(self, seed: int) -> None:
        self._draw(seed, self.weight_name, (self.outputs, self.inputs), self.scale)

    def _weights(self, rows: int, outputs: int = 0) -> Sequence[Array]:
        return [weight_oi.T for weight_oi in super()._weights(rows, outputs)]

    def _product_into(self, x_ni: Array, dy_no: Array, out: Array, accumulate: bool, work: Workspace) -> None:
        _product_into(self.matmul, dy_no.T, x_ni, out, accumulate, work)

    def _finished(self, name: str, work: Workspace) -> None:
        if self.marks_ready:
            super()._finished(name, work)
