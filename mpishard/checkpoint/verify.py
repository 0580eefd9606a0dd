"""Examines checkpoints: `examine` says all that is refused, to loading and to the command line.

Also finds those at a path, and compares the tensors of two.
"""

from __future__ import annotations

import io
import math
import os
import re
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpishard.arguments import listed
from mpishard.checkpoint import folder as folders
from mpishard.checkpoint.archives import Source, blocks
from mpishard.checkpoint.folder import MANIFEST, Candidate, FileEntry, Manifest
from mpishard.checkpoint.index import read_index
from mpishard.checkpoint.pieces import INDEX, CheckpointReader, Contents, ReadThreads, pieces_file
from mpishard.io import files

_MOST_DATASETS = 3
# How the user block of a file begins, see `pieces_mark` and `index_mark`: the id of the checkpoint, and the writer.
_MARK = re.compile(rb"mpishard (?:index|pieces) ([0-9a-f]{32})(?: (\d{5,}))?\n")

# -- examination -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Examination:
    """The readable parts of a checkpoint, and its problems: without any, it is whole."""

    folder: Path
    manifest: Manifest | None  # None: it cannot be read, and nothing else was opened
    contents: Contents | None  # None: the index is damaged
    problems: tuple[str, ...]


def examine(
    candidate: Candidate,
    kinds: Container[str] | None = None,
    *,
    finite: bool = False,
    agree: Callable[[list[str]], list[str]] = list,
    rank: int = 0,
    ranks: int = 1,
    threads: ReadThreads | None = None,
) -> Examination:
    """Examine a checkpoint: sizes and hashes of its files, its index, and the chunks of `kinds`, by default of all.

    With `finite` values that are NaN or infinite are problems, too.  HDF5 opens no file with a wrong hash.  Ranks share
    the work: `agree` gives each of them the problems of all.  Collective if `agree` is.
    """
    folder, manifest = candidate.path, candidate.manifest
    if manifest is None:
        return Examination(folder, None, None, (candidate.problem,))
    problems = agree(_file_problems(folder, manifest, share_of_files(manifest, rank, ranks), threads))
    if problems and agree(_file_problems(folder, manifest, [INDEX])):
        return Examination(folder, manifest, None, tuple(problems))
    contents, refused = None, []
    try:
        contents = _contents(folder, manifest)
    except (ValueError, OSError) as error:
        refused = [str(error)]
    problems += dict.fromkeys(agree(refused))
    if contents is not None and not problems:
        problems = agree(_piece_problems(contents, kinds, rank, ranks))
    if contents is not None and not problems and finite:
        problems = list(_not_finite(contents))
    return Examination(folder, manifest, contents, tuple(problems))


def newest_whole(path: Path) -> tuple[Examination, list[str]]:
    """The checkpoint at a path, or the newest whole one of a run, and the problems of those that may be newer.

    ValueError with all problems if none is whole.
    """
    all_problems: list[str] = []
    # Those without a readable manifest, whose age is not known, come first.
    for candidate in sorted(found_at(path), key=lambda each: each.manifest is not None):
        examined = examine(candidate)
        if examined.contents is not None and not examined.problems:
            return examined, all_problems
        all_problems += examined.problems
    raise ValueError(f"no whole checkpoint at {path}: {'; '.join(all_problems)}")


def share_of_files(manifest: Manifest, rank: int, ranks: int) -> list[str]:
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


def _file_problems(
    folder: Path, manifest: Manifest, names: Iterable[str], threads: ReadThreads | None = None
) -> list[str]:
    """A text for each problem with some files of a checkpoint; hashes every byte, without HDF5."""

    def of(name: str) -> str:
        return _file_problem(folder / name, manifest.files[name], manifest.id)

    found = map(of, names) if threads is None else threads.map(of, names)
    return [problem for problem in found if problem]


