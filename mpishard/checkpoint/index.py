"""The index of a checkpoint: its facts, and the table of which box of which tensor lies where in the files of pieces.

On request it also has every tensor as a whole, by name, as a virtual data set over the files of pieces: for other HDF5
programs.  Mpishard itself reads the pieces that the table names: a virtual data set without its sources silently reads
as fill values.

An index may have any origin: whatever mpishard takes from it is checked.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpishard.arguments import mapping
from mpishard.checkpoint.pieces import (
    DTYPES,
    INDEX,
    USER_BLOCK,
    VERSION,
    Contents,
    StoredPiece,
    file_inside,
    naming,
    new_file,
    pieces_file,
    read_mark,
    refusing,
    writer_of,
)
from mpishard.io import hdf5
from mpishard.layout.boxes import Box, check_cover, whole_box
from mpishard.layout.run_state import link_name
from mpishard.version import VERSION as MPISHARD_VERSION

_FORMAT = "mpishard checkpoint"
_OWN = {"format": str, "version": int, "mpishard_version": str, "id": str, "generation": int, "saved": str}
_TABLES = ("tensors", "kinds", "pieces")
_JSON = ".json"
_FACT = re.compile(r"[A-Za-z]\w*([.-]\w+)*", re.ASCII)
_ID = re.compile(r"[0-9a-f]{32}")
_MOST_ELEMENTS = 2**60
_KIND = re.compile(r"(?!(json|history)\b)\w+(/\w+)?", re.ASCII)


def index_mark(id: str) -> bytes:
    """The user block of the index of the checkpoint `id`."""
    return f"mpishard index {id}\n".encode().ljust(USER_BLOCK, b"\0")


# -- writing ----------------------------------------------------------------------------------------------------------


def write_index(
    path: Path,
    *,
    id: str,
    generation: int,
    tensors: Mapping[str, Sequence[int]],
    kinds: Mapping[str, np.dtype],
    pieces: Iterable[StoredPiece],
    facts: Mapping[str, Any],
    virtual: bool = False,
) -> None:
    """Write the index of a checkpoint into a new file, which is closed, but not synced to the disk.

    `virtual` adds a virtual data set for each tensor of each kind, about 0.3 ms of CPU time each.  ValueError if pieces
    do not cover each element once, or kinds or facts cannot be stored.
    """
    pieces = list(pieces)
    tables = {
        "tensors": [[name, list(shape)] for name, shape in tensors.items()],
        "kinds": {kind: np.dtype(dtype).name for kind, dtype in kinds.items()},
        "pieces": _pieces_table(tensors, kinds, pieces),
    }
    texts = {name: json.dumps(table) for name, table in tables.items()}
    check_facts(facts)
    for kind in kinds:
        _check_kind(kind)
    by_tensor = _check_pieces(tensors, kinds, pieces)
    with new_file(path, index_mark(id)) as (h5, disk):
        h5.attrs.update(format=_FORMAT, version=VERSION, mpishard_version=MPISHARD_VERSION, id=id)
        h5.attrs.update(generation=generation, saved=datetime.now(UTC).isoformat(timespec="seconds"))
        for name, value in facts.items():
            if name.endswith(_JSON):
                texts[name.removesuffix(_JSON)] = json.dumps(value, sort_keys=True)
            elif isinstance(value, np.ndarray):
                h5.create_dataset(f"history/{name}", data=value)
            else:  # h5py takes no text of another class, as NumPy's
                h5.attrs[name] = str.__str__(value) if isinstance(value, str) else value
        for name, text in texts.items():
            h5.create_dataset(f"json/{name}", data=text, dtype=h5py.string_dtype())
        if virtual:
            _add_virtual_datasets(h5, tensors, kinds, by_tensor)
        disk.check()


def _pieces_table(
    tensors: Mapping[str, Sequence[int]], kinds: Iterable[str], pieces: Iterable[StoredPiece]
) -> dict[str, list[list[Any]]]:
    """For each kind its pieces, in the order of each file: number of the tensor, writer, and box unless it is whole."""
    numbers = {name: number for number, name in enumerate(tensors)}
    wholes = {name: whole_box(shape) for name, shape in tensors.items()}
    table: dict[str, list[list[Any]]] = {kind: [] for kind in kinds}
    writers: dict[str, int] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.start)):
        if piece.file not in writers:
            writers[piece.file] = writer_of(piece.file)
        if piece.kind in table and piece.name in numbers:
            box = [] if piece.box == wholes[piece.name] else [piece.box]
            table[piece.kind].append([numbers[piece.name], writers[piece.file], *box])
    return table


def check_facts(facts: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless an index can store these facts, as `RunState.facts`."""
    for name, value in mapping("facts", facts, "names and values").items():
        _check_fact(name, value)


