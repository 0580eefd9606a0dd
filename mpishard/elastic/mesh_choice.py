"""The mesh that an elastic run takes for a number of processes, if it may change its tensor and pipeline sizes too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpishard.arguments import integer, shown

Sizes = Mapping[str, int]
# What a user may give; "auto" and AutoLayouts are the Any.
Layouts = Sequence[Sizes] | Callable[[int], Sizes | None] | Any
_AXES = ("data", "tensor", "pipeline")


class MeshSizes(NamedTuple):
    """Sizes of the axes of a mesh, each at least 1."""

    data: int
    tensor: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self._asdict().items() if size > 1) or "data=1"

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> MeshSizes:
        """The sizes that a user gives by axis; an axis that is left out, and ``data=-1``, count as 1.

        Raises TypeError if an axis has another name or a size is no integer, ValueError if a size is below 1.
        """
        return cls(**{"data": 1, **_checked(sizes)})

    @classmethod
    def parse(cls, text: str) -> MeshSizes:
        """The sizes in a text such as ``data=2,tensor=2``; an axis that is left out has size 1.

        Raises ValueError if the text has another form, names an axis twice, or has a size below 1.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if name not in _AXES or name in sizes or not size.isdecimal() or int(size) < 1:
                raise ValueError(f"the mesh is {text!r}; give sizes such as data=2,tensor=2,pipeline=1")
            sizes[name] = int(size)
        return cls.of(sizes)


class MeshChoice:
    """Chooses the mesh for a number of processes, on one process, which informs the others.

    `layouts` is the argument of `ElasticOptimizer`: a sequence of mappings, a callable, "auto" or an AutoLayouts;
    TypeError or ValueError if it is none of these, or an entry has no valid sizes.  No mesh has fewer than `min_ranks`
    ranks.

    `why_not` gives the reason why the model and the optimizer cannot have a mesh, empty if they can.  `auto` is "auto"
    or the AutoLayouts that makes the function once the problem is known, see `use`; None without.
    """

    def __init__(self, layouts: Layouts, min_ranks: int) -> None:
        self.min_ranks = min_ranks
        self.why_not: Callable[[MeshSizes], str] = lambda sizes: ""
        self._function: Callable[[int], Sizes | None] | None = None
        self._listed: list[dict[str, int]] = []
        self.auto: Any = None
        if layouts == "auto" or hasattr(layouts, "for_problem"):
            self.auto = layouts
        elif callable(layouts):
            self._function = layouts
        elif isinstance(layouts, list | tuple):
            self._listed = [_checked(entry) for entry in layouts]
            if not self._listed:
                raise ValueError("layouts is empty: name at least one mesh, such as [{'tensor': 2}, {}]")
        else:
            raise TypeError(
                f"layouts={shown(layouts)} must be a list of mesh sizes, a function of a number of ranks, or 'auto'"
            )

    @property
    def fewest(self) -> int:
        """The fewest ranks for which a list has a mesh; of a function nothing is known before it is called."""
        cells = ((entry, entry.get("tensor", 1) * entry.get("pipeline", 1)) for entry in self._listed)
        found = (cell * entry.get("data", -(-self.min_ranks // cell)) for entry, cell in cells)
        return min((ranks for ranks in found if ranks >= self.min_ranks), default=self.min_ranks)

    def best(self, ranks: int, batch_size: int) -> MeshSizes | None:
        """The mesh for at most this number of ranks and of samples in a step; None if none fits.

        Of a list the entry with the most ranks, of several such the first; of a function what it returns for `ranks`,
        or for the next smaller number for which it does not return None.  More data ranks than samples would have
        nothing to do.  Raises TypeError or ValueError if the function returns no valid sizes, a mesh of more ranks, or
        one that the model cannot have.
        """
        found = (sizes for sizes in self._candidates(ranks, batch_size) if sizes.ranks >= self.min_ranks)
        if self._function is not None:
            return next(found, None)
        return max(found, key=lambda sizes: sizes.ranks, default=None)

    def _candidates(self, ranks: int, batch_size: int) -> Iterator[MeshSizes]:
        for entry in self._listed:
            if (sizes := _fitted(entry, ranks, batch_size)) is not None:
                yield sizes
        if self._function is None:
            return
        for number in range(ranks, 0, -1):
            returned = self._function(number)
            if returned is None:
                continue
            sizes = _fitted(_checked(returned), number, batch_size)
            if sizes is None:
                raise ValueError(
                    f"layouts({number}) returned {shown(returned)}, which needs more ranks, or more data ranks than "
                    f"batch_size={batch_size}; return a mesh of at most {number} ranks, or None"
                )
            if problem := self.why_not(sizes):
                raise ValueError(f"layouts({number}) returned {shown(returned)}, but {problem}")
            yield sizes

    def use(self, function: Callable[[int], Sizes | None]) -> None:
        """Choose by a function from now on."""
        self._function = function

    def why_refused(self, sizes: MeshSizes) -> str:
        """The reason why the run does not take a mesh that was asked for by its sizes; empty if it does."""
        if not self._listed or any(_has(entry, sizes) for entry in self._listed):
            return self.why_not(sizes)
        listed = "; ".join(",".join(f"{name}={size}" for name, size in entry.items()) or "{}" for entry in self._listed)
        return f"{sizes} is none of the layouts of the run: {listed}"

    def check(self) -> None:
        """Raise ValueError if the list has a mesh that the model or the optimizer cannot have."""
        for entry in self._listed:
            sizes = MeshSizes.of(entry)
            if problem := self.why_not(sizes):
                raise ValueError(f"layouts has {sizes}, but {problem}")


def _checked(entry: Any) -> dict[str, int]:
    """The sizes that an entry gives; data=-1 counts as not given."""
    if not isinstance(entry, Mapping) or not set(entry) <= set(_AXES):
        raise TypeError(f"the layout {shown(entry)} must be sizes by axis, such as {{'data': 2, 'tensor': 2}}")
    given = {name: integer(f"the layout's {name}", size) for name, size in entry.items()}
    if given.get("data") == -1:
        del given["data"]
    if any(size < 1 for size in given.values()):
        raise ValueError(f"the layout {shown(entry)} has a size below 1; only data may be -1, for as many as fit")
    return given


def _fitted(entry: Mapping[str, int], ranks: int, batch_size: int) -> MeshSizes | None:
    """The entry on at most `ranks` ranks, with as many data ranks as fit if it gives no data size."""
    tensor, pipeline = entry.get("tensor", 1), entry.get("pipeline", 1)
    data = entry.get("data", min(ranks // (tensor * pipeline), batch_size))
    sizes = MeshSizes(data, tensor, pipeline)
    return sizes if 1 <= data <= batch_size and sizes.ranks <= ranks else None


def _has(entry: Mapping[str, int], sizes: MeshSizes) -> bool:
    cell = entry.get("tensor", 1), entry.get("pipeline", 1)
    return cell == (sizes.tensor, sizes.pipeline) and entry.get("data", sizes.data) == sizes.data
