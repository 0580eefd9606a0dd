"""Errors that all ranks raise together, so that no rank continues while another raises.  Nothing here needs MPI."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from mpishard.launch.exit_codes import code_of_exit
from mpishard.launch.job_notes import ECHO
from mpishard.launch.script import in_users_code

Array = Any
E = TypeVar("E", bound=Exception)

# The errors that all ranks can raise; others become a RuntimeError on ranks whose own check passed.
_FILE_ERRORS = (OSError, PermissionError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_KNOWN_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, FloatingPointError, RuntimeError, *_FILE_ERRORS)
}


def known_to_all(kind: type[E]) -> type[E]:
    """Let all ranks raise errors of a class, which is made from a message."""
    _KNOWN_ERRORS[kind.__name__] = kind
    return kind


class CaughtError:
    """A context that keeps the error of its block as `error`, for an agreement of the ranks that follows."""

    error: Exception | None = None

    def __enter__(self) -> CaughtError:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        return True


class _Ranks(Protocol):
    def raise_if_any(self, problem: BaseException | None) -> None: ...


@contextmanager
def raised_on_all(ranks: _Ranks | None) -> Iterator[None]:
    """A context whose block may fail on one rank: what one raises in it, all raise at its end.  Collective.

    None: this process is alone, and an error takes its usual way.
    """
    problem: BaseException | None = None
    try:
        yield
    except (Exception, SystemExit) as error:
        if ranks is None:
            raise
        problem = error
    if ranks is not None:
        ranks.raise_if_any(problem)


class OneRank:
    """The world of a call without a mesh: what agreements and sums of a few numbers need of an `Axis`, without MPI.

    Code that sends arrays takes `Axis.single`, which has all of its methods.
    """

    rank, size = 0, 1

    def raise_if_any(self, problem: BaseException | None) -> None:
        if problem is not None:
            raise problem

    def all_reduce(self, buffer: Array, *, op: str = "sum", label: str = "") -> Array:
        return buffer

    def allgather_object(self, value: Any) -> list[Any]:
        return [value]


def on_any(ranks: Any, flag: bool, label: str = "control") -> bool:
    """Return True if the flag is set on any of the ranks.  Collective over them."""
    return bool(ranks.all_reduce(np.array([flag], np.int64), op="max", label=label)[0])


class ErrorForOthers(NamedTuple):
    """An error of one rank as the others learn of it."""

    kind: str  # its class, or the nearest base class that all ranks can raise
    text: str  # with the class where theirs is another: the text alone may say little
    exit_code: int | None  # that ``sys.exit`` asked for; None for an error
    place: str  # in the user's code, which the tracebacks of other ranks cannot show
    rank: int | None  # of the whole mesh; None: the text says where, as that of an error from another axis

    @classmethod
    def of(cls, problem: BaseException, rank: int) -> ErrorForOthers:
        kinds = [kind.__name__ for kind in type(problem).__mro__]
        kind = next((name for name in kinds if name in _KNOWN_ERRORS), kinds[0])
        text = str(problem) if kinds[0] in _KNOWN_ERRORS else f"{kinds[0]}: {problem}"
        code = code_of_exit(problem.code) if isinstance(problem, SystemExit) else None
        if hasattr(problem, ECHO):
            return cls(kind, text, code, "\n".join(getattr(problem, "__notes__", ())), None)
        frames = in_users_code(problem)
        return cls(kind, text, code, f"On rank {rank}:\n{frames.rstrip()}" if frames else "", rank)

    def made(self) -> BaseException:
        """The error that the other ranks raise."""
        if self.exit_code is not None:
            return SystemExit(self.exit_code)
        where = "" if self.rank is None else f"rank {self.rank}: "
        error = _KNOWN_ERRORS.get(self.kind, RuntimeError)(where + self.text)
        setattr(error, ECHO, True)
        if self.place:
            error.add_note(self.place)
        return error
