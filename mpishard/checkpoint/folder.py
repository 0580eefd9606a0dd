"""The folder of a run's checkpoints: what each is called, which are there, how a new one appears and old ones go.

A checkpoint is written in a folder whose name begins with ``.unfinished``, and renamed when every byte of it is on the
disk: so what has a checkpoint's name was whole once.  Old ones lose their name before they are removed.
"""

from __future__ import annotations

import io
import os
import re
import secrets
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpishard.checkpoint import disk
from mpishard.checkpoint import manifest as manifests
from mpishard.checkpoint.manifest import Manifest

LATEST = "latest"

_UNFINISHED = ".unfinished-"
_STEP = re.compile(r"step-(\d{8,})(-\d+)?", re.ASCII)


@dataclass(frozen=True)
class Candidate:
    """A folder with the name of a checkpoint: its manifest, or what is wrong with that."""

    path: Path
    manifest: Manifest | None
    problem: str = ""


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written.

    Parameters
    ----------
    path : Path
        Where it is written.
    target : Path
        Where it will be.
    id : str
        32 hexadecimal digits, drawn at random.
    generation : int
        One more than the largest in the folder.
    held : file
        Open until it is published or given up: another process that cleans up leaves it alone meanwhile.
    others : frozenset of str
        Ids of the checkpoints that were in the folder when it began.
    """

    path: Path
    target: Path
    id: str
    generation: int
    held: io.FileIO | None = None
    others: frozenset[str] = frozenset()


def candidates(run: Path) -> list[Candidate]:
    """The checkpoints in a folder, newest first, then those whose manifest cannot be read, by name.

    A folder that is itself a checkpoint is the only one; a folder that is not there has none.

    Raises
    ------
    OSError
        If it cannot be listed.
    """
    if (run / manifests.NAME).is_file():
        return [_candidate(run)]
    found = [_candidate(run / name) for name in _names(run) if _STEP.fullmatch(name) and (run / name).is_dir()]
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
    """The step in the name of a checkpoint; None if it has a name of another kind."""
    named = _STEP.fullmatch(path.name)
    return None if named is None else int(named[1])


def _candidate(path: Path) -> Candidate:
    try:
        manifest = manifests.read(path)
        if named_step(path) not in (None, manifest.step):
            raise ValueError(f"{path / manifests.NAME} is stale: it belongs to a checkpoint of step {manifest.step}")
        return Candidate(path, manifest)
    except ValueError as error:
        return Candidate(path, None, str(error))


def astray(run: Path) -> str:
    """What is wrong with ``latest``, in words; it is a hint for people, nothing is loaded through it."""
    link = run / LATEST
    if not link.is_symlink():
        return f"{link} is not a link" if link.exists() else ""
    name = os.readlink(link)
    if _STEP.fullmatch(name) and (run / name).is_dir():
        return ""
    return f"{link} points to {name!r}, which is no checkpoint of this folder"


def next_generation(known: Iterable[Candidate]) -> int:
    """What makes a checkpoint the newest beside these."""
    return 1 + max((candidate.manifest.generation for candidate in known if candidate.manifest), default=0)


def unfinished_path(target: Path, id: str) -> Path:
    """Where something is made that will be called `target`, until it is whole."""
    return target.with_name(f"{_UNFINISHED}{target.name}-{id}")


def sweep(folder: Path, names: str) -> None:
    """Remove what processes that are dead left in a folder of things to be called as a regular expression says.

    What cannot be removed stays: it is in nobody's way.
    """
    left = re.compile(rf"{re.escape(_UNFINISHED)}({names})-[0-9a-f]{{8,32}}", re.ASCII)
    for path in (folder / name for name in _names(folder) if left.fullmatch(name)):
        with suppress(OSError):
            held = path / manifests.NAME if path.is_dir() and not path.is_symlink() else path
            if disk.abandoned(path, held):
                disk.remove(path)


def begin(run: Path, step: int) -> Unfinished:
    """Make the folder in which the checkpoint of a step is written, and the run's folder where needed.

    What dead runs left unfinished is removed.

    Raises
    ------
    ValueError
        If the folder is itself a checkpoint.
    OSError
    """
    if (run / manifests.NAME).is_file():
        raise ValueError("this is itself a checkpoint; save into the folder that it is in, or into another one")
    for folder in reversed([folder for folder in (run, *run.parents) if not folder.is_dir()]):
        with suppress(FileExistsError):  # of another run that begins
            disk.make_folder(folder)
        disk.sync(folder.parent)
    sweep(run, f"{_STEP.pattern}|{LATEST}")
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
        held = disk.hold(path / manifests.NAME)
    except OSError:
        disk.remove(path)
        raise
    return Unfinished(path, run / name, id, next_generation(known), held, others)


def publish(unfinished: Unfinished, manifest: Manifest) -> None:
    """Write the manifest and give the checkpoint its name; all its other files are on the disk already.

    Raises
    ------
    OSError
    """
    path, run = unfinished.path, unfinished.path.parent
    assert unfinished.held is not None
    disk.write(unfinished.held, manifest.encode())
    disk.sync(path / manifests.NAME)
    disk.sync(path)
    disk.rename(path, unfinished.target)
    disk.sync(run)


def tidy(published: Path, keep: int | None, own: Collection[str]) -> list[str]:
    """Point ``latest`` at a checkpoint that is on the disk, and remove what is older than the newest `keep`.

    Only checkpoints whose ids are among `own` count, and go.  The checkpoint is whole whatever happens here, so what
    goes wrong is told in words and not raised.
    """
    run = published.parent
    told = []
    link = unfinished_path(run / LATEST, secrets.token_hex(4))
    try:
        disk.make_link(link, published.name)
        disk.replace_link(link, run / LATEST)
        disk.sync(run)
    except OSError as error:
        told.append(f"{run / LATEST} does not point to {published.name}: {error.strerror or error}")
    if keep is None:
        return told
    named = {published.name}
    with suppress(OSError):
        named.add(os.readlink(run / LATEST))
    try:
        counted = [each.path for each in candidates(run) if each.manifest is not None and each.manifest.id in own]
    except OSError as error:
        return [*told, f"{run} cannot be listed, so what is beyond keep={keep} stays: {error.strerror or error}"]
    for path in counted[keep:]:
        if path.name in named:
            continue
        try:
            nameless = unfinished_path(path, secrets.token_hex(4))
            disk.rename(path, nameless)
            disk.remove(nameless)
        except OSError as error:
            told.append(f"{path} is beyond keep={keep} and was not removed: {error.strerror or error}")
    return told