def _file_problem(path: Path, entry: FileEntry, id: str) -> str:
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode):
            what = "a link that may lead elsewhere" if stat.S_ISLNK(about.st_mode) else "no file"
            return f"{path} is {what}"
        if about.st_size != entry.size:
            how = "cut short" if about.st_size < entry.size else "too long"
            return f"{path} is {how}: {about.st_size} bytes of {entry.size}"
        if folders.hash_file(path) == (entry.size, entry.xxh3_128):
            return ""
        return f"{path} is {_how_altered(path, id)}"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"


def _how_altered(path: Path, id: str) -> str:
    with io.FileIO(files.open_to_read(path)) as file:
        mark = _MARK.match(file.read(512) or b"")
    if mark is None:
        return "altered: its hash differs from the one in the manifest"
    other = mark[1].decode()
    if other != id:
        return f"stale: it belongs to the checkpoint {other}, this one is {id}"
    whose = mark[2]
    if whose is not None and path.name != pieces_file(int(whose)):
        return f"exchanged: it holds the pieces of rank {int(whose)}"
    return "altered: its hash differs from the one in the manifest"


def _contents(folder: Path, manifest: Manifest) -> Contents:
    """The contents of a checkpoint whose hashes are correct; ValueError if its index does not fit the manifest."""
    contents, index = read_index(folder), folder / INDEX
    if (contents.id, contents.generation) != (manifest.id, manifest.generation):
        raise ValueError(
            f"{index} is of the checkpoint {contents.id}, generation {contents.generation}; the manifest next to it is "
            f"of {manifest.id}, generation {manifest.generation}"
        )
    unlisted = {piece.file for piece in contents.pieces} - manifest.files.keys()
    if unlisted:
        raise ValueError(f"{index} wants pieces of {', '.join(sorted(unlisted))}, which the manifest does not have")
    return contents


def _piece_problems(contents: Contents, kinds: Container[str] | None, rank: int, ranks: int) -> list[str]:
    """Texts for the first few problems of the data sets of pieces of some kinds, or of all; each rank has its share.

    Without problems all their values can be read, unless the disk fails.
    """
    found: list[str] = []
    datasets = {(piece.file, piece.dataset): piece for piece in contents.pieces if kinds is None or piece.kind in kinds}
    with CheckpointReader(contents) as reader:
        for piece in list(datasets.values())[rank::ranks]:
            try:
                reader.check(piece)
            except ValueError as error:
                found.append(str(error))
                if len(found) == _MOST_DATASETS:
                    break
    return found


def _not_finite(contents: Contents) -> Iterator[str]:
    """A text for each tensor of a whole checkpoint with NaN or infinite values; reads all values."""
    try:
        with CheckpointReader(contents) as source:
            for kind in contents.kinds:
                for name in contents.tensors:
                    found = figures(source, kind, name)
                    if found.nans or found.infinities:
                        yield f"{kind} {name} has {found.nans} NaN and {found.infinities} infinite values"
    except ValueError as error:  # of the disk
        yield str(error)


# -- where checkpoints are ---------------------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    """Return True if a folder is one checkpoint, whole or damaged, rather than a folder of several."""
    return any((path / name).is_file() for name in (MANIFEST, INDEX)) or any(path.glob("pieces-*.h5"))


def found_at(path: Path) -> list[Candidate]:
    """The checkpoint at a path, or through a link there; or those of a run in this folder, newest first.

    ValueError without a checkpoint.
    """
    if not path.exists():
        where = f"the link {path} leads to {path.readlink()}, which" if path.is_symlink() else f"{path}"
        nearest = next(above for above in (*path.parents, Path.cwd()) if above.is_dir())
        named = "the working directory" if nearest == Path() else f"{nearest}"
        raise ValueError(f"{where} does not exist; {_what_is_there(nearest, named)}")
    path = path.resolve()
    if not path.is_dir():
        if is_checkpoint(path.parent):
            raise ValueError(f"{path} is a file of the checkpoint {path.parent}; give that folder")
        raise ValueError(f"{path} is a file; give the folder of a checkpoint, or of the checkpoints of a run")
    found = folders.candidates(path)
    if not found and is_checkpoint(path):
        return [folders.candidate(path)]
    if not found:
        raise ValueError(f"no checkpoint in {path}; {_what_is_there(path, 'it')}")
    return found


