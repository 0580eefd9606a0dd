"""A minimisation on one process, without MPI; that of ranks is in `mpishard.inverse.mesh_run`."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import printable
from mpishard.backend import array as arrays
from mpishard.comm.errors import OneRank
from mpishard.inverse.functions import EvaluationFailed, digits_of, failure_in_words
from mpishard.inverse.unknowns import Unknowns
from mpishard.minimizers.elements import applied, check_inverse, operators, whole_limits
from mpishard.minimizers.method import (
    ELEMENTS,
    Limits,
    Method,
    Minimizer,
    Wanted,
    check_metadata,
    lifted,
    log_projected_start,
)
from mpishard.minimizers.penalty import PenaltyOfVectors
from mpishard.minimizers.space import LocalSpace

if TYPE_CHECKING:
    from mpishard.io.hdf5 import FileImage

Array = Any


class OneProcess:
    """A process that minimises alone, without MPI: what `MeshRanks` are for ranks. The start is moved into the bounds.

    Raises ValueError or TypeError if an option does not fit the unknowns, or this rank has only its part of them.
    """

    interrupted = False
    culprits = ""  # the last failure of an evaluation

    def __init__(self, method: Method, unknowns: Unknowns) -> None:
        flat = unknowns.flat
        unknowns.check_not_split()
        self.world = self.together = OneRank()
        self._method = method
        self._unknowns = unknowns
        self._rows = arrays.zeros((len(method.slots), unknowns.size), flat.dtype, like=flat)
        for slot, row in zip(method.slots, self._rows, strict=True):
            row[...] = method.initial(slot)
        self._limits = _limits(method, unknowns)
        if (penalty := getattr(method, "penalty", None)) is not None:
            vectors = PenaltyOfVectors(penalty, lambda vector: vector, lambda whole: whole, flat[:0])
            self._limits = replace(self._limits, penalty=vectors)
            penalty.begin()
        space = LocalSpace(unknowns.size, flat)
        self.minimizer: Minimizer = method.make(space, self._rows, flat.copy(), self._limits)
        self._moved = self.minimizer.begin()
        if self._moved:
            self.publish(self.minimizer.point)

    def watching(self) -> AbstractContextManager[Any]:
        """No context: Ctrl-C raises KeyboardInterrupt."""
        return nullcontext()

    def publish(self, vector: Array) -> None:
        self._unknowns.flat[...] = vector

    @staticmethod
    def gather(vector: Array) -> Array:
        return vector

    @staticmethod
    def own(given: Array) -> Array:
        return given.copy()

    def tell(self, what: str, value: float, vector: Any, problem: BaseException | None) -> None:
        may_fail = self.minimizer.wanted is Wanted.GRADIENT and self.minimizer.progress.evaluations > 0
        if may_fail and isinstance(problem, EvaluationFailed):
            self.culprits = failure_in_words(self.minimizer, str(problem))
            point = self.minimizer.point
            self.minimizer.tell(math.inf, arrays.zeros(point.size, point.dtype, like=point))
            return
        self.world.raise_if_any(problem)
        flat = self._unknowns.vector(what, vector)
        if self.minimizer.wanted is Wanted.PRODUCT:
            self.minimizer.tell_product(flat)
            return
        log_projected_start(self._moved)  # not before: a state may replace the start
        self._moved = 0
        self.minimizer.take_digits(digits_of(vector))
        self.minimizer.tell(value, flat)

    def combined_product(self, given: Any, problem: BaseException | None) -> Array:
        self.world.raise_if_any(problem)
        return self._unknowns.vector("the Hessian product", given)

    def serialize(self) -> bytes:
        """The state of the minimisation, with the point, as an HDF5 file image."""
        rows = dict(zip(self._method.slots, self._rows, strict=True))
        metadata = {**self.minimizer.to_metadata(), ELEMENTS: _hash(self._limits)}
        return _encoded(type(self._method).__name__, self.minimizer.point, rows, metadata)

    def deserialize(self, data: bytes) -> None:
        """Continue from `serialize`; nothing has changed if that raises."""
        point, rows, metadata = _decoded(data, self._method, self._unknowns.flat)
        check_metadata(self._method, metadata, _hash(self._limits))
        self.minimizer.point[...] = point
        for slot, row in zip(self._method.slots, self._rows, strict=True):
            row[...] = rows[slot]
        self.minimizer.restore(metadata)
        self._moved = 0
        if lifted(self._method, self.minimizer.progress, self.minimizer.stop_reason):
            self.minimizer.reopen()
        self.publish(self.minimizer.point)


def _limits(method: Method, unknowns: Unknowns) -> Limits:
    flat = unknowns.flat
    lower, upper, fixed, weights, scaling, l1_weights, l1_reference = (
        None if values is None else np.array(values, like=flat)
        for values in whole_limits(method, unknowns.specs, flat.dtype)
    )
    functions = operators(method, lambda what, function: partial(applied, what, function))
    if "solve" in functions:
        check_inverse(functions["solve"](functions["apply"](np.ones(unknowns.size, flat.dtype, like=flat))))
    l1: dict[str, Any] = {"l1_weights": l1_weights, "l1_reference": l1_reference}
    return Limits(lower, upper, fixed, weights, scaling, penalty=None, **l1, **functions)


def _hash(limits: Limits) -> str:
    """A hash of the limits; of a preconditioner that is a function, only its existence."""
    hasher = hashlib.blake2b(digest_size=8)
    for known in (limits.lower, limits.upper, limits.fixed, limits.weights, limits.scaling):
        hasher.update(b"none" if known is None else np.ascontiguousarray(arrays.to_host(known)).data)
    for known in (limits.l1_weights, limits.l1_reference) if limits.l1_weights is not None else ():
        hasher.update(b"zeros" if known is None else np.ascontiguousarray(arrays.to_host(known)).data)
    if limits.penalty is not None:
        hasher.update(limits.penalty.terms.text.encode())
        for known in limits.penalty.terms.elements:
            hasher.update(known.data)
    return f"{hasher.hexdigest()}{' and a function' if limits.precondition else ''}"


# The state of a minimisation on one process as bytes: an HDF5 file image, checked before HDF5 opens it.


def _image() -> FileImage:
    from mpishard.io.hdf5 import FileImage

    return FileImage(b"mpishard minimisation\0", 1, "minimisation state")


def _encoded(method: str, point: Array, rows: Mapping[str, Array], metadata: Mapping[str, Any]) -> bytes:
    """Encode a state as an HDF5 file image.

    `method` is the name of its class, `point` that of the next evaluation, and `rows` the vectors of the method by
    slot.
    """
    import h5py  # only for those who save

    from mpishard.io.hdf5 import USER_BLOCK

    file = io.BytesIO()
    with h5py.File(file, "w", userblock_size=USER_BLOCK) as h5:
        h5.attrs["format"], h5.attrs["version"] = "mpishard minimisation", 1
        h5.attrs["method"] = method
        h5.create_dataset("minimizer", data=json.dumps(dict(metadata), sort_keys=True), dtype=h5py.string_dtype())
        h5.create_dataset("point", data=arrays.to_host(point))
        for slot, row in rows.items():
            h5.create_dataset(f"slots/{slot}", data=arrays.to_host(row))
    return _image().seal(file.getvalue())


def _decoded(data: bytes, method: Method, like: Array) -> tuple[Array, dict[str, Array], dict[str, Any]]:
    """The point, the vectors by slot and the metadata from `_encoded`, for a method and unknowns like these.

    Raises TypeError if `data` is not bytes; ValueError if it is no such state, is damaged, or is of another method or
    other unknowns.
    """
    import h5py

    from mpishard.io import hdf5

    def array_like(group: Any, name: str) -> Array:
        dataset = hdf5.open_plain(group, name)
        if (dataset.shape, dataset.dtype) != (like.shape, like.dtype):
            raise ValueError(f"slots/{name} is {dataset.dtype} {dataset.shape}, not {like.dtype} {like.shape}")
        return np.asarray(dataset[()], like=like)

    _image().check(data)
    try:
        with h5py.File(io.BytesIO(data), "r") as h5:
            found = hdf5.attribute(h5, "method")
            text = hdf5.open_plain(h5, "minimizer")
            if text.shape != () or h5py.check_string_dtype(text.dtype) is None:
                raise ValueError(f"minimizer is {text.dtype} {text.shape}, not one text")
            metadata = json.loads(text[()].decode())
            point = hdf5.open_plain(h5, "point")
            if found != type(method).__name__:
                raise ValueError(f"it is of the method {found}, but this is {type(method).__name__}")
            if (point.shape, point.dtype) != (like.shape, like.dtype):
                raise ValueError(
                    f"it is of {point.size} unknowns of {point.dtype}, but these are {like.size} of {like.dtype}"
                )
            if not isinstance(metadata, dict):
                raise ValueError("the numbers of its method are no table")
            slots = sorted(h5["slots"]) if "slots" in h5 else []
            if slots != sorted(method.slots):
                raise ValueError(
                    f"it has {len(slots)} vectors and the method {len(method.slots)}; give the method the options "
                    "with which it was saved"
                )
            if slots:
                hdf5.check_hard_link(h5, "slots")
            values = {slot: array_like(h5["slots"], slot) for slot in slots}
            return np.asarray(point[()], like=like), values, metadata
    except Exception as error:  # h5py raises errors of many kinds for invalid content
        raise ValueError(f"this state cannot be used: {printable(str(error) or type(error).__name__)}") from None
