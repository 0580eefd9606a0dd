"""`map_runs`: independent runs, such as fits, seeds or weights of a regularisation, over groups of the ranks of a mesh.

The cases enter, their results leave, in order.  `_Runs` deals them out, `_SavedResults` has those that are done in a
folder.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import date, time, timedelta
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import xxhash

from mpishard.arguments import entries, flag, integer, path, shown
from mpishard.comm.agreement import opening, text_of
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.comm.work_queue import WorkQueue, is_of_mpi
from mpishard.inverse.result import OptimizeResult
from mpishard.io import log
from mpishard.io.files import is_deep, read_note, write_note
from mpishard.io.terminal import is_terminal
from mpishard.launch.processes import remove_leftovers
from mpishard.training.metrics import ProgressBar

_HASH = "xxh3_128"  # the entry of a file, and the name of the hash
_REMOVE = "remove it, and the case runs again"


def map_runs(
    function: Callable[[Any, Mesh], Any],
    cases: Iterable[Any],
    mesh: Mesh,
    *,
    ranks_each: int = 1,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> list[Any]:
    """Call a function for many independent cases, several at a time, each on a group of ranks.  Collective.

    The ranks of `mesh` form groups of `ranks_each` neighbours.  Each group takes the next case as soon as it is free,
    so that cases may take as long as they like.

    Parameters
    ----------
    function : callable
        ``function(case, mesh)`` returns the result of a case.  All ranks of a group call it, with a `Mesh` over that
        group; what its rank 0 returns is kept.  An error must be raised on all ranks of the group, as the functions of
        mpishard do, or be passed to ``mesh.world.raise_if_any``: where others wait in a collective for the rank that
        has raised it, they soon end the job, and name the error.
    cases : iterable
        What differs between the runs, such as numbers, arrays, or tuples and dictionaries of these; the same on all
        ranks.
    mesh : Mesh
        All ranks that take part.
    ranks_each : int
        Ranks of a group; divides the number of ranks of `mesh`.
    folder : path, optional
        A folder that all ranks see.  The result of each case is saved there when it is done.  It must consist of None,
        numbers, strings, arrays, and lists, tuples, dictionaries and `OptimizeResult` of these; one that does not is
        returned, and a warning says that it is not saved.
    resume : bool
        Take the results that are in `folder`, and run the other cases only.  Each has a hash, by which a damaged one is
        found; it is refused, and its case runs again once the file is removed.  So is one without a hash.
    progress : bool, optional
        Show on stderr of rank 0 how many cases have ended, those that failed included: a bar on a terminal, lines
        elsewhere.  Default: on a terminal only.

    Returns
    -------
    list
        The results in the order of the cases, on all ranks.  In the place of a case that failed is a RuntimeError that
        names the error; rank 0 of its group has warned of it, and its traceback is a note of that error.  So is one in
        the place of a result that pickle sends and cannot read.

    Raises
    ------
    ValueError, TypeError
        On all ranks, if an argument is invalid or differs between ranks, or if `folder` has results without
        `resume`, of other cases, or damaged.
    OSError
        On all ranks, if `folder` cannot be used.

    Examples
    --------
    >>> import mpishard
    >>> def fit(weight, mesh):
    ...     def misfit(x):
    ...         return (x[0] - 1) ** 2 + weight * x[0] ** 2, 2 * (x - 1) + 2 * weight * x
    ...     return mpishard.minimize(misfit, [0.0], mesh=mesh)
    >>> results = mpishard.map_runs(fit, [0.0, 1.0, 3.0], mpishard.Mesh())
    >>> [round(float(result.x[0]), 6) for result in results]
    [1.0, 0.5, 0.25]
    """
    with opening(checked_mesh(mesh).world, "map_runs") as same:
        if not callable(function):
            raise TypeError(f"function={shown(function)} must be callable, as function(case, mesh)")
        cases = list(entries("cases", cases, "cases"))
        ranks_each = integer("ranks_each", ranks_each, least=1)
        if mesh.size % ranks_each:
            fitting = ", ".join(str(size) for size in range(1, mesh.size + 1) if mesh.size % size == 0)
            raise ValueError(
                f"ranks_each={ranks_each} does not divide the {mesh.size} ranks of the mesh; give {fitting}"
            )
        where = None if folder is None else path("folder", folder).absolute()  # a case may change the directory
        if flag("resume", resume) and folder is None:
            raise ValueError("resume=True takes the results in a folder, but there is none; give folder=")
        if progress is not None:
            flag("progress", progress)
        saved = None if where is None else _SavedResults(where, cases)
        same |= {f"case {number}": _text_of(case) for number, case in enumerate(cases)}
        same |= {"ranks_each": ranks_each, "folder": str(folder), "resume": resume}
    known: dict[int, Any] = {}
    if saved is not None:
        with raised_on_all(mesh.world):
            if mesh.rank == 0:
                known = saved.open(resume)
    done = mesh.world.allgather_object(sorted(known))[0]
    runs = _Runs(function, cases, [number for number in range(len(cases)) if number not in done], saved)
    outcomes: dict[int, _Outcome] = {number: pickle.dumps(value) for number, value in known.items()}
    shows = mesh.rank == 0 and (is_terminal(sys.stderr) if progress is None else bool(progress))
    for theirs in runs.run(mesh, ranks_each, outcomes, shows and len(done) < len(cases)):
        outcomes |= theirs
    return [_unpacked(number, outcomes[number]) for number in range(len(cases))]


class _Failure(NamedTuple):
    """The failure of a case, in a form that every rank can read."""

    text: str
    traceback: str


_Outcome = bytes | _Failure  # a pickled result


def _unpacked(number: int, outcome: _Outcome) -> Any:
    if isinstance(outcome, bytes):
        try:
            return pickle.loads(outcome)
        except Exception as problem:  # as of an exception whose class wants other arguments; the other cases are whole
            text = f"the result of cases[{number}] cannot be received: {type(problem).__name__}: {problem}"
            outcome = _Failure(text, "".join(traceback.format_exception(problem)))
    error = RuntimeError(outcome.text)
    error.add_note(outcome.traceback)
    return error


class _Runs:
    """The cases still to run."""

    def __init__(
        self, function: Callable[[Any, Mesh], Any], cases: list[Any], numbers: list[int], saved: _SavedResults | None
    ) -> None:
        self._function, self._cases, self._numbers, self._saved = function, cases, numbers, saved

    def run(self, mesh: Mesh, ranks_each: int, outcomes: dict[int, _Outcome], shows: bool) -> list[dict[int, _Outcome]]:
        """The outcomes that all ranks hold at the end, those given here included.  Collective.

        `shows`: this rank, the first, shows the progress.
        """
        bar = ProgressBar(len(self._cases), shows, unit="case", done=len(self._cases) - len(self._numbers))
        with contextlib.closing(bar):
            return self._run(mesh, ranks_each, dict(outcomes), bar)

    def _run(
        self, mesh: Mesh, ranks_each: int, outcomes: dict[int, _Outcome], bar: ProgressBar
    ) -> list[dict[int, _Outcome]]:
        """`run`, which adds to these outcomes; rank 0 counts in the bar what has ended.  Collective."""
        group, groups = mesh.rank // ranks_each, mesh.size // ranks_each
        queue = WorkQueue(mesh.world, group, groups, len(self._numbers), lambda: bar.advance(""))
        comm: Any = mesh.world.comm.Split(group, mesh.rank)
        with Mesh(comm, timeout=mesh.timeout, debug=mesh.debug) as own:
            comm.Free()
            # Where the ranks of the group meet after a case: collectives of the function cannot match.
            after = Axis("case", own.world.comm.Dup(), own.ledger)
            turn = np.empty(1, np.int64)
            while True:
                if own.rank == 0:
                    turn[0] = queue.take()
                own.world.broadcast(turn, label="control")
                if turn[0] < 0:
                    break
                number = self._numbers[turn[0]]
                outcome = self._outcome(number, own, after, mesh.rank)
                if own.rank == 0:
                    outcomes[number] = outcome
            after.free()
            return queue.gather(outcomes)

    def _outcome(self, number: int, own: Mesh, after: Axis, first: int) -> _Outcome:
        """Call the function. Collective over the group, whose rank 0 logs and saves."""
        value, problem = None, None
        try:
            value = self._function(self._cases[number], own)
        except (Exception, SystemExit) as error:  # of the user's function: it is the result
            if is_of_mpi(error):
                raise
            problem = error
            own.ledger.absent = f"has raised {type(error).__name__}: {error}".partition("\n")[0]
        try:
            after.raise_if_any(problem)
            packed = _packed(value) if own.rank == 0 else b""
        except (Exception, SystemExit) as error:
            if is_of_mpi(error):
                raise
            where = f"rank {first}" if own.size == 1 else f"ranks {first} to {first + own.size - 1}"
            text = f"cases[{number}] of {len(self._cases)} failed on {where}: {type(error).__name__}: {error}"
            if own.rank == 0:
                log.warn(f"{text}; the other cases continue")
            return _Failure(text, "".join(traceback.format_exception(error)))
        finally:
            own.ledger.absent = ""
        if own.rank == 0 and self._saved is not None:
            try:
                self._saved.save(number, value)
            except (OSError, TypeError, ValueError) as error:
                log.warn(f"the result of cases[{number}] is not saved, and resume=True will run it again: {error}")
        return packed


def _packed(value: Any) -> bytes:
    """A result for the other ranks.  Raises TypeError if it cannot be sent."""
    try:
        return pickle.dumps(value)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(f"the result, {shown(value)}, cannot be sent to the other ranks: {error}") from error


# -- the folder: one JSON file a case ----------------------------------------------------------------------------------


class _SavedResults:
    """The results of finished cases, in a folder."""

    def __init__(self, folder: Path, cases: list[Any]) -> None:
        self._folder, self._texts = folder, [_text_of(case) for case in cases]

    def open(self, resume: bool) -> dict[int, Any]:
        """The existing results, by case; makes the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder, r"case-\d+\.json")
        notes = {number: self._note(number) for number in range(len(self._texts))}
        notes = {number: note for number, note in notes.items() if note is not None}
        if notes and not resume:
            raise ValueError(
                f"{self._folder} has the results of {len(notes)} of {len(self._texts)} cases; resume=True takes them, "
                "and another folder begins anew"
            )
        return {number: self._result(number, note) for number, note in notes.items()}

    def _note(self, number: int) -> Any:
        try:
            return read_note(self._path(number), most=None)
        except ValueError as error:
            raise ValueError(f"{error}; {_REMOVE}") from None

    def _result(self, number: int, note: Any) -> Any:
        """The result in a file; ValueError if it is damaged, or of another case."""
        try:
            case, result, digits = note["case"], note["result"], note.get(_HASH)
            if digits is None:
                raise ValueError("it has no hash")
            if digits != _hash_of(case, result):
                raise ValueError("it is damaged: it differs from what was written")
            value = _decoded(result)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{self._path(number)} is no result of a case: {error!r}; {_REMOVE}") from None
        if case != self._texts[number]:
            raise ValueError(
                f"{self._folder} has the result of another case for cases[{number}]: {shown(case)}, and now it is "
                f"{shown(self._texts[number])}; give other cases a folder of their own"
            )
        return value

    def save(self, number: int, value: Any) -> None:
        """Write a file; TypeError or ValueError if it cannot have the result."""
        note = {"case": self._texts[number]}
        try:
            note["result"] = _encoded(value)
            deep = is_deep(note)
        except RecursionError:
            deep = True
        if deep:
            raise ValueError("its lists and dictionaries are nested too deep, or contain themselves")
        write_note(self._path(number), {**note, _HASH: _hash_of(**note)})

    def _path(self, number: int) -> Path:
        return self._folder / f"case-{number}.json"


