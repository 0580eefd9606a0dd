"""What is asked of files that anybody may have written, before anything in them is used."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import h5py

from mpishard.checkpoint.pieces import StoredPiece
from mpishard.layout.boxes import Box
from mpishard.layout.run_state import brief

# Each cut dimension doubles the corners of a box.
_MOST_CORNERS = 2**22
_KIND = re.compile(r"(?!(json|history)\b)\w+(/\w+)?", re.ASCII)


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Whatever goes wrong in reading a file is one ValueError with its path.

    h5py raises errors of many kinds for content that is damaged or absurd.
    """
    try:
        yield
    except Exception as error:
        told = str(error) or "too large or too deep"
        if not isinstance(error, ValueError):
            told = f"{type(error).__name__}: {told}"
        raise ValueError(f"{path} is refused: {brief(told)}") from error


def file_inside(folder: Path, name: str) -> Path:
    """The path of a file of a folder; ValueError unless it is a regular file that lies there and nowhere else."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path} is missing" if not path.exists() else f"{path} is not a file")
    if path.resolve().parent != folder.resolve():
        raise ValueError(f"{path} is a link to {path.resolve()}, outside of its folder")
    return path


def check_kind(kind: str) -> None:
    """Raise ValueError unless it can be the group of an array, such as ``"optimizer/exp_avg"``."""
    if not _KIND.fullmatch(kind):
        raise ValueError(f"{kind!r} cannot be the kind of an array; wanted a name, or two with a slash between")


def check_links(h5: h5py.File, expected: set[str]) -> None:
    """Raise ValueError unless the groups and data sets of a file are these, each by one hard link.

    HDF5 visits what a group holds once, by whatever ways it can be reached, so that circles end.
    """
    missing = {path.encode() for path in expected}

    # HDF5 stops at the first answer; an exception cannot pass through it.
    def visit(path: bytes, link: h5py.h5l.LinkInfo) -> str | None:
        if link.type != h5py.h5l.TYPE_HARD:
            return f"/{path.decode(errors='replace')} is a link to elsewhere"
        if path not in missing:
            return f"it has /{path.decode(errors='replace')}, which its tables do not name"
        missing.remove(path)
        return None

    problem = h5.id.links.visit(visit, info=True)
    if problem is None and missing:
        problem = f"it lacks /{min(missing).decode()}, and {len(missing) - 1} more of what its tables name"
    if problem is not None:
        raise ValueError(problem)


def box_of(space: h5py.h5s.SpaceID) -> Box:
    """What is selected in a data space; ValueError unless it is one box."""
    if space.get_simple_extent_type() == h5py.h5s.SCALAR:
        return ()
    if space.get_select_type() not in (h5py.h5s.SEL_ALL, h5py.h5s.SEL_HYPERSLABS):
        raise ValueError("a mapping of its virtual data set selects single points, or nothing")
    first, last = space.get_select_bounds()
    box = tuple((int(start), int(stop) + 1) for start, stop in zip(first, last, strict=True))
    if space.get_select_npoints() != prod(stop - start for start, stop in box):
        raise ValueError(f"a mapping of its virtual data set selects only some elements within {box}")
    return box


def check_cover(shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """Raise ValueError unless boxes cover each element of a tensor exactly once.

    A box is the signed sum of the orthants at its corners, and sums of orthants are equal only term by term: so the
    corners of the boxes must cancel but for those of the whole tensor.  This takes time linear in the boxes.
    """
    whole = tuple((0, extent) for extent in shape)
    boxes = list(boxes)
    if 0 in shape:
        if boxes:
            raise ValueError("it has pieces of a tensor without elements")
        return
    if not boxes:
        raise ValueError("no piece covers any of its elements")
    for box in boxes:
        if len(box) != len(shape) or any(not 0 <= a < b <= extent for (a, b), extent in zip(box, shape, strict=True)):
            raise ValueError(f"a piece {box} lies outside of its shape {tuple(shape)}")
    cut = [dim for dim in range(len(shape)) if any(box[dim] != whole[dim] for box in boxes)]
    if len(boxes) << len(cut) > _MOST_CORNERS:
        raise ValueError(
            f"its {len(boxes)} pieces are cut along {len(cut)} dimensions and have more than {_MOST_CORNERS} corners; "
            "make it a tensor of fewer dimensions"
        )
    corners: Counter[tuple[int, ...]] = Counter()
    for box, sign in (*((box, 1) for box in boxes), (whole, -1)):
        for choice in itertools.product((0, 1), repeat=len(cut)):
            corners[tuple(box[dim][end] for dim, end in zip(cut, choice, strict=True))] += sign * (-1) ** sum(choice)
    wrong = [corner for corner, count in corners.items() if count]
    if wrong:
        where = ", ".join(str(start) for start in min(wrong))
        raise ValueError(f"its pieces leave elements out or have some twice, near [{where}] of dimensions {cut}")


@contextmanager
def told_of(kind: str, name: str) -> Iterator[None]:
    """A ValueError names the tensor."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{kind} of tensor {name!r}: {error}") from error


def check_pieces(
    tensors: Mapping[str, Sequence[int]], kinds: Iterable[str], pieces: Iterable[StoredPiece]
) -> dict[tuple[str, str], list[StoredPiece]]:
    """The pieces of each kind and tensor; ValueError unless they cover each element once."""
    found: dict[tuple[str, str], list[StoredPiece]] = {(kind, name): [] for kind in kinds for name in tensors}
    for piece in pieces:
        if (piece.kind, piece.name) not in found:
            raise ValueError(f"{piece.kind} of tensor {piece.name!r} are not among the tensors and kinds")
        found[piece.kind, piece.name].append(piece)
    for (kind, name), parts in found.items():
        with told_of(kind, name):
            if len({(part.file, part.dataset) for part in parts}) < len(parts):
                raise ValueError("two of its pieces are one data set")
            check_cover(tensors[name], [part.box for part in parts])
    return found
