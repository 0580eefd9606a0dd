"""Finds the newest checkpoint and verifies that it is whole; `filling` then places it in the arrays of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpishard.backend.garbage import no_garbage_collection
from mpishard.checkpoint import folder, manifest, polling
from mpishard.checkpoint.contents import Contents
from mpishard.checkpoint.examining import contents_of
from mpishard.checkpoint.filling import check_fits, fill
from mpishard.checkpoint.manifest import Manifest
from mpishard.checkpoint.piece_reader import damages
from mpishard.comm.axis import Axis
from mpishard.comm.ledger import users_level
from mpishard.comm.mesh import Mesh
from mpishard.io.readers import Readers
from mpishard.layout.run_state import RunState

Check = Callable[[Mapping[str, Any]], None]


def load_newest(run: Path, state: RunState, mesh: Mesh, patient: Axis, check: Check | None) -> Contents | None:
    """Read the newest whole checkpoint in a folder into the arrays of `state`.  Collective.

    All of it is checked before anything is written: hashes, the index, the chunks, and whether it fits the state.  Then
    values are read directly into the arrays: on most file systems out of the page cache, in which the first pass left
    them.  No rank needs memory for a second copy, only for a chunk, and for a bucket of elements that it sends to
    ranks with copies.

    Parameters
    ----------
    run : Path
        Folder of checkpoints, or of one checkpoint.
    state : RunState
        Its arrays are written.
    mesh : Mesh
        The ranks of the state.
    patient : Axis
        The same ranks, for waits for a disk, without a time limit.
    check : callable or None
        Gets the facts on all ranks before anything is written; may raise ValueError.

    Returns
    -------
    Contents or None
        The contents of the checkpoint that was read; None if there is none.

    Raises
    ------
    ValueError
        On every rank and before anything is written, if there are only damaged ones, or if the newest whole one does
        not fit.
    OSError
        On every rank, if the folder cannot be listed.  Or if the disk fails after the check, and no older checkpoint
        can be read: then the arrays are partly written, and the message says so.
    """
    with Readers(mesh.node.size) as readers, no_garbage_collection():
        return _load_newest(run, state, mesh, patient, check, readers)


def _load_newest(
    run: Path, state: RunState, mesh: Mesh, patient: Axis, check: Check | None, readers: Readers
) -> Contents | None:
    axis = mesh.world
    known, passed_over = _find(run, patient)
    spoilt = False
    for path, listed in known:
        contents = None
        problems = _verify(path, listed, patient, readers)
        if not problems:
            contents, problems = _open(path, listed, patient)
        if contents is not None and not problems:
            problems = _decode(contents, state, patient)
        if contents is not None and not problems:
            try:
                axis.raise_if_any(_misfit(contents, state, check))
            except Exception as error:  # on all ranks
                if not spoilt:
                    raise
                problems = [str(error)]
        if contents is not None and not problems:
            try:
                fill(contents, state, axis, patient, one_node=mesh.node.size == mesh.size, readers=readers)
                return contents
            except ValueError as error:  # on all ranks
                problems, spoilt = [str(error)], True
        passed_over += problems
        _warn(axis, f"the checkpoint {path} is damaged and passed over: {'; '.join(problems[:3])}")
    if spoilt:
        raise OSError(
            f"a disk failed while a checkpoint in {run} was read into place: {'; '.join(passed_over)}; parameters and "
            "optimizer state are partly overwritten: load again, or make them anew"
        )
    if passed_over:
        raise ValueError(f"no checkpoint in {run} is whole: {'; '.join(passed_over)}")
    return None


def _misfit(contents: Contents, state: RunState, check: Check | None) -> Exception | None:
    """The reason why a whole checkpoint does not fit this state; None if it fits."""
    try:
        check_fits(contents, state)
        if check is not None:
            check(contents.facts)
    except Exception as error:  # any error: all ranks raise it
        return error
    return None


def _find(run: Path, axis: Axis) -> tuple[list[tuple[Path, Manifest]], list[str]]:
    """The checkpoints, newest first, and the problems of those whose manifest cannot be read."""
    shared: Any = None
    if axis.rank == 0:
        try:
            found = folder.candidates(run)
            listed = [
                (str(each.path.relative_to(run)), each.manifest.encode().decode()) for each in found if each.manifest
            ]
            shared = {"listed": listed, "problems": [each.problem for each in found if each.problem], "error": None}
            for problem in shared["problems"]:
                _warn(axis, f"a damaged checkpoint is passed over: {problem}")
            if astray := folder.astray(run):
                _warn(axis, astray)
        except OSError as error:
            shared = {"error": (error.errno, error.strerror or str(error))}
    shared = polling.share(axis, shared)
    if shared["error"] is not None:
        raise OSError(shared["error"][0], f"cannot look for checkpoints in {run}: {shared['error'][1]}")
    return [(run / name, manifest.decode(text.encode())) for name, text in shared["listed"]], shared["problems"]


def _verify(path: Path, listed: Manifest, axis: Axis, readers: Readers) -> list[str]:
    """The problems of the files of a checkpoint; each rank checks some of them."""
    own = manifest.share(listed, axis.rank, axis.size)
    return polling.gather_lists(axis, manifest.problems(path, listed, own, readers))


def _open(path: Path, listed: Manifest, axis: Axis) -> tuple[Contents | None, list[str]]:
    """The contents of a checkpoint whose hashes are correct, or the problems."""
    contents = None
    problem = []
    try:
        contents = contents_of(path, listed)
    except (ValueError, OSError) as error:
        problem = [str(error)]
    return contents, list(dict.fromkeys(polling.gather_lists(axis, problem)))


def _decode(contents: Contents, state: RunState, axis: Axis) -> list[str]:
    """The problems of the pieces of a checkpoint that a state needs; each rank checks some of them."""
    return polling.gather_lists(axis, damages(contents, state.kinds, axis.rank, axis.size))


def _warn(axis: Axis, text: str) -> None:
    if axis.rank == 0:
        warnings.warn(text, RuntimeWarning, stacklevel=users_level())
