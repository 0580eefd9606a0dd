"""Files of pieces: the part of a checkpoint that one rank writes, a data set per kind with its boxes of global tensors.

The boxes lie end to end, in the order in which they were written: HDF5 takes long to make or open a data set, and one
for each of thousands of small tensors would cost seconds. HDF5 writes through a Python file object: system calls run
without the interpreter's lock, and errors of the disk stay outside the HDF5 library, which may leave files open after
an error. The first 512 bytes of each file, HDF5's user block, have the checkpoint and the writer of the file, so that
readers can check these before they open the file with HDF5.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import h5py
import numpy as np

from mpishard.backend.process import cpu_quota, own_cores
from mpishard.checkpoint.disk import DiskFile
from mpishard.io import files, hdf5
from mpishard.layout.boxes import Box, box_shape, box_size, inside, intersect
from mpishard.layout.run_state import brief

Item = TypeVar("Item")
Result = TypeVar("Result")

VERSION = 2
INDEX = "index.h5"
USER_BLOCK = 512
DTYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))
COMPRESSIONS = (None, "gzip")

# Virtual data sets need HDF5 1.10; nothing needs a later version, and old versions of its tools are in use.
_LIBVER = ("earliest", "v110")
# Bytes from which an array is written by itself.
_LARGE = 2**22
# Elements of a compressed chunk.
_CHUNK = 2**16
# Files stay open for the next piece, but a process may only have about a thousand open files.
_OPEN_FILES = 64
# Elements read at a time where they are not contiguous in their array.
_BLOCK = 2**22
# Bytes of a row from which it is read by itself; of shorter ones many are read at once, also what lies between.
_LONG_ROW = 2**16
_MOST_THREADS = 8  # more of them only wait for each other
_LEAST_SHARE = 2**23


# -- files of pieces ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredPiece:
    """The location of a box of a tensor on disk: `start` is the first of its elements in `dataset` of `file`."""

    kind: str
    name: str
    box: Box
    file: str
    start: int

    @property
    def dataset(self) -> str:
        """The path of the data set, which has all boxes of a kind that are in the file."""
        return f"/{self.kind}"

    @property
    def size(self) -> int:
        return box_size(self.box)

    @property
    def shape(self) -> tuple[int, ...]:
        return box_shape(self.box)


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, without the values."""

    folder: Path
    id: str
    generation: int
    saved: str  # ISO 8601, UTC
    mpishard_version: str
    facts: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]  # in the order of the model
    kinds: dict[str, np.dtype]  # by names such as "parameters" and "optimizer/exp_avg"
    pieces: tuple[StoredPiece, ...]  # together they cover each element of each tensor and kind once


@dataclass(frozen=True)
class PieceValues:
    """A piece that is to be written, and its values or a function that reads them: on the host, shaped like the box."""

    kind: str
    name: str
    box: Box
    values: np.ndarray | Callable[[], np.ndarray]

    @property
    def where(self) -> tuple[str, str, Box]:
        """Kind, name and box, as for `stored_pieces`."""
        return self.kind, self.name, self.box


def pieces_file(writer: int) -> str:
    """The name of the file with a writer's pieces."""
    return f"pieces-{writer:05d}.h5"


def writer_of(file: str) -> int:
    """The number of the writer of a file with a name from `pieces_file`."""
    return int(file.removeprefix("pieces-").removesuffix(".h5"))


def pieces_mark(id: str, writer: int) -> bytes:
    """The user block of that file in the checkpoint `id`."""
    return f"mpishard pieces {id} {writer:05d}\n".encode().ljust(USER_BLOCK, b"\0")


def read_mark(path: Path) -> bytes:
    """The user block of a file of a checkpoint, with zeros where the file is shorter."""
    with os.fdopen(files.open_to_read(path), "rb") as file:
        return file.read(USER_BLOCK).ljust(USER_BLOCK, b"\0")