def _check_fact(name: str, value: Any) -> None:
    plain = str(name).removesuffix(_JSON)
    if not _FACT.fullmatch(plain) or name in _OWN or (name != plain and plain in _TABLES):
        raise ValueError(f"a fact of a checkpoint cannot be named {name!r}; take letters, digits, '_', '-' and '.'")
    if name != plain:
        try:
            json.dumps(value, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"JSON cannot hold the fact {name!r}: {error}") from None
    elif isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iuf":
            raise ValueError(f"the fact {name!r} is {value.dtype} {value.shape}; arrays are of numbers, and 1-D")
    elif not isinstance(value, bool | int | float | str | np.bool | np.integer | np.floating):
        raise ValueError(f"the fact {name!r} is a {type(value).__name__}; name it '{name}.json' to store it as JSON")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"the fact {name!r} is {value}, more than 64 bits; name it '{name}.json' to store it as JSON")
    elif isinstance(value, str) and "\0" in value:
        raise ValueError(f"the fact {name!r} has a zero byte; name it '{name}.json' to store it as JSON")


def _add_virtual_datasets(
    h5: h5py.File,
    tensors: Mapping[str, Sequence[int]],
    kinds: Mapping[str, np.dtype],
    pieces: Mapping[tuple[str, str], Sequence[StoredPiece]],
) -> None:
    """Add each tensor of each kind as a data set over its pieces; NaN where a piece is missing."""
    ends: Counter[tuple[str, str]] = Counter()
    for piece in itertools.chain.from_iterable(pieces.values()):
        ends[piece.file, piece.kind] = max(ends[piece.file, piece.kind], piece.start + piece.size)
    for kind, dtype in kinds.items():
        group = h5.require_group(kind)
        stored_as, nan = h5py.h5t.py_create(dtype.newbyteorder("<")), np.array(np.nan, dtype)
        for name, shape in tensors.items():
            # With h5py's VirtualLayout one data set takes 1 ms and more.
            space, plist = h5py.h5s.create_simple(tuple(shape)), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_fill_value(nan)
            for piece in pieces[kind, name]:
                source = h5py.h5s.create_simple((ends[piece.file, kind],))
                source.select_hyperslab((piece.start,), (piece.size,))
                if shape:
                    space.select_hyperslab(tuple(start for start, _ in piece.box), piece.shape)
                plist.set_virtual(space, piece.file.encode(), piece.dataset.encode(), source)
            space.select_all()
            h5py.h5d.create(group.id, link_name(name).encode(), stored_as, space, plist)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Contents:
    """Read the index in the folder of a checkpoint, but no values; ValueError if it is not as `write_index` writes it.

    Check the hashes of the manifest before: flipped bits in an HDF5 file can crash the library.
    """
    folder = Path(folder)
    path = file_inside(folder, INDEX)
    with refusing(path):
        mark = read_mark(path)
        with hdf5.open_to_read(path, locking=False) as h5:
            own = _check_origin(h5, mark)
            texts = {name: _text(h5, name) for name in hdf5.children(h5, "json")}
            tensors, kinds = _tensors(texts.pop("tensors")), _kinds(texts.pop("kinds"))
            history = hdf5.children(h5, "history")
            pieces = _pieces_in(texts.pop("pieces"), tensors, kinds)
            facts = {name: hdf5.attribute(h5, name) for name in h5.attrs if name not in own}
            facts |= {name + _JSON: value for name, value in texts.items()}
            facts |= {name: _numbers(h5, name) for name in history}
        _check_pieces(tensors, kinds, pieces)
        for file in sorted({piece.file for piece in pieces}):
            file_inside(folder, file)
    written = own["id"], own["generation"], own["saved"], own["mpishard_version"]
    return Contents(folder, *written, facts, tensors, kinds, tuple(pieces))


def _check_origin(h5: h5py.File, mark: bytes) -> dict[str, Any]:
    """The attributes from `write_index`; ValueError unless this is an index that this version can read."""
    own: dict[str, Any] = {name: hdf5.attribute(h5, name) if name in h5.attrs else None for name in _OWN}
    if own["format"] != _FORMAT:
        raise ValueError(f"its format is {own['format']!r}, not {_FORMAT!r}")
    if own["version"] != VERSION:
        raise ValueError(
            f"it has version {own['version']} of the format, written by mpishard {own['mpishard_version']}; "
            f"this mpishard {MPISHARD_VERSION} reads version {VERSION}: read it with the mpishard that wrote it"
        )
    for name, kind in _OWN.items():
        if type(own[name]) is not kind:
            raise ValueError(f"its attribute {name!r} is {own[name]!r}")
    if not _ID.fullmatch(own["id"]) or mark != index_mark(own["id"]):
        raise ValueError(f"its id {own['id']!r} is not that of its first bytes, {mark[:47]!r}")
    return own


