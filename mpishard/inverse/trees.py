"""Unknowns that are a tree: a dictionary, list or tuple of arrays, nested as one likes, seen as one flat array.

A complex array counts as pairs of real numbers. The gradient by ``z = a + ib`` is ``df/da + i df/db``, whose negative
descends, as PyTorch gives it; JAX gives its complex conjugate.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arguments import shown
from mpishard.backend import array as arrays
from mpishard.layout.tensors import ParameterSpec

Array = Any
CONVENTION = "the gradient by z = a + ib is df/da + i df/db, as of PyTorch; JAX gives its conjugate"


def is_tree(x: Any) -> bool:
    """Return True for a dictionary, and for a list or tuple that has an array or a dictionary inside."""
    if isinstance(x, Mapping):
        return True
    return isinstance(x, list | tuple) and any(tuple(getattr(each, "shape", ())) or is_tree(each) for each in x)


def tree_of(x: Any) -> Tree | None:
    """The tree of arrays, or of an array of complex numbers, which is one leaf; None for what is flat as it is."""
    return Tree(x) if is_tree(x) or _is_complex(x) else None


def _is_complex(x: Any) -> bool:
    """Return True for an array of complex numbers; what is a tree is none."""
    kind = getattr(getattr(x, "dtype", None), "kind", None)
    if kind is None and not isinstance(x, str):
        try:
            kind = np.asarray(x).dtype.kind
        except (TypeError, ValueError, RuntimeError):  # the error of a real array says more
            return False
    return bool(kind == "c")


@dataclass(frozen=True)
class Leaf:
    """An array of a tree, and its place in the flat array."""

    name: str  # the path to it, such as "layers.0.weight"
    shape: tuple[int, ...]
    is_complex: bool
    start: int  # in real numbers

    @property
    def size(self) -> int:
        """Real numbers."""
        return math.prod(self.shape) * (2 if self.is_complex else 1)

    @property
    def spec(self) -> ParameterSpec:
        return ParameterSpec(self.name, (*self.shape, 2) if self.is_complex else self.shape)

    def expect_real(self, kind: str) -> None:
        """Raise TypeError if the array is complex, which no term of this class takes."""
        if self.is_complex:
            raise TypeError(f"{kind} is for real numbers, and x0 is complex; give its parts as two arrays")


class Tree:
    """The structure of a tree: its containers, and the leaves in the order of the flat array.

    A list or tuple without arrays inside is a leaf, as a number is. Raises TypeError or ValueError if the tree has no
    leaves, a leaf is no array of numbers, or leaves have different dtypes or one name.
    """

    def __init__(self, x: Any) -> None:
        values: list[tuple[str, Any]] = []
        self._template = _template(x, "", values)
        if self._is_one_array:
            values = [("", arrays.as_array(x).reshape(-1))]
        if not values:
            raise ValueError(f"x0 is empty: there are no arrays in this {type(x).__name__}")
        found = [(name, array_of_numbers(_of("x0", name), value)) for name, value in values]
        self.dtype = _common_dtype(
            [(name, value, array.dtype) for (name, value), (_, array) in zip(values, found, strict=True)]
        )
        self.values: list[Any] = [value for _, value in values]  # as they were given
        self.leaves: list[Leaf] = []
        start = 0
        for name, array in found:
            leaf = Leaf(name or "x", tuple(array.shape), array.dtype.kind == "c", start)
            if any(leaf.name == other.name for other in self.leaves):
                raise ValueError(f"x0 has two arrays of the name {leaf.name!r}; give the keys of dictionaries others")
            self.leaves.append(leaf)
            start += leaf.size
        self.size = start
        self.flat: Array = arrays.joined([_reals(array, self.dtype) for _, array in found])  # the values, copied

    @property
    def _is_one_array(self) -> bool:
        """Return True if x0 is an array itself: the template is the index of the only leaf."""
        return bool(self._template == 0)

    @property
    def specs(self) -> tuple[ParameterSpec, ...]:
        return tuple(leaf.spec for leaf in self.leaves)

    @property
    def complex_leaf(self) -> Leaf | None:
        return next((leaf for leaf in self.leaves if leaf.is_complex), None)

    def of(self, flat: Array) -> Any:
        """A tree of views of a flat array."""

        def view(index: int) -> Array:
            leaf = self.leaves[index]
            part = flat[leaf.start : leaf.start + leaf.size]
            return (part.view(_complex(part.dtype)) if leaf.is_complex else part).reshape(leaf.shape)

        return _built(self._template, view)

    def flattened(self, what: str, given: Any) -> Array:
        """A tree like x0 as a new flat array. Raises TypeError or ValueError, with `what`, if it is unlike x0."""
        flat = arrays.empty(self.size, self.dtype, like=self.flat)
        for index, value in _pairs(self._template, given, what):
            leaf = self.leaves[index]
            flat[leaf.start : leaf.start + leaf.size] = self._converted(_of(what, leaf.name), value, leaf)
        return flat

    def columns(self, what: str, given: Any, rows: int) -> np.ndarray:
        """The columns of a matrix that is given as a tree of blocks of the shape (rows, *shape of the leaf)."""
        blocks = []
        for index, value in _pairs(self._template, given, what):
            leaf = self.leaves[index]
            block = array_of_numbers(_of(what, leaf.name), value)
            if block.shape != (rows, *leaf.shape):
                raise ValueError(
                    f"{_of(what, leaf.name)} has the shape {block.shape}, but fun returned {rows} numbers, and x0 has "
                    f"the shape {leaf.shape} there; return {(rows, *leaf.shape)}"
                )
            blocks.append(block.reshape(rows, leaf.size))
        return np.concatenate(blocks, 1)

    def _converted(self, what: str, value: Any, leaf: Leaf) -> Array:
        array = array_of_numbers(what, value, like=self.flat)
        if self._is_one_array and array.size == math.prod(leaf.shape):  # which is seen as flat
            array = array.reshape(leaf.shape)
        if tuple(array.shape) != leaf.shape:
            raise ValueError(f"{what} has the shape {tuple(array.shape)}, but x0 has {leaf.shape} there")
        if (array.dtype.kind == "c") != leaf.is_complex:
            theirs = f"{'complex' if leaf.is_complex else 'real'} numbers"
            remedy = CONVENTION if leaf.is_complex else "take the real part"
            raise TypeError(f"{what} is {array.dtype}, but x0 has {theirs} there; {remedy}")
        return _reals(array, self.dtype)

    # -- options of elements ------------------------------------------------------------------------------------------

    def by_name(self, what: str, given: Any) -> Any:
        """An option of elements by names of leaves: `given` is one number, or a tree like x0, where None stands for no
        option of what is below, and keys of dictionaries may be missing.
        """
        if given is None or _is_number(given):
            return given
        found = {}
        for index, value in _pairs(self._template, given, what, partly=True):
            leaf = self.leaves[index]
            found[leaf.name] = _repeated(_of(what, leaf.name), value, leaf) if leaf.is_complex else value
        return found

    def bounds(self, given: Any) -> Any:
        """Bounds by names of leaves: `given` is one pair of numbers, or pairs in a tree like x0, as for `by_name`."""
        one = (given.lb, given.ub) if hasattr(given, "lb") and hasattr(given, "ub") else given
        if isinstance(one, list | tuple) and len(one) == 2 and all(each is None or _is_number(each) for each in one):
            found = {leaf.name: tuple(one) for leaf in self.leaves}
        else:
            pairs = _pairs(self._template, given, "bounds", partly=True)
            found = {self.leaves[index].name: pair for index, pair in pairs if pair is not None}
        for leaf in self.leaves:
            if leaf.is_complex and leaf.name in found:
                where = "" if self._is_one_array else f" at {leaf.name!r}"
                raise ValueError(
                    f"bounds are for real numbers, and x0 is complex{where}; give its real and imaginary parts as two "
                    "arrays"
                )
        return found


def _template(x: Any, path: str, values: list[tuple[str, Any]]) -> Any:
    """The containers of a tree with the indices of their leaves, which are appended to `values`."""
    if not is_tree(x):
        values.append((path, x))
        return len(values) - 1
    if isinstance(x, Mapping):
        return _mapping(x, [(key, _template(each, _below(path, key), values)) for key, each in x.items()])
    return _sequence(x, [_template(each, _below(path, index), values) for index, each in enumerate(x)])


def _mapping(like: Any, items: list[tuple[Any, Any]]) -> Any:
    return OrderedDict(items) if type(like) is OrderedDict else dict(items)


def _sequence(like: Any, children: list[Any]) -> Any:
    """A list, tuple or named tuple like another."""
    if hasattr(like, "_fields"):
        return type(like)(*children)
    return children if isinstance(like, list) else tuple(children)


def _built(template: Any, leaf: Callable[[int], Any]) -> Any:
    if isinstance(template, int):
        return leaf(template)
    if isinstance(template, Mapping):
        return _mapping(template, [(key, _built(each, leaf)) for key, each in template.items()])
    return _sequence(template, [_built(each, leaf) for each in template])


def _pairs(template: Any, given: Any, what: str, path: str = "", partly: bool = False) -> Iterator[tuple[int, Any]]:
    """Indices of leaves with what a tree has there; `partly`: None stands for nothing, and keys may be missing."""
    if partly and given is None:
        return
    if isinstance(template, int):
        yield template, given
        return
    if isinstance(template, Mapping):
        here = f"a dictionary of {', '.join(map(repr, template))}"
        if not isinstance(given, Mapping):
            raise _unlike(what, path, here, _kind(given))
        missing = [repr(key) for key in template if key not in given and not partly]
        unknown = [repr(key) for key in given if key not in template]
        if missing or unknown:
            why = [f"{', '.join(missing)} missing"] * bool(missing) + [f"{', '.join(unknown)} unknown"] * bool(unknown)
            raise _unlike(what, path, here, " and ".join(why))
        children = [(key, each, given[key]) for key, each in template.items() if key in given]
    else:
        here = f"a {'list' if isinstance(template, list) else 'tuple'} of {len(template)}"
        if not isinstance(given, list | tuple):
            raise _unlike(what, path, here, _kind(given))
        if len(given) != len(template):
            raise _unlike(what, path, here, f"{len(given)}")
        children = [(key, each, value) for key, (each, value) in enumerate(zip(template, given, strict=True))]
    for key, each, value in children:
        yield from _pairs(each, value, what, _below(path, key), partly)


def _unlike(what: str, path: str, x0: str, given: str) -> ValueError:
    return ValueError(f"{what} must have the structure of x0: {_of('x0', path)} is {x0}, here {given}")


def _kind(given: Any) -> str:
    shape = getattr(given, "shape", None)
    return f"{type(given).__name__} {shown(given)}" if shape is None else f"an array of shape {tuple(shape)}"


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _of(what: str, path: str) -> str:
    return f"{what} of {path!r}" if path else what


def array_of_numbers(what: str, value: Any, like: Array | None = None) -> Array:
    """An array of real or complex numbers; TypeError, with `what`, for others, and for those of another module."""
    try:
        array = arrays.as_array(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError of PyTorch, of a tensor that needs a gradient
        raise TypeError(f"{what} must be an array of numbers, got {shown(value)}") from None
    if array.dtype.kind not in "biufc":
        raise TypeError(f"{what} must be an array of numbers, got {shown(value)}")
    if like is not None and (module := arrays.module_of(like)) is not arrays.module_of(array):
        raise TypeError(f"{what} must be an array of {module.__name__}, like x0; got {type(value).__name__}")
    return array


def _common_dtype(leaves: list[tuple[str, Any, np.dtype]]) -> np.dtype:
    """The dtype of the real numbers: that of the arrays of floats, or float64."""
    of_dtype: dict[np.dtype, str] = {}
    for name, value, dtype in leaves:
        real = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
        # A number of Python takes the dtype of the others; that of a Partition is the dtype of its array.
        if real in arrays.FLOATS and hasattr(getattr(value, "local", value), "dtype"):
            of_dtype.setdefault(real, name)
    if len(of_dtype) > 1:
        found = " and ".join(f"{name!r} is {dtype}" for dtype, name in of_dtype.items())
        raise TypeError(f"the arrays of x0 must have one precision, but {found}; cast them")
    return next(iter(of_dtype), np.dtype(np.float64))


def _complex(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"c{2 * dtype.itemsize}")


def _reals(array: Array, dtype: np.dtype) -> Array:
    """An array as flat real numbers of a dtype; maybe not a copy."""
    if array.dtype.kind == "c":
        return array.astype(_complex(dtype), copy=False).reshape(-1).view(dtype)
    return array.astype(dtype, copy=False).reshape(-1)


def _is_number(value: Any) -> bool:
    if hasattr(value, "keys") or isinstance(value, list | tuple):  # whose arrays may be of several shapes
        return False
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf"


def _repeated(what: str, value: Any, leaf: Leaf) -> Any:
    """An option of a complex leaf for its pairs."""
    if value is None or _is_number(value):
        return value
    found = np.asarray(value)
    if found.shape != leaf.shape:
        raise ValueError(f"{what} has the shape {found.shape}, but x0 has {leaf.shape} there; give that, or one number")
    return np.stack([found, found], -1)
