"""HDF5 files of unknown origin: checks of data sets before their values are read, and sealed images of whole files.

HDF5 follows links and storage into other files.  It reads fill values where nothing was written, and uninitialised
memory where a chunk is too short.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpishard.io import files

# Checks of data sets.

_GZIP = h5py.h5z.FILTER_DEFLATE
# A chunk is decoded as a whole; by itself h5py makes none above 1 MiB.
LARGEST_CHUNK = 2**26
_TEXT_REFERENCE = 16  # bytes on disk for each text of variable length


def open_to_read(path: Path | str, **options: Any) -> h5py.File:
    """Open a file of unknown origin; OSError if it is no regular file.  `options` are those of h5py."""
    files.check(path)
    try:
        return h5py.File(path, "r", **options)
    except OSError as error:
        if "locking" not in str(error):
            raise
        return h5py.File(path, "r", **{**options, "locking": None})  # as who has it open in this process, too


def check_hard_link(h5: h5py.Group, path: str) -> None:
    """Raise ValueError unless the last part of a path is a link to an object of this very file."""
    name = path.encode()
    if not h5.id.links.exists(name):
        raise ValueError(f"{path} is missing")
    if h5.id.links.get_info(name).type != h5py.h5l.TYPE_HARD:
        raise ValueError(f"{path} is a link to elsewhere")


def check_hard_links(h5: h5py.File, path: str) -> None:
    """Raise ValueError unless every part of a path is a link to an object of this very file."""
    walked = ""
    for name in path.strip("/").split("/"):
        walked = f"{walked}/{name}"
        check_hard_link(h5, walked)


def children(h5: h5py.File, group: str) -> list[str]:
    """Names in a group, which may be missing; ValueError if it is a link to elsewhere, which is not followed."""
    if not h5.id.links.exists(group.encode()):
        return []
    check_hard_link(h5, group)
    return list(h5[group])


def check_lies_here(dataset: h5py.h5d.DatasetID) -> None:
    """Raise ValueError unless all values of a data set lie in its own file.

    Call it first: to get the shape of some virtual data sets HDF5 opens their sources.
    """
    plist = dataset.get_create_plist()
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        raise ValueError("the values are those of another, virtual data set")
    if plist.get_external_count():
        raise ValueError("the values lie in a file outside")


def open_plain(h5: h5py.Group, path: str) -> h5py.Dataset:
    """Open a data set; ValueError unless all its values were written, in one run of this file."""
    check_hard_link(h5, path)
    dataset = h5py.h5d.open(h5.id, path.encode())
    try:
        check_lies_here(dataset)
        if dataset.shape is None or dataset.get_create_plist().get_layout() == h5py.h5d.CHUNKED:
            raise ValueError("it has no values" if dataset.shape is None else "its values are in chunks")
        _check_run(dataset)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return h5py.Dataset(dataset)


def attribute(h5: h5py.File, name: str) -> Any:
    """An attribute as one number or text; ValueError if it is anything else."""
    if name not in h5.attrs:
        raise ValueError(f"its attribute {name!r} is missing")
    found = h5.attrs.get_id(name)
    text = h5py.check_string_dtype(found.dtype)
    if found.get_space().get_simple_extent_type() != h5py.h5s.SCALAR:
        raise ValueError(f"its attribute {name!r} is not a single value")
    if found.dtype.kind not in "biuf" and (text is None or text.length is not None):
        raise ValueError(f"its attribute {name!r} is neither a number nor text but {found.dtype}")
    value = h5.attrs[name]
    return value.item() if isinstance(value, np.generic) else value


def check_written(dataset: h5py.h5d.DatasetID) -> None:
    """Raise ValueError unless all values of a data set were written, with known filters."""
    plist = dataset.get_create_plist()
    if plist.get_layout() != h5py.h5d.CHUNKED:
        _check_run(dataset)
        return
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    shuffled = [h5py.h5z.FILTER_SHUFFLE]
    if filters not in ([], shuffled, [_GZIP], [*shuffled, _GZIP]):
        raise ValueError(f"it has filters {filters}; wanted shuffling or none, then gzip or none")
    pairs = list(zip(dataset.shape, plist.get_chunk(), strict=True))
    if any(chunk > extent for extent, chunk in pairs):
        raise ValueError("its chunks are larger than itself")
    if dataset.get_num_chunks() != prod(-(-extent // chunk) for extent, chunk in pairs):
        raise ValueError("some of its values were never written")


def check_array(dataset: h5py.h5d.DatasetID) -> None:
    """Raise ValueError unless all values of a data set are in its own file, in chunks that can be read one by one.

    For data sets of other programs, which may have filters that `check_written` refuses.
    """
    check_lies_here(dataset)
    if dataset.shape is None:
        raise ValueError("it has no values")
    plist = dataset.get_create_plist()
    if plist.get_layout() != h5py.h5d.CHUNKED:
        _check_run(dataset)
        return
    chunk = plist.get_chunk()
    check_chunk_size(prod(chunk) * dataset.dtype.itemsize)
    wanted = prod(-(-extent // along) for extent, along in zip(dataset.shape, chunk, strict=True))
    if dataset.get_num_chunks() < wanted:
        raise ValueError(f"it has {dataset.get_num_chunks()} of its {wanted} chunks: the others were never written")


def check_chunk_size(size: int) -> None:
    """Raise ValueError if chunks of `size` bytes are too large: each is decoded as a whole."""
    if size > LARGEST_CHUNK:
        raise ValueError(f"its chunks are {size} bytes; this mpishard reads chunks of at most {LARGEST_CHUNK}")


def check_chunks(dataset: h5py.h5d.DatasetID) -> None:
    """Raise ValueError unless every chunk decodes to all of its values; reads all chunks, one at a time.

    Call it after `check_written`.  A data set without chunks has nothing to decode.
    """
    plist = dataset.get_create_plist()
    if plist.get_layout() != h5py.h5d.CHUNKED:
        return
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    compressed = _GZIP in filters
    chunk = plist.get_chunk()
    size = prod(chunk) * dataset.dtype.itemsize
    check_chunk_size(size)
    for place in itertools.product(*map(range, itertools.repeat(0), dataset.shape, chunk)):
        stored = dataset.get_chunk_info_by_coord(place)
        if stored.byte_offset is None or not 0 < stored.size <= 2 * size + 64:
            raise ValueError(f"its chunk at {place} is missing, or too long")
        skipped, data = dataset.read_direct_chunk(place)
        # HDF5 skips the compression if it does not make a chunk smaller.
        if skipped and (not compressed or skipped != 1 << len(filters) - 1):
            raise ValueError(f"its chunk at {place} skips the filters {skipped:#b} of {filters}")
        found = _inflated_size(data, size) if compressed and not skipped else len(data)
        if found != size:
            how = "cannot be decoded" if found < 0 else f"decodes to {found} bytes or more" if found > size else ""
            raise ValueError(f"its chunk at {place} {how or f'decodes to {found} bytes'} instead of {size}")


def _check_run(dataset: h5py.h5d.DatasetID) -> None:
    """Raise ValueError unless the values of a data set without chunks were written and lie within the file."""
    text = h5py.check_string_dtype(dataset.dtype) is not None and dataset.dtype.kind == "O"
    size = prod(dataset.shape) * (_TEXT_REFERENCE if text else dataset.dtype.itemsize)
    if dataset.get_storage_size() != size:
        raise ValueError("some of its values were never written")
    if (dataset.get_offset() or 0) + size > h5py.h5i.get_file_id(dataset).get_filesize():
        raise ValueError("its values extend beyond the end of the file")


def _inflated_size(data: bytes, most: int) -> int:
    """How many bytes zlib makes of a chunk: -1 if it cannot, more than `most` if there are more."""
    decoder = zlib.decompressobj()
    try:
        size = len(decoder.decompress(data, most + 1))
    except zlib.error:
        return -1
    return size if size > most or decoder.eof else -1


# HDF5 file images with a seal in their user block, which HDF5 readers ignore.
#
# The first 512 bytes have a mark, the length of the image and the SHA-256 of all other bytes of the image.  They are
# checked before HDF5 opens it, since a corrupt file can hang or crash the HDF5 library.

USER_BLOCK = 512


@dataclass(frozen=True)
class FileImage:
    """A kind of file image: its first bytes, the version of its content, and what it has, for messages."""

    mark: bytes
    version: int
    what: str

    @property
    def _header(self) -> struct.Struct:
        return struct.Struct(f"<{len(self.mark)}sIQ")

    @property
    def _place(self) -> slice:
        """The place of the SHA-256."""
        return slice(self._header.size, self._header.size + 32)

    def seal(self, image: bytes) -> bytes:
        """A copy of an image, which has a user block of `USER_BLOCK` bytes, with its seal."""
        sealed = bytearray(image)
        self._header.pack_into(sealed, 0, self.mark, self.version, len(sealed))
        sealed[self._place] = self._digest(sealed)
        return bytes(sealed)

    def digest(self, data: bytes) -> bytes:
        """The SHA-256 that a sealed image has of its other bytes."""
        return bytes(data[self._place])

    def check(self, data: bytes) -> None:
        """Raise ValueError unless bytes from anywhere are a whole, unaltered image of this kind and version."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"deserialize takes the bytes that serialize returned, got {type(data).__name__}")
        if len(data) < USER_BLOCK or bytes(data[: len(self.mark)]) != self.mark:
            raise ValueError(f"these {len(data)} bytes are no {self.what} of mpishard (no mark at their start)")
        _, version, length = self._header.unpack_from(data)
        if version != self.version:
            raise ValueError(f"{self.what} of version {version}; this mpishard reads version {self.version}")
        if len(data) != length:
            raise ValueError(f"{self.what} is cut short or padded: {len(data)} bytes, but it was written with {length}")
        if self._digest(data) != self.digest(data):
            raise ValueError(f"{self.what} is damaged: its SHA-256 differs from the one written with it")

    def _digest(self, image: bytes | bytearray | memoryview) -> bytes:
        view = memoryview(image)
        hasher = hashlib.sha256(view[: self._place.start])
        hasher.update(view[self._place.stop :])
        return hasher.digest()
