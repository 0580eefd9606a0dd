"""The activations of a block that are kept for its backward pass: all, all in half precision, or only its input.

If not all are kept, blocks run in one shared workspace.  Before a backward pass the activations are restored there:
unpacked from half precision, or computed again (Chen et al., 2016, "Training deep nets with sublinear memory cost").
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpishard.backend.convert import BITS
from mpishard.nn.block import TransformerBlock
from mpishard.nn.units import Batch
from mpishard.nn.workspace import Workspace

Array = Any


class Spot(NamedTuple):
    """The position of a block: its number in its chunk, and whether the units before and after it are blocks."""

    number: int
    after_block: bool
    before_block: bool


class BlockUnit:
    """A block as a unit, called like the other units of a `mpishard.nn.Chunk`.

    Parameters
    ----------
    block : TransformerBlock
    keeping : KeepAll or ActivationCheckpointing
        What is kept of its activations.
    spot : Spot
    """

    def __init__(self, block: TransformerBlock, keeping: KeepAll | ActivationCheckpointing, spot: Spot) -> None:
        self.name: str = block.name
        self._block = block
        self._keeping = keeping
        self._spot = spot

    def forward(self, x_nc: Array, work: Workspace, batch: Batch) -> Array:
        return self._keeping.forward(self._block, x_nc, work, batch.length, self._spot)

    predict = forward

    def backward(self, dy_nc: Array, work: Workspace, batch: Batch) -> Array:
        return self._keeping.backward(self._block, dy_nc, work, batch.length)


class KeepAll:
    """Keep all activations: each micro-batch has a workspace for each block."""

    saved_bytes = 0
    keeps = True

    def forward(self, block: TransformerBlock, x_nc: Array, work: Workspace, length: int, spot: Spot) -> Array:
        return block.forward(x_nc, work.part(block.name), length)

    def backward(self, block: TransformerBlock, dy_nc: Array, work: Workspace, length: int) -> Array:
        return block.backward(dy_nc, work.part(block.name), length)


class _Recording(Workspace):
    """A workspace that remembers what was saved since `begin`."""

    def begin(self, work: Workspace) -> Workspace:
        self.recorded: dict[str, tuple[Array, bool]] = {}
        return self.follow(work)

    def save(self, name: str, *shape: int) -> Array:
        array = super().save(name, *shape)
        self.recorded[name] = array, False
        return array

    def save_statistics(self, name: str, *shape: int) -> Array:
        array = super().save_statistics(name, *shape)
        self.recorded[name] = array, True
        return array

    def save_bits(self, name: str, *shape: int, dtype: np.dtype = BITS) -> Array:
        array = super().save_bits(name, *shape, dtype=dtype)
        self.recorded[name] = array, True
        return array


class ActivationCheckpointing:
    """Blocks run in a shared workspace, and few of their activations are kept for each micro-batch.

    Parameters
    ----------
    sharing : Workspace
        The workspace whose scratch memory is used.
    recompute : bool
        Keep the input of a block, and run its forward pass again before its backward pass.
    storage_dtype : dtype or None
        Store kept activations in this dtype, float16 or bfloat16, except for statistics (one or two numbers per row
        and head) and for inputs from and outputs to other units.

    Attributes
    ----------
    keeps : bool
        Set it to False for forward passes without a backward pass, which then keep nothing.
    """

    keeps = True

    def __init__(self, sharing: Workspace, recompute: bool, storage_dtype: Any) -> None:
        self._inner = _Recording(sharing.dtype, sharing.module, sharing)
        # The operands of the products are overwritten by the next block.
        self._inner.defers_products = False
        self._recompute = recompute
        self._storage_dtype = None if storage_dtype is None else np.dtype(storage_dtype)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the shared workspace, without scratch."""
        return self._inner.saved_bytes

    def forward(self, block: TransformerBlock, x_nc: Array, work: Workspace, length: int, spot: Spot) -> Array:
        """Return the output, which outlives the block's other activations."""
        part, inner = work.part(block.name), self._inner
        packed = []
        if self.keeps and self._storage_dtype is not None and spot.after_block:
            packed.append((x_nc, self._pack("input", x_nc, part)))
        inner.begin(work)
        y_nc = block.forward(x_nc, inner, length)
        if self.keeps and not self._recompute:
            for name, (array, exact) in inner.recorded.items():
                if array is not y_nc:
                    packed.append((array, self._pack(name, array, part, exact)))
            part.kept["inside"] = dict(inner.kept)
        part.kept["input"], part.kept["packed"] = x_nc, packed
        if not spot.before_block or (self.keeps and self._storage_dtype is None):
            kept_nc = part.save("output", *y_nc.shape)
        else:
            # Two buffers in turn: the output of the next block must not overwrite its input.
            kept_nc = work.borrow(f"block output {spot.number % 2}", *y_nc.shape)
        kept_nc[...] = y_nc
        return kept_nc

    def backward(self, block: TransformerBlock, dy_nc: Array, work: Workspace, length: int) -> Array:
        part, inner = work.part(block.name), self._inner
        inner.begin(work)
        for array, packed in part.kept["packed"]:
            array[...] = packed
        if self._recompute:
            block.forward(part.kept["input"], inner, length)
        else:
            inner.kept = part.kept["inside"]
        return block.backward(dy_nc, inner, length)

    def _pack(self, name: str, array: Array, part: Workspace, exact: bool = False) -> Array:
        packed = part.saved(name, array.shape, array.dtype if exact else self._storage_dtype)
        packed[...] = array
        return packed
