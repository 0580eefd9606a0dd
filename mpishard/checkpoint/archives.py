"""Checkpoints without a run: sources of whole tensors, converted to a checkpoint, to one plain file or to an archive.

Archives are files of all tensors of a model that other programs read: safetensors and NumPy archives (npz).  Parameters
have their names, slots of optimizer state are called ``optimizer/<slot>/<tensor>``.  The facts of a run, other than
arrays, are stored as JSON: in the metadata of a safetensors file, or in the zip comment of an npz.  Files are read as
hostile: nothing is unpickled, and the claims of a header are first checked against the size of the file.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from mpishard.arguments import printable
from mpishard.backend.array import FLOATS
from mpishard.checkpoint import disk
from mpishard.checkpoint.disk import refusing_links
from mpishard.checkpoint.folder import (
    MANIFEST,
    FileEntry,
    Manifest,
    Unfinished,
    hash_file,
    named_step,
    provisional,
    publish,
    published_file,
)
from mpishard.checkpoint.index import write_index
from mpishard.checkpoint.pieces import (
    INDEX,
    USER_BLOCK,
    CheckpointReader,
    Contents,
    PieceValues,
    StoredPiece,
    new_file,
    pieces_file,
    stored_pieces,
    write_pieces,
)
from mpishard.io import files, hdf5
from mpishard.layout.boxes import Box, boxes_of_range, inside, split, whole_box
from mpishard.layout.run_state import PARAMETERS, SLOT, link_name
from mpishard.layout.tensors import WHOLE, ParameterSpec, cut_holding
from mpishard.lazy import of_extra

BLOCK = 2**22  # elements read at once
SUFFIXES = (".safetensors", ".npz")
_SLOTS = SLOT.format("")
_CODES: dict[str, np.dtype] = {"F16": np.dtype(np.float16), "F32": np.dtype(np.float32), "F64": np.dtype(np.float64)}
_MOST_DIMENSIONS = 32  # of HDF5
_EXTENT_LIMIT = 2**60  # sizes of longer tensors would overflow int64
_FACTS = "mpishard"
_LONGEST_COMMENT = 2**16 - 1
_MOST_DEFLATED = 1032  # largest number of bytes that deflate makes of one
# An archive that unpacks to more bytes than the first must not unpack to more than its size times the second.
_LEAST_REFUSED, _MOST_UNPACKED = 2**26, 100
# What has the tensors of a model by name, with one array for each kind.
Source: TypeAlias = "CheckpointReader | Archive"


def total_bytes(source: Source, kinds: Iterable[str]) -> int:
    """The size of the tensors of these kinds in bytes."""
    return sum(map(prod, source.tensors.values())) * sum(source.kinds[kind].itemsize for kind in kinds)


def blocks(shape: Sequence[int]) -> Iterator[Box]:
    """Boxes of at most `BLOCK` elements that cover a tensor in row-major order."""
    size = prod(shape)
    for start in range(0, size, BLOCK):
        yield from boxes_of_range(shape, start, min(start + BLOCK, size))


# -- checkpoints and plain files ---------------------------------------------------------------------------------------


def write_checkpoint(source: Source, target: Path, *, files: int = 1, generation: int, id: str) -> None:
    """Write a checkpoint with the tensors of a source, cut evenly over at most `files` files, one piece at a time.

    Its index shows them whole to other HDF5 programs.

    The folder `target` must not exist; it appears as a whole or not at all. ValueError if it exists or the source
    cannot be read, OSError if the disk fails.
    """
    step = source.facts.get("step", 0)
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"a checkpoint is of a step, a number of at least 0, not of {step!r}")
    if named_step(target) not in (None, step):
        raise ValueError(f"{target} is the name of a checkpoint of another step than {step}; give step-{step:08d}")
    if files < 1:
        raise ValueError(f"a checkpoint has at least 1 file of pieces, got {files}")
    specs = [ParameterSpec(name, shape) for name, shape in source.tensors.items()]
    whole = WHOLE.holding(specs)
    cuts = split(sum(spec.size for spec in specs), files)
    pieces: list[StoredPiece] = []
    with provisional(target, total_bytes(source, source.kinds)) as path:
        disk.make_folder(path)
        with disk.hold(path / MANIFEST) as held:
            for writer, bounds in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
                layout = cut_holding(whole, [bounds])
                own = [
                    PieceValues(kind, piece.name, piece.box, partial(source.read, kind, piece.name, piece.box))
                    for kind in source.kinds
                    for piece in layout
                ]
                if own:
                    file = pieces_file(writer)
                    write_pieces(path / file, own, id=id, writer=writer)
                    pieces += stored_pieces([piece.where for piece in own], file)
            write_index(
                path / INDEX,
                id=id,
                generation=generation,
                tensors=source.tensors,
                kinds=source.kinds,
                pieces=pieces,
                facts=source.facts,
                virtual=True,
            )
            entries = {}
            for name in sorted({piece.file for piece in pieces} | {INDEX}):
                disk.sync(path / name)
                entries[name] = FileEntry(*hash_file(path / name))
            publish(Unfinished(path, target, id, generation, held), Manifest(id, generation, step, entries))


def write_plain(contents: Contents, target: Path) -> None:
    """Write one HDF5 file with the facts of a whole checkpoint and its tensors as plain data sets, of the same names.

    The file must not exist; it appears as a whole or not at all.  ValueError if it exists or a piece does not match the
    index, OSError if the disk fails.
    """
    mark = f"mpishard plain {contents.id}\n".encode().ljust(USER_BLOCK, b"\0")
    with CheckpointReader(contents) as source, published_file(target, total_bytes(source, source.kinds)) as path:
        index_file = contents.folder / INDEX
        with hdf5.open_to_read(index_file, locking=False) as index, new_file(path, mark, held=True) as (h5, file):
            h5.attrs.update(index.attrs)
            h5.attrs["format"] = "mpishard plain checkpoint"
            for group in ("json", "history"):
                if group in index:
                    index.copy(group, h5)
            del h5["json/pieces"]  # a plain file has no pieces
            for kind, dtype in contents.kinds.items():
                for name, shape in contents.tensors.items():
                    dataset = h5.create_dataset(f"{kind}/{link_name(name)}", shape, dtype)
                    for box in blocks(shape):
                        dataset[tuple(slice(*run) for run in box)] = source.read(kind, name, box)
                        file.check()


# -- archives ----------------------------------------------------------------------------------------------------------


def format_of(file: Path) -> str:
    """The suffix of a file; ValueError if it is none of `SUFFIXES`."""
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file} ends in {file.suffix or 'nothing'}; name it *{' or *'.join(SUFFIXES)}")
    return file.suffix


def write_archive(source: Source, file: Path, *, optimizer: bool = False) -> None:
    """Write parameters, and slots of optimizer state if asked, to a new file in the format of its suffix, by blocks.

    ValueError if the file exists, its suffix is unknown or a name cannot be written; OSError if the disk fails, with
    nothing left behind.
    """
    write = _write_safetensors if format_of(file) == ".safetensors" else _write_npz
    kinds = [kind for kind in source.kinds if kind == PARAMETERS or (optimizer and kind.startswith(_SLOTS))]
    labels = {_label(kind, name): (kind, name) for kind in kinds for name in source.tensors}
    for name in source.tensors:
        if name.startswith(_SLOTS) or "\0" in name or name == "__metadata__":
            raise ValueError(f"a tensor named {name!r} clashes with other entries of {file.name}; rename it")
    with published_file(file, total_bytes(source, kinds)) as path, open(path, "wb", opener=refusing_links) as stream:
        write(source, labels, stream)


def _label(kind: str, name: str) -> str:
    return name if kind == PARAMETERS else f"{kind}/{name}"


def _facts_text(source: Source) -> str:
    return json.dumps({name: value for name, value in source.facts.items() if not isinstance(value, np.ndarray)})


def _write_safetensors(source: Source, labels: Mapping[str, tuple[str, str]], stream: IO[bytes]) -> None:
    # The package's own writer needs all tensors in memory.  The widest dtype comes first, so that all are aligned.
    codes = {dtype: code for code, dtype in _CODES.items()}
    order = sorted(labels, key=lambda label: -source.kinds[labels[label][0]].itemsize)
    header: dict[str, Any] = {"__metadata__": {_FACTS: _facts_text(source)}}
    end = 0
    for label in order:
        kind, name = labels[label]
        start, end = end, end + prod(source.tensors[name]) * source.kinds[kind].itemsize
        header[label] = {
            "dtype": codes[source.kinds[kind]],
            "shape": source.tensors[name],
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    stream.write(struct.pack("<Q", len(text)) + text)
    for label in order:
        _write_values(source, *labels[label], stream)


def _write_npz(source: Source, labels: Mapping[str, tuple[str, str]], stream: IO[bytes]) -> None:
    comment = json.dumps({_FACTS: json.loads(_facts_text(source))}).encode()
    if len(comment) > _LONGEST_COMMENT:
        raise ValueError(
            f"the facts of this run are {len(comment)} bytes, too many for an npz; export to *.safetensors"
        )
    with zipfile.ZipFile(stream, "w") as archive:
        archive.comment = comment
        for label, (kind, name) in labels.items():
            with archive.open(f"{label}.npy", "w", force_zip64=True) as member:
                descr = np.lib.format.dtype_to_descr(source.kinds[kind].newbyteorder("<"))
                header = {"descr": descr, "fortran_order": False, "shape": source.tensors[name]}
                np.lib.format.write_array_header_1_0(member, header)
                _write_values(source, kind, name, member)


def _write_values(source: Source, kind: str, name: str, stream: IO[bytes]) -> None:
    little = source.kinds[kind].newbyteorder("<")
    for box in blocks(source.tensors[name]):
        stream.write(np.asarray(source.read(kind, name, box), little).reshape(-1).view(np.uint8).data)


class Archive(AbstractContextManager["Archive"]):
    """The tensors of a safetensors or npz file; a `Source`, and a context manager that closes the file.

    ValueError if the file is damaged or has anything but float32 or float64 tensors: parameters of one dtype, and for
    each slot all tensors, of one dtype.
    """

    def __init__(self, file: Path) -> None:
        self.path = file
        format_of(file)
        with self._refused(), ExitStack() as stack:
            opened = _Safetensors(file, stack) if file.suffix == ".safetensors" else _Npz(file, stack)
            self._file: _Safetensors | _Npz = opened
            self.facts: dict[str, Any] = _facts(opened.facts_text)
            self.tensors: dict[str, tuple[int, ...]]
            self.kinds: dict[str, np.dtype]
            self.tensors, self.kinds = self._sort(opened.entries)
            self._stack = stack.pop_all()

    def _sort(
        self, entries: Mapping[str, tuple[tuple[int, ...], np.dtype]]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, np.dtype]]:
        """Shapes of the tensors and dtypes of the kinds, from the labels of a file with their shapes and dtypes."""
        shapes: dict[str, dict[str, tuple[int, ...]]] = {PARAMETERS: {}}
        kinds: dict[str, np.dtype] = {}
        for label, (shape, dtype) in entries.items():
            kind, name = PARAMETERS, label
            if label.startswith(_SLOTS):
                slot, _, name = label.removeprefix(_SLOTS).partition("/")
                kind = SLOT.format(slot)
                if not slot:
                    raise ValueError(f"entry {label!r} is of a slot without a name")
            if not name:
                raise ValueError(f"entry {label!r} names no tensor")
            if len(shape) > _MOST_DIMENSIONS or not all(0 <= extent < _EXTENT_LIMIT for extent in shape):
                raise ValueError(f"{label!r} has shape {shape}, which no tensor has")
            if dtype not in FLOATS:
                raise ValueError(f"{label!r} is {dtype}; convert it to float32 or float64 first")
            if kinds.setdefault(kind, dtype) != dtype:
                raise ValueError(f"{label!r} is {dtype}, others of {kind} are {kinds[kind]}; convert them to one dtype")
            shapes.setdefault(kind, {})[name] = shape
        if not shapes[PARAMETERS]:
            raise ValueError("it holds no tensor of a model")
        for kind, found in shapes.items():
            for name in found.keys() ^ shapes[PARAMETERS].keys():
                raise ValueError(
                    f"tensor {name!r} is in only one of {PARAMETERS} and {kind}; each slot has all tensors"
                )
            for name, shape in found.items():
                if shape != shapes[PARAMETERS][name]:
                    raise ValueError(f"{name!r} is {shapes[PARAMETERS][name]}, but {shape} in {kind}")
        return shapes[PARAMETERS], kinds

    def read(self, kind: str, name: str, box: Box) -> np.ndarray:
        """The values in a box of a tensor, contiguous; reads the whole tensor."""
        with self._refused():
            whole = self._file.read(_label(kind, name))
        return np.asarray(whole[inside(box, whole_box(whole.shape))], self.kinds[kind], order="C")

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Turn the errors that the readers of both formats raise on bad files into one ValueError."""
        try:
            yield
        except _errors_of_readers() as error:
            # zipfile seeks to any offset that the file contains; that error names no file, unlike errors of opening.
            if isinstance(error, OSError) and error.filename is not None:
                raise
            raise ValueError(
                f"{self.path} cannot be read as {self.path.suffix[1:]}: {printable(str(error))}"
            ) from error

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def _facts(text: str | None) -> dict[str, Any]:
    """The facts of a run; none in a file of another program."""
    facts = json.loads(text) if text is not None else {}
    if not isinstance(facts, dict):
        raise ValueError(f"the facts of its run are not an object: {text[:60] if text else text}")
    for name, value in facts.items():
        if not name.endswith(".json") and not isinstance(value, bool | int | float | str):
            raise ValueError(f"the fact {name!r} of its run is a {type(value).__name__}")
    return facts


