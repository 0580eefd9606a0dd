"""Memory that layers reuse from step to step: what a forward pass keeps for its backward pass, and scratch."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

Array = Any

# Views are small, but text generation asks for a new shape with every token.
MOST_VIEWS = 10_000


class Pool:
    """Arrays by name. Asking again for a name and a shape gives the same array; a larger shape grows the memory.

    Two shapes of one name share memory, so a run over ragged batches holds no more than its largest batch needs.

    Parameters
    ----------
    module : module
        ``numpy`` or ``cupy``: where the memory lives.
    """

    def __init__(self, module: Any = np) -> None:
        self._module = module
        self._memory: dict[tuple[str, Any], Array] = {}
        self._views: dict[tuple[str, Any, tuple[int, ...]], Array] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """The array `name`, C-contiguous, of `shape` and `dtype`; new memory is not initialised."""
        view = self._views.get((name, dtype, shape))
        if view is None:
            view = self._view(name, shape, dtype)
        return view

    def _view(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        size = prod(shape)
        memory = self._memory.get((name, dtype))
        if memory is None or memory.size < size:
            memory = self._memory[name, dtype] = self._module.empty(size, dtype)
            # Views of the outgrown memory would keep it alive.
            for key in [key for key in self._views if key[:2] == (name, dtype)]:
                del self._views[key]
        if len(self._views) >= MOST_VIEWS:
            self._views.clear()
        view = self._views[name, dtype, shape] = memory[:size].reshape(shape)
        return view

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(memory.nbytes for memory in self._memory.values())


class Workspace:
    """Activations of one micro-batch in flight, and scratch memory that all micro-batches share.

    Parameters
    ----------
    dtype : dtype
        Of the activations.
    module : module
        ``numpy`` or ``cupy``.
    sharing : Workspace, optional
        Use the scratch of this workspace: a schedule that holds several micro-batches computes one at a time.

    Attributes
    ----------
    saved : Pool
        What a forward pass keeps for the backward pass of the same micro-batch.
    scratch : Pool
        What is dead when the call that asked for it, or the layer above that call, returns.
    kept : dict
        By layer name: arrays of others that the layer's backward pass needs, such as its input.
    """

    def __init__(self, dtype: Any, module: Any = np, sharing: Workspace | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.module = module
        self.saved = Pool(module)
        self.scratch: Pool = Pool(module) if sharing is None else sharing.scratch
        self.kept: dict[str, Any] = {}

    def save(self, name: str, *shape: int) -> Array:
        """The saved array `name` in the dtype of the activations."""
        return self.saved(name, shape, self.dtype)

    def borrow(self, name: str, *shape: int) -> Array:
        """The scratch array `name` in the dtype of the activations."""
        return self.scratch(name, shape, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held, scratch included."""
        return self.saved.nbytes + self.scratch.nbytes
