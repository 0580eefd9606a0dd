"""The folder of a run's checkpoints: their names, finding them, publishing a new one, and removing old ones.

A checkpoint is written in a folder whose name begins with ``.unfinished``, and renamed when every byte of it is on the
disk.  So a folder with the name of a checkpoint was whole once.  Old ones are renamed before they are removed.

The manifest of a checkpoint lists its files; with it damage is found before HDF5 opens a file.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mpishard.checkpoint import disk
from mpishard.checkpoint.pieces import INDEX
from mpishard.io import files

MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"

_FORMAT = "mpishard checkpoint"
_VERSION = 1
_UNFINISHED = ".unfinished-"
_STEP = re.compile(r"step-(\d{8,})(-\d+)?", re.ASCII)
_HASH = "xxh3_128"
_HEX = re.compile(r"[0-9a-f]{32}", re.ASCII)
_FILE = re.compile(r"index\.h5|pieces-\d{5,}\.h5", re.ASCII)
_LARGEST = 2**28  # bytes of a manifest
# Bytes that are read and hashed at once: they stay in the cache of a core, and suffice to leave the interpreter's lock.
_BLOCK = 2**18


# -- the manifest ------------------------------------------------------------------------------------------------------
#
# HDF5 reads the fill value where a piece of a virtual data set is missing, accepts changed or exchanged pieces, and can
# hang on a corrupt file.  The manifest has the size and hash of every file, and a hash of itself.  A text that is not
# the canonical encoding of its content is rejected, so that every flipped bit is found.


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


def decode_manifest(data: bytes) -> Manifest:
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


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; ValueError if it is missing, cannot be read or is damaged."""
    path = folder / MANIFEST
    try:
        data = files.read(path, _LARGEST, links=False)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        return decode_manifest(data)
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from None


