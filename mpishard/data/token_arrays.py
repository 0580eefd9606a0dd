"""Tokens in arrays of HDF5 and Zarr, and in texts that are tokenized when they are opened."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arguments import printable, shown
from mpishard.data.token_files import checked_path, file_size
from mpishard.io.files import open_to_read

_CACHE = 16 * 1024**2  # bytes of chunks that HDF5 keeps, for each file
_LARGEST_TEXT = 2**32  # bytes; a text is tokenized in memory


class ArrayTokens:
    """Tokens of a one-dimensional array of integers, in memory or on disk.

    Not collective.

    Parameters
    ----------
    name : str
        For messages.
    array : array
        What has a shape, a dtype and slices.
    bounds : ndarray, int64 (documents + 1,), optional
        Where documents begin and end.
    digest : str
        Of the tokens and bounds, which must be the same on all ranks; empty if they are not compared.

    Raises
    ------
    ValueError
        If it is no such array, or is empty.
    """

    def __init__(self, name: str, array: Any, bounds: np.ndarray | None = None, digest: str = "") -> None:
        if len(array.shape) != 1 or np.dtype(array.dtype).kind not in "iu":
            raise ValueError(
                f"{name} has shape {tuple(array.shape)} and dtype {array.dtype}: tokens are a one-dimensional array of "
                "integers"
            )
        if not array.shape[0]:
            raise ValueError(f"{name} has no token")
        self.name = name
        self.count = int(array.shape[0])
        self.dtype = np.dtype(array.dtype)
        self.documents = 0 if bounds is None else len(bounds) - 1
        self.digest = digest
        self._array = array
        self._bounds = bounds

    def read(self, start: int, stop: int) -> np.ndarray:
        try:
            return np.array(self._array[start:stop])
        except Exception as error:  # of many kinds
            raise OSError(f"{self.name} cannot be read at positions {start} to {stop}: {error}") from error

    def document(self, number: int) -> tuple[int, int]:
        assert self._bounds is not None
        first, after = self._bounds[number : number + 2].tolist()
        return first, after


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
        object.__setattr__(self, "path", checked_path(self.path))
        if not isinstance(self.dataset, str):
            raise TypeError(f"dataset={shown(self.dataset)} must be a name")

    def open(self) -> ArrayTokens:
        """Open the file.

        Returns
        -------
        ArrayTokens
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
        try:
            hdf5.check_hard_links(file, self.dataset)
            found = file[self.dataset]
            if not isinstance(found, h5py.Dataset):
                raise ValueError("it is a group")
            hdf5.check_array(found.id)
        except (ValueError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"{self.path} has no data set {self.dataset!r} of tokens: {printable(str(error))}; it has "
                f"{shown(sorted(file))}"
            ) from None
        return ArrayTokens(f"{self.path}:{self.dataset}", found)


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
        object.__setattr__(self, "path", checked_path(self.path))

    def open(self) -> ArrayTokens:
        """Open the array.

        Returns
        -------
        ArrayTokens
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
            raise FileNotFoundError(f"there is no folder {self.path}")
        try:
            array = zarr.open_array(str(self.path), mode="r")
        except Exception as error:  # of many kinds
            raise ValueError(f"{self.path} is no Zarr array: {printable(str(error))}") from None
        _check_zarr(array, Path(self.path))
        return ArrayTokens(str(self.path), array)


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
        object.__setattr__(self, "path", checked_path(self.path))
        if not callable(self.tokenize):
            raise TypeError(f"tokenize={shown(self.tokenize)} must be a function of a text")
        if not (self.separator is None or isinstance(self.separator, str)):
            raise TypeError(f"separator={shown(self.separator)} must be a text")
        if self.separator == "":
            raise ValueError("separator is empty: leave it out for one document")

    def open(self) -> ArrayTokens:
        """Read the file and tokenize it.

        Returns
        -------
        ArrayTokens
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
        texts = [text] if self.separator is None else text.split(self.separator)
        parts = [self._tokens(text) for text in texts if text]
        tokens = np.concatenate([np.empty(0, np.int32), *parts])
        bounds = np.cumsum([0, *map(len, parts)])
        digest = hashlib.blake2b(tokens.data, digest_size=8)
        digest.update(bounds.data)
        return ArrayTokens(str(self.path), tokens, bounds, digest.hexdigest())

    def _tokens(self, text: str) -> np.ndarray:
        tokens = np.asarray(self.tokenize(text))
        if tokens.size and (tokens.ndim != 1 or tokens.dtype.kind not in "iu"):
            raise TypeError(f"tokenize returned {shown(tokens)} for a text of {self.path}, not a list of integers")
        return tokens.astype(np.int32)
