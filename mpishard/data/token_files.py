"""Files of tokens on disk, as memory maps of which little stays resident."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mpishard.arguments import integer, shown
from mpishard.io.files import open_to_read

# Bytes of a map that may be resident before they are let go of; the page cache of the node keeps what it has room for.
RESIDENT = 32 * 1024**2
# What one access makes resident beside its own bytes: Linux maps the neighbours of a page too, 64 KiB at either end.
_AROUND = 2 * 64 * 1024


class Tokens(Protocol):
    """Open tokens, one after the other; several threads may read them.

    Attributes
    ----------
    name : str
        For messages.
    count : int
        Number of tokens.
    dtype : dtype
        Of what is stored: an integer type.
    documents : int
        Number of documents; 0 if that is not known.
    """

    name: str
    count: int
    dtype: np.dtype[Any]
    documents: int

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens from `start` to before `stop`: a copy, of any integer type.  Not collective."""
        ...

    def document(self, number: int) -> tuple[int, int]:
        """Where a document starts and stops.  Not collective."""
        ...


class TokenSource(Protocol):
    """Where tokens are: a description, which a data set opens on each rank."""

    def open(self) -> Tokens:
        """Open the file; errors name it.  Not collective."""
        ...


class MappedTokens:
    """Tokens of a file as a memory map that is let go of every so many bytes.

    Not collective.

    Parameters
    ----------
    path : path
        Of the file.
    dtype : dtype
        Of a token.
    offset : int
        Bytes before the first one.
    count : int
        Number of tokens, at least 1; the file has them all.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], offset: int, count: int) -> None:
        self.name = str(path)
        self.count = count
        self.dtype = dtype
        self.documents = 0
        self._offset = offset
        with os.fdopen(open_to_read(path), "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._values = np.frombuffer(self._map, dtype, count, offset)
        self._end = offset + self._values.nbytes
        # Windows are taken in random order: the kernel's guess of what comes next would read many times too much.
        self._advise("MADV_RANDOM")
        self._touched = 0
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> np.ndarray:
        if (size := self._map.size()) < self._end:  # to read beyond the end would kill the process
            raise OSError(f"{self.name} has {size} bytes, and had {self._end}: it was cut short after it was opened")
        first = self._offset + start * self.dtype.itemsize
        page = first - first % mmap.PAGESIZE
        length = self._offset + stop * self.dtype.itemsize - page
        self._advise("MADV_WILLNEED", page, length)  # one access to the disk, not one for each page
        copy = self._values[start:stop].copy()
        with self._lock:
            self._touched += length + _AROUND
            if full := self._touched > RESIDENT:
                self._touched = 0
        if full:
            self._advise("MADV_DONTNEED")
        return copy

    def document(self, number: int) -> tuple[int, int]:
        raise ValueError(f"{self.name} has no index of documents")

    def _advise(self, advice: str, *extent: int) -> None:
        option = getattr(mmap, advice, None)  # not on every system
        if option is not None:
            self._map.madvise(option, *extent)


@dataclass(frozen=True)
class TokenFile:
    """A file that has tokens and nothing else, as nanoGPT and llm.c write them (``.bin``).

    A description: the file is opened by the data set that takes it.  No method is collective.

    Parameters
    ----------
    path : path
        Of the file.
    dtype : dtype
        An integer type, in the byte order of the file: ``"<u2"`` says little-endian.  nanoGPT's files have uint16.
    offset : int
        Bytes of a header, which are skipped; 1024 in the files of llm.c.

    Raises
    ------
    TypeError
        If `dtype` is no integer type, or `path` no path.
    ValueError
        If `offset` is negative.
    """

    path: str | os.PathLike[str]
    dtype: Any = np.uint16
    offset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", checked_path(self.path))
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))
        object.__setattr__(self, "offset", integer("offset", self.offset, least=0))

    def open(self) -> MappedTokens:
        """Open the file.

        Returns
        -------
        MappedTokens
            At least one.

        Raises
        ------
        OSError
            If the file cannot be read.
        ValueError
            If it has no token, or a part of one.
        """
        path = Path(self.path)
        size = file_size(path) - self.offset
        if size % self.dtype.itemsize:
            raise ValueError(
                f"{path} has {size} bytes of tokens, no multiple of the {self.dtype.itemsize} of {self.dtype.name}: "
                "it is cut short, or has another dtype or offset"
            )
        if size <= 0:
            raise ValueError(f"{path} has {size + self.offset} bytes, so no token after an offset of {self.offset}")
        return MappedTokens(path, self.dtype, self.offset, size // self.dtype.itemsize)


def checked_path(path: Any) -> Path:
    """A path as one that a change of the working directory does not change; TypeError if it is none."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path={shown(path)} must be a path")
    return Path(path).absolute()


def checked_dtype(dtype: Any) -> np.dtype[Any]:
    """An integer type; TypeError if it is none."""
    try:
        known = np.dtype(dtype)
    except TypeError:
        known = np.dtype(object)
    if known.kind not in "iu":
        raise TypeError(f"dtype={shown(dtype)} must be an integer type, such as uint16 or uint32")
    return known


def file_size(path: Path) -> int:
    """Bytes of a file; an OSError that names it if there is none."""
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            return os.fstat(file.fileno()).st_size
    except IsADirectoryError:
        raise IsADirectoryError(f"{path} is a folder: give the file of tokens in it") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None
