"""Keys and values of the tokens so far, so that the next token of a text needs a pass over this token alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
