"""Statistics of one tensor, and differences of two tensors, computed block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpishard.checkpoint.sources import Source, blocks


@dataclass(frozen=True)
class Figures:
    """Statistics of the finite values of one tensor, and how many are not finite.  NaN if no value is finite.

    `rms` is the root of the mean square.
    """

    least: float
    largest: float
    mean: float
    rms: float
    nans: int
    infinities: int


@dataclass(frozen=True)
class Difference:
    """The difference of two tensors.

    Parameters
    ----------
    kind, name : str
        Which tensor.
    absolute : float
        Largest ``|a - b|``; infinite where only one is NaN, zero where both are or where they are the same infinity.
    relative : float
        Largest ``|a - b| / max(|a|, |b|)``.
    same_bits : bool
        Whether they are equal to the last bit, and of one dtype.
    """

    kind: str
    name: str
    absolute: float
    relative: float
    same_bits: bool


def figures(source: Source, kind: str, name: str) -> Figures:
    """Figures of one tensor, computed in float64.  Not collective.

    Parameters
    ----------
    source : Source
        What is read.
    kind, name : str
        The kind of array, and the tensor.

    Returns
    -------
    Figures
        NaN where no value is finite.
    """
    least, largest, total, squares = math.inf, -math.inf, 0.0, 0.0
    finite = nans = infinities = 0
    for box in blocks(source.tensors[name]):
        values = source.read(kind, name, box).astype(np.float64, copy=False).reshape(-1)
        whole = np.isfinite(values)
        if not whole.all():
            missing = int(np.isnan(values).sum())
            nans += missing
            infinities += int((~whole).sum()) - missing
            values = values[whole]
        if values.size:
            finite += values.size
            least, largest = min(least, float(values.min())), max(largest, float(values.max()))
            with np.errstate(over="ignore"):
                total += float(values.sum())
                squares += float(np.square(values).sum())
    if not finite:
        return Figures(math.nan, math.nan, math.nan, math.nan, nans, infinities)
    return Figures(least, largest, total / finite, math.sqrt(squares / finite), nans, infinities)


def unlike(one: Source, other: Source) -> list[str]:
    """Texts for the kinds and tensors that only one source has, and for those whose shapes differ.  Not collective.

    Parameters
    ----------
    one, other : Source
        What is compared.

    Returns
    -------
    list of str
        Empty if they can be compared whole.
    """
    found = []
    for which, here, there in (("first", one, other), ("second", other, one)):
        found += [f"{kind} is only in the {which}" for kind in here.kinds if kind not in there.kinds]
        found += [f"tensor {name} is only in the {which}" for name in here.tensors if name not in there.tensors]
    for name, shape in one.tensors.items():
        if other.tensors.get(name, shape) != shape:
            found.append(f"tensor {name} is {shape} in the first, {other.tensors[name]} in the second")
    return found


def differences(one: Source, other: Source) -> Iterator[Difference]:
    """Differences of all tensors that both sources have in the same shape, by kind.  Not collective.

    Parameters
    ----------
    one, other : Source
        What is compared.

    Yields
    ------
    Difference
        One for each kind and tensor, also where there is none.
    """
    for kind, dtype in one.kinds.items():
        if kind not in other.kinds:
            continue
        for name, shape in one.tensors.items():
            if other.tensors.get(name) != shape:
                continue
            absolute = relative = 0.0
            same = dtype == other.kinds[kind]
            for box in blocks(shape):
                a, b = one.read(kind, name, box).reshape(-1), other.read(kind, name, box).reshape(-1)
                if a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8)):
                    continue
                same = False
                far, rather = _apart(a.astype(np.float64, copy=False), b.astype(np.float64, copy=False))
                absolute, relative = max(absolute, far), max(relative, rather)
            yield Difference(kind, name, absolute, relative, same)


def _apart(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    with np.errstate(all="ignore"):
        apart = np.abs(a - b)
        apart[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
        apart[np.isnan(apart)] = np.inf
        relative = apart / np.maximum(np.abs(a), np.abs(b))
    relative[apart == 0] = 0
    relative[np.isinf(apart)] = np.inf
    return float(apart.max()), float(relative.max())
