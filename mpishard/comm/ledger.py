"""The ledger: every collective of a rank, with the bytes it sent and the time it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from mpishard.launch.script import NOT_USERS, PACKAGE, main_frame

_KEEP = 1000
# The kind of a span that is a matrix product of the layers.
PRODUCT = "product"
# The number of frames between `begin` and a user's code that calls an axis directly.
_NEAR = 4


class Call(NamedTuple):
    """A communication call under way, with what must match on the other ranks."""

    began: float  # in seconds of `time.perf_counter`
    axis: str
    # Its number among the collectives, or messages, on its communicator: equal on all ranks, as long as none has raised
    # an error before MPI's call.
    sequence: int
    op: str  # such as ``"all_reduce"``
    dtype: np.dtype
    elements: int
    label: str  # what is sent
    # Of the user's line, as `line` (see `users_frame`); after the call unknown if it is many frames away.
    code: CodeType | None
    line: int
    members: Sequence[int]  # ranks of the whole mesh that take part
    started: bool  # it is on the communicator of calls that are started

    @property
    def kind(self) -> str:
        """A text that is the same on all ranks for the collectives of one purpose on one communicator.

        Communicators of a reshaped mesh are not distinguished from those of its parent.
        """
        form, members = "started" if self.started else "blocking", self.members
        return f"{form} {self.axis} {self.op} {self.label} of {len(members)} ranks, {members[0]} to {members[-1]}"

    @property
    def site(self) -> str:
        """``file:line (function)`` of the user's line; empty if unknown."""
        return "" if self.code is None else f"{self.code.co_filename}:{self.line} ({self.code.co_name})"

    def __str__(self) -> str:
        what = f"{self.axis}.{self.op} #{self.sequence} of {self.elements} {self.dtype}"
        return f"{what}{f' [{self.label}]' if self.label else ''}{f' called at {self.site}' if self.code else ''}"

    def placed(self, frame: FrameType | None) -> Call:
        """The call with its site filled in: the user's line among `frame` and its callers.

        It returns itself if the site is known already, or is not found.
        """
        if self.code is not None:
            return self
        frame = users_frame(frame)
        return self if frame is None else self._replace(code=frame.f_code, line=frame.f_lineno)


class Entry(NamedTuple):
    """A finished call, the bytes that this rank sent (counted as for a ring algorithm), and the seconds spent in it."""

    call: Call
    sent: int
    seconds: float


class Span(NamedTuple):
    """A named interval in seconds of `time.perf_counter`, for a trace; `kind` is an axis, or what else it was."""

    name: str
    kind: str
    began: float
    ended: float


@dataclass
class Total:
    """Sum over the calls of one kind."""

    calls: int = 0
    sent: int = 0
    seconds: float = 0.0


