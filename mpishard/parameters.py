"""Parameters: named tensors that are views into one flat buffer.  Layers and optimizers meet here and nowhere else."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpishard.array import is_array
from mpishard.gradients import GradientBuckets
from mpishard.layout import ParameterSpec

Array = Any


class FlatParameters:
    """One flat parameter buffer, one flat gradient buffer, and named views into both.

    Parameters
    ----------
    specs : sequence of ParameterSpec
        The tensors, in the order in which the model uses them; they are stored in this order.
    dtype : dtype
        float32 or float64.
    module : module
        ``numpy`` (default) or ``cupy``: where the buffers live.
    """

    def __init__(self, specs: Sequence[ParameterSpec], dtype: Any = np.float32, *, module: Any = np) -> None:
        size = sum(spec.size for spec in specs)
        self._bind(specs, module.zeros(size, np.dtype(dtype)))

    @classmethod
    def over(cls, flat: Array, specs: Sequence[ParameterSpec] | None = None) -> FlatParameters:
        """Names for an existing flat array, which stays where it is; without `specs` it is one tensor."""
        check_flat("parameters", flat)
        if specs is None:
            specs = [ParameterSpec("parameters", (flat.size,))]
        if sum(spec.size for spec in specs) != flat.size:
            named = sum(spec.size for spec in specs)
            raise ValueError(f"the specs name {named} elements, but the flat array has {flat.size}")
        self = cls.__new__(cls)
        self._bind(specs, flat)
        return self

    def _bind(self, specs: Sequence[ParameterSpec], flat: Array) -> None:
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two parameters are named {twice!r}; names must be unique")
        self.specs = tuple(specs)
        self.flat = flat
        self._views = {}
        start = 0
        for spec in self.specs:
            self._views[spec.name] = flat[start : start + spec.size].reshape(spec.shape)
            start += spec.size
        self.gradients = GradientBuckets(self.specs, flat, minimum=max(1, flat.size))

    @property
    def size(self) -> int:
        """Number of parameters on this rank."""
        return int(self.flat.size)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.flat.dtype)

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number of 62 bits that depends on the names, shapes, order and dtype of the tensors."""
        text = repr([(spec.name, spec.shape) for spec in self.specs] + [self.dtype.name])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2

    @property
    def description(self) -> str:
        """Their number and size in words."""
        return f"{len(self)} tensors of {self.size} {self.dtype} values, first {next(iter(self), 'none')!r}"

    def __getitem__(self, name: str) -> Array:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def gradient(self, name: str) -> tuple[Array, bool]:
        """Where a backward pass writes the gradient of `name`: ``(view, accumulate)``.

        If ``accumulate`` is False the view holds garbage and must be overwritten, else added to.  Ask in every pass:
        under ZeRO-2 the memory is another one each time.
        """
        return self.gradients.gradient(name)

    def finished(self, name: str) -> None:
        """Announce that this backward pass is done with the gradient of `name`, so that its reduction may start."""
        self.gradients.finished(name)

    def reset_gradients(self) -> None:
        """Forget the gradients; the next backward pass starts from zero.  Optimizers do this after each step."""
        self.gradients.reset()


def check_flat(what: str, array: Array, *, written: bool = False) -> None:
    """Raise unless `array` is a contiguous 1-D float32 or float64 array, and writeable where `written`."""
    if not is_array(array):
        raise TypeError(f"{what} must be a flat NumPy or CuPy array, got {type(array).__name__}")
    if array.ndim != 1:
        raise ValueError(f"{what} must be flat (1-D), got shape {array.shape}; pass array.reshape(-1)")
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{what} must be float32 or float64, got {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{what} must be contiguous in memory; pass a copy (array.copy())")
    if written and not getattr(array.flags, "writeable", True):
        raise ValueError(f"{what} are read-only, but are written to; pass a copy (array.copy())")
