"""The matrix products of layers as spans of a trace."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import numpy as np

from mpishard.comm.ledger import PRODUCT, Ledger
from mpishard.nn.layers import Array, Layer
from mpishard.nn.products import Matmul


class TracedProducts:
    """Notes the products of bound layers, and of those inside of them, in a ledger while a trace is taken.

    Layers call a product that notes itself only in steps that are traced; a step that is not pays one comparison.
    Products of device arrays are not noted: they are computed after the call has returned.
    """

    def __init__(self, layers: Sequence[Layer], ledger: Ledger) -> None:
        self._layers = tuple(layers)
        self._ledger = ledger
        # By layer: the product that it was bound to; empty while none is noted.
        self._plain: dict[Layer, Matmul] = {}

    def follow_trace(self) -> None:
        """Note the products from now on if a trace is taken now, else not; for the beginning of a step."""
        if (self._ledger.spans is not None) == bool(self._plain):
            return
        if self._plain:
            for layer, matmul in self._plain.items():
                layer.matmul = matmul
            self._plain = {}
        else:
            for layer in self._layers:
                self._trace(layer)

    def _trace(self, layer: Layer) -> None:
        if layer.module is np and layer not in self._plain:
            self._plain[layer] = layer.matmul
            layer.matmul = _noted(layer.matmul, self._ledger)
        for child in layer.children:
            self._trace(child)


def _noted(matmul: Matmul, ledger: Ledger) -> Matmul:
    """The product, which notes its time and the extents of its operands."""

    @functools.wraps(matmul)
    def noted(a: Array, b: Array, out: Array) -> Array:
        began = time.perf_counter()
        product = matmul(a, b, out=out)
        ledger.note(f"{' x '.join(map(str, a.shape))} by {b.shape[-1]}", PRODUCT, began)
        return product

    return noted