def _errors_of_readers() -> tuple[type[Exception], ...]:
    of_npz = ValueError, MemoryError, OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, struct.error
    safetensors = sys.modules.get("safetensors")  # only if its reader was used
    return of_npz if safetensors is None else (*of_npz, safetensors.SafetensorError)


class _Safetensors:
    """Labels with shape and dtype, and the values by label, of a safetensors file."""

    def __init__(self, file: Path, stack: ExitStack) -> None:
        safetensors = of_extra("safetensors", "weights", "a file of safetensors")
        # The package checks offsets against the file's size, but of two entries with one name it takes the last.
        files.check(file)
        self._opened = stack.enter_context(safetensors.safe_open(file, "numpy"))
        with os.fdopen(files.open_to_read(file), "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length), object_pairs_hook=_unique)
        metadata = header.pop("__metadata__", None) or {}
        self.facts_text: str | None = metadata.get(_FACTS)
        self.entries: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        for label, entry in header.items():
            if entry["dtype"] not in _CODES:
                raise ValueError(f"{label!r} is {entry['dtype']}; convert it to float32 or float64 first")
            dtype: np.dtype = _CODES[entry["dtype"]]
            self.entries[label] = tuple(entry["shape"]), dtype

    def read(self, label: str) -> np.ndarray:
        return self._opened.get_tensor(label)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Pairs of names and values as a dictionary; ValueError if a name is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, count),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is in it {count} times")
    return found


