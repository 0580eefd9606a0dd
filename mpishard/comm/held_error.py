"""An error of the user's code on one rank, which all ranks raise where they next meet.

If the rank raised it at once, the others would wait for that rank in the collectives of the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

from mpishard.comm.axis import Axis
from mpishard.comm.capabilities import heals_in_place


class HeldError:
    """Holds the first error of the user's code on this rank.  Creation is not collective.

    Parameters
    ----------
    world : Axis
        All ranks.
    transactional : bool
        Whether an error counts as a death where MPI informs the others of it (ULFM): then it is raised at once.

    Attributes
    ----------
    error : Exception, SystemExit or None
        None: the user's code has not failed here.
    meet : callable
        Called where all workers know that one has failed; returns the ranks that raise the error.
    """

    def __init__(self, world: Axis, transactional: bool) -> None:
        self.error: Exception | SystemExit | None = None
        self.meet: Callable[[], Axis] = lambda: world
        self._world, self._transactional = world, transactional  # a worker may be alone with spares
        self._as_death = transactional and heals_in_place()

    @contextlib.contextmanager
    def holding(self, alone: bool = True) -> Iterator[None]:
        """Hold an error of the block.

        Parameters
        ----------
        alone : bool
            Whether no other rank waits for this one inside the block.  False: the error is raised at once.

        Yields
        ------
        None
            Errors of MPI are never held.
        """
        try:
            yield
        except MPI.Exception:
            raise
        except (Exception, SystemExit) as error:
            if not alone or self._as_death or (self._world.size == 1 and not self._transactional):
                raise
            self.error = error

    def raise_on_all(self) -> None:
        """Raise the error of any rank on all ranks; without one do nothing.  Collective over the workers.

        Raises
        ------
        Exception
            On a rank that has failed its own error, elsewhere one that names the first such rank and its error.
        SystemExit
            If the first such rank has called ``sys.exit``: all ranks end with its code.
        """
        failed = np.array([self.error is not None], np.int64)
        if self._world.all_reduce(failed, op="max", label="control")[0]:
            self.raise_over(self.meet())

    def raise_over(self, axis: Axis) -> None:
        """The part of `raise_on_all` after all ranks have met; `axis`: those that raise.  Collective over them.

        Parameters
        ----------
        axis : Axis
            As above.
        """
        error, self.error = self.error, None
        axis.raise_together(error)
