"""Requests to an elastic run from outside of its script: signals, other shells, and `discover`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from mpishard.comm.axis import Axis
from mpishard.comm.capabilities import heals_in_place
from mpishard.elastic.control import FIXED, Control, ControlFolder, Wanted
from mpishard.elastic.discovery import Discovery
from mpishard.elastic.membership import is_joining
from mpishard.elastic.mesh_choice import MeshChoice
from mpishard.launch.signals import Signals


class Outside:
    """Receives requests while it is entered as a context manager.

    Creation is collective over `axis`, all processes of the run.  Raises ValueError or OSError on every rank if the
    control folder (`folder`: of the run) cannot be made or belongs to another user.  `discover` is the source of a
    `Discovery`; `choice` is given for a run that may change its mesh.
    """

    def __init__(
        self,
        axis: Axis,
        min_workers: int,
        max_workers: int,
        folder: Path | None,
        discover: Callable[[], int] | str | os.PathLike[str] | None,
        choice: MeshChoice | None = None,
    ) -> None:
        self.signals: Signals = Signals()
        self._axis = axis
        self._limits = min_workers, max_workers
        self._discovery = None if discover is None else Discovery(discover)
        self._control: Control | None = None
        if folder is not None:
            control, problem = ControlFolder(folder), None
            if axis.rank == 0 and not is_joining():
                try:
                    control.make()
                except (ValueError, OSError) as error:
                    problem = error
            axis.raise_if_any(problem)
            refuse = (lambda sizes: FIXED) if choice is None else choice.refuse
            self._control = Control(control, min_workers, max_workers, refuse)

    def __enter__(self) -> Outside:
        self.signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.signals.__exit__(kind, error, trace)
        if self._discovery is not None:
            self._discovery.close()
        if self._control is None or self._axis.rank or is_joining():
            return
        if kind is None or not heals_in_place():  # after an error here the other processes continue and need the folder
            self._control.close()

    @property
    def discovered(self) -> int:
        """The last number that the run got from `discover`, -1 if none; another rank that asks next must have it."""
        return -1 if self._discovery is None else self._discovery.known

    @discovered.setter
    def discovered(self, number: int) -> None:
        if self._discovery is not None:
            self._discovery.known = number

    def wanted(self, workers: int, step: int, waits: bool, mesh: str = "") -> Wanted | None:
        """The number of workers or the mesh of a new request, or None.  The first worker calls this after each step.

        `waits` is true while the run waits for workers to join; `mesh` is the present one, of a run that may change it.
        """
        found = None if self._discovery is None else self._discovery.news()
        if found is not None:
            found = min(max(found, self._limits[0]), self._limits[1])
        asked = None if self._control is None else self._control.poll(workers, step, waits, mesh)
        return found if asked is None else asked
