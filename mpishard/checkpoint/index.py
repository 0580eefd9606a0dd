"""The index of a checkpoint: every tensor as a whole, by name, as a virtual data set over the files of pieces.

Other HDF5 programs read the tensors through it.  Mpishard takes only the locations of the pieces from it, and reads the
pieces themselves: a virtual data set without its sources silently reads as fill values.

An index may have any origin.  Its tables of tensors and kinds determine what must be in it; anything else is rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpishard.checkpoint import checks
from mpishard.checkpoint.pieces import BLOCK, DTYPES, VERSION, StoredPiece, new_file, read_mark
from mpishard.io import hdf5
from mpishard.layout.run_state import link_name
from mpishard.version import VERSION as MPISHARD_VERSION

INDEX = "index.h5"
_FORMAT = "mpishard checkpoint"
_OWN = {"format": str, "version": int, "mpishard_version": str, "id": str, "generation": int, "saved": str}
_TABLES = ("tensors", "kinds")
_JSON = ".json"
_FACT = re.compile(r"[A-Za-z]\w*([.-]\w+)*", re.ASCII)
_ID = re.compile(r"[0-9a-f]{32}")
_PIECES = re.compile(r"pieces-[0-9]{5,}\.h5")
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_MOST_ELEMENTS = 2**60


@dataclass(frozen=True)
class Origin:
    """Which checkpoint an index belongs to, and what wrote it.

    Parameters
    ----------
    id : str
        32 hexadecimal digits, unique to this checkpoint.
    generation : int
        Counts the checkpoints of a run.
    saved : str
        Time of the save: ISO 8601, UTC.
    mpishard_version : str
        The version that wrote it.
    """

    id: str
    generation: int
    saved: str = ""
    mpishard_version: str = ""


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, without the values.

    Parameters
    ----------
    folder : Path
        That of the checkpoint.
    origin : Origin
        What has saved it.
    facts : dict
        As in `RunState.facts`.
    tensors : dict
        Names to global shapes, in the order of the model.
    kinds : dict
        The kinds of arrays stored for each tensor, with their dtypes: ``"parameters"``, ``"optimizer/exp_avg"``.
    pieces : tuple of StoredPiece
        Together they cover each element of each tensor and kind once.
    """

    folder: Path
    origin: Origin
    facts: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    kinds: dict[str, np.dtype]
    pieces: tuple[StoredPiece, ...]

    @property
    def id(self) -> str:
        """`Origin.id`."""
        return self.origin.id

    @property
    def generation(self) -> int:
        """`Origin.generation`."""
        return self.origin.generation

    @property
    def saved(self) -> str:
        """`Origin.saved`."""
        return self.origin.saved

    @property
    def mpishard_version(self) -> str:
        """`Origin.mpishard_version`."""
        return self.origin.mpishard_version


def index_mark(id: str) -> bytes:
    """The user block of the index of the checkpoint `id`."""
    return f"mpishard index {id}\n".encode().ljust(BLOCK, b"\0")


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
    tables = {
        "tensors": [[name, list(shape)] for name, shape in tensors.items()],
        "kinds": {kind: np.dtype(dtype).name for kind, dtype in kinds.items()},
    }
    texts = {name: json.dumps(table) for name, table in tables.items()}
    check_facts(facts)
    for kind in kinds:
        checks.check_kind(kind)
    by_tensor = checks.check_pieces(tensors, kinds, pieces)
    with new_file(path, index_mark(id)) as (h5, disk):
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
        for kind, dtype in kinds.items():
            group = h5.create_group(kind).id
            for name, shape in tensors.items():
                _create_whole(group, link_name(name), tuple(shape), np.dtype(dtype), by_tensor[kind, name])
                disk.check()


def check_facts(facts: Mapping[str, Any]) -> None:
    """Raise ValueError unless an index can store these facts.  Not collective.

    Parameters
    ----------
    facts : mapping
        As in `RunState.facts`.

    Raises
    ------
    ValueError
        With the name of the first that it cannot.
    """
    for name, value in facts.items():
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


