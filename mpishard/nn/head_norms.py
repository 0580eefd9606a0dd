"""Norms of the queries and keys of each head, as Qwen3 has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpishard.layout.specs import ParameterSpec
from mpishard.nn.layers import Layer
from mpishard.nn.workspace import Workspace

Array = Any


class HeadNorms(Layer):
    """Queries and keys divided by their root mean square, and scaled, with one weight for all query or key heads.

    Tensor ranks have heads of their own, so that their gradients are terms of a sum.  In a model of several shards
    `backward` takes it, and is collective over the tensor axis.

    Parameters
    ----------
    name : str
        Its tensors are ``name.query_norm.weight`` and ``name.key_norm.weight``, which start at 1.
    head_width : int
        Channels of a head.
    epsilon : float
        Added to the mean square.
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
        """Norm all queries and keys, in place.

        Parameters
        ----------
        heads_lsbhtd : array
            By slice of this rank and kind: queries of all kinds, keys, values.
        work : Workspace
            Memory of the micro-batch.
        """
        slices, kinds, *rest = heads_lsbhtd.shape
        raw_lsbhtd = work.save(f"{self.role}.raw", slices, kinds - 1, *rest)
        scale_lsbht = work.save_statistics(f"{self.role}.raw scale", slices, kinds - 1, *rest[:3])
        work.kept[f"{self.role}.norms"] = raw_lsbhtd, scale_lsbht
        raw_lsbhtd[...] = heads_lsbhtd[:, :-1]
        weights = [self.parameters[name] for name in self.weight_names]
        for raw, scale, heads in zip(raw_lsbhtd, scale_lsbht, heads_lsbhtd, strict=True):
            for weight, kind in zip(weights, self._kinds(kinds), strict=True):
                x_nd, y_nd = (each[kind].reshape(-1, self.head_width) for each in (raw, heads))
                self.ops.rms_norm(x_nd, weight, y_nd, scale[kind].reshape(-1), self.epsilon)

    def backward(self, dheads_lsbhtd: Array, work: Workspace) -> None:
        """Gradients by the queries and keys before the norm, in place of those after it.

        Parameters
        ----------
        dheads_lsbhtd : array
            As for `forward`; the gradient of the loss by the result.
        work : Workspace
            That of the forward pass.
        """
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
