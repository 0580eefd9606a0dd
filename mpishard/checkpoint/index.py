"""The index of a checkpoint: every tensor as a whole, by name, as a virtual data set over the files of pieces.

Other HDF5 programs read the tensors through it.  Mpishard takes only the locations of the pieces from it, from a table,
and reads the pieces themselves: a virtual data set without its sources silently reads as fill values.

An index may have any origin.  Its tables of tensors and kinds determine what must be in it; anything else is rejected.
"""

from __future__ import annotations

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
from mpishard.checkpoint import checks, virtual_tensors
from mpishard.checkpoint.contents import INDEX, Contents, Origin
from mpishard.checkpoint.disk import DiskFile
from mpishard.checkpoint.pieces import (
    DTYPES,
    USER_BLOCK,
    VERSION,
    StoredPiece,
    new_file,
    pieces_file,
    read_mark,
    writer_of,
)
from mpishard.io import hdf5, virtual_datasets
from mpishard.layout.boxes import whole_box
from mpishard.version import VERSION as MPISHARD_VERSION

_FORMAT = "mpishard checkpoint"
_OWN = {"format": str, "version": int, "mpishard_version": str, "id": str, "generation": int, "saved": str}
_TABLES = ("tensors", "kinds", "pieces")
_JSON = ".json"
_FACT = re.compile(r"[A-Za-z]\w*([.-]\w+)*", re.ASCII)
_ID = re.compile(r"[0-9a-f]{32}")
_MOST_ELEMENTS = 2**60


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
) -> None:
    """Write the index of a checkpoint into a new file.  It is closed, but not synced to the disk.  Not collective.

    Parameters are as in `Contents` and `Origin`.

    Raises
    ------
    OSError
        With the path, if the disk is full or fails.
    ValueError
        If pieces do not cover each element once, or kinds or facts cannot be stored.
    """
    pieces = list(pieces)
    tables = {
        "tensors": [[name, list(shape)] for name, shape in tensors.items()],
        "kinds": {kind: np.dtype(dtype).name for kind, dtype in kinds.items()},
        "pieces": _table(tensors, kinds, pieces),
    }
    texts = {name: json.dumps(table) for name, table in tables.items()}
    check_facts(facts)
    for kind in kinds:
        checks.check_kind(kind)
    by_tensor = checks.check_pieces(tensors, kinds, pieces)
    groups: dict[str, int] = {}

    def add_tensors(disk: DiskFile) -> None:
        added = virtual_tensors.of(tensors, kinds, by_tensor)
        virtual_datasets.fill_groups(disk, [(groups[kind], kinds[kind], each) for kind, each in added if each])

    with new_file(path, index_mark(id), finish=add_tensors) as (h5, disk):
        h5.attrs.update(format=_FORMAT, version=VERSION, mpishard_version=MPISHARD_VERSION, id=id)
        h5.attrs.update(generation=generation, saved=datetime.now(UTC).isoformat(timespec="seconds"))
        for name, value in facts.items():
            if name.endswith(_JSON):
                texts[name.removesuffix(_JSON)] = json.dumps(value, sort_keys=True)
            elif isinstance(value, np.ndarray):
                h5.create_dataset(f"history/{name}", data=value)
            else:
                h5.attrs[name] = value
        for name, text in texts.items():
            h5.create_dataset(f"json/{name}", data=text, dtype=h5py.string_dtype())
        groups |= {kind: virtual_datasets.group_address(h5.create_group(kind)) for kind in kinds}
        disk.check()


def _table(
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
    """Raise unless an index can store these facts.  Not collective.

    Parameters
    ----------
    facts : mapping
        As in `RunState.facts`.

    Raises
    ------
    TypeError
        If they are no mapping.
    ValueError
        With the name of the first that it cannot.
    """
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


# -- reading ----------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Contents:
    """Read the index in the folder of a checkpoint, but no values.  Not collective.

    Check the hashes of the manifest before: flipped bits in an HDF5 file can crash the library.

    Raises
    ------
    ValueError
        If it is missing, of another version, no index, or its tables are not as `write_index` writes them: elements
        covered by no piece or by several, missing files of pieces.  `virtual_tensors.check` checks the rest.
    """
    folder = Path(folder)
    path = checks.file_inside(folder, INDEX)
    with checks.refusing(path):
        mark = read_mark(path)
        with hdf5.open_to_read(path, locking=False) as h5:
            own = _check_origin(h5, mark)
            texts = {name: _text(h5, name) for name in hdf5.children(h5, "json")}
            tensors, kinds = _tensors(texts.pop("tensors")), _kinds(texts.pop("kinds"))
            history = hdf5.children(h5, "history")
            pieces = _placed(texts.pop("pieces"), tensors, kinds)
            facts = {name: hdf5.attribute(h5, name) for name in h5.attrs if name not in own}
            facts |= {name + _JSON: value for name, value in texts.items()}
            facts |= {name: _numbers(h5, name) for name in history}
        checks.check_pieces(tensors, kinds, pieces)
        for file in sorted({piece.file for piece in pieces}):
            checks.file_inside(folder, file)
    origin = Origin(own["id"], own["generation"], own["saved"], own["mpishard_version"])
    return Contents(folder, origin, facts, tensors, kinds, tuple(pieces))


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
        checks.check_kind(kind)
        if dtype not in [known.name for known in DTYPES]:
            raise ValueError(f"its {kind} are {dtype}; this mpishard reads {', '.join(map(str, DTYPES))}")
        found[kind] = np.dtype(dtype)
    return found


def _placed(table: Any, tensors: Mapping[str, tuple[int, ...]], kinds: Mapping[str, np.dtype]) -> list[StoredPiece]:
    """The pieces of `_table`."""
    if table.keys() != kinds.keys():
        raise ValueError(f"its table of pieces has {', '.join(table)}; wanted {', '.join(kinds)}")
    names = list(tensors)
    wholes = {name: whole_box(shape) for name, shape in tensors.items()}
    files: dict[int, str] = {}
    found: list[StoredPiece] = []
    last: list[StoredPiece] = []
    last_rows: Any = None
    for kind, rows in table.items():
        if rows == last_rows:  # kinds are mostly cut alike
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
