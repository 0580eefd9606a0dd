"""An optimizer whose workers come and go."""

from __future__ import annotations

import operator
from typing import Any

from mpishard.elastic.crew import is_newcomer
from mpishard.elastic.loop import ElasticLoop
from mpishard.mesh import Mesh
from mpishard.optim import DDPOptimizer, Rule, ShardedOptimizer, ShardingConfiguration

_NUMBER = 2**24


class ElasticOptimizer:
    """Wraps a rule or an optimizer so that a run goes on when workers leave, come back or die.

    Creation is collective over the mesh.

    Parameters
    ----------
    optimizer : Rule or ShardedOptimizer
        A rule becomes a `DDPOptimizer` with ``reproducible=True``.
    config : ShardingConfiguration or Mesh, optional
        For a rule.
    min_workers, max_workers : int
        Fewer workers than the one end the run; more than the other never train.

    Notes
    -----
    The processes of the job that do not train are spares: they wait, and take the place of workers that die.  Deaths
    are survived in place under Open MPI's ``mpirun --with-ft ulfm``; under other MPIs `mpishard run --elastic` starts
    the job again from the newest checkpoint.  With ``reproducible=True`` the run has the same bits whatever happens to
    its workers.
    """

    def __init__(
        self,
        optimizer: Rule | ShardedOptimizer,
        config: ShardingConfiguration | Mesh | None = None,
        min_workers: int = 1,
        max_workers: int = 1024,
    ) -> None:
        if isinstance(optimizer, Rule):
            if config is None:
                raise TypeError("ElasticOptimizer of a rule needs a Mesh or a ShardingConfiguration")
            if isinstance(config, Mesh):
                config = ShardingConfiguration(config, reproducible=True)
            optimizer = DDPOptimizer(optimizer, config)
        elif config is not None:
            raise TypeError("an optimizer has its configuration; leave config out")
        self.optimizer = optimizer
        mesh = optimizer.mesh
        if mesh.data.size < mesh.size:
            raise ValueError(f"an elastic run is data-parallel for now, but the mesh is {mesh.sizes}")
        if not 1 <= min_workers <= max_workers:
            raise ValueError(f"min_workers={min_workers} and max_workers={max_workers} must be 1 <= min <= max")
        if min_workers > mesh.size and not is_newcomer():
            raise ValueError(f"min_workers={min_workers}, but there are {mesh.size} processes; start more of them")
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.request = self.agreed = 0 if is_newcomer() else min(max_workers, mesh.size)
        mesh.unwatch()

    @property
    def mesh(self) -> Mesh:
        """The mesh, of which the data axis has the current workers."""
        return self.optimizer.mesh

    @property
    def current_workers(self) -> int:
        """How many train now."""
        return self.mesh.data.size

    @property
    def can_scale_up(self) -> bool:
        """Whether more may train than do now."""
        return self.current_workers < self.max_workers

    @property
    def can_scale_down(self) -> bool:
        """Whether fewer may train than do now."""
        return self.current_workers > self.min_workers

    def resize(self, workers: int) -> None:
        """Train with so many workers from the next step on; not collective, the last request counts.

        Raises
        ------
        ValueError
            If it is below `min_workers` or above `max_workers`.
        """
        if not self.min_workers <= workers <= self.max_workers:
            raise ValueError(
                f"resize({workers}) is outside of min_workers={self.min_workers} to max_workers={self.max_workers}"
            )
        # Requests are numbered, so that the last one counts, whichever rank it came from.
        self.request = (max(self.request, self.agreed) // _NUMBER + 1) * _NUMBER + operator.index(workers)

    @property
    def agreed_size(self) -> int:
        """How many workers there shall be."""
        return self.agreed % _NUMBER

    def heed(self, request: int) -> None:
        """Take note of a request that all ranks have agreed on."""
        self.agreed = max(request, self.agreed)

    def settle_for(self, processes: int) -> None:
        """Want no more workers than there are processes, after deaths; `resize` may ask for more."""
        self.agreed += min(self.agreed_size, processes) - self.agreed_size

    def optimize(self, problem: Any, **options: Any) -> Any:
        """Minimise an `OptimizationProblem`, as `ShardedOptimizer.optimize`; every process of the job takes part.

        At its end all processes that live are workers again, and have the result.
        """

        def loop(*arguments: Any) -> ElasticLoop:
            return ElasticLoop(self, *arguments)

        return problem.minimize(self.optimizer, loop=loop, **options)
