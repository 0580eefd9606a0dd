"""The ledger: every collective of a rank, with what it sent and how long it waited."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import numpy as np

_PACKAGE = str(Path(__file__).parent) + os.sep
_KEEP = 1000


class Call(NamedTuple):
    """A communication call under way, and what tells it from the one it should match."""

    began: float
    axis: str
    sequence: int
    op: str
    dtype: np.dtype
    elements: int
    label: str
    code: CodeType
    line: int

    @property
    def site(self) -> str:
        """``file:line (function)`` of the first caller outside mpishard."""
        return f"{self.code.co_filename}:{self.line} ({self.code.co_name})"

    def __str__(self) -> str:
        what = f"{self.axis}.{self.op} #{self.sequence} of {self.elements} {self.dtype}"
        return f"{what}{f' [{self.label}]' if self.label else ''} called at {self.site}"


class Entry(NamedTuple):
    """A finished call: what it was, bytes this rank sent by the ring count, seconds spent inside it."""

    call: Call
    sent: int
    seconds: float


@dataclass
class Total:
    """Sum over the calls of one kind."""

    calls: int = 0
    sent: int = 0
    seconds: float = 0.0


class Ledger:
    """What a rank has communicated.

    Attributes
    ----------
    active : Call or None
        The call in which this rank may be waiting now; read by the watchdog from another thread.
    totals : dict
        ``(axis, op, label)`` to `Total`; grows with the kinds of calls, not with their number.
    recent : deque of Entry
        The last thousand calls.
    step : int
        The training step under way, for messages.
    members : dict
        Ranks of the whole mesh by axis.
    """

    def __init__(self) -> None:
        self.active: Call | None = None
        self.totals: dict[tuple[str, str, str], Total] = {}
        self.recent: deque[Entry] = deque(maxlen=_KEEP)
        self.step = 0
        self.members: dict[str, list[int]] = {}

    def begin(self, axis: str, sequence: int, op: str, dtype: np.dtype, count: int, label: str) -> Call:
        """Describe a call that begins now.  Its site is the first frame outside mpishard."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        return Call(time.perf_counter(), axis, sequence, op, dtype, count, label, frame.f_code, frame.f_lineno)

    def enter(self, call: Call, sent: int, seconds: float) -> None:
        """Enter a finished call: the bytes that this rank sent, and the time it spent inside."""
        key = (call.axis, call.op, call.label)
        total = self.totals.get(key)
        if total is None:
            total = self.totals[key] = Total()
        total.calls += 1
        total.sent += sent
        total.seconds += seconds
        self.recent.append(Entry(call, sent, seconds))

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
        self.totals.clear()
        self.recent.clear()


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