def _what_is_there(folder: Path, named: str) -> str:
    """A text for a message: folders of checkpoints at or below a folder, or else the content of the folder."""
    inside = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    runs = [
        each for each in (folder, *inside) if each.is_dir() and os.access(each, os.R_OK) and folders.candidates(each)
    ]
    if runs:
        return f"there are some in {listed(runs)}"
    return f"{named} holds {listed(each.name for each in inside)}" if inside else f"{named} is empty"


# -- values ------------------------------------------------------------------------------------------------------------
#
# Statistics of one tensor, and differences of two tensors, computed block by block.


@dataclass(frozen=True)
class Figures:
    """Statistics of the finite values of one tensor, and how many are not finite.  NaN if no value is finite.

    `rms` is the root of the mean square.
    """

    least: float
    largest: float
    mean: float
    rms: float
    nans: int
    infinities: int


@dataclass(frozen=True)
class Difference:
    """The difference of two tensors."""

    kind: str
    name: str
    # Largest |a - b|; infinite where only one is NaN, zero where both are or where they are the same infinity.
    absolute: float
    relative: float  # largest |a - b| / max(|a|, |b|)
    same_bits: bool  # and of one dtype


def figures(source: Source, kind: str, name: str) -> Figures:
    """Figures of one tensor, computed in float64."""
    least, largest, total, squares = math.inf, -math.inf, 0.0, 0.0
    finite = nans = infinities = 0
    for box in blocks(source.tensors[name]):
        values = source.read(kind, name, box).astype(np.float64, copy=False).reshape(-1)
        whole = np.isfinite(values)
        if not whole.all():
            missing = int(np.isnan(values).sum())
            nans += missing
            infinities += int((~whole).sum()) - missing
            values = values[whole]
        if values.size:
            finite += values.size
            least, largest = min(least, float(values.min())), max(largest, float(values.max()))
            with np.errstate(over="ignore"):
                total += float(values.sum())
                squares += float(np.square(values).sum())
    if not finite:
        return Figures(math.nan, math.nan, math.nan, math.nan, nans, infinities)
    return Figures(least, largest, total / finite, math.sqrt(squares / finite), nans, infinities)


def unlike(one: Source, other: Source) -> list[str]:
    """Texts for the kinds and tensors that only one source has, and for those whose shapes differ."""
    found = []
    for which, here, there in (("first", one, other), ("second", other, one)):
        found += [f"{kind} is only in the {which}" for kind in here.kinds if kind not in there.kinds]
        found += [f"tensor {name} is only in the {which}" for name in here.tensors if name not in there.tensors]
    for name, shape in one.tensors.items():
        if other.tensors.get(name, shape) != shape:
            found.append(f"tensor {name} is {shape} in the first, {other.tensors[name]} in the second")
    return found


def differences(one: Source, other: Source) -> Iterator[Difference]:
    """The difference of each tensor that both sources have in the same shape, by kind."""
    for kind, dtype in one.kinds.items():
        if kind not in other.kinds:
            continue
        for name, shape in one.tensors.items():
            if other.tensors.get(name) != shape:
                continue
            absolute = relative = 0.0
            same = dtype == other.kinds[kind]
            for box in blocks(shape):
                a, b = one.read(kind, name, box).reshape(-1), other.read(kind, name, box).reshape(-1)
                if a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8)):
                    continue
                same = False
                far, rather = _apart(a.astype(np.float64, copy=False), b.astype(np.float64, copy=False))
                absolute, relative = max(absolute, far), max(relative, rather)
            yield Difference(kind, name, absolute, relative, same)


def _apart(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    with np.errstate(all="ignore"):
        apart = np.abs(a - b)
        apart[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
        apart[np.isnan(apart)] = np.inf
        relative = apart / np.maximum(np.abs(a), np.abs(b))
    relative[apart == 0] = 0
    relative[np.isinf(apart)] = np.inf
    return float(apart.max()), float(relative.max())
