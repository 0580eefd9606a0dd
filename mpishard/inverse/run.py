"""The interface between the loop of a minimisation and the ranks, and a minimisation on one process, without MPI."""

from __future__ import annotations

import hashlib
import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mpishard.backend import array as arrays
from mpishard.inverse.functions import Unknowns
from mpishard.minimizers.elements import preconditioned, whole_limits
from mpishard.minimizers.method import ELEMENTS, Limits, Method, Minimizer, check_metadata, lifted, warn_projected_start
from mpishard.minimizers.space import LocalSpace

Array = Any


class MinimizationRun(Protocol):
    """A minimisation, its unknowns, and the ranks that take part. Methods other than `watching` are collective."""

    method: Method
    unknowns: Unknowns
    speaks: bool  # this rank writes messages
    value: float  # of the last evaluation
    interrupted: bool  # Ctrl-C came on any rank before the last evaluation, inside of `watching`
    culprits: str  # the ranks whose value or gradient is not finite, if that has ended it and ranks differ

    def watching(self) -> AbstractContextManager[Any]:
        """The context in which Ctrl-C ends the loop in order, where it does."""
        ...

    @property
    def minimizer(self) -> Minimizer: ...

    def publish(self, vector: Array) -> None:
        """Make a vector of the minimizer the values of the unknowns, on all ranks."""
        ...

    def whole(self, vector: Array) -> Array:
        """A vector of the minimizer as an array like the unknowns of this rank; maybe not a copy."""
        ...

    def tell(self, value: float, gradient: Any, problem: BaseException | None) -> None:
        """Check the results of the user's function on every rank, combine them, and give them to the minimizer.

        Raises on all ranks if any has a problem.
        """
        ...

    def value_of(self, value: float, gradient: Any, problem: BaseException | None) -> float:
        """The value of all ranks, checked as by `tell`, which the minimizer does not get."""
        ...

    def tell_product(self, product: Any, problem: BaseException | None) -> None:
        """As `tell`, for a Hessian product."""
        ...

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank."""
        ...

    def raise_if_any(self, problem: BaseException | None) -> None: ...

    def serialize(self) -> bytes:
        """The whole state of the minimisation, with the point."""
        ...

    def deserialize(self, data: bytes) -> None:
        """Continue from `serialize`; nothing has changed if that raises."""
        ...

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint."""
        ...

    def load(self, folder: str | Path) -> None:
        """Continue from the newest checkpoint."""
        ...


class LocalRun:
    """A minimisation by one process: a `Run`. The start in `unknowns` is moved into the bounds.

    Raises ValueError or TypeError if an option does not fit the unknowns, or this rank has only its part of them.
    """

    speaks = True
    interrupted = False
    value = math.nan
    culprits = ""

    def __init__(self, method: Method, unknowns: Unknowns) -> None:
        flat = unknowns.flat
        unknowns.check_whole()
        self.method = method
        self.unknowns = unknowns
        self._rows = arrays.zeros((len(method.slots), unknowns.size), flat.dtype, like=flat)
        for slot, row in zip(method.slots, self._rows, strict=True):
            row[...] = method.initial(slot)
        self._limits = _limits(method, unknowns)
        self.minimizer: Minimizer = self._make()
        self._moved = self.minimizer.begin()
        if self._moved:
            self.publish(self.minimizer.point)

    def _make(self) -> Minimizer:
        """A minimisation at the unknowns, with its own copy of them."""
        space = LocalSpace(self.unknowns.size, self.unknowns.flat)
        return self.method.make(space, self._rows, self.unknowns.flat.copy(), self._limits)

    def watching(self) -> AbstractContextManager[Any]:
        """No context: Ctrl-C raises KeyboardInterrupt."""
        return nullcontext()

    def publish(self, vector: Array) -> None:
        self.unknowns.flat[...] = vector

    def whole(self, vector: Array) -> Array:
        return vector

    def tell(self, value: float, gradient: Any, problem: BaseException | None) -> None:
        self.raise_if_any(problem)
        warn_projected_start(self._moved)  # not before: a state may replace the start
        self._moved = 0
        self.value = value
        self.minimizer.tell(value, self.unknowns.vector("the gradient", gradient))

    def value_of(self, value: float, gradient: Any, problem: BaseException | None) -> float:
        self.raise_if_any(problem)
        self.unknowns.vector("the gradient", gradient)
        return value

    def tell_product(self, product: Any, problem: BaseException | None) -> None:
        self.raise_if_any(problem)
        self.minimizer.tell_product(self.unknowns.vector("the Hessian product", product))

    def any(self, flag: bool) -> bool:
        return flag

    def raise_if_any(self, problem: BaseException | None) -> None:
        if problem is not None:
            raise problem

    def serialize(self) -> bytes:
        from mpishard.inverse import state_image  # with h5py: only for those who save

        return state_image.encode(
            type(self.method).__name__,
            self.minimizer.point,
            dict(zip(self.method.slots, self._rows, strict=True)),
            {**self.minimizer.to_metadata(), ELEMENTS: _hash(self._limits)},
        )

    def deserialize(self, data: bytes) -> None:
        from mpishard.inverse import state_image

        point, rows, metadata = state_image.decode(data, self.method, self.unknowns.flat)
        check_metadata(self.method, metadata, _hash(self._limits))
        self.minimizer.point[...] = point
        for slot, row in zip(self.method.slots, self._rows, strict=True):
            row[...] = rows[slot]
        self.minimizer.restore(metadata)
        self._moved = 0
        if lifted(self.method, self.minimizer.progress, self.minimizer.stop_reason):
            self.minimizer.reopen()
        self.publish(self.minimizer.point)

    def save(self, folder: str | Path) -> Path:
        """Raises; checkpoints are for meshes."""
        raise ValueError("checkpoints need a mesh: give mesh=mpishard.Mesh(), or keep the bytes of serialize()")

    def load(self, folder: str | Path) -> None:
        """Raises; checkpoints are for meshes."""
        self.save(folder)


def _limits(method: Method, unknowns: Unknowns) -> Limits:
    def on_device(whole: np.ndarray | None) -> Array | None:
        return None if whole is None else arrays.on_device_of(whole, unknowns.flat)

    whole = whole_limits(method, unknowns.specs, unknowns.flat.dtype)
    lower, upper, fixed, weights, scaling = map(on_device, whole)
    function = partial(preconditioned, method.preconditioner) if callable(method.preconditioner) else None
    return Limits(lower, upper, fixed, weights, scaling, function)


def _hash(limits: Limits) -> str:
    """A hash of the limits; of a preconditioner that is a function, only its existence."""
    hasher = hashlib.blake2b(digest_size=8)
    for known in (limits.lower, limits.upper, limits.fixed, limits.weights, limits.scaling):
        hasher.update(b"none" if known is None else np.ascontiguousarray(arrays.to_host(known)).data)
    return f"{hasher.hexdigest()}{' and a function' if limits.precondition else ''}"
