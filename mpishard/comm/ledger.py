"""The ledger: every collective of a rank, with what it sent and how long it waited."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_KEEP = 1000
# Frames from the one that notes a call to the user's, if he has called an axis himself.
_NEAR = 4
_MAIN = threading.main_thread().ident or 0


class Call(NamedTuple):
    """A communication call under way, and what tells it from the one it should match.

    `members` are the ranks of the whole mesh that take part.  `code` and `line` are those of the first caller outside
    mpishard; of a call that is over they are not known if many calls lay between.
    """

    began: float
    axis: str
    sequence: int
    op: str
    dtype: np.dtype
    elements: int
    label: str
    code: CodeType | None
    line: int
    members: Sequence[int]

    @property
    def site(self) -> str:
        """``file:line (function)`` of the first caller outside mpishard; empty if that is not known."""
        return "" if self.code is None else f"{self.code.co_filename}:{self.line} ({self.code.co_name})"

    def __str__(self) -> str:
        what = f"{self.axis}.{self.op} #{self.sequence} of {self.elements} {self.dtype}"
        return f"{what}{f' [{self.label}]' if self.label else ''}{f' called at {self.site}' if self.code else ''}"

    def placed(self, frame: FrameType | None) -> Call:
        """With its site known: the first frame outside mpishard among `frame` and its callers."""
        if self.code is not None:
            return self
        while frame is not None and _inside(frame):
            frame = frame.f_back
        return self if frame is None else self._replace(code=frame.f_code, line=frame.f_lineno)


class Entry(NamedTuple):
    """A finished call: what it was, bytes this rank sent by the ring count, seconds spent inside it."""

    call: Call
    sent: int
    seconds: float


class Span(NamedTuple):
    """Something that took its time, in seconds of `time.perf_counter`; `kind` is an axis, or what else it was."""

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
    """What a rank has communicated.

    A large buffer leaves little of the interpreter in cache, and what a call costs there is what it touches: so calls
    are noted as plain tuples, and summed up when somebody asks or a thousand of them have come together.

    Attributes
    ----------
    active : tuple or None
        The fields of the `Call` in which this rank may be waiting now; read by the watchdog from another thread.
    step : int
        The training step under way, for messages.
    any_over : bool
        Whether a step has ended.
    seconds : float
        Time spent inside all calls until now, those too that have only begun.
    spans : list of Span or None
        While it is a list, what this rank does is noted there, for a trace.
    """

    def __init__(self) -> None:
        self.active: tuple[Any, ...] | None = None
        self._step = 0
        self.any_over = False
        self.seconds: float = 0.0
        self.spans: list[Span] | None = None
        self._entries: list[tuple[tuple[Any, ...], int, float]] = []
        self._summed = 0
        self._totals: dict[tuple[str, str, str], Total] = {}

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self.any_over = self.any_over or self._step not in (0, step)
        self._step = step

    def begin(
        self, axis: str, sequence: int, op: str, dtype: np.dtype, count: int, label: str, members: Sequence[int]
    ) -> tuple[Any, ...]:
        """The fields of a `Call` that begins now."""
        # Calls of the user's own are near.  Under `optimize` he is up to thirty frames away, and each would become an
        # object: half a per cent of the step of a small model.
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_NEAR):
            if frame is None or not _inside(frame):
                break
            frame = frame.f_back
        else:
            frame = None
        code, line = (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
        return (time.perf_counter(), axis, sequence, op, dtype, count, label, code, line, members)

    def spend(self, call: tuple[Any, ...], began: float) -> float:
        """The time inside a call from `began` until now is over; returns the seconds."""
        ended = time.perf_counter()
        self.seconds += ended - began
        if self.spans is not None:
            _, axis, _, op, _, _, label, _, _, _ = call
            self.spans.append(Span(f"{axis}.{op}{f' [{label}]' if label else ''}", axis, began, ended))
        return ended - began

    def note(self, name: str, kind: str, began: float) -> None:
        """What has gone on from `began` until now is no call, but belongs into a trace."""
        if self.spans is not None:
            self.spans.append(Span(name, kind, began, time.perf_counter()))

    def enter(self, call: tuple[Any, ...], sent: int, seconds: float) -> None:
        """Enter a finished call: the bytes that this rank sent, and the time it spent inside."""
        self._entries.append((call, sent, seconds))
        if len(self._entries) >= 2 * _KEEP:
            self._sum_up()

    def _sum_up(self) -> None:
        for call, sent, seconds in self._entries[self._summed :]:
            _, axis, _, op, _, _, label, _, _, _ = call
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
        """Sums by ``(axis, op, label)``; as many as there are kinds of calls, however many calls there were."""
        self._sum_up()
        return self._totals

    @property
    def recent(self) -> list[Entry]:
        """The last thousand calls or more."""
        return [Entry(Call(*call), sent, seconds) for call, sent, seconds in self._entries]

    @property
    def waiting(self) -> Call | None:
        """The call in which this rank may be waiting now: its main thread, where calls are made."""
        active = self.active
        return None if active is None else Call(*active).placed(sys._current_frames().get(_MAIN))

    def sent(self, axis: str | None = None, op: str | None = None, label: str | None = None) -> int:
        """Bytes sent by this rank, over all calls that match."""
        wanted = (axis, op, label)
        return sum(
            total.sent
            for key, total in self.totals.items()
            if all(want is None or want == have for want, have in zip(wanted, key, strict=True))
        )

    def summary(self) -> dict[str, dict[str, float]]:
        """Calls, bytes sent and seconds by ``"axis.op label"``, plain numbers for saving and printing."""
        return {
            f"{axis}.{op} {label}".rstrip(): {"calls": t.calls, "bytes": t.sent, "seconds": t.seconds}
            for (axis, op, label), t in sorted(self.totals.items())
        }

    def clear(self) -> None:
        """Start counting anew."""
        self._entries.clear()
        self._totals.clear()
        self._summed = 0


def users_level() -> int:
    """The `stacklevel` for a warning of the caller's that shows the first line outside mpishard which led to it."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and _inside(frame):
        frame, level = frame.f_back, level + 1
    return level


def _inside(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def ring_elements(op: str, pieces: Sequence[int], rank: int) -> int:
    """Elements that `rank` sends in the textbook ring algorithm of a collective.

    Parameters
    ----------
    op : str
        ``"all_gather"``: every piece but the next rank's.  ``"reduce_scatter"`` and ``"all_to_all"``: every piece but
        the rank's own.
    pieces : sequence of int
        Elements by rank.
    """
    kept = (rank + 1) % len(pieces) if op == "all_gather" else rank
    return sum(pieces) - pieces[kept]


def all_reduce_elements(count: int, size: int, rank: int) -> int:
    """The same for an all-reduce: a reduce-scatter and an all-gather of even pieces (Patarasuk and Yuan, 2009).

    ``2 (size - 1) / size * count`` where that is whole, and its total over the ranks always.
    """
    quotient, remainder = divmod(count, size)
    following = (rank + 1) % size
    return 2 * (count - quotient) - (rank < remainder) - (following < remainder)
