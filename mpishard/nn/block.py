"""The transformer block and its two-layer networks, plain and gated.

On devices GELU is computed in the epilogue of the first product, where a library has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.backend.cublas import CublasLt, FeedForwardShape, cublaslt_on_device
from mpishard.nn import device_kernels
from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.layers import GELU, Dropout, Layer, checked_rate
from mpishard.nn.linear import Linear
from mpishard.nn.norms import LayerNorm, Norm
from mpishard.nn.products import Matmul, multiply_into, rounded_dtype, rounded_weight, shared_operand
from mpishard.nn.tensor_parallel import TensorParallel
from mpishard.nn.workspace import Workspace

Array = Any


class GELUEpilogues:
    """Bias and GELU in the kernel of the product before, and a backward pass that has all but sums in half precision.

    The backward pass is a product and a separate kernel: cuBLASLt has an epilogue for it, but on an H200 that was a
    product and a second kernel, of 322 us for 16384 rows of 3072 channels.
    """

    def __init__(self, library: CublasLt, matmul: Matmul, half: np.dtype) -> None:
        self.half: np.dtype = half
        self._library = library
        self._matmul = matmul

    def forward(self, x_nc: Array, weight_cd: Array, bias_d: Array, before_nd: Array, y_nd: Array) -> None:
        """``y = GELU(x W + bias)``; `before`, for `backward`, gets what GELU is applied to.

        `x` is rounded or not; `weight` and `bias` are views of parameters; `before` and `y`, of shape (n, d), are in
        half precision.
        """
        self._library.forward(self._rounded(x_nc), self._weight(weight_cd), self._weight(bias_d), before_nd, y_nd)

    def backward(self, dy_nc: Array, weight_dc: Array, before_nd: Array, dbias_d: Array, work: Workspace) -> Array:
        """Gradient with respect to `before`, of shape (n, d) in half precision, which the next call overwrites.

        `dy`, of shape (n, c), is the gradient with respect to the product of `y` and the view `weight` of a second
        weight, of shape (d, c). The gradient of the bias, summed in the dtype of activations, is added to `dbias`.
        """
        dbefore_nd = work.scratch("gradient before GELU", before_nd.shape, self.half)
        self._matmul(self._rounded(dy_nc), self._weight(weight_dc).T, out=dbefore_nd)
        device_kernels.gelu_backward_of_rounded(dbefore_nd, before_nd, dbias_d)
        return dbefore_nd

    def _rounded(self, array: Array) -> Array:
        return shared_operand(self._matmul, array)

    def _weight(self, weight: Array) -> Array:
        """Rounded, once a step where weights stay as they are."""
        return self._rounded(rounded_weight(self._matmul, weight))


def choose_epilogues(
    matmul: Matmul, tensor: TensorParallel, x_nc: Array, inner: int, work: Workspace
) -> GELUEpilogues | None:
    """The epilogues for rows `x` and GELU of `inner` channels; None: GELU is a separate kernel.

    They are used only if operands are rounded, the model is one slice, and the library takes the shape.
    """
    half = rounded_dtype(matmul)
    # Tensor ranks have replicas whose bits must not differ, and each rank finds out on its own what its library takes.
    # Texts that are generated have other rows with every token.
    if half is None or tensor.slices.total > 1 or work.cache is not None or not x_nc.flags.c_contiguous:
        return None
    library = cublaslt_on_device(x_nc)
    if library is None or not library.takes(FeedForwardShape(len(x_nc), x_nc.shape[1], inner), half, x_nc):
        return None
    return GELUEpilogues(library, matmul, half)


# The gated two-layer network of models like Llama.


class GatedMLP(Layer):
    """``(SiLU(x Wg) * (x Wu)) Wd``, without biases (SwiGLU, Shazeer, 2020).

    Tensor parallelism splits the channels inside.  Its passes are collective over the tensor axis; gate and up get
    their rows, and return the gradient with respect to these, in one communication.

    Parameters
    ----------
    name : str
        Its tensors are ``name.gate.weight``, ``name.up.weight`` and ``name.down.weight``.
    width, hidden : int
        Channels outside and inside, of the whole network.
    output_scale : float
        Standard deviation of the initial weights of the last product.
    sequence_parallel : bool
        Whether tensor ranks hold some rows each outside of it.
    """

    only_multiplies = True

    def __init__(
        self, name: str, width: int, hidden: int, *, output_scale: float = 0.02, sequence_parallel: bool = False
    ) -> None:
        self.gate: Linear = Linear(f"{name}.gate", width, hidden, bias=False, split=1)
        self.up: Linear = Linear(f"{name}.up", width, hidden, bias=False, split=1)
        self.down: Linear = Linear(
            f"{name}.down",
            hidden,
            width,
            scale=output_scale,
            bias=False,
            split=0,
            sequence_parallel=sequence_parallel,
        )
        super().__init__(name, [self.gate, self.up, self.down])

    def forward(self, x_nc: Array, work: Workspace, residual_nc: Array | None = None) -> Array:
        """The output, plus `residual` where given.

        Parameters
        ----------
        x_nc : array, shape (n, width)
            The rows that this rank holds.  Kept; it must stay as it is until `backward`.
        work : Workspace
            Memory of the micro-batch.
        residual_nc : array, shape (n, width), optional
            Added to the result.

        Returns
        -------
        array, shape (n, width)
            The rows that this rank holds, in the memory of `work`.
        """
        rows_nc = shared_operand(self.matmul, self._all_rows(x_nc, work))
        shape = len(rows_nc), self.gate.local_outputs
        gate_nd, up_nd = (work.save(f"{self.role}.{name}", *shape) for name in ("gate", "up"))
        y_nd = self._save_for_products(work, *shape)
        work.kept[self.role] = x_nc, gate_nd, up_nd
        self.gate.apply(rows_nc, gate_nd)
        self.up.apply(rows_nc, up_nd)
        self.ops.swiglu(gate_nd, up_nd, y_nd)
        return self.down.forward(y_nd, work, residual_nc)

    def backward(self, dy_nc: Array, work: Workspace) -> Array:
        """Gradient with respect to `x`.

        Parameters
        ----------
        dy_nc : array, shape (n, width)
            Gradient of the loss with respect to the output.
        work : Workspace
            That of the forward pass.

        Returns
        -------
        array, shape (n, width)
            In the memory of `work`.
        """
        # The forward pass left the derivatives in the memory of gate and up, which is this micro-batch's own.
        x_nc, dgate_nd, dup_nd = work.kept[self.role]
        self.ops.swiglu_backward(dgate_nd, dup_nd, self.down.backward(dy_nc, work))
        shared = shared_operand(self.matmul, dgate_nd, "dgate"), shared_operand(self.matmul, dup_nd, "dup")
        dx_nc = self._input_gradient(*shared, work)
        if work.deferred is None or not work.defers_products:
            self._add_products(x_nc, *shared, work, functools.partial(self._finished, work=work))
        else:  # not in the memory that others share
            ready = self.parameters.mark_ready
            work.deferred.append(functools.partial(self._add_products, x_nc, dgate_nd, dup_nd, work, ready))
        return dx_nc

    def _input_gradient(self, dgate_nd: Array, dup_nd: Array, work: Workspace) -> Array:
        """Gradient with respect to `x`: the sum of two products for each slice, added up over the slices."""
        rows, width = len(dgate_nd), self.gate.inputs
        weights = self.gate._weights(rows), self.up._weights(rows)
        dys = self.gate._outputs_apart(dgate_nd), self.up._outputs_apart(dup_nd)
        product_memory = functools.partial(work.borrow, "gated product", rows, width)

        def term(index: int, out_nc: Array) -> None:
            for number, (weight, dy) in enumerate(zip(weights, dys, strict=True)):
                multiply_into(self.matmul, dy[index], weight[index].T, out_nc, number > 0, product_memory)

        def memory(depth: int) -> Array:
            return work.borrow(f"terms {depth}" if depth else f"{self.role}.dx", rows, width)

        terms_nc = self.tensor.slices.add(term, memory)
        own = functools.partial(work.borrow, f"{self.role}.dx of own rows")
        return self.tensor.enter.backward(terms_nc, work.rows, own)

    def _add_products(
        self, x_nc: Array, dgate_nd: Array, dup_nd: Array, work: Workspace, finished: Callable[[str], None]
    ) -> None:
        """The gradients of up and gate; the first is `finished` before the second has memory."""
        rows_nc = shared_operand(self.matmul, self._all_rows(x_nc, work))
        for part, dy_nd in ((self.up, dup_nd), (self.gate, dgate_nd)):
            part._add_product_of_rows(rows_nc, dy_nd, work)
            finished(part.weight_name)

    def _all_rows(self, x_nc: Array, work: Workspace) -> Array:
        return self.tensor.enter.forward(x_nc, work.rows, functools.partial(work.borrow, "all rows"))


# The transformer block and its two-layer network.


class MLP(Layer):
    """``GELU(x W1 + b1) W2 + b2`` with four times as many channels inside, which tensor parallelism splits.

    Its passes are collective over the tensor axis.

    Parameters
    ----------
    name : str
        Its tensors are ``name.expand.{weight,bias}`` and ``name.contract.{weight,bias}``.
    width : int
        Channels outside, of the whole network.
    output_scale : float
        Standard deviation of the initial weights of the second product.
    sequence_parallel : bool
        Whether tensor ranks hold some rows each outside of it.
    """

    only_multiplies = True

    def __init__(self, name: str, width: int, *, output_scale: float = 0.02, sequence_parallel: bool = False) -> None:
        self.expand: Linear = Linear(f"{name}.expand", width, 4 * width, split=1)
        self.activation: GELU = GELU(f"{name}.activation")
        self.activation.gives_bits = True
        self.contract: Linear = Linear(
            f"{name}.contract", 4 * width, width, scale=output_scale, split=0, sequence_parallel=sequence_parallel
        )
        super().__init__(name, [self.expand, self.activation, self.contract])

    def forward(self, x_nc: Array, work: Workspace, residual_nc: Array | None = None) -> Array:
        """The output, plus `residual` where given.

        Parameters
        ----------
        x_nc : array, shape (n, width)
            The rows that this rank holds.  Kept; it must stay as it is until `backward`.
        work : Workspace
            Memory of the micro-batch.
        residual_nc : array, shape (n, width), optional
            Added to the result.

        Returns
        -------
        array, shape (n, width)
            The rows that this rank holds, in the memory of `work`.
        """
        work.kept[self.role] = x_nc
        inner = self.expand.local_outputs
        epilogues = choose_epilogues(self.matmul, self.tensor, x_nc, inner, work)
        work.kept[f"{self.role}.epilogues"] = epilogues
        if epilogues is not None:
            y_nd, before_nd = (
                work.save(f"{layer.role}.y", len(x_nc), inner, dtype=epilogues.half)
                for layer in (self.activation, self.expand)
            )
            work.kept[self.activation.role] = before_nd
            epilogues.forward(x_nc, self.parameters[self.expand.weight_name], self.expand.bias, before_nd, y_nd)
            return self.contract.forward(y_nd, work, residual_nc)
        hidden_nd = self.expand.product(x_nc, work)
        return self.contract.forward(self.activation.forward(hidden_nd, work, self.expand.bias), work, residual_nc)

    def backward(self, dy_nc: Array, work: Workspace) -> Array:
        """Gradient with respect to `x`.

        Parameters
        ----------
        dy_nc : array, shape (n, width)
            Gradient of the loss with respect to the output.
        work : Workspace
            That of the forward pass.

        Returns
        -------
        array, shape (n, width)
            In the memory of `work`.
        """
        bias_name = self.expand.bias_name
        assert bias_name is not None
        epilogues = work.kept[f"{self.role}.epilogues"]
        if epilogues is None:
            dhidden_nd = self.contract.backward(dy_nc, work)
            self.activation.backward(dhidden_nd, work, self._gradient_to_add_to(bias_name))
        else:
            before_nd, weight_name = work.kept[self.activation.role], self.contract.weight_name

            def through_gelu(dy_nc: Array, work: Workspace) -> Array:
                dbias_d = self._gradient_to_add_to(bias_name)
                return epilogues.backward(dy_nc, self.parameters[weight_name], before_nd, dbias_d, work)

            dhidden_nd = self.contract.backward(dy_nc, work, through_gelu)
        self._finished(bias_name, work)
        dhidden_nd = self.expand.shared(dhidden_nd, work)
        dx_nc = self.expand.input_gradient(dhidden_nd, work)
        self.expand.weight_gradient(work.kept[self.role], dhidden_nd, work)
        return dx_nc


class TransformerBlock(Layer):
    """Pre-norm residual block of any parts: ``x += attention(norm(x))``, then ``x += mlp(norm(x))``.

    Its passes are collective over the tensor axis.

    Parameters
    ----------
    name : str
        Prefix of the names of its parts, such as ``"blocks.0"``.
    attention_norm : LayerNorm or RMSNorm
        Of the input of the attention.
    attention : CausalSelfAttention
        Or a layer with such passes.
    mlp_norm : LayerNorm or RMSNorm
        Of the input of the MLP.
    mlp : MLP or GatedMLP
        Or a layer with such passes.
    dropout : float
        Rate of dropout of the results of attention and MLP, before they are added to the residual stream.

    Raises
    ------
    TypeError, ValueError
        If `dropout` is no number from 0 to below 1.
    """

    def __init__(
        self,
        name: str,
        attention_norm: Norm,
        attention: CausalSelfAttention,
        mlp_norm: Norm,
        mlp: MLP | GatedMLP,
        dropout: float = 0.0,
    ) -> None:
        attention_norm.gives_bits, mlp_norm.gives_bits = attention.only_multiplies, mlp.only_multiplies
        self.attention_norm: Norm = attention_norm
        self.attention: CausalSelfAttention = attention
        self.mlp_norm: Norm = mlp_norm
        self.mlp: MLP | GatedMLP = mlp
        self.dropouts: tuple[Dropout, Dropout] | None = None
        parts: list[Layer] = [self.attention_norm, self.attention, self.mlp_norm, self.mlp]
        if checked_rate(dropout):
            self.dropouts = Dropout(f"{name}.attention_dropout", dropout), Dropout(f"{name}.mlp_dropout", dropout)
            parts += self.dropouts
        super().__init__(name, parts)
        self.width: int = attention_norm.width
        self.share_scratch(name)

    def forward(self, x_nc: Array, work: Workspace, length: int) -> Array:
        """The residual stream after the block.

        Parameters
        ----------
        x_nc : array, shape (n, width)
            Sequences end to end; the rows that this rank holds.  Kept until `backward`.
        work : Workspace
            Memory of the micro-batch.
        length : int
            Tokens of a sequence.

        Returns
        -------
        array, shape (n, width)
            The rows that this rank holds, in the memory of `work`.
        """
        normed_nc = self.attention_norm.forward(x_nc, work)
        if self.dropouts is not None and work.draws is not None:
            x_nc = self._add(0, self.attention.forward(normed_nc, work, length), x_nc, work)
            return self._add(1, self.mlp.forward(self.mlp_norm.forward(x_nc, work), work), x_nc, work)
        x_nc = self.attention.forward(normed_nc, work, length, residual_nc=x_nc)
        return self.mlp.forward(self.mlp_norm.forward(x_nc, work), work, residual_nc=x_nc)

    def backward(self, dy_nc: Array, work: Workspace, length: int) -> Array:
        """Gradient with respect to `x`.

        Parameters
        ----------
        dy_nc : array, shape (n, width)
            Gradient of the loss with respect to the output; overwritten by the result.
        work : Workspace
            That of the forward pass.
        length : int
            Tokens of a sequence.

        Returns
        -------
        array, shape (n, width)
            `dy_nc` itself.
        """
        dmlp_nc = self.mlp.backward(self._dropped(1, dy_nc, work), work)
        self.mlp_norm.backward(dmlp_nc, work, residual_nc=dy_nc)
        dattention_nc = self.attention.backward(self._dropped(0, dy_nc, work), work, length)
        self.attention_norm.backward(dattention_nc, work, residual_nc=dy_nc)
        return dy_nc

    def _add(self, part: int, y_nc: Array, residual_nc: Array, work: Workspace) -> Array:
        """Add the result of a part to the residual stream, in the memory of the result."""
        assert self.dropouts is not None
        self.dropouts[part].apply(y_nc, work)
        y_nc += residual_nc
        return y_nc

    def _dropped(self, part: int, dy_nc: Array, work: Workspace) -> Array:
        """The gradient with respect to the result of a part, from that by the residual stream, which stays as it is."""
        if self.dropouts is None or work.draws is None:
            return dy_nc
        masked_nc = work.borrow("masked gradient", *dy_nc.shape)
        masked_nc[...] = dy_nc
        return self.dropouts[part].apply(masked_nc, work)


class Block(TransformerBlock):
    """The block of GPT-2: layer norms, attention with as many keys as queries, and an `MLP`, with biases.

    Its passes are collective over the tensor axis.

    Parameters
    ----------
    name : str
        Prefix of its tensors.
    width, heads : int
        Channels and attention heads of the whole block.
    output_scale : float
        Standard deviation of the initial weights of the two projections back to the residual stream.
    sequence_parallel : bool
        Whether tensor ranks hold some rows of the residual stream each, instead of all of them.
    dropout : float
        As for `TransformerBlock`.

    Raises
    ------
    TypeError, ValueError
        As `TransformerBlock` and `CausalSelfAttention`.
    """

    def __init__(
        self,
        name: str,
        width: int,
        heads: int,
        *,
        output_scale: float = 0.02,
        sequence_parallel: bool = False,
        dropout: float = 0.0,
    ) -> None:
        rows: dict[str, Any] = dict(sequence_parallel=sequence_parallel)
        super().__init__(
            name,
            LayerNorm(f"{name}.attention_norm", width, **rows),
            CausalSelfAttention(f"{name}.attention", width, heads, output_scale=output_scale, **rows),
            LayerNorm(f"{name}.mlp_norm", width, **rows),
            MLP(f"{name}.mlp", width, output_scale=output_scale, **rows),
            dropout,
        )
