"""The manifest of a checkpoint: the list of its files, with which damage is found before HDF5 opens a file.

HDF5 reads the fill value where a piece of a virtual data set is missing, accepts changed or exchanged pieces, and can
hang on a corrupt file.  The manifest has the size and hash of every file, and a hash of itself.  A text that is not the
canonical encoding of its content is rejected, so that every flipped bit is found.
"""

from __future__ import annotations

import io
import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mpishard.checkpoint.pieces import INDEX, pieces_file
from mpishard.io import files
from mpishard.io.readers import Readers

NAME = "manifest.json"

_FORMAT = "mpishard checkpoint"
_VERSION = 1
# Bytes that are read and hashed at once: they stay in the cache of a core, and suffice to leave the interpreter's lock.
_BLOCK = 2**18
_HASH = "xxh3_128"
_HEX = re.compile(r"[0-9a-f]{32}", re.ASCII)
_FILE = re.compile(r"index\.h5|pieces-\d{5,}\.h5", re.ASCII)
# The first bytes of a file of a checkpoint: the id of the checkpoint, and the writer of the pieces.
_LABEL = re.compile(rb"mpishard (?:index|pieces) ([0-9a-f]{32})(?: (\d{5,}))?\n")
_LARGEST = 2**28


def hash_file(path: Path) -> tuple[int, str]:
    """The size of a file and the xxh3_128 of its content, in hex."""
    hasher, size = xxhash.xxh3_128(), 0
    block = memoryview(bytearray(_BLOCK))
    with io.FileIO(files.open_to_read(path)) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
            size += count
    return size, hasher.hexdigest()


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and hash of a file."""

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """The list of the files of a checkpoint."""

    id: str  # 32 random hexadecimal digits, with which the files of the checkpoint begin
    generation: int  # larger than that of any other checkpoint in the folder at the time of the save
    step: int
    files: Mapping[str, FileEntry]  # all but the manifest, by name

    def encode(self) -> bytes:
        """The manifest as canonical JSON with its own hash."""
        said: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "id": self.id,
            "generation": self.generation,
            "step": self.step,
            "files": {name: {"size": entry.size, _HASH: entry.xxh3_128} for name, entry in self.files.items()},
        }
        said[_HASH] = xxhash.xxh3_128(_canonical(said)).hexdigest()
        return _canonical(said)


def _canonical(said: Any) -> bytes:
    return (json.dumps(said, sort_keys=True, indent=1) + "\n").encode()


def decode(data: bytes) -> Manifest:
    """Decode the result of `Manifest.encode`; ValueError if a single bit differs, or it is of a later version."""
    try:
        said = json.loads(data)
        version = said["version"] if said["format"] == _FORMAT else None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("damaged, or no manifest of an mpishard checkpoint") from None
    if isinstance(version, int) and version > _VERSION:
        raise ValueError(f"of version {version}; this mpishard reads version {_VERSION}, a later one reads it")
    try:
        files = {name: FileEntry(entry["size"], entry[_HASH]) for name, entry in said["files"].items()}
        manifest = Manifest(said["id"], said["generation"], said["step"], files)
        numbers = [manifest.generation, manifest.step, *(entry.size for entry in files.values())]
        sound = (
            manifest.encode() == data
            and all(type(number) is int and number >= 0 for number in numbers)
            and all(_FILE.fullmatch(name) for name in files)
            and all(_HEX.fullmatch(digits) for digits in (manifest.id, *(each.xxh3_128 for each in files.values())))
            and INDEX in files
        )
    except (TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise ValueError("damaged: it differs from what was written")
    return manifest


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint; ValueError if it is missing, cannot be read or is damaged."""
    path = folder / NAME
    try:
        data = files.read(path, _LARGEST, links=False)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        return decode(data)
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from None


def share(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """The files that a rank checks: about as many bytes as other ranks, and about those that it will read.

    Writers and readers are ranks in one order, so that their parts of the model are, too.
    """
    total = sum(entry.size for entry in manifest.files.values()) or 1
    found, before = [], 0
    for name in sorted(manifest.files, key=lambda name: (len(name), name)):
        size = manifest.files[name].size
        if (2 * before + size) * ranks // (2 * total + 1) == rank:
            found.append(name)
        before += size
    return found


def problems(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None, readers: Readers | None = None
) -> list[str]:
    """A text for each problem with some files of a checkpoint, by default all; hashes every byte, without HDF5."""

    def of(name: str) -> str:
        return _problem(folder / name, manifest.files[name], manifest.id)

    names = manifest.files if names is None else names
    found = map(of, names) if readers is None else readers.map(of, names)
    return [problem for problem in found if problem]


def _problem(path: Path, entry: FileEntry, id: str) -> str:
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            what = "a link that may lead elsewhere" if stat.S_ISLNK(about.st_mode) else "no file"
            return f"{path} is {what}"
        if about.st_size != entry.size:
            how = "cut short" if about.st_size < entry.size else "too long"
            return f"{path} is {how}: {about.st_size} bytes of {entry.size}"
        if hash_file(path) == (entry.size, entry.xxh3_128):
            return ""
        return f"{path} is {_how_altered(path, id)}"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"


def _how_altered(path: Path, id: str) -> str:
    with io.FileIO(files.open_to_read(path)) as file:
        label = _LABEL.match(file.read(512) or b"")
    if label is None:
        return "altered: its hash differs from the one in the manifest"
    other = label[1].decode()
    if other != id:
        return f"stale: it belongs to the checkpoint {other}, this one is {id}"
    whose = label[2]
    if whose is not None and path.name != pieces_file(int(whose)):
        return f"exchanged: it holds the pieces of rank {int(whose)}"
    return "altered: its hash differs from the one in the manifest"
