"""Reads files of pieces: values that lie end to end straight from the file, others with HDF5."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType

import h5py
import numpy as np

from mpishard.checkpoint import checks
from mpishard.checkpoint.index import Contents
from mpishard.checkpoint.pieces import StoredPiece, pieces_mark, read_mark, writer_of
from mpishard.io import hdf5
from mpishard.io.readers import Readers, read_into
from mpishard.layout.boxes import Box, boxes_of_range, intersect

# Files stay open for the next piece, but a process may only have about a thousand open files.
_OPEN_FILES = 64
# Elements read at a time where they are not contiguous in their array.
_BLOCK = 2**22
# Bytes of a row from which it is read by itself; of shorter ones many are read at once, also what lies between.
_LONG_ROW = 2**16
_MOST_SHOWN = 3


@dataclass(frozen=True)
class _Opened:
    """The data set of a piece, checked.  `place` is the byte of its file where its values begin, end to end, if so."""

    piece: StoredPiece
    dataset: h5py.h5d.DatasetID
    file: int
    place: int | None


class PieceReader:
    """Reads pieces of one checkpoint.  A context manager, which closes the files; not collective.

    It opens files with HDF5; compare their hashes with the manifest before.

    Parameters
    ----------
    contents : Contents
        The result of `read_index`.
    readers : Readers, optional
        The threads that read; default: this thread.
    """

    def __init__(self, contents: Contents, readers: Readers | None = None) -> None:
        self._contents = contents
        self._readers = readers
        self._files: OrderedDict[str, h5py.File] = OrderedDict()
        self._opened: _Opened | None = None

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened = None
        while self._files:
            self._files.popitem()[1].close()

    def read(self, piece: StoredPiece, box: Box, out: np.ndarray) -> None:
        """Read a box of the global tensor, which must be inside the piece, into `out`.

        Parameters
        ----------
        piece : StoredPiece
            One of ``contents.pieces``.
        box : Box
            A box of the global tensor, not relative to the piece.  Only its rows are read.
        out : array
            Host memory shaped like the box, of the dtype of the piece's kind; may have gaps.

        Raises
        ------
        ValueError
            With file and data set, if either is missing, belongs to another checkpoint, or is not as `write_pieces`
            writes this piece.
        """
        shape = tuple(stop - start for start, stop in box)
        assert intersect(box, piece.box) == box and out.shape == shape, (box, piece, out.shape)
        with checks.refusing(self._contents.folder / piece.file):
            opened = self._open(piece)
            if out.dtype != opened.dataset.dtype:
                raise ValueError(f"{piece.dataset} is {opened.dataset.dtype}, wanted {out.dtype}")
            first = [start - origin for (start, _), (origin, _) in zip(box, piece.box, strict=True)]
            place = opened.place
            if place is None:
                _read_chunks(opened.dataset, first, out)
                return
            size = out.dtype.itemsize

            def read(element: int, run: np.ndarray) -> None:
                if self._readers is None:
                    read_into(opened.file, place + element * size, run)
                else:
                    self._readers.read(opened.file, place + element * size, run)

            _read_rows(read, piece.shape, first, out)

    def check(self, piece: StoredPiece) -> None:
        """Raise ValueError, as `read` does, unless all of a piece can be read; decodes its chunks."""
        with checks.refusing(self._contents.folder / piece.file), checks.naming_tensor(piece.kind, piece.name):
            hdf5.check_chunks(self._open(piece).dataset)

    def _open(self, piece: StoredPiece) -> _Opened:
        """Open the data set of a piece, and check it."""
        if self._opened is not None and self._opened.piece is piece:
            return self._opened
        file = self._file(piece.file)
        path = ""
        for name in piece.dataset.strip("/").split("/"):
            path = f"{path}/{name}"
            hdf5.check_hard_link(file, path)
        dataset = h5py.h5d.open(file.id, path.encode())
        hdf5.check_lies_here(dataset)
        dtype = self._contents.kinds[piece.kind]
        if dataset.shape != piece.shape or dataset.dtype != dtype:
            raise ValueError(f"{path} is {dataset.dtype} {dataset.shape}, in the index {dtype} {piece.shape}")
        hdf5.check_written(dataset)
        self._opened = _Opened(piece, dataset, file.id.get_vfd_handle(), dataset.get_offset())
        return self._opened

    def _file(self, name: str) -> h5py.File:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name]
        path = checks.file_inside(self._contents.folder, name)
        mark, wanted = read_mark(path), pieces_mark(self._contents.id, writer_of(name))
        if mark != wanted:
            raise ValueError(f"its first bytes {mark[:55]!r} are not those of this checkpoint, {wanted[:55]!r}")
        if len(self._files) == _OPEN_FILES:
            self._opened = None
            self._files.popitem(last=False)[1].close()
        self._files[name] = h5py.File(path, "r", locking=False)
        return self._files[name]


def _read_rows(
    read: Callable[[int, np.ndarray], None],
    shape: tuple[int, ...],
    first: Sequence[int],
    out: np.ndarray,
    start: int = 0,
) -> None:
    """Read a box of row-major values into `out`, which is shaped like it.

    Parameters
    ----------
    read : callable
        Reads elements from a number on into a contiguous array.
    shape : tuple of int
        That of the values.
    first : sequence of int
        Where the box begins.
    out : array
        May have gaps.
    start : int
        The number of the first of the values.
    """
    row = prod(shape[1:])
    start += first[0] * row if shape else 0
    if out.shape[1:] == shape[1:] and out.flags.c_contiguous:
        read(start, out.reshape(-1))
        return
    if row * out.itemsize >= _LONG_ROW:
        for number, each in enumerate(out):
            _read_rows(read, shape[1:], first[1:], each, start + number * row)
        return
    columns = tuple(slice(begin, begin + extent) for begin, extent in zip(first[1:], out.shape[1:], strict=True))
    many = max(1, _BLOCK // row)
    for number in range(0, len(out), many):
        part = out[number : number + many]
        rows = np.empty((len(part), *shape[1:]), out.dtype)
        read(start + number * row, rows.reshape(-1))
        part[...] = rows[(slice(None), *columns)]


def _read_chunks(dataset: h5py.h5d.DatasetID, first: Sequence[int], out: np.ndarray) -> None:
    """Read a box of a data set, which begins at the indices `first`, with HDF5."""
    if out.flags.c_contiguous:
        _read_box(dataset, first, out)
        return
    for begin in range(0, out.size, _BLOCK):
        for box in boxes_of_range(out.shape, begin, min(begin + _BLOCK, out.size)):
            part = np.empty([stop - start for start, stop in box], out.dtype)
            _read_box(dataset, [a + start for a, (start, _) in zip(first, box, strict=True)], part)
            out[inside(box, tuple((0, extent) for extent in out.shape))] = part


def _read_box(dataset: h5py.h5d.DatasetID, first: Sequence[int], out: np.ndarray) -> None:
    """Read a box of a data set, which begins at the indices `first`, into the contiguous array `out`."""
    space = dataset.get_space()
    if out.shape:
        space.select_hyperslab(tuple(first), out.shape)
    memory = h5py.h5s.create_simple(out.shape) if out.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    dataset.read(memory, space, out)


def inside(box: Box, outer: Box) -> tuple[slice | EllipsisType, ...]:
    """The index of a box in an array of the box `outer` around it; it always gives a view, also of a scalar."""
    slices = (slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
    return (*slices, ...)


def damages(contents: Contents, pieces: Iterable[StoredPiece]) -> list[str]:
    """Texts for the problems of these pieces of a checkpoint, the first few.  Not collective.

    Empty: all their values can be read, unless the disk fails.
    """
    found: list[str] = []
    with PieceReader(contents) as reader:
        for piece in pieces:
            try:
                reader.check(piece)
            except ValueError as error:
                found.append(str(error))
                if len(found) == _MOST_SHOWN:
                    break
    return found