def _text_of(case: Any) -> str:
    """A case as text, another one for each."""
    return text_of(_plain(case))


def _plain(value: Any) -> Any:
    """What is in a case, as `text_of` tells it from others: of arrays of JAX, dates or sets it has the kind alone."""
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_text_of, value))
    if isinstance(value, date | time | timedelta | np.datetime64 | np.timedelta64 | Enum | range | slice):
        return str(value)
    if hasattr(value, "__array__") and not isinstance(value, np.ndarray | np.generic | type):
        with contextlib.suppress(Exception):  # one on a device, or of a dtype that NumPy has not
            value = np.asarray(value.detach() if hasattr(value, "detach") else value)
    return _plain(value.tolist()) if isinstance(value, np.ndarray) and value.dtype.hasobject else value


def _hash_of(case: Any, result: Any) -> str:
    """The hash of a case and its result as JSON, in hex."""
    return xxhash.xxh3_128(json.dumps([case, result], sort_keys=True).encode()).hexdigest()


def _encoded(value: Any) -> Any:
    """A value as JSON: arrays by their bytes, all but plain numbers and strings as ``{kind: content}``."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    is_array = type(value) in (np.ndarray, np.memmap)  # others have more than their bytes, such as a mask or a unit
    # The text of a dtype with fields, or of bfloat16, says less than it.
    if (is_array or isinstance(value, np.generic)) and not value.dtype.hasobject and value.dtype == value.dtype.str:
        content = base64.b64encode(value.tobytes()).decode()
        return {"array" if is_array else "scalar": [value.dtype.str, list(value.shape), content]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encoded(each) for each in value]}
    if (type(value) is dict or isinstance(value, OptimizeResult)) and all(isinstance(name, str) for name in value):
        kind = "dict" if type(value) is dict else "OptimizeResult"
        return {kind: [[name, _encoded(each)] for name, each in value.items()]}
    of = f" of {value.dtype}" if hasattr(value, "dtype") else ""
    raise TypeError(
        f"it has a {type(value).__name__}{of}, but a saved result consists of None, numbers, strings, arrays, and "
        "lists, tuples, dictionaries with names and OptimizeResult of these"
    )


def _decoded(note: Any) -> Any:
    """The value from `_encoded`."""
    if not isinstance(note, dict):
        return note
    ((kind, content),) = note.items()
    if kind == "complex":
        return complex(*content)
    if kind in ("array", "scalar"):
        dtype, shape, data = content
        if not isinstance(dtype, str) or any(type(extent) is not int or extent < 0 for extent in shape):
            raise ValueError(f"dtype={shown(dtype)} and shape={shown(shape)} are those of no array")
        array = np.frombuffer(base64.b64decode(data, validate=True), np.dtype(dtype)).reshape(shape).copy()
        return array if kind == "array" else array[()]
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(_decoded, content))
    named = {name: _decoded(each) for name, each in content}
    return named if kind == "dict" else {"OptimizeResult": OptimizeResult}[kind](named)