def _create_whole(
    group: h5py.h5g.GroupID, link: str, shape: tuple[int, ...], dtype: np.dtype, pieces: Sequence[StoredPiece]
) -> None:
    """One tensor as a virtual data set; one without elements as a plain one."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_fill_value(np.array(np.nan, dtype))
    for piece in pieces:
        space, source = _space(shape), _space(piece.shape)
        if shape:
            space.select_hyperslab(tuple(start for start, _ in piece.box), piece.shape)
        # In the names of sources "%b" is a block number, and "%%" a percent sign.
        plist.set_virtual(space, piece.file.encode(), piece.dataset.replace("%", "%%").encode(), source)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    h5py.h5d.create(group, link.encode(), h5py.h5t.py_create(dtype, logical=True), _space(shape), plist, links)


def _space(shape: tuple[int, ...]) -> h5py.h5s.SpaceID:
    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Contents:
    """Read the index in the folder of a checkpoint, but no values.  Not collective.

    Check the hashes of the manifest before: flipped bits in an HDF5 file can crash the library.

    Raises
    ------
    ValueError
        If it is missing, of a later version, no index, or not as `write_index` writes it: links or virtual data sets
        that lead out of the folder, elements covered by no piece or by several, missing files of pieces.
    """
    folder = Path(folder)
    path = checks.file_inside(folder, INDEX)
    with checks.refusing(path):
        mark = read_mark(path)
        with h5py.File(path, "r", locking=False) as h5:
            own = _check_origin(h5, mark)
            texts = {name: _text(h5, name) for name in _children(h5, "json")}
            tensors, kinds = _tensors(texts.pop("tensors")), _kinds(texts.pop("kinds"))
            history = _children(h5, "history")
            checks.check_links(h5, _expected(h5, tensors, kinds, [*texts, *_TABLES], history))
            facts = {name: hdf5.attribute(h5, name) for name in h5.attrs if name not in own}
            facts |= {name + _JSON: value for name, value in texts.items()}
            facts |= {name: _numbers(h5, name) for name in history}
            pieces = [
                piece
                for kind, dtype in kinds.items()
                for name, shape in tensors.items()
                for piece in _mapped(h5, kind, name, shape, dtype)
            ]
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
            f"this mpishard {MPISHARD_VERSION} reads version {VERSION}"
        )
    for name, kind in _OWN.items():
        if type(own[name]) is not kind:
            raise ValueError(f"its attribute {name!r} is {own[name]!r}")
    if not _ID.fullmatch(own["id"]) or mark != index_mark(own["id"]):
        raise ValueError(f"its id {own['id']!r} is not that of its first bytes, {mark[:47]!r}")
    return own


def _children(h5: h5py.File, group: str) -> list[str]:
    """Names in a group, which may be missing; a link out of the file is not followed."""
    if not h5.id.links.exists(group.encode()):
        return []
    hdf5.check_hard_link(h5, group)
    return list(h5[group])


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


def _expected(
    h5: h5py.File, tensors: Iterable[str], kinds: Iterable[str], texts: Sequence[str], history: Sequence[str]
) -> set[str]:
    """The paths of all links of an index with these tables."""
    links = [link_name(name) for name in tensors]
    paths = {f"{kind}/{link}" for kind in kinds for link in links}
    paths |= {f"json/{name}" for name in texts} | {f"history/{name}" for name in history}
    paths |= {"json", *kinds, *(kind.partition("/")[0] for kind in kinds)}
    return paths | ({"history"} if h5.id.links.exists(b"history") else set())


def _mapped(h5: h5py.File, kind: str, name: str, shape: tuple[int, ...], dtype: np.dtype) -> list[StoredPiece]:
    """The pieces of a virtual data set."""
    dataset = h5py.h5d.open(h5.id, f"{kind}/{link_name(name)}".encode())
    with checks.naming_tensor(kind, name):
        pieces: list[StoredPiece] = []
        if 0 in shape:
            hdf5.check_lies_here(dataset)
        else:
            plist = dataset.get_create_plist()
            if plist.get_layout() != h5py.h5d.VIRTUAL:
                raise ValueError("it is not a virtual data set over pieces")
            pieces = [_source(plist, number, kind, name) for number in range(plist.get_virtual_count())]
        # Last: to get the shape HDF5 may open the sources.
        if dataset.shape != shape or dataset.dtype != dtype:
            raise ValueError(f"it is {dataset.dtype} {dataset.shape}, in the tables {dtype} {shape}")
        return pieces


def _source(plist: h5py.h5p.PropDCID, number: int, kind: str, name: str) -> StoredPiece:
    file = plist.get_virtual_filename(number)
    if not _PIECES.fullmatch(file):
        raise ValueError(f"it takes values from {file!r}, which is no file of pieces in this folder")
    dataset = plist.get_virtual_dsetname(number).replace("%%", "%")
    front = f"/{kind}/{link_name(name)}/"
    if not dataset.startswith(front) or not _NUMBER.fullmatch(dataset.removeprefix(front)):
        raise ValueError(f"it takes values from {dataset!r} of {file}; wanted {front}0, 1, and so on")
    box = checks.box_of(plist.get_virtual_vspace(number))
    source = plist.get_virtual_srcspace(number)
    # The index does not have the extent of a source that is used as a whole; `PieceReader` checks it in the data set.
    whole = source.get_select_type() == h5py.h5s.SEL_ALL
    if not whole and checks.box_of(source) != tuple((0, stop - start) for start, stop in box):
        raise ValueError(f"it takes only a part of {dataset} of {file}, or more than it has")
    return StoredPiece(kind, name, box, file, dataset)
