"""Reads files of pieces: values that lie end to end straight from the file, others with HDF5."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from mpishard.checkpoint import checks
from mpishard.checkpoint.contents import Contents
from mpishard.checkpoint.pieces import StoredPiece, pieces_mark, read_mark, writer_of
from mpishard.io import hdf5
from mpishard.io.readers import Readers, read_into
from mpishard.layout.boxes import Box, box_shape, intersect

# Files stay open for the next piece, but a process may only have about a thousand open files.
_OPEN_FILES = 64
# Elements read at a time where they are not contiguous in their array.
_BLOCK = 2**22
# Bytes of a row from which it is read by itself; of shorter ones many are read at once, also what lies between.
_LONG_ROW = 2**16
_MOST_SHOWN = 3


@dataclass(frozen=True)
class _Opened:
    """A data set, checked.  `place` is the byte of its file where its values begin, if they lie there end to end."""

    dataset: h5py.h5d.DatasetID
    file: int
    place: int | None


class Run(NamedTuple):
    """Elements that lie end to end in a data set and in an array.

    Parameters
    ----------
    source : StoredPiece
        A piece in that data set; the run may go beyond it.
    start, place : int
        The first of them in the data set, and in the array.
    size : int
        How many there are.
    """

    source: StoredPiece
    start: int
    place: int
    size: int


class PieceReader:
    """Reads pieces of one checkpoint.  A context manager, which closes the files; not collective.

    It opens files with HDF5; compare their hashes with the manifest before.

    Parameters
    ----------
    contents : Contents
        The result of `read_index`.
    readers : Readers, optional
        The threads of `read_runs`; default: this thread.
    """

    def __init__(self, contents: Contents, readers: Readers | None = None) -> None:
        self._contents = contents
        self._readers = readers
        self._files: OrderedDict[str, h5py.File] = OrderedDict()
        self._opened: dict[tuple[str, str], _Opened] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        for piece in contents.pieces:
            key = piece.file, piece.dataset
            self._sizes[key] = max(self._sizes.get(key, 0), piece.start + piece.size)

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()
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
        assert intersect(box, piece.box) == box and out.shape == box_shape(box), (box, piece, out.shape)
        with checks.refusing(self._contents.folder / piece.file):
            opened = self._open(piece)
            if out.dtype != opened.dataset.dtype:
                raise ValueError(f"{piece.dataset} is {opened.dataset.dtype}, wanted {out.dtype}")
            first = [start - origin for (start, _), (origin, _) in zip(box, piece.box, strict=True)]
            _read_rows(functools.partial(self._read, opened), piece.shape, first, out, piece.start)

    def read_runs(self, runs: Iterable[Run], out: np.ndarray) -> None:
        """Read runs of elements into an array, in several threads where there are many bytes.

        Parameters
        ----------
        runs : iterable of Run
            Of one kind, in the order of their files.
        out : 1-D array
            Contiguous host memory of the dtype of their kind.

        Raises
        ------
        ValueError
            As `read`.
        """
        waiting: list[tuple[Path, int, int, np.ndarray]] = []
        files: set[str] = set()
        for run in runs:
            if run.source.file not in files and len(files) == _OPEN_FILES:
                self._read_all(waiting)
                waiting.clear()
                files.clear()
            files.add(run.source.file)
            path, target = self._contents.folder / run.source.file, out[run.place : run.place + run.size]
            with checks.refusing(path):
                opened = self._open(run.source)
                if opened.place is None:
                    self._read(opened, run.start, target)
                    continue
            for first in range(0, run.size, _BLOCK):
                part = target[first : first + _BLOCK]
                waiting.append((path, opened.file, opened.place + (run.start + first) * out.itemsize, part))
        self._read_all(waiting)

    def _read_all(self, parts: Sequence[tuple[Path, int, int, np.ndarray]]) -> None:
        def read(part: tuple[Path, int, int, np.ndarray]) -> None:
            path, file, place, out = part
            with checks.refusing(path):
                read_into(file, place, out)

        if self._readers is None:
            for part in parts:
                read(part)
        else:
            self._readers.share(read, parts, [out.nbytes for _, _, _, out in parts])

    def _read(self, opened: _Opened, start: int, out: np.ndarray) -> None:
        if opened.place is None:
            space = opened.dataset.get_space()
            space.select_hyperslab((start,), out.shape)
            opened.dataset.read(h5py.h5s.create_simple(out.shape), space, out)
        else:
            read_into(opened.file, opened.place + start * out.itemsize, out)

    def check(self, piece: StoredPiece) -> None:
        """Raise ValueError, as `read` does, unless all of the data set of a piece can be read; decodes its chunks."""
        with checks.refusing(self._contents.folder / piece.file):
            with checks.naming(piece.dataset):
                hdf5.check_chunks(self._open(piece).dataset)

    def _open(self, piece: StoredPiece) -> _Opened:
        """Open the data set of a piece, and check it."""
        key = piece.file, piece.dataset
        if key in self._opened:
            self._files.move_to_end(piece.file)  # what uses it, may use its descriptor later
            return self._opened[key]
        file = self._file(piece.file)
        hdf5.check_hard_links(file, piece.dataset)
        dataset = h5py.h5d.open(file.id, piece.dataset.encode())
        hdf5.check_lies_here(dataset)
        dtype = self._contents.kinds[piece.kind]
        shape = (self._sizes[key],)
        if dataset.shape != shape or dataset.dtype != dtype:
            raise ValueError(f"{piece.dataset} is {dataset.dtype} {dataset.shape}, in the index {dtype} {shape}")
        hdf5.check_written(dataset)
        self._opened[key] = _Opened(dataset, file.id.get_vfd_handle(), dataset.get_offset())
        return self._opened[key]

    def _file(self, name: str) -> h5py.File:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name]
        path = checks.file_inside(self._contents.folder, name)
        mark, wanted = read_mark(path), pieces_mark(self._contents.id, writer_of(name))
        if mark != wanted:
            raise ValueError(f"its first bytes {mark[:55]!r} are not those of this checkpoint, {wanted[:55]!r}")
        if len(self._files) == _OPEN_FILES:
            self._opened.clear()
            self._files.popitem(last=False)[1].close()
        self._files[name] = hdf5.open_to_read(path, locking=False)
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


def damages(contents: Contents, kinds: Container[str] | None = None, rank: int = 0, ranks: int = 1) -> list[str]:
    """Texts for the problems of the data sets of pieces of a checkpoint, the first few.  Not collective.

    Empty: all their values can be read, unless the disk fails.

    Parameters
    ----------
    contents : Contents
    kinds : container of str, optional
        Those to check; default: all.
    rank, ranks : int
        Of as many ranks this one checks its share.
    """
    found: list[str] = []
    datasets = {(piece.file, piece.dataset): piece for piece in contents.pieces if kinds is None or piece.kind in kinds}
    with PieceReader(contents) as reader:
        for piece in list(datasets.values())[rank::ranks]:
            try:
                reader.check(piece)
            except ValueError as error:
                found.append(str(error))
                if len(found) == _MOST_SHOWN:
                    break
    return found
