"""The folder of a run's checkpoints: what each is called, which are there, how a new one appears and old ones go.

A checkpoint is written in a folder whose name begins with ``.unfinished``, and renamed when every byte of it is on the
disk: so what has a checkpoint's name was whole once.  Old ones lose their name before they are removed.
"""

from __future__ import annotations

import os
import re
import secrets
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
    """

    path: Path
    target: Path
    id: str
    generation: int


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


def begin(run: Path, step: int) -> Unfinished:
    """Make the folder in which the checkpoint of a step is written, and the run's folder where needed.

    What dead runs left unfinished is removed.

    Raises
    ------
    OSError
    """
    if not run.is_dir():
        run.parent.mkdir(parents=True, exist_ok=True)
        disk.make_folder(run)
        disk.sync(run.parent)
    for name in _names(run):
        if name.startswith(_UNFINISHED):
            disk.remove(run / name)
    known = (candidate.manifest for candidate in candidates(run))
    generation = 1 + max((manifest.generation for manifest in known if manifest is not None), default=0)
    id = secrets.token_hex(16)
    name = wanted = f"step-{step:08d}"
    number = 1
    while os.path.lexists(run / name):
        number += 1
        name = f"{wanted}-{number}"
    unfinished = Unfinished(run / f"{_UNFINISHED}{name}-{id}", run / name, id, generation)
    disk.make_folder(unfinished.path)
    return unfinished


def publish(unfinished: Unfinished, manifest: Manifest) -> None:
    """Write the manifest and give the checkpoint its name; all its other files are on the disk already.

    Raises
    ------
    OSError
    """
    path, run = unfinished.path, unfinished.path.parent
    disk.write(path / manifests.NAME, manifest.encode())
    disk.sync(path / manifests.NAME)
    disk.sync(path)
    disk.rename(path, unfinished.target)
    disk.sync(run)


def tidy(published: Path, keep: int | None) -> list[str]:
    """Point ``latest`` at a checkpoint that is on the disk, and remove what is older than the newest `keep`.

    The checkpoint is whole whatever happens here, so what goes wrong is told in words and not raised.
    """
    run = published.parent
    told = []
    link = run / f"{_UNFINISHED}{LATEST}"
    try:
        disk.remove(link)
        disk.make_link(link, published.name)
        disk.replace_link(link, run / LATEST)
        disk.sync(run)
    except OSError as error:
        told.append(f"{run / LATEST} does not point to {published.name}: {error.strerror or error}")
    if keep is None:
        return told
    try:
        named = {published.name, os.readlink(run / LATEST)}
    except OSError:
        named = {published.name}
    known = [candidate.path for candidate in candidates(run) if candidate.manifest is not None]
    for path in known[keep:]:
        if path.name in named:
            continue
        try:
            nameless = run / f"{_UNFINISHED}{path.name}-{secrets.token_hex(4)}"
            disk.rename(path, nameless)
            disk.remove(nameless)
        except OSError as error:
            told.append(f"{path} is beyond keep={keep} and was not removed: {error.strerror or error}")
    return told
