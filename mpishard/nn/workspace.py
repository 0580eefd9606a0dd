"""Memory of layers: arrays kept for the backward pass, scratch, and keys and values of the tokens so far.

Layers reuse it from step to step.  With keys and values the next token of a text needs a pass over this token alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from mpishard.backend.array import module_of

Array = Any


class KeyValueCache:
    """The keys and values of each attention of this rank, for several texts of different lengths.

    A pass through the model is over some of the texts, and adds equally many tokens to each: all so far of texts that
    are computed from their beginning, or one. Axes: l slices, b texts, h heads of keys and values, t positions, d
    channels.
    """

    def __init__(self, texts: int, capacity: int) -> None:
        self._texts = texts
        self._capacity = capacity
        self._held: dict[str, tuple[Array, Array]] = {}
        self.numbers: list[int] = []  # the texts of this pass
        self.starts: list[int] = []  # of each of them, the position of the first token of this pass

    def over(self, numbers: Sequence[int], starts: Sequence[int]) -> KeyValueCache:
        """The same keys and values, for a pass over some texts."""
        of_pass = KeyValueCache(self._texts, self._capacity)
        of_pass._held = self._held
        of_pass.numbers, of_pass.starts = list(numbers), list(starts)
        return of_pass

    def clear(self) -> None:
        """Give the memory back, also where a workspace still has the cache of its last pass."""
        self._held.clear()

    @property
    def fresh(self) -> bool:
        """Return True if this pass has all tokens of its texts."""
        return not any(self.starts)

    def store(self, name: str, k_lbhtd: Array, v_lbhtd: Array) -> None:
        """Keep the keys and values of this pass, of the attention `name`."""
        if name not in self._held:
            slices, _, heads, _, channels = k_lbhtd.shape
            shape = slices, self._texts, heads, self._capacity, channels
            module = module_of(k_lbhtd)
            self._held[name] = module.empty(shape, k_lbhtd.dtype), module.empty(shape, k_lbhtd.dtype)
        length = k_lbhtd.shape[3]
        for held, new in zip(self._held[name], (k_lbhtd, v_lbhtd), strict=True):
            for place, (number, start) in enumerate(zip(self.numbers, self.starts, strict=True)):
                held[:, number, :, start : start + length] = new[:, place]

    def known(self, name: str, place: int, length: int) -> tuple[Array, Array]:
        """Keys and values of a text of this pass, with the `length` tokens of this pass: (l, 1, h, t, d) each."""
        number, stop = self.numbers[place], self.starts[place] + length
        k, v = self._held[name]
        return k[:, number : number + 1, :, :stop], v[:, number : number + 1, :, :stop]


# Views are small, but text generation asks for a new shape with every token.
MOST_VIEWS = 10_000


class Pool:
    """Arrays by name. Asking again for a name and a shape gives the same array; a larger shape grows the memory.

    Two shapes of one name share memory, so a run over ragged batches holds no more than its largest batch needs.
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
        if min(shape, default=0) < 0:
            raise ValueError(f"the array {name!r} of shape {shape} has a negative extent")
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

    def ones(self, count: int, dtype: Any) -> Array:
        """So many ones, which nobody may change: they are written once."""
        before = self._memory.get(("ones", dtype))
        view = self("ones", (count,), dtype)
        if self._memory["ones", dtype] is not before:
            self._memory["ones", dtype].fill(1)
        return view

    @classmethod
    def like(cls, array: Array) -> Pool:
        """A pool whose memory lives where that of `array` does."""
        return cls(module_of(array))

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())


class Workspace:
    """Activations of one micro-batch in flight, and scratch memory that all micro-batches share.

    Parameters
    ----------
    dtype : dtype
        Of the activations.
    module : module
        Of the arrays, as for `FlatParameters`.
    sharing : Workspace, optional
        Use the scratch of this workspace: a schedule that holds several micro-batches computes one at a time.

    Attributes
    ----------
    saved : Pool
        Arrays that a forward pass keeps for the backward pass of the same micro-batch.
    scratch : Pool
        Arrays that are unused once the call that borrowed them, or the layer above it, returns.
    kept : dict
        By layer: arrays that its backward pass needs, such as its input.
    rows : int
        Tokens of the micro-batch, of which a rank may hold some only (sequence parallelism).
    draws : Draws or None
        What the masks of dropout depend on; None: nothing is dropped.
    deferred : list of callables, or None
        Deferred work of a backward pass: marking gradients ready, and products for weight gradients.  None: nothing is
        deferred.
    cache : KeyValueCache or None
        In a pass that continues texts: the keys and values of their tokens so far.
    defers_products : bool
        False: products are not deferred, since their operands are overwritten too soon.
    """

    def __init__(self, dtype: Any, module: Any = np, sharing: Workspace | None = None) -> None:
        self.dtype: np.dtype = np.dtype(dtype)
        self.module = module
        self.saved: Pool = Pool(module)
        self.scratch: Pool = Pool(module) if sharing is None else sharing.scratch
        self.kept: dict[str, Any] = {}
        self.rows: int = 0
        self.draws: Any = None
        self.deferred: list[Callable[[], None]] | None = None
        self.defers_products = True
        self.cache: KeyValueCache | None = None
        self._parts: dict[str, Workspace] = {}

    def save(self, name: str, *shape: int, dtype: np.dtype | None = None, exact: bool = False) -> Array:
        """An array that is kept for the backward pass.

        Parameters
        ----------
        name : str
            The same name and shape give the same array again.
        *shape : int
            Its extents.
        dtype : dtype, optional
            None: that of the activations. Others are half precision: float16, or uint16 for the bits of bfloat16.
        exact : bool
            It is few numbers on which many others depend, and must not be stored rounded.

        Returns
        -------
        array
            C-contiguous; new memory is not initialised.
        """
        return self.saved(name, shape, self.dtype if dtype is None else dtype)

    def borrow(self, name: str, *shape: int) -> Array:
        """A scratch array in the dtype of the activations.

        Parameters
        ----------
        name : str
            Layers that use one name at different times share the memory.
        *shape : int
            Its extents.

        Returns
        -------
        array
            C-contiguous; it has what the last user has left.
        """
        return self.scratch(name, shape, self.dtype)

    def part(self, name: str) -> Workspace:
        """The workspace of one of several networks whose layers have the same roles, for this micro-batch.

        Parameters
        ----------
        name : str
            Of the network.

        Returns
        -------
        Workspace
            With separate memory for what is saved, and the scratch of this one.
        """
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = Workspace(self.dtype, self.module, sharing=self)
        return part.follow(self)

    def follow(self, other: Workspace) -> Workspace:
        """Use this workspace for the micro-batch of another.

        Parameters
        ----------
        other : Workspace
            Its `rows`, `draws`, `deferred` and `cache` are taken over.

        Returns
        -------
        Workspace
            This one.
        """
        self.rows, self.draws, self.deferred = other.rows, other.draws, other.deferred
        self.cache = other.cache
        return self

    @property
    def saved_bytes(self) -> int:
        """Bytes held for this micro-batch, without scratch."""
        return self.saved.nbytes + sum(part.saved_bytes for part in self._parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes held, scratch included."""
        return self.saved_bytes + self.scratch.nbytes
