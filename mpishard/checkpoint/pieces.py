"""Files of pieces: the part of a checkpoint that one rank writes, a data set per kind with its boxes of global tensors.

The boxes lie end to end, in the order in which they were written: HDF5 takes long to make a data set, and longer to
open it, so that thousands of small tensors had cost seconds.

HDF5 writes through a Python file object.  The system calls then run without the interpreter's lock, and errors of the
disk stay outside the HDF5 library, which may leave files open after an error.

The first 512 bytes of each file are HDF5's user block.  It has the checkpoint and the writer of the file, so that
readers can check these before they open the file with HDF5.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import h5py
import numpy as np

from mpishard.checkpoint.disk import DiskFile
from mpishard.io import files
from mpishard.layout.boxes import Box, box_shape, box_size

VERSION = 2
USER_BLOCK = 512
DTYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))
COMPRESSIONS = (None, "gzip", "lzf")

# Virtual data sets need HDF5 1.10; nothing needs a later version, and old versions of its tools are in use.
_LIBVER = ("earliest", "v110")
# Bytes from which an array is written by itself.
_LARGE = 2**22
# Elements of a compressed chunk.
_CHUNK = 2**16


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


class Values(Protocol):
    """A piece and its values, which are on the host and shaped like the box."""

    @property
    def where(self) -> tuple[str, str, Box]:
        """Kind, name and box, as for `stored`."""

    @property
    def values(self) -> np.ndarray:
        """They may be read when this is asked for."""


@dataclass(frozen=True)
class PieceValues:
    """The values of one piece on the host: shaped like the box, a view of the live array or of a copy."""

    kind: str
    name: str
    box: Box
    values: np.ndarray

    @property
    def where(self) -> tuple[str, str, Box]:
        """Kind, name and box, as for `stored`."""
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


def stored(boxes: Iterable[tuple[str, str, Box]], file: str) -> list[StoredPiece]:
    """The locations at which `write_pieces` stores the pieces of these kinds, names and boxes; without empty ones."""
    ends: Counter[str] = Counter()
    found = []
    for kind, name, box in boxes:
        if size := box_size(box):
            found.append(StoredPiece(kind, name, box, file, ends[kind]))
            ends[kind] += size
    return found


def write_pieces(path: Path, parts: Sequence[Values], *, id: str, writer: int, compression: str | None = None) -> None:
    """Write parts into a new file.  It is closed, but not synced to the disk.  Not collective.

    Parameters
    ----------
    path : Path
        Must not exist.
    parts : sequence of Values
        With float16, float32 or float64 values, of which few are held at a time.  Empty parts are left out.
    id : str
        The id of the checkpoint.
    writer : int
        Number of the writer in the checkpoint.
    compression : None, "gzip" or "lzf"
        HDF5 filter.  ``"lzf"`` is faster, but HDF5's own tools do not read it.

    Raises
    ------
    OSError
        With the path, if the disk is full or fails; the incomplete file stays and has no user block.
    ValueError
        If values do not have the shape of their box, or another dtype.
    """
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression {compression!r} is not one of {', '.join(map(str, COMPRESSIONS))}")
    sizes: Counter[str] = Counter()
    for part in parts:
        kind, _, box = part.where
        sizes[kind] += box_size(box)
    with new_file(path, pieces_mark(id, writer)) as (h5, disk):
        h5.attrs.update(format="mpishard pieces", version=VERSION, id=id, writer=writer)
        kinds: dict[str, _Kind] = {}
        for part in parts:
            kind, _, box = part.where
            values = part.values
            _check_values(part.where, values)
            if not values.size:
                continue
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
def new_file(
    path: Path, mark: bytes, *, held: bool = False, finish: Callable[[DiskFile], None] | None = None
) -> Iterator[tuple[h5py.File, DiskFile]]:
    """A new HDF5 file, or a `held` one, to fill, and the file under it, whose `check` raises errors of the disk.

    The user block `mark` is written last, and before it what `finish` writes, after HDF5 has closed the file.  An error
    of the disk is raised at the end, whatever HDF5 reports.
    """
    with DiskFile(path, held) as disk:
        try:
            with h5py.File(disk, "w", libver=_LIBVER, userblock_size=USER_BLOCK) as h5:
                yield h5, disk
            disk.check()
            if finish is not None:
                finish(disk)
            disk.seek(0)
            disk.write(mark)
        finally:
            disk.check()
