"""The gated two-layer network of models like Llama."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mpishard.nn.layers import Layer
from mpishard.nn.linear import Linear
from mpishard.nn.products import multiply_into, shared_operand
from mpishard.nn.workspace import Workspace

Array = Any


class GatedMLP(Layer):
    """``(SiLU(x Wg) * (x Wu)) Wd``, without biases (SwiGLU, Shazeer, 2020).

    Tensor parallelism splits the channels inside.  Its passes are collective over the tensor axis; gate and up get
    their rows, and return the gradient by these, in one communication.

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
        """Gradient by `x`.

        Parameters
        ----------
        dy_nc : array, shape (n, width)
            Gradient of the loss by the output.
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
        """Gradient by `x`: the sum of two products for each slice, added up over the slices."""
        rows, width = len(dgate_nd), self.gate.inputs
        weights = self.gate._weights(rows), self.up._weights(rows)
        dys = self.gate._outputs_apart(dgate_nd), self.up._outputs_apart(dup_nd)

        def term(index: int, out_nc: Array) -> None:
            for number, (weight, dy) in enumerate(zip(weights, dys, strict=True)):
                multiply_into(self.matmul, dy[index], weight[index].T, out_nc, number > 0, product_memory)

        def product_memory() -> Array:
            return work.borrow("gated product", rows, width)

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