def stored_pieces(boxes: Iterable[tuple[str, str, Box]], file: str) -> list[StoredPiece]:
    """The locations at which `write_pieces` stores the pieces of these kinds, names and boxes; without empty ones."""
    ends: Counter[str] = Counter()
    found = []
    for kind, name, box in boxes:
        if size := box_size(box):
            found.append(StoredPiece(kind, name, box, file, ends[kind]))
            ends[kind] += size
    return found


def write_pieces(
    path: Path, pieces: Sequence[PieceValues], *, id: str, writer: int, compression: str | None = None
) -> None:
    """Write pieces, of which few are held at a time, into a new file, which is closed, but not synced to the disk.

    Empty ones are left out.  OSError if the disk fails: the incomplete file stays and has no user block.  ValueError
    if values do not have the shape of their box, or another dtype.
    """
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression {compression!r} is not one of {', '.join(map(str, COMPRESSIONS))}")
    sizes: Counter[str] = Counter()
    for piece in pieces:
        sizes[piece.kind] += box_size(piece.box)
    with new_file(path, pieces_mark(id, writer)) as (h5, disk):
        h5.attrs.update(format="mpishard pieces", version=VERSION, id=id, writer=writer)
        kinds: dict[str, _Kind] = {}
        for piece in pieces:
            values = piece.values() if callable(piece.values) else piece.values
            _check_values(piece.where, values)
            if not values.size:
                continue
            kind = piece.kind
            if kind not in kinds:
                kinds[kind] = _Kind(h5, kind, sizes[kind], values.dtype, compression)
            kinds[kind].add(values)
            disk.check()
        for each in kinds.values():
            each.flush()
            disk.check()


def _check_values(where: tuple[str, str, Box], values: np.ndarray) -> None:
    kind, name, box = where
    shape = box_shape(box)
    if values.shape != shape or values.dtype not in DTYPES:
        raise ValueError(
            f"the piece {box} of {kind} {name!r} has values of {values.dtype} {values.shape}; "
            f"wanted floating-point numbers of shape {shape}"
        )


class _Kind:
    """The data set of a kind, which is filled from its start; small arrays are written together."""

    def __init__(self, h5: h5py.File, kind: str, size: int, dtype: np.dtype, compression: str | None) -> None:
        filters = {"compression": compression, "shuffle": True, "chunks": (min(size, _CHUNK),)} if compression else {}
        self._kind = kind
        self._dataset: h5py.h5d.DatasetID = h5.create_dataset(kind, (size,), dtype, **filters).id
        self._dtype = np.dtype(dtype)
        self._end = 0
        self._waiting: list[np.ndarray] = []
        self._waiting_bytes = 0

    def add(self, values: np.ndarray) -> None:
        if values.dtype != self._dtype:
            raise ValueError(f"{self._kind} has values of {self._dtype} and {values.dtype}; wanted those of one type")
        if values.nbytes >= _LARGE:
            self.flush()
            self._write(np.ascontiguousarray(values).reshape(-1))
            return
        self._waiting.append(values.reshape(-1))
        self._waiting_bytes += values.nbytes
        if self._waiting_bytes >= _LARGE:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._write(np.concatenate(self._waiting))
            self._waiting, self._waiting_bytes = [], 0

    def _write(self, values: np.ndarray) -> None:
        space = self._dataset.get_space()
        space.select_hyperslab((self._end,), values.shape)
        self._dataset.write(h5py.h5s.create_simple(values.shape), space, values)
        self._end += values.size


@contextmanager
def new_file(path: Path, mark: bytes, *, held: bool = False) -> Iterator[tuple[h5py.File, DiskFile]]:
    """A new HDF5 file, or a `held` one, to fill, and the file under it, whose `check` raises errors of the disk.

    The user block `mark` is written last.  An error of the disk is raised at the end, whatever HDF5 reports.
    """
    with DiskFile(path, held) as disk:
        try:
            with h5py.File(disk, "w", libver=_LIBVER, userblock_size=USER_BLOCK) as h5:
                yield h5, disk
            disk.check()
            disk.seek(0)
            disk.write(mark)
        finally:
            disk.check()


