"""Tokens on disk: plain files as memory maps, files of Megatron-LM, arrays of HDF5 and Zarr, and texts."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpishard.arguments import integer, printable, shown
from mpishard.arguments import path as checked_path
from mpishard.io.files import open_to_read

# Bytes of a map that may be resident before they are let go of; the page cache of the node keeps what it has room for.
RESIDENT = 32 * 1024**2
# What one access makes resident in addition to its own bytes: Linux maps the neighbours of a page too, 64 KiB at either
# end.
_AROUND = 2 * 64 * 1024


class Tokens:
    """Open tokens: a one-dimensional array of integers, in memory or on disk, and where its documents are.

    `name` is for messages.  `array` has a shape, a dtype and slices, which several threads may take.  `bounds` has
    slices too: numbers of tokens, documents + 1 of them, between which the documents are; None if they are not known.
    `digest` is of the tokens and bounds, which must be the same on all ranks; empty if they are not compared.  Raises
    ValueError if the array is another one, or is empty.
    """

    def __init__(self, name: str, array: Any, bounds: Any = None, digest: str = "") -> None:
        if len(array.shape) != 1 or np.dtype(array.dtype).kind not in "iu":
            raise ValueError(
                f"{name} has shape {tuple(array.shape)} and dtype {array.dtype}: tokens are a one-dimensional array of "
                "integers"
            )
        if not array.shape[0]:
            raise ValueError(f"{name} has no token")
        self.name = name
        self.count = int(array.shape[0])
        self.dtype: np.dtype[Any] = np.dtype(array.dtype)
        self.documents = 0 if bounds is None else len(bounds) - 1  # 0: they are not known
        self.digest = digest
        self._array = array
        self._bounds = bounds

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens from `start` to before `stop`, only to be read; OSError if they cannot be."""
        try:
            return np.asarray(self._array[start:stop])
        except Exception as error:  # of many kinds
            raise OSError(f"{self.name} cannot be read at positions {start} to {stop}: {error}") from error

    def document(self, number: int) -> tuple[int, int]:
        """Start and stop of a document."""
        start, stop = self._bounds[number : number + 2].tolist()
        return start, stop


class TokenSource(Protocol):
    """The description of a place of tokens, which a data set opens on each rank."""

    def open(self) -> Tokens:
        """Open the file; errors name it."""


