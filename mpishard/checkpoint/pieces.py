"""Files of pieces: the part of a checkpoint that one rank writes, one data set per box of a global tensor.

HDF5 writes through a Python file object.  The system calls then run without the interpreter's lock, and errors of the
disk stay outside the HDF5 library, which may leave files open after an error.

The first 512 bytes of each file are HDF5's user block.  It has the checkpoint and the writer of the file, so that
readers can check these before they open the file with HDF5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from mpishard.checkpoint.disk import DiskFile
from mpishard.layout.boxes import Box
from mpishard.layout.run_state import link_name

VERSION = 1
BLOCK = 512
DTYPES = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))
COMPRESSIONS = (None, "gzip", "lzf")

# Virtual data sets need HDF5 1.10; nothing needs a later version, and old versions of its tools are in use.
_LIBVER = ("earliest", "v110")


@dataclass(frozen=True)
class StoredPiece:
    """The location of a box of a tensor on disk: all of `dataset` in `file`, in the folder of the checkpoint."""

    kind: str
    name: str
    box: Box
    file: str
    dataset: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)


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
    return f"mpishard pieces {id} {writer:05d}\n".encode().ljust(BLOCK, b"\0")


def read_mark(path: Path) -> bytes:
    """The user block of a file of a checkpoint, with zeros where the file is shorter."""
    with path.open("rb") as file:
        return file.read(BLOCK).ljust(BLOCK, b"\0")


def stored(boxes: Iterable[tuple[str, str, Box]], file: str) -> list[StoredPiece]:
    """The locations at which `write_pieces` stores the pieces of these kinds, names and boxes; without empty ones."""
    locate = _Locations(file)
    return [locate(*box) for box in boxes if not _is_empty(box[2])]


def write_pieces(
    path: Path, parts: Iterable[PieceValues], *, id: str, writer: int, compression: str | None = None
) -> None:
    """Write parts into a new file.  It is closed, but not synced to the disk.  Not collective.

    Parameters
    ----------
    path : Path
        Must not exist.
    parts : iterable of PieceValues
        With float16, float32 or float64 values; taken one at a time.  Empty parts are left out.
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
    locate = _Locations(path.name)
    with new_file(path, pieces_mark(id, writer)) as (h5, disk):
        h5.attrs.update(format="mpishard pieces", version=VERSION, id=id, writer=writer)
        for part in parts:
            values = part.values
            shape = tuple(stop - start for start, stop in part.box)
            if values.shape != shape or values.dtype not in DTYPES:
                raise ValueError(
                    f"the piece {part.box} of {part.kind} {part.name!r} has values of {values.dtype} {values.shape}; "
                    f"wanted floating-point numbers of shape {shape}"
                )
            if _is_empty(part.box):
                continue
            # A scalar has no chunks, and filters work on chunks.
            filters = {"compression": compression, "shuffle": True} if compression and values.ndim else {}
            h5.create_dataset(locate(*part.where).dataset, data=values, **filters)
            disk.check()


class _Locations:
    """Numbers the pieces of each kind and tensor in one file."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._count: Counter[tuple[str, str]] = Counter()

    def __call__(self, kind: str, name: str, box: Box) -> StoredPiece:
        number = self._count[kind, name]
        self._count[kind, name] += 1
        return StoredPiece(kind, name, box, self._file, f"/{kind}/{link_name(name)}/{number}")


def _is_empty(box: Box) -> bool:
    return any(start >= stop for start, stop in box)


@contextmanager
def new_file(path: Path, mark: bytes, *, held: bool = False) -> Iterator[tuple[h5py.File, DiskFile]]:
    """A new HDF5 file, or a `held` one, to fill, and the file under it, whose `check` raises errors of the disk.

    The user block `mark` is written last.  An error of the disk is raised at the end, whatever HDF5 reports.
    """
    with DiskFile(path, held) as disk:
        try:
            with h5py.File(disk, "w", libver=_LIBVER, userblock_size=BLOCK) as h5:
                yield h5, disk
            disk.seek(0)
            disk.write(mark)
        finally:
            disk.check()
