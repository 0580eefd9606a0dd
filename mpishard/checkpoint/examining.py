"""Checkpoints as a person finds them: which there are at a path, and what is wrong with each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mpishard.checkpoint import folder as folders
from mpishard.checkpoint import manifest as manifests
from mpishard.checkpoint.comparing import figures
from mpishard.checkpoint.folder import Candidate
from mpishard.checkpoint.index import Contents, read_index
from mpishard.checkpoint.manifest import INDEX, Manifest
from mpishard.checkpoint.reading import damages
from mpishard.checkpoint.sources import Stored

_MOST_NAMES = 5


@dataclass(frozen=True)
class Examination:
    """A checkpoint as far as it can be read.

    Parameters
    ----------
    folder : Path
    manifest : Manifest or None
        None: it cannot be read, so nothing else was opened.
    contents : Contents or None
        None: the index is damaged.
    problems : tuple of str
        All that is wrong, in words; none: it is whole.
    """

    folder: Path
    manifest: Manifest | None
    contents: Contents | None
    problems: tuple[str, ...]


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one checkpoint, whole or damaged, rather than a folder of several."""
    return any((path / name).is_file() for name in (manifests.NAME, INDEX)) or any(path.glob("pieces-*.h5"))


def found_at(path: Path) -> list[Candidate]:
    """The checkpoint at a path, or through a link there; or those of a run in this folder, newest first.

    Raises
    ------
    ValueError
        If there is none.
    """
    if not path.exists():
        where = f"the link {path} leads to {path.readlink()}, which" if path.is_symlink() else f"{path}"
        nearest = next(above for above in (*path.parents, Path.cwd()) if above.is_dir())
        named = "the working directory" if nearest == Path() else f"{nearest}"
        raise ValueError(f"{where} is not there; {_what_is_there(nearest, named)}")
    path = path.resolve()
    if not path.is_dir():
        if is_checkpoint(path.parent):
            raise ValueError(f"{path} is a file of the checkpoint {path.parent}; give that folder")
        raise ValueError(f"{path} is a file; give the folder of a checkpoint, or of the checkpoints of a run")
    found = folders.candidates(path)
    if not found and is_checkpoint(path):
        try:
            return [Candidate(path, manifests.read(path))]
        except ValueError as error:
            return [Candidate(path, None, str(error))]
    if not found:
        raise ValueError(f"there is no checkpoint in {path}; {_what_is_there(path, 'it')}")
    return found


def _what_is_there(folder: Path, named: str) -> str:
    """Instead of what was asked for, in words: folders of checkpoints at or below a folder, or else what it holds."""
    inside = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    runs = [
        each for each in (folder, *inside) if each.is_dir() and os.access(each, os.R_OK) and folders.candidates(each)
    ]
    if runs:
        return f"there are some in {_some(map(str, runs))}"
    return f"{named} holds {_some(each.name for each in inside)}" if inside else f"{named} is empty"


def _some(names: Iterable[str]) -> str:
    told = list(names)
    more = f" and {len(told) - _MOST_NAMES} more" if len(told) > _MOST_NAMES else ""
    return ", ".join(told[:_MOST_NAMES]) + more


def examine(candidate: Candidate) -> Examination:
    """Hash every file of a checkpoint, read its index, decode chunks.  HDF5 opens nothing before its hash was right."""
    folder, manifest = candidate.path, candidate.manifest
    if manifest is None:
        return Examination(folder, None, None, (candidate.problem,))
    problems = manifests.problems(folder, manifest)
    contents = None
    if not manifests.problems(folder, manifest, [INDEX]):
        try:
            contents = contents_of(folder, manifest)
        except ValueError as error:
            problems.append(str(error))
    if contents is not None and not problems:
        problems += damages(contents, contents.pieces)
    return Examination(folder, manifest, contents, tuple(problems))


def contents_of(folder: Path, manifest: Manifest) -> Contents:
    """What a checkpoint has, whose hashes were found right.

    Raises
    ------
    ValueError
        If the index is damaged, or not that of this manifest.
    """
    contents, index = read_index(folder), folder / INDEX
    if (contents.id, contents.generation) != (manifest.id, manifest.generation):
        raise ValueError(
            f"{index} is of the checkpoint {contents.id}, generation {contents.generation}; the manifest beside it is "
            f"of {manifest.id}, generation {manifest.generation}"
        )
    unlisted = {piece.file for piece in contents.pieces} - manifest.files.keys()
    if unlisted:
        raise ValueError(f"{index} wants pieces of {', '.join(sorted(unlisted))}, which the manifest does not have")
    return contents


def not_finite(contents: Contents) -> Iterator[str]:
    """In words: each tensor of a whole checkpoint that has NaN or infinite values, and how many; reads all of it.

    Raises
    ------
    ValueError
        If a piece is not what the index says.
    """
    with Stored(contents) as source:
        for kind in contents.kinds:
            for name in contents.tensors:
                found = figures(source, kind, name)
                if found.nans or found.infinities:
                    yield f"{kind} {name} has {found.nans} NaN and {found.infinities} infinite values"


def newest_whole(path: Path) -> Examination:
    """The checkpoint at a path, or the newest whole one of a run.

    Raises
    ------
    ValueError
        If there is none; what is wrong with each is named.
    """
    told: list[str] = []
    for candidate in found_at(path):
        examined = examine(candidate)
        if examined.contents is not None and not examined.problems:
            return examined
        told += examined.problems
    raise ValueError(f"there is no whole checkpoint at {path}: {'; '.join(told)}")
