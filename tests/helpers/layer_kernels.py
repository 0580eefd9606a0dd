"""Models whose layers compute by the formulas that kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterable

from mpishard.nn import formulas
from mpishard.nn.layers import Layer


def use_formulas(layers: Iterable[Layer]) -> None:
    """Let layers compute by formulas in the place of kernels, as on devices."""
    for layer in layers:
        layer.ops = formulas
        use_formulas(layer.children)
