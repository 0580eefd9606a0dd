"""Progress of a run: a live bar on a terminal, or a line every few seconds in a log."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

# A log gets a line every 5 seconds; in a long run the pause is 5 % of the time so far, at most one minute.
_EVERY_S, _SHARE, _MOST_S = 5.0, 0.05, 60.0


class ProgressBar:
    """Progress of a run on stderr; shows nothing if `shown` is False (ranks above 0).

    Under mpirun stderr is a pipe, not a terminal, so that users see lines there.  `done` is the number of steps before
    a resumed run.
    """

    def __init__(self, total: int | None, shown: bool, unit: str = "step", done: int = 0) -> None:
        self._live = shown and sys.stderr.isatty()
        self.shown = shown
        self._total = total
        self._unit = unit
        self._began = time.perf_counter()
        self._printed = self._began
        self._done = self._first = done
        self._bar = tqdm(total=total, unit=unit, initial=done, disable=not self._live)

    def advance(self, note: str) -> None:
        """Count a finished step; `note` describes it."""
        self._done += 1
        if self._live:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()
        now = time.perf_counter()
        if (
            self.shown
            and not self._live
            and (now - self._printed >= self._pause(now) or self._done in (self._first + 1, self._total))
        ):
            self._printed = now
            self._print(note)

    def close(self) -> None:
        self._bar.close()

    def _pause(self, now: float) -> float:
        return min(max(_EVERY_S, _SHARE * (now - self._began)), _MOST_S)

    def _print(self, note: str) -> None:
        elapsed = time.perf_counter() - self._began
        line = tqdm.format_meter(
            self._done, self._total, elapsed, unit=self._unit, postfix=note, ncols=0, initial=self._first
        )
        print(line, file=sys.stderr, flush=True)
