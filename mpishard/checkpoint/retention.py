"""Which checkpoints of a folder `keep` counts.  Nothing is removed here: that is `mpishard.checkpoint.folder.tidy`."""

from __future__ import annotations

from dataclasses import dataclass

from mpishard.checkpoint.folder import Unfinished


@dataclass(frozen=True)
class Retained:
    """What one save leaves in the folder: the newest `keep` of the checkpoints with these ids; None: all of them.

    The best one stays in any case.
    """

    keep: int | None = None
    ids: frozenset[str] = frozenset()
    best: bool = False  # whether the saved checkpoint is the best


class Retention:
    """Counts the checkpoints that this run has saved and, after `adopt`, all that are in the folder.  Removes none.

    Parameters
    ----------
    keep : int or None
        Number of checkpoints to keep; None: all.

    Attributes
    ----------
    ids : set of str
        The ids of the checkpoints that count.
    """

    def __init__(self, keep: int | None) -> None:
        self.keep = keep
        self.ids: set[str] = set()
        self._adopts = False

    def adopt(self) -> None:
        """Count all checkpoints that are in the folder when the next save begins."""
        self._adopts = True

    def begin(self, unfinished: Unfinished) -> None:
        """Count a checkpoint whose save begins.

        It is counted before it is written: if a rank dies during the save, the checkpoint may be whole without any
        survivor knowing it, and what was never counted would never be removed.
        """
        if self._adopts:
            self.ids |= unfinished.others
        self._adopts = False
        self.ids.add(unfinished.id)

    def retained(self, best: bool = False) -> Retained:
        """What the save that has just begun, of the best checkpoint so far or not, leaves in the folder."""
        return Retained(self.keep, frozenset(self.ids), best)