# -- threads that read -------------------------------------------------------------------------------------------------
#
# System calls and hashes of large blocks run without the interpreter's lock.


class ReadThreads(AbstractContextManager["ReadThreads"]):
    """Threads that read files, for one of `processes` processes of a node: as many as its share of the cores.

    `cores`: those of the node, if not all that this process may use.  `least`: bytes from which a second thread pays.
    """

    def __init__(self, processes: int = 1, *, cores: float | None = None, least: int = _LEAST_SHARE) -> None:
        cores = min(len(own_cores()), cpu_quota()) if cores is None else cores
        self._least = least
        self._count = max(1, min(int(cores / processes), _MOST_THREADS))
        self._pool = ThreadPoolExecutor(self._count, "mpishard-read") if self._count > 1 else None

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """The results of a function for all items, in their order; it runs in several threads at once."""
        if self._pool is None:
            return [function(item) for item in items]
        futures = [self._pool.submit(function, item) for item in items]
        wait(futures)  # before one raises: no thread writes to memory that the caller then uses otherwise
        return [future.result() for future in futures]

    def share(self, function: Callable[[Item], object], items: Sequence[Item], sizes: Sequence[int]) -> None:
        """Call a function for all items: each thread takes some side by side, of about as many bytes of `sizes`."""
        ends = list(accumulate(sizes))
        threads = min(self._count, ends[-1] // self._least) if ends else 0
        if threads < 2:
            for item in items:
                function(item)
            return
        inner = [bisect_right(ends, ends[-1] * thread / threads) for thread in range(1, threads)]
        cuts = [0, *inner, len(items)]

        def run(thread: int) -> None:
            for item in items[cuts[thread] : cuts[thread + 1]]:
                function(item)

        self.map(run, range(threads))


def read_into(file: int, offset: int, out: Any) -> None:
    """Fill contiguous memory with bytes of a file from `offset` on; the position of its descriptor stays where it is.

    OSError if the disk fails, or the file ends before.
    """
    left = memoryview(out).cast("B")
    # One call reads at most 2 GiB, and may read less than requested.
    while left:
        count = os.preadv(file, [left], offset)
        if not count:
            raise OSError(f"the file ends at byte {offset}, {len(left)} bytes too early")
        offset, left = offset + count, left[count:]


# -- reading ----------------------------------------------------------------------------------------------------------


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


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Add to a ValueError what it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


@dataclass(frozen=True)
class _OpenDataset:
    """A data set, checked.  `offset` is the byte of its file where its values begin, if they lie there end to end."""

    dataset: h5py.h5d.DatasetID
    file: int
    offset: int | None


class PieceRange(NamedTuple):
    """Elements that lie end to end in the data set of a piece, also beyond that piece, and in an array."""

    piece: StoredPiece
    start: int  # of the first in the data set
    place: int  # of the first in the array
    size: int


class CheckpointReader(AbstractContextManager["CheckpointReader"]):
    """Reads the tensors of a checkpoint, in `threads`; a `Source`, and a context manager for its files.

    It opens files with HDF5; compare their hashes with the manifest before.
    """

    def __init__(self, contents: Contents, threads: ReadThreads | None = None) -> None:
        self.facts: dict[str, Any] = contents.facts
        self.tensors: dict[str, tuple[int, ...]] = contents.tensors
        self.kinds: dict[str, np.dtype] = contents.kinds
        self.pieces: dict[tuple[str, str], list[StoredPiece]] = defaultdict(list)  # by kind and tensor
        self._contents = contents
        self._threads = threads
        self._files: OrderedDict[str, h5py.File] = OrderedDict()
        self._opened: dict[tuple[str, str], _OpenDataset] = {}
        self._sizes: dict[tuple[str, str], int] = {}
        for piece in contents.pieces:
            self.pieces[piece.kind, piece.name].append(piece)
            key = piece.file, piece.dataset
            self._sizes[key] = max(self._sizes.get(key, 0), piece.start + piece.size)

    def __exit__(self, *_: object) -> None:
        self._opened.clear()
        while self._files:
            self._files.popitem()[1].close()

    def read(self, kind: str, name: str, box: Box) -> np.ndarray:
        """The values in a box of a tensor, from all pieces that it touches; ValueError as `read_piece`."""
        values = np.empty(box_shape(box), self.kinds[kind])
        for piece in self.pieces[kind, name]:
            common = intersect(box, piece.box)
            if common is not None:
                self.read_piece(piece, common, values[inside(common, box)])
        return values

    def read_piece(self, piece: StoredPiece, box: Box, out: np.ndarray) -> None:
        """Read a box of the global tensor, which must be inside the piece, into `out`, host memory that may have gaps.

        ValueError with file and data set, if either is missing, belongs to another checkpoint, or is not as
        `write_pieces` writes this piece.
        """
        assert intersect(box, piece.box) == box and out.shape == box_shape(box), (box, piece, out.shape)
        with refusing(self._contents.folder / piece.file):
            opened = self._open(piece)
            if out.dtype != opened.dataset.dtype:
                raise ValueError(f"{piece.dataset} is {opened.dataset.dtype}, wanted {out.dtype}")
            first = [start - origin for (start, _), (origin, _) in zip(box, piece.box, strict=True)]
            _read_rows(functools.partial(self._read, opened), piece.shape, first, out, piece.start)

    def read_ranges(self, ranges: Iterable[PieceRange], out: np.ndarray) -> None:
        """Read ranges of one kind, in the order of their files, into a contiguous array; if long, in several threads.

        ValueError as `read_piece`.
        """
        waiting: list[tuple[Path, int, int, np.ndarray]] = []
        files: set[str] = set()
        for piece, start, place, size in ranges:
            if piece.file not in files and len(files) == _OPEN_FILES:
                self._read_all(waiting)
                waiting.clear()
                files.clear()
            files.add(piece.file)
            path, target = self._contents.folder / piece.file, out[place : place + size]
            with refusing(path):
                opened = self._open(piece)
                if opened.offset is None:
                    self._read(opened, start, target)
                    continue
            for first in range(0, size, _BLOCK):
                part = target[first : first + _BLOCK]
                waiting.append((path, opened.file, opened.offset + (start + first) * out.itemsize, part))
        self._read_all(waiting)

    def _read_all(self, parts: Sequence[tuple[Path, int, int, np.ndarray]]) -> None:
        def read(part: tuple[Path, int, int, np.ndarray]) -> None:
            path, file, offset, out = part
            with refusing(path):
                read_into(file, offset, out)

        if self._threads is None:
            for part in parts:
                read(part)
        else:
            self._threads.share(read, parts, [out.nbytes for _, _, _, out in parts])

    def _read(self, opened: _OpenDataset, start: int, out: np.ndarray) -> None:
        if opened.offset is None:
            space = opened.dataset.get_space()
            space.select_hyperslab((start,), out.shape)
            opened.dataset.read(h5py.h5s.create_simple(out.shape), space, out)
        else:
            read_into(opened.file, opened.offset + start * out.itemsize, out)

    def check(self, piece: StoredPiece) -> None:
        """Raise ValueError, as `read_piece`, unless all of the data set of a piece can be read; decodes its chunks."""
        with refusing(self._contents.folder / piece.file), naming(piece.dataset):
            hdf5.check_chunks(self._open(piece).dataset)

    def _open(self, piece: StoredPiece) -> _OpenDataset:
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
        self._opened[key] = _OpenDataset(dataset, file.id.get_vfd_handle(), dataset.get_offset())
        return self._opened[key]

    def _file(self, name: str) -> h5py.File:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name]
        path = file_inside(self._contents.folder, name)
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
    """Read the box from `first` on of row-major values of a shape, the first of them number `start`, into `out`."""
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
