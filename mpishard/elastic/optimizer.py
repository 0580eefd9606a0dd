"""An optimizer whose workers come and go."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mpishard.arguments import flag, integer, number
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.optimizers import optimizer_of
from mpishard.data_parallel.results import OptimizationResult, P, TrainingState
from mpishard.data_parallel.settings import agree_on_settings
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.validation import check_problem
from mpishard.elastic.external_requests import Outside
from mpishard.elastic.loop import Elasticity, ElasticLoop
from mpishard.elastic.membership import is_newcomer
from mpishard.elastic.stopped_processes import Watch
from mpishard.elastic.worker_target import WorkerTarget
from mpishard.launch.run_folder import RunFolder
from mpishard.optim import Rule
from mpishard.record import RunRecord
from mpishard.training import OptimizationProblem, Scaling

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints


class ElasticOptimizer:
    """Wraps a rule or an optimizer so that a run goes on when workers leave, come back or die.

    Creation is collective over the mesh.

    Parameters
    ----------
    optimizer : Rule or ShardedOptimizer
        A rule becomes what `as_distributed` makes of it, with ``reproducible=True`` where `config` is a mesh.
    config : ShardingConfiguration or Mesh, optional
        For a rule.
    min_workers, max_workers : int
        Fewer workers than the one end the run; more than the other never train.  A worker is one replica of the model:
        a process, or ``tensor * pipeline`` of them, and their number is the size of the data axis.
    folder : path, optional
        Where ``mpishard resize FOLDER N`` finds the run: a folder that all processes see.  Default: that of the
        checkpoints given to `optimize`, else the one of `mpishard run`.
    discover : callable or path, optional
        Says how many workers there shall be; asked about every second, and a number outside of the limits counts as
        the nearer limit.  A function without arguments, called in a thread; a file that holds one number, or a host a
        line as ``NAME``, ``NAME:SLOTS`` or ``NAME slots=SLOTS``; or an executable file that prints one of these.
    failure_timeout : float
        Seconds after which a process that is stopped (SIGSTOP) counts as failed and is ended by those on its host,
        where deaths are survived in place.
    respawn : bool
        After a death, with no spare left, whether another process is spawned while the others go on; not if they have
        taken no step since the last death or arrival.  Without, the run also lets those go who are on their way.
    scaling : {"constant", "linear", "square_root"}
        What a step is with other workers than the run began with.  By default the same: the global batch and the
        learning rate stay.  Else the batch is in proportion to the workers (with c of n at the beginning:
        ``batch_size * c // n`` samples), and the learning rate, a number or a schedule, to the batch ("linear", Goyal
        et al. 2017) or to its square root (Krizhevsky 2014; for Adam Malladi et al. 2022).  A step takes the samples
        that come next, every one once an epoch, at the end of which a batch is cut short.  Checkpoints know how far a
        run is; another run of the optimizer begins where batches of `batch_size` would have come to.

    Notes
    -----
    SIGTERM or SIGUSR1 to one process: it leaves the run in order, and waits for its end.  To all processes that train,
    as launchers pass it on, or Ctrl-C: the run saves a checkpoint and stops with ``result.stop_reason == "signal"``.
    For a batch script to see that, let the training script end with::

        if result.stop_reason == "signal":
            sys.exit(os.EX_TEMPFAIL)  # 75

    Open MPI's own launcher kills the ranks a second after it was sent SIGTERM; SIGUSR1 leaves them the time, and
    `mpishard run` sends that.

    The processes of the job that do not train are spares: they wait, and take the place of those that die.  With tensor
    or pipeline ranks each process stays at its place in a replica, and a spare takes over from one of the same place;
    where none is left, the replica's other processes become spares, and those that are in no whole replica at the end
    of the run end their scripts there, with exit code 0.  Deaths are survived in place under Open MPI's
    ``mpirun --with-ft ulfm``; under other MPIs `mpishard run --elastic` starts the job again from the newest
    checkpoint.  With ``reproducible=True`` the run has the same bits whatever happens to its workers.

    Where fewer workers are left each computes more of a batch: ``micro_batch_size`` of the problem limits how much at a
    time, and so the memory that it takes.
    """

    scaling: str

    def __init__(
        self,
        optimizer: Rule | ShardedOptimizer,
        config: ShardingConfiguration | Mesh | None = None,
        min_workers: int = 1,
        max_workers: int = 1024,
        *,
        folder: str | os.PathLike[str] | None = None,
        discover: Callable[[], int] | str | os.PathLike[str] | None = None,
        failure_timeout: float = 10.0,
        respawn: bool = True,
        scaling: Literal["constant", "linear", "square_root"] = "constant",
    ) -> None:
        if isinstance(optimizer, Rule):
            if config is None:
                raise TypeError("ElasticOptimizer of a rule needs a Mesh or a ShardingConfiguration")
            if isinstance(config, Mesh):
                config = ShardingConfiguration(config, reproducible=True)
            optimizer = optimizer_of(optimizer, config)
        elif config is not None:
            raise TypeError("an optimizer has its configuration; leave config out")
        self.optimizer = optimizer
        mesh = optimizer.mesh
        if mesh.is_reshaped:
            sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items() if name != "data" and size > 1)
            raise ValueError(
                f"the mesh {mesh.sizes} shares its ranks with one of another shape, made by reshaped(); an elastic run "
                f"needs one of its own, made as Mesh({sizes})"
            )
        min_workers = integer("min_workers", min_workers)
        max_workers = integer("max_workers", max_workers)
        if not 1 <= min_workers <= max_workers:
            raise ValueError(f"min_workers={min_workers} and max_workers={max_workers} must be 1 <= min <= max")
        if not (discover is None or callable(discover) or isinstance(discover, str | os.PathLike)):
            raise TypeError(f"discover={discover!r} must be a function, or the path of a file")
        there = mesh.data.size
        if min_workers > there and not is_newcomer():
            raise ValueError(
                f"min_workers={min_workers}, but only {there} can be made of the {mesh.size} processes; "
                "start more of them"
            )
        failure_timeout = number("failure_timeout", failure_timeout, above=0, finite=False)
        first = 0 if is_newcomer() else min(max_workers, there)
        self._target = WorkerTarget(first, min_workers, max_workers)
        # A script may change its directory.
        self.folder: Path | None = None if folder is None else Path(folder).absolute()
        self.discover = discover
        self.failure_timeout = failure_timeout
        self.respawn = flag("respawn", respawn)
        self.scaling = Scaling(scaling, 1).policy
        mesh.unwatch()

    @property
    def mesh(self) -> Mesh:
        """The mesh, whose data axis has the current workers."""
        return self.optimizer.mesh

    @property
    def min_workers(self) -> int:
        """Fewer workers than this end the run."""
        return self._target.min_workers

    @min_workers.setter
    def min_workers(self, workers: int) -> None:
        self._target.min_workers = workers

    @property
    def max_workers(self) -> int:
        """More workers than this never train."""
        return self._target.max_workers

    @max_workers.setter
    def max_workers(self, workers: int) -> None:
        self._target.max_workers = workers

    @property
    def current_workers(self) -> int:
        """How many train now."""
        return self.mesh.data.size

    @property
    def can_scale_up(self) -> bool:
        """Whether more may train than do now."""
        return self.current_workers < self._target.most

    @property
    def can_scale_down(self) -> bool:
        """Whether fewer may train than do now."""
        return self.current_workers > self.min_workers

    def resize(self, workers: int) -> None:
        """Train with so many workers; not collective, the last request counts.

        From the next step on, as far as there are processes; others are spawned, which takes seconds, and come in
        between two steps once all of them are there.  If they cannot, the run says why and wants no more than it has.
        They run the script from its beginning, and can come to its first call of `optimize` only.

        Raises
        ------
        ValueError
            If it is below `min_workers` or above `max_workers`, or would leave some workers without a sample.
        """
        self._target.resize(workers)

    @property
    def agreed_size(self) -> int:
        """How many workers there shall be."""
        return self._target.agreed_size

    def optimize(
        self,
        problem: OptimizationProblem[P],
        *,
        callback: Callable[[TrainingState[P]], bool | None] | None = None,
        progress: bool = True,
        checkpoints: Checkpoints | None = None,
        resume: bool = False,
        record: RunRecord | None = None,
    ) -> OptimizationResult[P]:
        """Minimise a problem; the options are those of `ShardedOptimizer.optimize`.

        Every process of the job takes part.  At its end all processes that live are workers again, and have the result.
        While it runs, SIGTERM and SIGUSR1 are its own; their handlers before are put back.

        Raises
        ------
        ValueError, OSError
            On every rank, if the run's folder cannot hold a ``control`` folder that is the user's own.
        """
        check_problem(problem)
        own = {name: str(getattr(self, name)) for name in ("min_workers", "max_workers", "respawn", "scaling")}
        agree_on_settings(self.mesh.world, own)
        # With a batch that stays the same, more workers than samples would have nothing to do.
        constant = self.scaling == "constant"
        self._target.most = min(self.max_workers, problem.batch_size) if constant else self.max_workers

        with ExitStack() as stack:
            limits = self.min_workers, self._target.most
            folder = self._folder(checkpoints)
            outside = stack.enter_context(Outside(self.mesh.world, *limits, folder, self.discover))
            watch = Watch(self.failure_timeout)
            if heals_in_place():
                stack.enter_context(watch)
            elasticity = Elasticity(self._target, outside, watch, self.respawn, self.scaling)
            return problem.minimize(
                self.optimizer,
                callback=callback,
                progress=progress,
                checkpoints=checkpoints,
                resume=resume,
                record=record,
                loop=partial(ElasticLoop, elasticity),
            )

    def _folder(self, checkpoints: Checkpoints | None) -> Path | None:
        """Where the run is found from other shells."""
        folder: Path | None = self.folder or getattr(checkpoints, "folder", None)
        if folder is not None:
            return folder
        run = RunFolder.from_environment()
        return None if run is None else run.path
