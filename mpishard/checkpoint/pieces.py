"""Files of pieces: what one rank writes of a checkpoint, one data set a box of a global tensor.

HDF5 writes through a Python file object.  The system calls then run without the interpreter's lock, and an error of
the disk stays outside of the HDF5 library, which an error in the middle of its work can leave with open files.

The first 512 bytes of each file are HDF5's user block.  It tells which checkpoint and which writer the file is of, for
readers that do not want to open it with HDF5 before they know.
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

# Virtual data sets need 1.10; nothing here needs a later HDF5, and its tools are about in old versions.
_LIBVER = ("earliest", "v110")


@dataclass(frozen=True)
class StoredPiece:
    """Where on disk the box of an array over a tensor lies: the whole of `dataset` in `file` of the same folder."""

    kind: str
    name: str
    box: Box
    file: str
    dataset: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class Part:
    """Host values of one piece: `values` are shaped like the box, a view of the live array or of a copy."""

    kind: str
    name: str
    box: Box
    values: np.ndarray

    @property
    def where(self) -> tuple[str, str, Box]:
        """What `stored` wants to know of it."""
        return self.kind, self.name, self.box


def pieces_file(writer: int) -> str:
    """The name of the file that a writer's pieces are in."""
    return f"pieces-{writer:05d}.h5"


def writer_of(file: str) -> int:
    """The number of the writer of a file that is called as `pieces_file` does."""
    return int(file.removeprefix("pieces-").removesuffix(".h5"))


def pieces_mark(id: str, writer: int) -> bytes:
    """The user block of that file in the checkpoint `id`."""
    return f"mpishard pieces {id} {writer:05d}\n".encode().ljust(BLOCK, b"\0")


def read_mark(path: Path) -> bytes:
    """The user block of a file of a checkpoint, with zeros where the file is shorter."""
    with path.open("rb") as file:
        return file.read(BLOCK).ljust(BLOCK, b"\0")


def stored(boxes: Iterable[tuple[str, str, Box]], file: str) -> list[StoredPiece]:
    """Where `write_pieces` puts the pieces of these kinds, names and boxes in `file`; empty ones are left out."""
    place = _Places(file)
    return [place(*box) for box in boxes if not _is_empty(box[2])]


def write_pieces(path: Path, parts: Iterable[Part], *, id: str, writer: int, compression: str | None = None) -> None:
    """Write parts into a new file.  It is closed, but not synced to the disk.  Not collective.

    Parameters
    ----------
    path : Path
        Must not be there.
    parts : iterable of Part
        Of float16, float32 or float64 values; taken one at a time.  Those without elements are left out.
    id : str
        Of the checkpoint.
    writer : int
        Number of the writer in the checkpoint.
    compression : None, "gzip" or "lzf"
        HDF5 filter.  ``"lzf"`` is faster, but HDF5's own tools do not read it.

    Raises
    ------
    OSError
        With the path, if the disk is full or fails; what was written stays and has no user block.
    ValueError
        If values do not have the shape of their box, or another dtype.
    """
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression {compression!r} is not one of {', '.join(map(str, COMPRESSIONS))}")
    place = _Places(path.name)
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
            h5.create_dataset(place(*part.where).dataset, data=values, **filters)
            disk.check()


class _Places:
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
    """A new HDF5 file, or a `held` one, to be filled, and the file under it, whose `check` tells whether to go on.

    The user block `mark` is written last.  An error of the disk is raised on leaving, whatever HDF5 said of it.
    """
    with DiskFile(path, held) as disk:
        try:
            with h5py.File(disk, "w", libver=_LIBVER, userblock_size=BLOCK) as h5:
                yield h5, disk
            disk.seek(0)
            disk.write(mark)
        finally:
            disk.check()