class _Npz:
    """Labels with shape and dtype, and the values by label, of an npz file."""

    def __init__(self, file: Path, stack: ExitStack) -> None:
        stream = stack.enter_context(os.fdopen(files.open_to_read(file), "rb"))
        self._archive = stack.enter_context(zipfile.ZipFile(stream))
        infos = self._archive.infolist()
        _unique([(info.filename, None) for info in infos])
        size_on_disk = os.fstat(stream.fileno()).st_size
        if sum(info.compress_size for info in infos) > size_on_disk:
            raise ValueError(f"its members overlap, or claim more than its {size_on_disk} bytes")
        self.facts_text = None
        with suppress(ValueError, KeyError, TypeError):  # the comment may be that of another program
            self.facts_text = json.dumps(json.loads(self._archive.comment)[_FACTS])
        self.entries = {info.filename.removesuffix(".npy"): self._entry(info) for info in infos}
        unpacked = sum(info.file_size for info in infos)
        if unpacked > max(_LEAST_REFUSED, _MOST_UNPACKED * size_on_disk):
            raise ValueError(
                f"its {size_on_disk} bytes unpack to {unpacked}, more than {_MOST_UNPACKED} times as many, which no "
                "trained model does; numpy.savez writes such a file without compression"
            )

    def _entry(self, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype]:
        if not info.filename.endswith(".npy"):
            raise ValueError(f"member {info.filename!r} is no array")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"member {info.filename!r} is compressed by method {info.compress_type}")
        if info.file_size > info.compress_size * _MOST_DEFLATED:
            raise ValueError(f"member {info.filename!r} claims {info.file_size} bytes of {info.compress_size}")
        with self._archive.open(info) as member:
            shape, _, dtype = _read_header(member)
            start = member.tell()
        if dtype.hasobject:
            raise ValueError(f"member {info.filename!r} holds Python objects, which are not read")
        if start + prod(shape) * dtype.itemsize != info.file_size:
            raise ValueError(f"member {info.filename!r} claims shape {shape}, which is not its {info.file_size} bytes")
        return shape, dtype.newbyteorder("=")

    def read(self, label: str) -> np.ndarray:
        with self._archive.open(f"{label}.npy") as member:
            return np.lib.format.read_array(member, allow_pickle=False)


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(member)
    raise ValueError(f"it has an array of npy version {version}")
