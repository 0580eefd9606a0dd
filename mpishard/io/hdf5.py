"""HDF5 files of unknown origin: checks of data sets before their values are read, and sealed images of whole files.

HDF5 follows links and storage into other files.  It reads fill values where nothing was written, and uninitialised
memory where a chunk is too short.

Many virtual data sets are written at once, in the bytes of the file format.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpishard.io import files
from mpishard.layout.boxes import Box, box_shape

# Checks of data sets.

_GZIP = h5py.h5z.FILTER_DEFLATE
# A chunk is decoded as a whole; by itself h5py makes none above 1 MiB.
LARGEST_CHUNK = 2**26
_TEXT_REFERENCE = 16  # bytes on disk for each text of variable length


def open_to_read(path: Path | str, **options: Any) -> h5py.File:
    """Open a file of unknown origin; OSError if it is no regular file.  `options` are those of h5py."""
    files.check(path)
    return h5py.File(path, "r", **options)


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


# -- virtual data sets -------------------------------------------------------------------------------------------------
#
# The HDF5 library takes long to make one: with its calls instead, a save of 148 tensors and two slots of AdamW (89 MB)
# takes 132 to 157 ms of CPU time instead of 69, and one of 2000 tensors of 40 elements 1.2 s instead of 0.12.  The
# bytes are simple, and the same in all versions of the library from 1.10 on, which reads them: a group of symbols
# (sections III.A.1, III.B, III.C and III.D of the HDF5 File Format Specification, version 3.0), an object header a data
# set (IV.A.1.a), and the mappings in global heaps (III.E).  Everything else in a file is left to the library.

_UNDEFINED = b"\xff" * 8
# Defaults of the superblock: symbols in a leaf of a group, and children of a node above.
_SYMBOLS, _CHILDREN = 8, 32
_LEAF_BYTES = 8 + 40 * _SYMBOLS
_NODE_BYTES = 24 + 8 * _CHILDREN + 8 * (_CHILDREN + 1)
# HDF5 reads a heap as a whole.
_HEAP_BYTES = 4096
_MESSAGE_SPACE, _MESSAGE_TYPE, _MESSAGE_FILL, _MESSAGE_LAYOUT, _MESSAGE_GROUP = 0x01, 0x03, 0x05, 0x08, 0x11
# Little-endian IEEE numbers: bytes, bit of the sign, first bit and number of bits of exponent and fraction, its bias.
_FLOATS = {2: (15, 10, 5, 0, 10, 15), 4: (31, 23, 8, 0, 23, 127), 8: (63, 52, 11, 0, 52, 1023)}


@dataclass(frozen=True)
class VirtualSource:
    """A box of a virtual data set, and what it has: the elements from `start` on of a 1-D data set of a file."""

    box: Box
    file: str
    dataset: str
    start: int


@dataclass(frozen=True)
class VirtualDataset:
    """A data set of little-endian floating-point numbers; NaN where no mapping leads."""

    name: str
    shape: tuple[int, ...]
    sources: Sequence[VirtualSource]  # none if it has no elements


def group_address(group: h5py.Group) -> int:
    """The place of the header of a group that `fill_groups` fills."""
    return int(h5py.h5o.get_info(group.id).addr)


def fill_groups(file: io.FileIO, groups: Iterable[tuple[int, np.dtype, Iterable[VirtualDataset]]]) -> None:
    """Put virtual data sets into empty groups of an HDF5 file that h5py made with ``libver="earliest"`` and closed.

    For each group its `group_address`, the dtype of its data sets, and at least one of them, with different names.
    """
    file.seek(0)
    image = file.read()
    base = image.index(b"\x89HDF\r\n\x1a\n")
    version, ranks = image[base + 8], struct.unpack_from("<2H", image, base + 16)
    places = struct.unpack_from("<3Q", image, base + 24)
    assert version == 0 and ranks == (_SYMBOLS // 2, _CHILDREN // 2), (version, ranks)
    assert places[0] == base and places[2] == len(image), (places, len(image))
    start = len(image) + -len(image) % 8
    added = _Bytes(start - base)
    for address, dtype, datasets in groups:
        assert image[base + address] == 1 and image[base + address + 16] == _MESSAGE_GROUP, address
        symbols = _add_symbols(added, sorted(_add_datasets(added, dtype, datasets)))
        # A group's header says where its symbols are, and so does the link that leads to it.
        before = image[base + address + 24 : base + address + 40]
        link = struct.pack("<QII", address, 1, 0)  # where the header is, that the link says so, and nothing
        found = image.find(link + before)
        assert found >= 0, address
        for place in (base + address + 24, found + len(link)):
            file.seek(place)
            file.write(struct.pack("<QQ", *symbols))
    file.seek(base + 40)
    file.write(struct.pack("<Q", base + added.address))
    file.seek(start)
    file.write(added.joined())


class _Bytes:
    """Bytes that are added to a file from an address on."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._parts: list[bytes] = []

    def add(self, data: bytes) -> int:
        """Add data, a multiple of 8 bytes; returns its address."""
        place = self.address
        self._parts.append(data)
        self.address += len(data)
        return place

    def joined(self) -> bytes:
        return b"".join(self._parts)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