class MappedArray:
    """Numbers of a file as an array with slices: a memory map, of which all is let go after every `RESIDENT` bytes.

    `offset` is the number of bytes before the first number; the file has all `count` numbers, at least 1.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], offset: int, count: int) -> None:
        self.shape = (count,)
        self.dtype = dtype
        self._offset = offset
        with os.fdopen(open_to_read(path), "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._values = np.frombuffer(self._map, dtype, count, offset)
        self._end = offset + self._values.nbytes
        # Windows are taken in random order: the kernel's guess of what comes next would read many times too much.
        self._advise("MADV_RANDOM")
        self._touched = 0
        self._lock = threading.Lock()

    def __getitem__(self, part: slice) -> np.ndarray:
        """A copy of the numbers from ``part.start`` to before ``part.stop``."""
        if (size := self._map.size()) < self._end:  # to read beyond the end would kill the process
            raise OSError(f"it has {size} bytes, and had {self._end}: it was cut short after it was opened")
        if part.start == part.stop:  # of an empty document, behind which the file may end with a page
            return self._values[part].copy()
        first = self._offset + part.start * self.dtype.itemsize
        page = first - first % mmap.PAGESIZE
        length = self._offset + part.stop * self.dtype.itemsize - page
        self._advise("MADV_WILLNEED", page, length)  # one access to the disk, not one for each page
        copy = self._values[part].copy()
        with self._lock:
            self._touched += length + _AROUND
            if full := self._touched > RESIDENT:
                self._touched = 0
        if full:
            self._advise("MADV_DONTNEED")
        return copy

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
        object.__setattr__(self, "path", checked_path("path", self.path).absolute())
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))
        object.__setattr__(self, "offset", integer("offset", self.offset, least=0))

    def open(self) -> Tokens:
        """Open the file.

        Returns
        -------
        Tokens
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
        if size <= 0:
            raise ValueError(f"{path} has {size + self.offset} bytes, so no token after an offset of {self.offset}")
        if size % self.dtype.itemsize:
            raise ValueError(
                f"{path} has {size} bytes of tokens, no multiple of the {self.dtype.itemsize} of {self.dtype.name}: "
                "it is cut short, or has another dtype or offset"
            )
        return Tokens(str(path), MappedArray(path, self.dtype, self.offset, size // self.dtype.itemsize))


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
    """Bytes of a file; an OSError that names it if it does not exist."""
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            return os.fstat(file.fileno()).st_size
    except IsADirectoryError:
        raise IsADirectoryError(f"{path} is a folder: give the file of tokens in it") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None


# Of Megatron-LM, megatron/core/datasets/indexed_dataset.py: magic and version, code of the dtype, numbers of sequences
# and of entries in the list of documents, all little-endian; then lengths, places in bytes, and documents.
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point
_CHUNK = 1024**2  # sequences that are checked at a time


class Index(NamedTuple):
    """The contents of an index, as memory maps."""

    dtype: np.dtype[Any]  # of a token
    lengths: np.ndarray  # tokens of each sequence, int32 (sequences,)
    places: np.ndarray  # bytes before each sequence, int64 (sequences,)
    documents: np.ndarray  # the first sequence of each document, and their number, int64 (documents + 1,)


class _Bounds:
    """Between which tokens the documents of an index are, from its maps; `count` is the number of all tokens."""

    def __init__(self, index: Index, count: int) -> None:
        self._index, self._count = index, count

    def __len__(self) -> int:
        return len(self._index.documents)

    def __getitem__(self, part: slice) -> np.ndarray:
        index = self._index
        sequences = index.documents[part]  # ascending
        inside = sequences[sequences < len(index.lengths)]
        bounds = np.full(len(sequences), self._count)
        bounds[: len(inside)] = index.places[inside] // index.dtype.itemsize
        return bounds


@dataclass(frozen=True)
class MegatronFile:
    """A file of tokens and the index of its documents, as Megatron-LM writes them (``.bin`` and ``.idx``).

    A description: the files are opened by the data set that takes it.  The index is a memory map, so that the ranks of
    a node share it.  No method is collective.

    Parameters
    ----------
    path : path
        Of either file, or both without their ending.

    Raises
    ------
    TypeError
        If `path` is no path.
    """

    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        path = checked_path("path", self.path).absolute()
        object.__setattr__(self, "path", path.with_suffix("") if path.suffix in (".bin", ".idx") else path)

    def open(self) -> Tokens:
        """Open both files, and check the index.

        Returns
        -------
        Tokens
            At least one.

        Raises
        ------
        OSError
            If a file cannot be read.
        ValueError
            If the index is none, or says something else than the sizes of the files.
        """
        tokens_path, index_path = (Path(f"{self.path}{ending}") for ending in (".bin", ".idx"))
        index = _read_index(index_path)
        expected = _checked_end(index, index_path)
        size = file_size(tokens_path)
        if size != expected:
            raise ValueError(
                f"{tokens_path} has {size} bytes, but its index {index_path.name} is of {expected}: one of them is cut "
                "short, or they do not belong together"
            )
        if not size:
            raise ValueError(f"{tokens_path} has no token")
        count = size // index.dtype.itemsize
        return Tokens(str(tokens_path), MappedArray(tokens_path, index.dtype, 0, count), _Bounds(index, count))


def _read_index(path: Path) -> Index:
    """The parts of an index file as maps; ValueError unless it has its size."""
    size = file_size(path)
    with os.fdopen(open_to_read(path), "rb") as file:
        header = file.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise ValueError(f"{path} is no index of Megatron-LM: it does not begin with {_MAGIC!r}")
    if len(header) < _HEADER.size:
        raise ValueError(f"{path} has {size} bytes: it is cut short in its header")
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        raise ValueError(
            f"{path}: version {version} with dtype code {code}; known are version 1 and codes 1 to 5 and 8"
        )
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if size < expected or documents < 1:
        raise ValueError(
            f"{path} has {size} bytes, but {sequences} sequences and {documents} document entries take {expected}: it "
            "is cut short or corrupt"
        )
    parts, place = [], _HEADER.size
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", documents)):
        parts.append(np.memmap(path, dtype, "r", place, (count,)) if count else np.empty(0, dtype))
        place += parts[-1].nbytes
    return Index(np.dtype(_DTYPES[code]), *parts)


def _checked_end(index: Index, path: Path) -> int:
    """Bytes of tokens that an index speaks of; ValueError unless sequences and documents follow each other."""
    end = 0
    for start in range(0, len(index.lengths), _CHUNK):
        lengths = index.lengths[start : start + _CHUNK].astype(np.int64)
        ends = end + np.cumsum(lengths) * index.dtype.itemsize
        wrong = (lengths < 0) | (index.places[start : start + _CHUNK] != ends - lengths * index.dtype.itemsize)
        if wrong.any():
            raise ValueError(f"{path}: sequence {start + int(wrong.argmax())} does not begin where the last one ended")
        end = int(ends[-1])
    documents = index.documents
    if documents[0] != 0 or documents[-1] != len(index.lengths) or (np.diff(documents) < 0).any():
        raise ValueError(f"{path}: its documents are not the {len(index.lengths)} sequences in their order")
    return end


_CACHE = 16 * 1024**2  # bytes of chunks that HDF5 keeps, for each file
_LARGEST_TEXT = 2**32  # bytes; a text is tokenized in memory


@dataclass(frozen=True)
class HDF5Tokens:
    """A data set of an HDF5 file: one-dimensional, of integers.

    A description: the file is opened by the data set that takes it.  No method is collective.

    Parameters
    ----------
    path : path
        Of the file.
    dataset : str
        Its name in the file.

    Raises
    ------
    TypeError
        If `path` is no path or `dataset` no name.
    """

    path: str | os.PathLike[str]
    dataset: str = "tokens"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", checked_path("path", self.path).absolute())
        if not isinstance(self.dataset, str):
            raise TypeError(f"dataset={shown(self.dataset)} must be a name")

    def open(self) -> Tokens:
        """Open the file.

        Returns
        -------
        Tokens
            At least one.

        Raises
        ------
        OSError
            If the file cannot be read, or is no HDF5 file.
        ValueError
            If it has no such data set, or one whose values are in other files, were never written, or are in chunks of
            more than 64 MiB.
        """
        import h5py

        from mpishard.io import hdf5

        file_size(Path(self.path))
        try:
            file = h5py.File(self.path, "r", rdcc_nbytes=_CACHE)
        except OSError as error:
            raise OSError(f"{self.path} is no HDF5 file, or is cut short: {printable(str(error))}") from None
        with ExitStack() as after_error:  # the traceback may be kept, as in a notebook, and would keep it open
            after_error.callback(file.close)
            try:
                hdf5.check_hard_links(file, self.dataset)
                found = file[self.dataset]
                if not isinstance(found, h5py.Dataset):
                    raise ValueError("it is a group")
                hdf5.check_array(found.id)
            except (ValueError, KeyError, RuntimeError) as error:
                try:
                    listed = f"it has {shown(sorted(file))}"
                except RuntimeError:
                    listed = "the file is damaged"
                raise ValueError(
                    f"{self.path} has no data set {self.dataset!r} of tokens: {printable(str(error))}; {listed}"
                ) from None
            tokens = Tokens(f"{self.path}:{self.dataset}", found)
            after_error.pop_all()
        return tokens


@dataclass(frozen=True)
class ZarrTokens:
    """A Zarr array: one-dimensional, of integers.  It needs the package zarr.

    A description: the array is opened by the data set that takes it.  No method is collective.

    Parameters
    ----------
    path : path
        Of the folder of the array.

    Raises
    ------
    TypeError
        If `path` is no path.
    """

    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", checked_path("path", self.path).absolute())

    def open(self) -> Tokens:
        """Open the array.

        Returns
        -------
        Tokens
            At least one.

        Raises
        ------
        ModuleNotFoundError
            If there is no package zarr.
        FileNotFoundError
            If there is no such folder.
        ValueError
            If it is no such array, lacks most of its chunks, or has chunks of more than 64 MiB.
        """
        try:
            import zarr
        except ModuleNotFoundError:
            raise ModuleNotFoundError("ZarrTokens needs the package zarr: pip install 'mpishard[zarr]'") from None

        if not Path(self.path).is_dir():
            raise FileNotFoundError(f"folder {self.path} does not exist")
        try:
            array = zarr.open_array(str(self.path), mode="r")
        except Exception as error:  # of many kinds
            raise ValueError(f"{self.path} is no Zarr array: {printable(str(error))}") from None
        _check_zarr(array, Path(self.path))
        return Tokens(str(self.path), array)


def _check_zarr(array: Any, folder: Path) -> None:
    """Raise ValueError if chunks are too large, or most of them have no file: Zarr has 0 there.

    Zarr need not write chunks of zeros, but few chunks of tokens are all zeros.
    """
    from mpishard.io import hdf5

    try:
        hdf5.check_chunk_size(prod(array.chunks) * array.dtype.itemsize)
        stored = getattr(array, "shards", None) or array.chunks  # a file has several chunks, or one
        files = prod(-(-extent // along) for extent, along in zip(array.shape, stored, strict=True))
        found = sum(len(names) for _, _, names in os.walk(folder))
        if 2 * found < files:
            raise ValueError(f"it has {found} of its {files} files of chunks")
    except ValueError as error:
        raise ValueError(f"{folder}: {error}; write the tokens again") from None


@dataclass(frozen=True)
class TextFile:
    """A plain text, tokenized when it is opened: on each rank, and in memory.

    A description: the file is opened by the data set that takes it.  No method is collective.

    Parameters
    ----------
    path : path
        Of a text in UTF-8.
    tokenize : callable
        ``tokenize(text)`` returns the tokens of a text, integers of at least 0.
    separator : str, optional
        What is between two documents: each is tokenized by itself.  By default the text is one document.

    Raises
    ------
    TypeError
        If `path` is no path, `tokenize` is not callable, or `separator` is no text.
    ValueError
        If `separator` is empty.
    """

    path: str | os.PathLike[str]
    tokenize: Callable[[str], Sequence[int]]
    separator: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", checked_path("path", self.path).absolute())
        if not callable(self.tokenize):
            raise TypeError(f"tokenize={shown(self.tokenize)} must be a function of a text")
        if not (self.separator is None or isinstance(self.separator, str)):
            raise TypeError(f"separator={shown(self.separator)} must be a text")
        if self.separator == "":
            raise ValueError("separator is empty: leave it out for one document")

    def open(self) -> Tokens:
        """Read the file and tokenize it.

        Returns
        -------
        Tokens
            At least one.

        Raises
        ------
        OSError
            If the file cannot be read.
        ValueError
            If it is no UTF-8, or has no token.
        TypeError
            If `tokenize` returns anything else than integers.
        """
        file_size(Path(self.path))
        try:
            with os.fdopen(open_to_read(Path(self.path), _LARGEST_TEXT), encoding="utf-8") as file:
                text = file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is no text in UTF-8: {error}") from None
        # Reading has made each end of a line "\n", whatever it is in the file.
        separator = self.separator and self.separator.replace("\r\n", "\n").replace("\r", "\n")
        texts = [text] if separator is None else text.split(separator)
        parts = [self._tokens(text) for text in texts if text]
        tokens = np.concatenate([np.empty(0, np.int32), *parts])
        bounds = np.cumsum([0, *map(len, parts)])
        digest = hashlib.blake2b(tokens.data, digest_size=8)
        digest.update(bounds.data)
        return Tokens(str(self.path), tokens, bounds, digest.hexdigest())

    def _tokens(self, text: str) -> np.ndarray:
        tokens = np.asarray(self.tokenize(text))
        if tokens.size and (tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
            raise TypeError(f"tokenize returned {shown(tokens)} for a text of {self.path}, not a list of integers")
        return tokens.astype(np.int32)
