"""Checks of files of unknown origin, before their content is used."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import h5py

from mpishard.checkpoint.pieces import StoredPiece
from mpishard.layout.boxes import Box, box_size, run_start, whole_box
from mpishard.layout.run_state import brief

# Each dimension that is cut doubles the number of corners of a box.
_MOST_CORNERS = 2**22
_KIND = re.compile(r"(?!(json|history)\b)\w+(/\w+)?", re.ASCII)


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn any error in reading a file into one ValueError with its path.

    For damaged content h5py raises errors of many kinds.
    """
    try:
        yield
    except Exception as error:
        reason = str(error) or "too large or too deep"
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise ValueError(f"{path} is refused: {brief(reason)}") from error


def file_inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder; ValueError unless it is a regular file in that folder."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path} is missing" if not path.exists() else f"{path} is not a file")
    if path.resolve().parent != folder.resolve():
        raise ValueError(f"{path} is a link to {path.resolve()}, outside of its folder")
    return path


def check_kind(kind: str) -> None:
    """Raise ValueError unless `kind` can be the group of an array, such as ``"optimizer/exp_avg"``."""
    if not _KIND.fullmatch(kind):
        raise ValueError(f"{kind!r} cannot be the kind of an array; wanted a name, or two with a slash between")


def check_links(h5: h5py.File, expected: set[str]) -> None:
    """Raise ValueError unless a file has exactly these groups and data sets, each with one hard link.

    HDF5 visits each object once, so the visit ends even if links form a circle.
    """
    missing = {path.encode() for path in expected}

    # HDF5 stops at the first returned value; an exception cannot pass through it.
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
    """The selection of a data space; ValueError unless it is one box."""
    if space.get_simple_extent_type() == h5py.h5s.SCALAR:
        return ()
    if space.get_select_type() not in (h5py.h5s.SEL_ALL, h5py.h5s.SEL_HYPERSLABS):
        raise ValueError("a mapping of its virtual data set selects single points, or nothing")
    first, last = space.get_select_bounds()
    box = tuple((int(start), int(stop) + 1) for start, stop in zip(first, last, strict=True))
    if space.get_select_npoints() != box_size(box):
        raise ValueError(f"a mapping of its virtual data set selects only some elements within {box}")
    return box


def check_cover(shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """Raise ValueError unless boxes cover each element of a tensor exactly once.

    A box is a signed sum of the orthants at its corners, and two sums of orthants are equal only if their terms are.
    So all corners must cancel, except those of the whole tensor.  The time is linear in the number of boxes.
    """
    whole = whole_box(shape)
    boxes = list(boxes)
    if 0 in shape:
        if boxes:
            raise ValueError("it has pieces of a tensor without elements")
        return
    if not boxes:
        raise ValueError("no piece covers any of its elements")
    if _end_to_end(whole, boxes):
        return
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


def _end_to_end(whole: Box, boxes: Sequence[Box]) -> bool:
    """Whether boxes are runs of the row-major elements of a tensor, one after the other: ranks cut tensors so."""
    runs = []
    for box in boxes:
        if len(box) != len(whole) or any(not 0 <= a < b <= end for (a, b), (_, end) in zip(box, whole, strict=True)):
            return False
        start = run_start(box, whole)
        if start is None:
            return False
        runs.append((start, start + box_size(box)))
    runs.sort()
    ends = [0, *(stop for _, stop in runs)]
    return [start for start, _ in runs] == ends[:-1] and ends[-1] == box_size(whole)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Add to a ValueError what it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def naming_tensor(kind: str, name: str) -> AbstractContextManager[None]:
    """Add the name of the tensor to a ValueError."""
    return naming(f"{kind} of tensor {name!r}")


def check_pieces(
    tensors: Mapping[str, Sequence[int]], kinds: Iterable[str], pieces: Iterable[StoredPiece]
) -> dict[tuple[str, str], list[StoredPiece]]:
    """Group the pieces by kind and tensor; ValueError unless they cover each element once."""
    found: dict[tuple[str, str], list[StoredPiece]] = {(kind, name): [] for kind in kinds for name in tensors}
    for piece in pieces:
        if (piece.kind, piece.name) not in found:
            raise ValueError(f"{piece.kind} of tensor {piece.name!r} are not among the tensors and kinds")
        found[piece.kind, piece.name].append(piece)
    wholes = {name: whole_box(shape) for name, shape in tensors.items()}
    covers: dict[str, list[Box]] = {}  # kinds are mostly cut alike
    for (kind, name), parts in found.items():
        boxes = [part.box for part in parts]
        if boxes == [wholes[name]] and 0 not in tensors[name]:
            continue
        with naming_tensor(kind, name):
            if covers.get(name) != boxes:
                check_cover(tensors[name], boxes)
                covers[name] = boxes
    return found
