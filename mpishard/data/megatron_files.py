"""Token files with an index of their documents, as Megatron-LM writes them."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpishard.data.token_files import MappedTokens, checked_path, file_size
from mpishard.io.files import open_to_read

# Of Megatron-LM, megatron/core/datasets/indexed_dataset.py: magic and version, code of the dtype, numbers of sequences
# and of entries in the list of documents, all little-endian; then lengths, places in bytes, and documents.
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floating-point
_CHUNK = 1024**2  # sequences that are checked at a time


class Index(NamedTuple):
    """What an index says, as memory maps.

    Parameters
    ----------
    dtype : dtype
        Of a token.
    lengths : ndarray, int32 (sequences,)
        Tokens of each sequence.
    places : ndarray, int64 (sequences,)
        Bytes before each.
    documents : ndarray, int64 (documents + 1,)
        The first sequence of each document, and their number.
    """

    dtype: np.dtype[Any]
    lengths: np.ndarray
    places: np.ndarray
    documents: np.ndarray


class MegatronTokens(MappedTokens):
    """Open tokens of a file with an index; `documents` is the number of documents.

    Not collective.

    Parameters
    ----------
    path : path
        Of the tokens.
    index : Index
        Checked.
    count : int
        Number of tokens.
    """

    def __init__(self, path: Path, index: Index, count: int) -> None:
        super().__init__(path, index.dtype, 0, count)
        self.documents = len(index.documents) - 1
        self._index = index

    def document(self, number: int) -> tuple[int, int]:
        first, after = self._index.documents[number : number + 2].tolist()
        return self._position(first), self._position(after)

    def _position(self, sequence: int) -> int:
        """Tokens before a sequence."""
        index = self._index
        return self.count if sequence == len(index.lengths) else int(index.places[sequence]) // self.dtype.itemsize


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
        path = checked_path(self.path)
        object.__setattr__(self, "path", path.with_suffix("") if path.suffix in (".bin", ".idx") else path)

    def open(self) -> MegatronTokens:
        """Open both files, and check the index.

        Returns
        -------
        MegatronTokens
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
        return MegatronTokens(tokens_path, index, size // index.dtype.itemsize)


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