# -- data sets --------------------------------------------------------------------------------------------------------


def _add_datasets(added: _Bytes, dtype: np.dtype, datasets: Iterable[VirtualDataset]) -> list[tuple[bytes, int]]:
    """Add the headers of data sets and their mappings; returns name and address of each."""
    datasets = list(datasets)
    names: dict[tuple[str, str], bytes] = {}
    heaps = iter(_add_heaps(added, _checksummed([_encoded(each, names) for each in datasets if each.sources])))
    headers: dict[tuple[int, ...], bytes] = {}  # up to the layout, by shape
    found = []
    for dataset in datasets:
        if dataset.sources:
            layout = struct.pack("<BBQIxx", 4, 3, *next(heaps))
        else:
            layout = struct.pack("<BB8sQxxxxxx", 3, 1, _UNDEFINED, 0)
        if dataset.shape not in headers:
            headers[dataset.shape] = _header(dtype, dataset.shape, len(layout))
        found.append((dataset.name.encode(), added.add(headers[dataset.shape] + layout)))
    return found


def _header(dtype: np.dtype, shape: tuple[int, ...], layout_bytes: int) -> bytes:
    """The header of a data set up to its layout."""
    messages = b"".join(
        (
            _message(_MESSAGE_SPACE, struct.pack(f"<BBBxxxxx{len(shape)}Q", 1, len(shape), 0, *shape)),
            _message(_MESSAGE_TYPE, _float_type(dtype), constant=True),
            _message(_MESSAGE_FILL, _nan(dtype), constant=True),
            struct.pack("<HHBxxx", _MESSAGE_LAYOUT, layout_bytes, 0),
        )
    )
    return struct.pack("<BxHIIxxxx", 1, 4, 1, len(messages) + layout_bytes) + messages


def _message(kind: int, data: bytes, constant: bool = False) -> bytes:
    data = _padded(data)
    return struct.pack("<HHBxxx", kind, len(data), constant) + data


def _float_type(dtype: np.dtype) -> bytes:
    size = dtype.itemsize
    sign, *fields = _FLOATS[size]
    # Version 1 of class 1; the fraction has a hidden leading bit.
    return struct.pack("<BBBxIHHBBBBI", 0x11, 0x20, sign, size, 0, 8 * size, *fields)


def _nan(dtype: np.dtype) -> bytes:
    value = np.array(np.nan, dtype.newbyteorder("<")).tobytes()
    return struct.pack("<BBBBI", 2, 2, 2, 1, len(value)) + value


# -- sources ----------------------------------------------------------------------------------------------------------


def _encoded(dataset: VirtualDataset, names: dict[tuple[str, str], bytes]) -> bytes:
    """The sources of a data set, without the checksum.  `names` is a cache of their encoded names."""
    parts = [struct.pack("<BQ", 0, len(dataset.sources))]
    for each in dataset.sources:
        key = each.file, each.dataset
        if key not in names:
            # In the names of sources "%b" is a block number, and "%%" a percent sign.
            names[key] = each.file.encode() + b"\0" + each.dataset.replace("%", "%%").encode() + b"\0"
        sizes = box_shape(each.box)
        parts += (
            names[key],
            _selection(((each.start, each.start + prod(sizes)),)),
            _ALL if sizes == dataset.shape else _selection(each.box),
        )
    return b"".join(parts)


_ALL = struct.pack("<4I", 3, 1, 0, 0)


def _selection(box: Box) -> bytes:
    """A box in a data space."""
    rank, starts, ends = len(box), [start for start, _ in box], [stop - 1 for _, stop in box]
    if max(ends) < 2**32:
        return struct.pack(f"<6I{2 * rank}I", 2, 1, 0, 8 + 8 * rank, rank, 1, *starts, *ends)
    runs = [number for start, stop in box for number in (start, 1, 1, stop - start)]
    return struct.pack(f"<IIBII{4 * rank}Q", 2, 2, 1, 4 + 32 * rank, rank, *runs)


def _checksummed(blocks: Sequence[bytes]) -> list[bytes]:
    """Each block with its checksum after it."""
    numbers: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        numbers.setdefault(len(block), []).append(number)
    found = list(blocks)
    for of_one_size in numbers.values():
        sums = lookup3(np.array([np.frombuffer(blocks[number], np.uint8) for number in of_one_size]))
        for number, checksum in zip(of_one_size, sums.tolist(), strict=True):
            found[number] += struct.pack("<I", checksum)
    return found


