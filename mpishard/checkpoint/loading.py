"""Finding the newest whole checkpoint, and reading it into the arrays of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpishard.checkpoint import folder, manifest, polling
from mpishard.checkpoint.examining import contents_of
from mpishard.checkpoint.index import Contents
from mpishard.checkpoint.manifest import Manifest
from mpishard.checkpoint.reading import check_fits, damages, fill
from mpishard.comm.axis import Axis
from mpishard.comm.ledger import users_level
from mpishard.layout.run_state import RunState

Check = Callable[[Mapping[str, Any]], None]


def load_newest(run: Path, state: RunState, axis: Axis, patient: Axis, check: Check | None) -> Contents | None:
    """Read the newest whole checkpoint in a folder into the arrays of `state`.  Collective.

    All of it is checked before anything is written: hashes, the index, what chunks decode to, whether it fits.  Then
    values are read into place, so that no rank needs memory for a second copy: at most for a chunk, and for what
    travels at a time to ranks that hold copies.

    Parameters
    ----------
    run : Path
        Folder of checkpoints, or of one.
    state : RunState
        Its arrays are written.
    axis, patient : Axis
        The ranks of the state: for moving elements, and for waiting for a disk.
    check : callable or None
        Looks at the facts on all ranks before anything is written; may raise ValueError.

    Returns
    -------
    Contents or None
        What was read; None if there is no checkpoint.

    Raises
    ------
    ValueError
        On every rank and before anything is written, if there are only damaged ones, or if the newest whole one does
        not fit.
    OSError
        On every rank, if the folder cannot be listed.  Or if a disk fails that gave the same bytes a moment before, and
        no older checkpoint can be read: then the arrays are partly written, and the message says so.
    """
    known, passed_over = _find(run, patient)
    spoilt = False
    for path, listed in known:
        contents = None
        problems = _verify(path, listed, patient)
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
                fill(contents, state, axis, patient)
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
    """Why a checkpoint cannot become this state, whole as it is."""
    try:
        check_fits(contents, state)
        if check is not None:
            check(contents.facts)
    except Exception as error:  # whatever it is, all ranks hear of it
        return error
    return None


def _find(run: Path, axis: Axis) -> tuple[list[tuple[Path, Manifest]], list[str]]:
    """The checkpoints, newest first, and what is wrong with those of which not even the manifest can be read."""
    told: Any = None
    if axis.rank == 0:
        try:
            found = folder.candidates(run)
            listed = [
                (str(each.path.relative_to(run)), each.manifest.encode().decode()) for each in found if each.manifest
            ]
            told = {"listed": listed, "problems": [each.problem for each in found if each.problem], "error": None}
            for problem in told["problems"]:
                _warn(axis, f"a damaged checkpoint is passed over: {problem}")
            if astray := folder.astray(run):
                _warn(axis, astray)
        except OSError as error:
            told = {"error": (error.errno, error.strerror or str(error))}
    told = polling.share(axis, told)
    if told["error"] is not None:
        raise OSError(told["error"][0], f"cannot look for checkpoints in {run}: {told['error'][1]}")
    return [(run / name, manifest.decode(text.encode())) for name, text in told["listed"]], told["problems"]


def _verify(path: Path, listed: Manifest, axis: Axis) -> list[str]:
    """What is wrong with the files of a checkpoint; the ranks divide them."""
    largest_first = sorted(listed.files, key=lambda name: (-listed.files[name].size, name))
    return polling.gather_lists(axis, manifest.problems(path, listed, largest_first[axis.rank :: axis.size]))


def _open(path: Path, listed: Manifest, axis: Axis) -> tuple[Contents | None, list[str]]:
    """The contents of a checkpoint whose files are as they were written, or what is wrong with them."""
    contents = None
    problem = []
    try:
        contents = contents_of(path, listed)
    except (ValueError, OSError) as error:
        problem = [str(error)]
    return contents, list(dict.fromkeys(polling.gather_lists(axis, problem)))


def _decode(contents: Contents, state: RunState, axis: Axis) -> list[str]:
    """What is wrong with the pieces of a checkpoint that a state wants; the ranks divide them."""
    wanted = [piece for piece in contents.pieces if piece.kind in state.kinds]
    return polling.gather_lists(axis, damages(contents, wanted[axis.rank :: axis.size]))


def _warn(axis: Axis, text: str) -> None:
    if axis.rank == 0:
        warnings.warn(text, RuntimeWarning, stacklevel=users_level())
