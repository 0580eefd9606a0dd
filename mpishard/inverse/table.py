"""The table of a minimisation: a line an iteration."""

from __future__ import annotations

import time

from mpishard.io import log
from mpishard.minimizers.minimizer import Progress

_HEAD = f"{'iteration':>9} {'value':>17} {'|g|':>9} {'|proj g|':>9} {'step':>9} {'evaluations':>11} {'seconds':>9}"


class Table:
    """Writes a line for the start and for each iteration, with its header before the first one.  Not collective.

    Parameters
    ----------
    shown : bool
        Whether it writes anything: on one rank.
    """

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._has_head = False
        self._began = time.perf_counter()

    def row(self, progress: Progress) -> None:
        """Write a line.

        Parameters
        ----------
        progress : Progress
            After an iteration, or after the first evaluation.
        """
        if not self._shown:
            return
        if not self._has_head:
            log.inform(_HEAD)
            self._has_head = True
        seconds = time.perf_counter() - self._began
        log.inform(
            f"{progress.iterations:>9} {progress.value:>17.10e} {progress.gradient_norm:>9.2e} "
            f"{progress.projected_norm:>9.2e} {progress.step_length:>9.2e} {progress.evaluations:>11} {seconds:>9.2f}"
        )

    def end(self, message: str) -> None:
        """Write why it has ended.

        Parameters
        ----------
        message : str
            Of the result.
        """
        if self._shown:
            log.inform(message)