def lookup3(rows: np.ndarray) -> np.ndarray:
    """The hash that HDF5 calls a checksum, of each row of bytes, as uint32.

    Bob Jenkins, lookup3.c, function hashlittle with an initial value of 0.
    """
    length = rows.shape[1]
    words = np.zeros((len(rows), -(-length // 12) * 12), np.uint8)
    words[:, :length] = rows
    columns = words.view("<u4").astype(np.uint32).T
    a, b, c = (np.full(len(rows), (0xDEADBEEF + length) % 2**32, np.uint32) for _ in range(3))

    def turned(x: np.ndarray, bits: int) -> np.ndarray:
        return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))

    for place in range(0, len(columns), 3):
        a, b, c = a + columns[place], b + columns[place + 1], c + columns[place + 2]
        if place + 3 == len(columns):
            break
        a, c = (a - c) ^ turned(c, 4), c + b
        b, a = (b - a) ^ turned(a, 6), a + c
        c, b = (c - b) ^ turned(b, 8), b + a
        a, c = (a - c) ^ turned(c, 16), c + b
        b, a = (b - a) ^ turned(a, 19), a + c
        c, b = (c - b) ^ turned(b, 4), b + a
    c = (c ^ b) - turned(b, 14)
    a = (a ^ c) - turned(c, 11)
    b = (b ^ a) - turned(a, 25)
    c = (c ^ b) - turned(b, 16)
    a = (a ^ c) - turned(c, 4)
    b = (b ^ a) - turned(a, 14)
    return (c ^ b) - turned(b, 24)


def _add_heaps(added: _Bytes, blocks: Sequence[bytes]) -> list[tuple[int, int]]:
    """Add global heaps with these blocks; returns for each the address of its heap, and its number there."""
    found: list[tuple[int, int]] = []
    heap: list[bytes] = []
    size = 16

    def finish() -> None:
        nonlocal size
        rest = _HEAP_BYTES - size  # object 0 is what is left of the least size; less than 16 bytes have no header
        if rest > 0:
            heap.append((struct.pack("<HHxxxxQ", 0, 0, rest) if rest >= 16 else b"").ljust(rest, b"\0"))
        address = added.add(struct.pack("<4sBxxxQ", b"GCOL", 1, max(size, _HEAP_BYTES)) + b"".join(heap))
        found.extend((address, number) for number in range(1, len(heap) + 1 - (rest > 0)))
        heap.clear()
        size = 16

    for block in blocks:
        data = struct.pack("<HHxxxxQ", len(heap) + 1, 0, len(block)) + _padded(block)
        if heap and size + len(data) > _HEAP_BYTES:
            finish()
            data = struct.pack("<H", 1) + data[2:]
        heap.append(data)
        size += len(data)
    if heap:
        finish()
    return found


# -- links ------------------------------------------------------------------------------------------------------------


def _add_symbols(added: _Bytes, links: Sequence[tuple[bytes, int]]) -> tuple[int, int]:
    """Add a group with links in the order of their names; returns the addresses of its tree and its heap of names."""
    names = [b"", *(name for name, _ in links)]
    padded = [name + bytes(8 - len(name) % 8) for name in names]  # each ends with a zero byte
    places = list(accumulate(map(len, padded), initial=0))
    data = b"".join(padded)
    segment = added.add(data)
    heap = added.add(struct.pack("<4sxxxxQQQ", b"HEAP", len(data), 1, segment))  # 1: nothing in it is free
    # Of each node its address, and where its last name is.
    nodes: list[tuple[int, int]] = []
    for first in range(0, len(links), _SYMBOLS):
        part = links[first : first + _SYMBOLS]
        leaf = struct.pack("<4sBxH", b"SNOD", 1, len(part))
        for number, (_, address) in enumerate(part, first + 1):
            leaf += struct.pack("<QQ24x", places[number], address)
        nodes.append((added.add(leaf.ljust(_LEAF_BYTES, b"\0")), places[first + len(part)]))
    level = 0
    while level == 0 or len(nodes) > 1:
        nodes = _add_level(added, level, nodes)
        level += 1
    return nodes[0][0], heap


def _add_level(added: _Bytes, level: int, children: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Add the nodes above some nodes of a tree."""
    found = []
    before = 0  # of the name that is before all names of a node: at first the empty one
    for first in range(0, len(children), _CHILDREN):
        part = children[first : first + _CHILDREN]
        left = struct.pack("<Q", added.address - _NODE_BYTES) if first else _UNDEFINED
        right = struct.pack("<Q", added.address + _NODE_BYTES) if first + _CHILDREN < len(children) else _UNDEFINED
        node = struct.pack("<4sBBH8s8sQ", b"TREE", 0, level, len(part), left, right, before)
        for address, last in part:
            node += struct.pack("<QQ", address, last)
        found.append((added.add(node.ljust(_NODE_BYTES, b"\0")), part[-1][1]))
        before = part[-1][1]
    return found