def _text(h5: h5py.File, name: str) -> Any:
    """The value of the JSON text in a data set."""
    dataset = hdf5.open_plain(h5, f"json/{name}")
    text = h5py.check_string_dtype(dataset.dtype)
    if dataset.shape != () or text is None or text.length is not None:
        raise ValueError(f"its table {name} is {dataset.dtype} {dataset.shape}, not text")
    return json.loads(dataset[()])


def _numbers(h5: h5py.File, name: str) -> np.ndarray:
    dataset = hdf5.open_plain(h5, f"history/{name}")
    if dataset.ndim != 1 or dataset.dtype.kind not in "iuf":
        raise ValueError(f"its array {name} is {dataset.dtype} {dataset.shape}; wanted one of numbers, and 1-D")
    return dataset[()]


def _tensors(table: Any) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in table:
        extents = all(type(extent) is int and 0 <= extent < _MOST_ELEMENTS for extent in shape)
        if type(name) is not str or not name or name in found or not extents or prod(shape) > _MOST_ELEMENTS:
            raise ValueError(f"its table of tensors has {name!r} of shape {shape!r}")
        found[name] = tuple(shape)
    return found


def _kinds(table: Any) -> dict[str, np.dtype]:
    found = {}
    for kind, dtype in table.items():
        _check_kind(kind)
        if dtype not in [known.name for known in DTYPES]:
            raise ValueError(f"its {kind} are {dtype}; this mpishard reads {', '.join(map(str, DTYPES))}")
        found[kind] = np.dtype(dtype)
    return found


def _pieces_in(table: Any, tensors: Mapping[str, tuple[int, ...]], kinds: Mapping[str, np.dtype]) -> list[StoredPiece]:
    """The pieces of which `_pieces_table` made a table; ValueError if it is of another form."""
    if table.keys() != kinds.keys():
        raise ValueError(f"its table of pieces has {', '.join(table)}; wanted {', '.join(kinds)}")
    names = list(tensors)
    wholes = {name: whole_box(shape) for name, shape in tensors.items()}
    files: dict[int, str] = {}
    found: list[StoredPiece] = []
    last: list[StoredPiece] = []
    last_rows: Any = None
    for kind, rows in table.items():
        if rows == last_rows:  # kinds are mostly cut identically
            last = [StoredPiece(kind, each.name, each.box, each.file, each.start) for each in last]
            found += last
            continue
        last, last_rows = [], rows
        ends: Counter[int] = Counter()
        for row in rows:
            number, writer, *boxes = row
            bounds = [bound for box in boxes for run in box for bound in run]
            sound = all(type(each) is int and each >= 0 for each in (number, writer, *bounds))
            if not sound or number >= len(names) or len(boxes) > 1:
                raise ValueError(f"its table of pieces has {row!r}")
            name = names[number]
            box = tuple((start, stop) for start, stop in boxes[0]) if boxes else wholes[name]
            if writer not in files:
                files[writer] = pieces_file(writer)
            piece = StoredPiece(kind, name, box, files[writer], ends[writer])
            last.append(piece)
            ends[writer] += piece.size
        found += last
    return found


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_kind(kind: str) -> None:
    """Raise ValueError unless `kind` can be the group of an array, such as ``"optimizer/exp_avg"``."""
    if not _KIND.fullmatch(kind):
        raise ValueError(f"{kind!r} cannot be the kind of an array; wanted a name, or two with a slash between")


def _check_pieces(
    tensors: Mapping[str, Sequence[int]], kinds: Iterable[str], pieces: Iterable[StoredPiece]
) -> dict[tuple[str, str], list[StoredPiece]]:
    """Group the pieces by kind and tensor; ValueError unless they cover each element once."""
    found: dict[tuple[str, str], list[StoredPiece]] = {(kind, name): [] for kind in kinds for name in tensors}
    for piece in pieces:
        if (piece.kind, piece.name) not in found:
            raise ValueError(f"{piece.kind} of tensor {piece.name!r} are not among the tensors and kinds")
        found[piece.kind, piece.name].append(piece)
    wholes = {name: whole_box(shape) for name, shape in tensors.items()}
    covers: dict[str, list[Box]] = {}  # kinds are mostly cut identically
    for (kind, name), parts in found.items():
        boxes = [part.box for part in parts]
        if boxes == [wholes[name]] and 0 not in tensors[name]:
            continue
        with naming(f"{kind} of tensor {name!r}"):
            if covers.get(name) != boxes:
                check_cover(tensors[name], boxes)
                covers[name] = boxes
    return found