# -- the folder --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A folder with the name of a checkpoint, and its manifest or the problem with it."""

    path: Path
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written."""

    path: Path
    target: Path  # its path after it is published
    id: str
    generation: int
    # Open until the checkpoint is published or abandoned; other processes do not remove the folder meanwhile.
    held: io.FileIO | None = None
    others: frozenset[str] = frozenset()  # ids of the checkpoints in the folder when the save began


def candidate(path: Path) -> Candidate:
    """A folder as a checkpoint: its manifest, or the problem with that."""
    try:
        manifest = read_manifest(path)
        if named_step(path) not in (None, manifest.step):
            raise ValueError(f"{path / MANIFEST} is stale: it belongs to a checkpoint of step {manifest.step}")
        return Candidate(path, manifest)
    except ValueError as error:
        return Candidate(path, None, str(error))


def candidates(run: Path) -> list[Candidate]:
    """The checkpoints in a folder, newest first, then those whose manifest cannot be read, by name.

    Only manifests are read.  A folder that is itself a checkpoint is the only candidate; one that does not exist has
    none.
    """
    if (run / MANIFEST).is_file():
        return [candidate(run)]
    found = [candidate(run / name) for name in _names(run) if _STEP.fullmatch(name) and (run / name).is_dir()]
    return sorted(found, key=_newest_first)


def _newest_first(candidate: Candidate) -> tuple[int, int, str]:
    manifest = candidate.manifest
    age = (1, 0) if manifest is None else (-manifest.generation, -manifest.step)
    return (*age, candidate.path.name)


def _names(run: Path) -> list[str]:
    try:
        return sorted(os.listdir(run))
    except FileNotFoundError:
        return []


def named_step(path: Path) -> int | None:
    """The step in the name of a checkpoint; None for other names."""
    named = _STEP.fullmatch(path.name)
    return None if named is None else int(named[1])


def best_step(run: Path) -> int:
    """The step of the checkpoint that ``best`` points to; 0 without such a checkpoint."""
    try:
        return named_step(Path(os.readlink(run / BEST))) or 0
    except OSError:  # no link
        return 0


def dangling_links(run: Path) -> str:
    """A text for the problem with ``latest`` or ``best``, links for people; empty without a problem."""
    for link in (run / LATEST, run / BEST):
        if not link.is_symlink():
            if link.exists():
                return f"{link} is not a link"
            continue
        name = os.path.normpath(os.readlink(link))
        if not (_STEP.fullmatch(name) and (run / name).is_dir()):
            return f"{link} points to {name!r}, which is no checkpoint of this folder"
    return ""


def next_generation(known: Iterable[Candidate]) -> int:
    """The generation, at least 1, that makes a checkpoint newer than all in its folder."""
    return 1 + max((candidate.manifest.generation for candidate in known if candidate.manifest), default=0)


def unfinished_path(target: Path, id: str) -> Path:
    """The path at which `target` is made until it is whole."""
    return target.with_name(f"{_UNFINISHED}{target.name}-{id}")


def sweep(folder: Path, names: str) -> None:
    """Remove unfinished files of dead processes from a folder; `names` is a regular expression for the final names.

    What cannot be removed stays, and does no harm.
    """
    left = re.compile(rf"{re.escape(_UNFINISHED)}({names})-[0-9a-f]{{8,32}}(\.unheld)?", re.ASCII)
    for path in (folder / name for name in _names(folder) if left.fullmatch(name)):
        with suppress(OSError):
            held = path / MANIFEST if path.is_dir() and not path.is_symlink() else path
            if disk.abandoned(path, held):
                disk.remove(path)


def begin(run: Path, step: int) -> Unfinished:
    """Make the folder in which the checkpoint of a step is written, and if needed the run's folder.

    Unfinished checkpoints of dead runs are removed.  ValueError if the folder is itself a checkpoint.
    """
    if (run / MANIFEST).is_file():
        raise ValueError("this is itself a checkpoint; save into the folder that it is in, or into another one")
    for folder in reversed([folder for folder in (run, *run.parents) if not folder.is_dir()]):
        with suppress(FileExistsError):  # another run begins, too
            disk.make_folder(folder)
        disk.sync(folder.parent)
    sweep(run, f"{_STEP.pattern}|{LATEST}|{BEST}")
    known = candidates(run)
    id = secrets.token_hex(16)
    taken = {name.removeprefix(_UNFINISHED).rpartition("-")[0] for name in _names(run) if name.startswith(_UNFINISHED)}
    name = wanted = f"step-{step:08d}"
    number = 1
    while name in taken or os.path.lexists(run / name):
        number += 1
        name = f"{wanted}-{number}"
    path = unfinished_path(run / name, id)
    others = frozenset(candidate.manifest.id for candidate in known if candidate.manifest)
    disk.make_folder(path)
    try:
        held = disk.hold(path / MANIFEST)
    except OSError:
        disk.remove(path)
        raise
    return Unfinished(path, run / name, id, next_generation(known), held, others)


def publish(unfinished: Unfinished, manifest: Manifest) -> None:
    """Write the manifest and rename the checkpoint to its name; all other files are on the disk already."""
    path, run = unfinished.path, unfinished.path.parent
    assert unfinished.held is not None
    disk.write(unfinished.held, manifest.encode())
    disk.sync(path / MANIFEST)
    disk.sync(path)
    disk.rename(path, unfinished.target)
    disk.sync(run)


def tidy(published: Path, keep: int | None, own: Collection[str], best: bool = False) -> list[str]:
    """Point ``latest`` at a published checkpoint, ``best`` too if it is, and remove those older than the newest `keep`.

    Only checkpoints with ids in `own` are counted and removed, and never the one that ``best`` points to.  The
    published checkpoint is whole in any case, so problems are returned as texts, not raised.
    """
    run = published.parent
    problems = []
    for name in (LATEST, BEST) if best else (LATEST,):
        link = unfinished_path(run / name, secrets.token_hex(4))
        try:
            disk.make_link(link, published.name)
            disk.replace_link(link, run / name)
            disk.sync(run)
        except OSError as error:
            problems.append(f"{run / name} does not point to {published.name}: {error.strerror or error}")
            with suppress(OSError):
                disk.remove(link)
    if keep is None:
        return problems
    named = {published.name}
    for name in (LATEST, BEST):
        with suppress(OSError):
            named.add(Path(os.readlink(run / name)).name)  # a link of the user's may be absolute, or end in a slash
    try:
        counted = [each.path for each in candidates(run) if each.manifest is not None and each.manifest.id in own]
    except OSError as error:
        return [*problems, f"{run} cannot be listed, so what is beyond keep={keep} stays: {error.strerror or error}"]
    for path in counted[keep:]:
        if path.name in named:
            continue
        try:
            nameless = unfinished_path(path, secrets.token_hex(4))
            disk.rename(path, nameless)
            disk.remove(nameless)
        except OSError as error:
            problems.append(f"{path} is beyond keep={keep} and was not removed: {error.strerror or error}")
    return problems


# Which checkpoints `keep` counts: `tidy` removes all but the newest of these, and leaves others alone.


@dataclass(frozen=True)
class Retained:
    """The checkpoints that one save leaves in the folder: the newest `keep` of those with these ids; None: all of them.

    The best one stays in any case.
    """

    keep: int | None = None
    ids: frozenset[str] = frozenset()
    best: bool = False  # whether the saved checkpoint is the best


class Retention:
    """Counts the checkpoints that this run has saved and, after `adopt`, all in the folder; removes none."""

    def __init__(self, keep: int | None) -> None:
        self.keep = keep
        self.ids: set[str] = set()
        self._adopts = False

    def adopt(self) -> None:
        """Count all checkpoints that are in the folder when the next save begins."""
        self._adopts = True

    def begin(self, unfinished: Unfinished) -> None:
        """Count a checkpoint whose save begins.

        It is counted before it is written: if a rank dies during the save, the checkpoint may be whole without any
        survivor knowing it, and what was never counted would never be removed.
        """
        if self._adopts:
            self.ids |= unfinished.others
        self._adopts = False
        self.ids.add(unfinished.id)

    def retained(self, best: bool = False) -> Retained:
        """The checkpoints that the save that has just begun, of the best one so far or not, leaves in the folder."""
        return Retained(self.keep, frozenset(self.ids), best)


# New files and folders next to a run, which get their name when they are whole and on the disk.


@contextmanager
def provisional(target: Path, size: int) -> Iterator[Path]:
    """A path next to `target`, for about `size` bytes; after an error it is removed.

    Leftovers of killed processes for the same target are removed first. ValueError if the target exists or its folder
    does not; OSError if the disk fails or has too little space.
    """
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already; give another name, or remove it first")
    if not target.parent.is_dir():
        raise ValueError(f"{target} cannot be made: folder {target.parent} does not exist")
    free = disk.free_bytes(target.parent)
    if free is not None and free < size:
        raise OSError(errno.ENOSPC, f"{size} bytes are to be written and {free} are free", str(target))
    sweep(target.parent, re.escape(target.name))
    path = unfinished_path(target, secrets.token_hex(4))
    try:
        yield path
    except BaseException as error:
        disk.remove(path)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(target)) from error
        raise


@contextmanager
def published_file(target: Path, size: int) -> Iterator[Path]:
    """Like `provisional`, for a file, which is synced and renamed to `target` at the end of the context."""
    with provisional(target, size) as path, disk.hold(path):
        yield path
        disk.sync(path)
        disk.rename(path, target)
    disk.sync(target.parent)