class Ledger:
    """The communication of a rank. Nothing here is collective.

    After a large buffer little of the interpreter is in cache, and every object that is touched costs time. So calls
    are noted as plain tuples, and summed up on request or after a thousand of them.

    The training step under way, `step`, is for messages.
    """

    def __init__(self) -> None:
        # Fields of the `Call` in which this rank may be waiting now; read by the watchdog from another thread.
        self.active: tuple[Any, ...] | None = None
        # Why this rank does not come to a call in which others wait for it: "has raised ..."; for their watchdogs.
        self.absent = ""
        self._step = 0
        self.any_over = False  # a step has ended
        self.seconds: float = 0.0  # inside all calls until now, including those under way
        # While it is a list, the intervals of this rank are noted there, for a trace.
        self.spans: list[Span] | None = None
        self._entries: list[tuple[tuple[Any, ...], int, float]] = []
        self._summed = 0
        self._totals: dict[tuple[str, str, str], Total] = {}

    @property
    def step(self) -> int:
        """The training step under way; 0 before the first."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self.any_over = self.any_over or self._step not in (0, step)
        self._step = step

    def begin(
        self,
        axis: str,
        sequence: int,
        op: str,
        dtype: np.dtype,
        count: int,
        label: str,
        members: Sequence[int],
        started: bool = False,
    ) -> tuple[Any, ...]:
        """Note that a call begins now, with a buffer of `count` elements; returns the fields of its `Call`."""
        # A user's direct call is a few frames away.  Under `optimize` the user's code is up to thirty frames away, and
        # walking them all would make an object of each: half a per cent of the step of a small model.
        # Written out: a function call a frame costs more than the rest of this method.
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_NEAR):
            if frame is None or not frame.f_code.co_filename.startswith(NOT_USERS):
                break
            frame = frame.f_back
        else:
            frame = None
        code, line = (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
        return (time.perf_counter(), axis, sequence, op, dtype, count, label, code, line, members, started)

    def spend(self, call: tuple[Any, ...], began: float) -> float:
        """Add the time from `began` (of `time.perf_counter`) until now, spent inside a call; returns these seconds."""
        ended = time.perf_counter()
        self.seconds += ended - began
        if self.spans is not None:
            _, axis, _, op, _, _, label, *_ = call
            self.spans.append(Span(f"{axis}.{op}{f' [{label}]' if label else ''}", axis, began, ended))
        return ended - began

    def note(self, name: str, kind: str, began: float) -> None:
        """Note an interval from `began` (of `time.perf_counter`) until now for a trace; it is not a call."""
        if self.spans is not None:
            self.spans.append(Span(name, kind, began, time.perf_counter()))

    def enter(self, call: tuple[Any, ...], sent: int, seconds: float) -> None:
        """Enter a finished call by which this rank sent `sent` bytes, and inside which it spent `seconds`."""
        self._entries.append((call, sent, seconds))
        if len(self._entries) >= 2 * _KEEP:
            self._sum_up()

    def _sum_up(self) -> None:
        for call, sent, seconds in self._entries[self._summed :]:
            _, axis, _, op, _, _, label, *_ = call
            total = self._totals.get((axis, op, label))
            if total is None:
                total = self._totals[axis, op, label] = Total()
            total.calls += 1
            total.sent += sent
            total.seconds += seconds
        del self._entries[:-_KEEP]
        self._summed = len(self._entries)

    @property
    def totals(self) -> dict[tuple[str, str, str], Total]:
        """Sums by ``(axis, op, label)``: one entry per kind of call."""
        self._sum_up()
        return self._totals

    @property
    def recent(self) -> list[Entry]:
        """The last thousand calls or more."""
        return [Entry(Call(*call), sent, seconds) for call, sent, seconds in self._entries]

    def took_part(self, kind: str, sequence: int) -> bool:
        """Return True if this rank has finished a collective, or a later one of its kind.

        False also if it was so long ago that it is not in `recent`.
        """
        return any(call.sequence >= sequence and call.kind == kind for call, _, _ in self.recent)

    @property
    def waiting(self) -> Call | None:
        """The call in which the main thread of this rank may be waiting now."""
        active = self.active
        return None if active is None else Call(*active)

    @property
    def waiting_with_site(self) -> Call | None:
        """The same with its site, for a message; it reads the stack of the main thread."""
        call = self.waiting
        if call is None or call.code is not None:
            return call
        with main_frame() as frame:
            return call.placed(frame)

    def sent(self, axis: str | None = None, op: str | None = None, label: str | None = None) -> int:
        """Bytes sent by this rank, over all calls that match, counted as for a ring algorithm."""
        wanted = (axis, op, label)
        return sum(
            total.sent
            for key, total in self.totals.items()
            if all(want is None or want == have for want, have in zip(wanted, key, strict=True))
        )

    def summary(self) -> dict[str, dict[str, float]]:
        """All calls summed up: by ``"axis.op label"`` the ``calls``, the ``bytes`` sent, and ``seconds``."""
        return {
            f"{axis}.{op} {label}".rstrip(): {"calls": t.calls, "bytes": t.sent, "seconds": t.seconds}
            for (axis, op, label), t in sorted(self.totals.items())
        }

    def clear(self) -> None:
        """Reset all counts."""
        self._entries.clear()
        self._totals.clear()
        self._summed = 0


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The first frame of the user's code among `frame` and its callers; else the first one outside mpishard."""
    outside: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(NOT_USERS):
            return frame
        if outside is None and not name.startswith(PACKAGE):
            outside = frame
        frame = frame.f_back
    return outside


def users_level() -> int:
    """The `stacklevel` with which the caller's warning points at the user's line."""
    frame: FrameType | None = sys._getframe(1)
    users = users_frame(frame)
    level = 1
    while frame is not None and frame is not users:
        frame, level = frame.f_back, level + 1
    return level


def ring_elements(op: str, pieces: Sequence[int], rank: int) -> int:
    """Elements that `rank` sends in the textbook ring algorithm of a collective; `pieces`: elements by rank.

    ``"all_gather"``: every piece but the next rank's. ``"reduce_scatter"`` and ``"all_to_all"``: every piece but the
    rank's own.
    """
    kept = (rank + 1) % len(pieces) if op == "all_gather" else rank
    return sum(pieces) - pieces[kept]


def all_reduce_elements(count: int, size: int, rank: int) -> int:
    """The same for an all-reduce: a reduce-scatter and an all-gather of even pieces (Patarasuk and Yuan, 2009).

    ``2 (size - 1) / size * count`` where that is whole; over all ranks that is always the sum.
    """
    quotient, remainder = divmod(count, size)
    following = (rank + 1) % size
    return 2 * (count - quotient) - (rank < remainder) - (following < remainder)
