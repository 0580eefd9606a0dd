"""An optimizer whose workers may join, leave and die during a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mpishard.arguments import flag, integer, number, shown
from mpishard.comm.agreement import opening
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.data.evaluation import EarlyStopping, Evaluation
from mpishard.data_parallel.configuration import ShardingConfiguration, mesh_of
from mpishard.data_parallel.optimizers import default_optimizer
from mpishard.data_parallel.results import OptimizationResult, P, TrainingState
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.validation import check_problem
from mpishard.elastic.loop import ElasticLoop
from mpishard.elastic.membership import is_joining
from mpishard.elastic.mesh_choice import MeshChoice, MeshSizes
from mpishard.elastic.mesh_limits import MeshLimits
from mpishard.elastic.requests import ResizeRequests, WorkerTarget
from mpishard.elastic.run import ElasticOptions
from mpishard.elastic.spawning import JoiningProcess
from mpishard.elastic.stopped_peers import StoppedPeerMonitor
from mpishard.launch.job_notes import JobNotes
from mpishard.minimizers import Method
from mpishard.optim import Rule
from mpishard.parameters.flat import FlatParameters
from mpishard.record import RunRecord
from mpishard.training import OptimizationProblem, Scaling
from mpishard.training.audit import LEAST_SHARE, REPLICAS

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.elastic.auto_layouts import AutoLayouts


class ElasticOptimizer:
    """Wraps a rule or an optimizer so that a run continues when workers leave, join or die.

    Creation is collective over the mesh, and so is `optimize`; `resize` is not.

    Parameters
    ----------
    optimizer : Rule, Method or ShardedOptimizer
        A rule or method is wrapped as by `as_distributed`, with ``reproducible=True`` if `config` is a mesh.
    config : ShardingConfiguration or Mesh, optional
        Required with a rule; leave it out with an optimizer.
    min_workers, max_workers : int
        With fewer workers than `min_workers` the run ends; more than `max_workers` never train.  A worker is one
        replica of the model: a process, or ``tensor * pipeline`` processes.  The number of workers is the size of the
        data axis.
    folder : path, optional
        Where ``mpishard resize FOLDER N`` finds the run: a folder that all processes see.  Default: that of the
        checkpoints given to `optimize`, else the one of `mpishard run`.
    discover : callable or path, optional
        Source of the wanted number of workers, asked about every second.  A number outside of the limits counts as the
        nearer limit.  A function without arguments, called in a thread; a file that holds one number, or one host per
        line as ``NAME``, ``NAME:SLOTS`` or ``NAME slots=SLOTS``; or an executable file that prints one of these.
    failure_timeout : float
        Seconds after which a process that is stopped (SIGSTOP) counts as failed and is killed by a process on its host;
        only where the run survives deaths in place.
    respawn : bool
        Whether a process is spawned after a death if no spare is left, while the others continue.  None is spawned if
        the run has taken no step since the last death or arrival.  If False, a death also cancels processes that are
        still starting.
    scaling : {"constant", "linear", "square_root"}
        How batch and learning rate follow the number of workers.  "constant": the global batch and the learning rate
        stay the same.  Else the batch is proportional to the workers: with c workers in a run that began with n,
        ``batch_size * c // n`` samples.  The learning rate, a number or a schedule, is proportional to the batch
        ("linear", Goyal et al. 2017) or to its square root (Krizhevsky 2014; for Adam Malladi et al. 2022).  Each step
        takes the next samples of the epoch, each sample once per epoch, and the last batch of an epoch may be shorter.
        Checkpoints store the position in the epoch; another run of the optimizer begins at the position that batches
        of `batch_size` would have reached.
    layouts : sequence of mappings, callable, AutoLayouts or "auto", optional
        Lets the run change its tensor and pipeline sizes too: which mesh a number of ranks takes.  A list of sizes such
        as ``[{"tensor": 2, "pipeline": 2}, {"tensor": 2}, {}]``, where data is as many as fit if it is left out: the
        run takes the entry with the most ranks, of several such the first.  Or a function ``layouts(ranks)`` that
        returns the sizes of a mesh of at most that many ranks, or None if it has none.  Or "auto", or an `AutoLayouts`:
        the fastest that fits into memory, by `mpishard.estimate`.  `optimize` then takes a function
        that makes the problem for a mesh, and a worker is one process, so `min_workers`, `max_workers`, `resize` and
        `current_workers` count ranks.  If `optimizer` was made with a mesh of tensor or pipeline ranks, that is the
        layout for its number of ranks until another one is asked for; a mesh of data ranks alone is changed before the
        first step.
    rebuild : callable, optional
        ``rebuild(mesh)``, for functions that have made something of the communicators of the mesh, such as a domain
        that the ranks of `mesh.tensor` share: called on all workers, also those that have joined, after these
        communicators were made anew, before the next step.  It may communicate.
    audit : float or "replicas", optional
        Finds a worker that computes wrongly.  A number from 1e-9 to 1: the share of the micro-batches that a second
        worker computes too, drawn anew in each step; in steps with such a micro-batch, sums over ranks are checked,
        too.  Where the bits differ, all workers compute that micro-batch, or a third one adds up that sum.  A worker
        that is not with the majority is named, with host and step, and works no more; the others take the step again.
        For DDP and ZeRO-1 with ``reproducible=True`` on a data axis alone.  "replicas": every 10 steps, and after the
        last one, the parameters of all workers are compared, and under DDP their state.  A worker that differs takes
        those of the majority.

    Raises
    ------
    TypeError
        If a rule has no `config`, an optimizer has one, or an argument is of another type than above.
    ValueError
        If the limits are not ``1 <= min_workers <= max_workers``, there are fewer than `min_workers`, another number is
        out of its range, `scaling` is none of the above, the mesh was made by `reshaped`, or `layouts` is given with an
        `audit`, or with a `scaling` that is not constant.

    Notes
    -----
    A process that gets SIGTERM or SIGUSR1 alone leaves after the step under way, and waits for the end of the run.  If
    all processes that train get one, as launchers pass signals on, or on Ctrl-C, the run saves a checkpoint and stops
    with ``result.stop_reason == "signal"``.  To report that to a batch script, end the training script with::

        if result.stop_reason == "signal":
            sys.exit(os.EX_TEMPFAIL)  # 75

    Open MPI's own launcher kills the ranks a second after it got SIGTERM.  After SIGUSR1 it does not, so `mpishard run`
    sends SIGUSR1.

    Processes of the job that do not train are spares: they wait, and replace processes that die.  With tensor or
    pipeline ranks each process keeps its model-parallel rank, and a spare replaces a process of the same one.  If there
    is no such spare, the other processes of the replica become spares; with `layouts` all that are left take the mesh
    for their number.  Processes that are in no whole replica at the end of the run end their scripts there, with exit
    code 0.  A run survives deaths in place under Open MPI's
    ``mpirun --with-ft ulfm``; under other MPIs `mpishard run --elastic` starts the job again from the newest
    checkpoint.  With ``reproducible=True`` the run has the same bits whatever happens to its workers.

    With fewer workers each computes more of a batch.  ``micro_batch_size`` of the problem limits how much a worker
    computes at a time, and so its memory.  All ranks agree on every step, also between the averages of Local SGD.  A
    death may lose what compression has left out of gradients until then.
    """

    scaling: str

    def __init__(
        self,
        optimizer: Rule | Method | ShardedOptimizer,
        config: ShardingConfiguration | Mesh | None = None,
        min_workers: int = 1,
        max_workers: int = 1024,
        *,
        folder: str | os.PathLike[str] | None = None,
        discover: Callable[[], int] | str | os.PathLike[str] | None = None,
        failure_timeout: float = 10.0,
        respawn: bool = True,
        scaling: Literal["constant", "linear", "square_root"] = "constant",
        layouts: Sequence[Mapping[str, int]]
        | Callable[[int], Mapping[str, int] | None]
        | AutoLayouts
        | Literal["auto"]
        | None = None,
        rebuild: Callable[[Mesh], object] | None = None,
        audit: float | Literal["replicas"] | None = None,
    ) -> None:
        mesh = _mesh_of(optimizer, config)
        with opening(mesh.world, "ElasticOptimizer") as same:
            if isinstance(optimizer, Rule | Method):
                assert config is not None
                if isinstance(config, Mesh):
                    config = ShardingConfiguration(config, reproducible=True)
                optimizer = default_optimizer(optimizer, ShardingConfiguration.of(config))
            elif not isinstance(optimizer, ShardedOptimizer):
                raise TypeError(f"ElasticOptimizer takes a rule, a method or an optimizer, got {shown(optimizer)}")
            elif config is not None and config is not optimizer.mesh and config is not optimizer.config:
                what = "mesh" if isinstance(config, Mesh) else "configuration"
                raise TypeError(
                    f"{type(optimizer).__name__} was made with its own mesh and configuration; leave this {what} out"
                )
            self.optimizer = optimizer
            if mesh.is_reshaped:
                sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items() if name != "data" and size > 1)
                raise ValueError(
                    f"the mesh {mesh.sizes} shares its ranks with one of another shape, made by reshaped(); an elastic "
                    f"run needs its own, made as Mesh({sizes})"
                )
            min_workers = integer("min_workers", min_workers)
            max_workers = integer("max_workers", max_workers)
            if not 1 <= min_workers <= max_workers:
                raise ValueError(f"min_workers={min_workers} and max_workers={max_workers} must be 1 <= min <= max")
            if not (discover is None or callable(discover) or isinstance(discover, str | os.PathLike)):
                raise TypeError(f"discover={discover!r} must be a function, or the path of a file")
            if not (rebuild is None or callable(rebuild)):
                raise TypeError(f"rebuild={shown(rebuild)} must be a function of the mesh")
            self._rebuild = rebuild
            self._choice = None if layouts is None else MeshChoice(layouts, min_workers)
            there = self.current_workers
            if min_workers > there and not is_joining():
                raise ValueError(
                    f"min_workers={min_workers}, but only {there} can be made of the {mesh.size} processes; "
                    "start more of them"
                )
            first = 0 if is_joining() else min(max_workers, there)
            # A mesh of tensor or pipeline ranks that takes part as a whole is the one that is asked for at first.
            present = MeshSizes(**mesh.shape)
            is_asked_for = self._choice is not None and first == present.ranks > present.data
            request = WorkerTarget.encoded(first, present if is_asked_for else None)
            fewest = 1 if self._choice is None else self._choice.fewest
            self._target = WorkerTarget(request, min_workers, max_workers, fewest)
            # Absolute, since the script may change its directory.
            self.folder: Path | None = None if folder is None else Path(folder).absolute()
            self.discover = discover
            self.failure_timeout = number("failure_timeout", failure_timeout, above=0, finite=False)
            self.respawn = flag("respawn", respawn)
            self.scaling = Scaling(scaling, 1).policy
            if self._choice is not None and self.scaling != "constant":
                raise ValueError(
                    f"scaling={scaling!r} follows the data ranks, whose number jumps where the mesh changes its shape; "
                    "leave it out with layouts"
                )
            named = audit is None or audit == REPLICAS
            self.audit: float | str | None = (
                audit if named else number("audit", audit, least=LEAST_SHARE, most=1, otherwise=f"{REPLICAS!r}")
            )
            if self._choice is not None and audit is not None:
                raise ValueError("audit= is for workers of one rank, layouts= for other meshes; leave one out")
            same |= {
                **optimizer.config.settings(),
                **self._settings,
                "discover": discover is not None,
                "layouts": layouts,
                "rebuild": rebuild is not None,
            }
            same |= {"failure_timeout": self.failure_timeout}

    @property
    def _settings(self) -> dict[str, Any]:
        """What can be changed until `optimize`, and all ranks must have alike."""
        names = "min_workers", "max_workers", "respawn", "scaling", "audit"
        return {name: getattr(self, name) for name in names} | {"folder": str(self.folder)}

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
        if self._choice is not None:
            self._choice.min_ranks = workers
            self._target.fewest = self._choice.fewest

    @property
    def max_workers(self) -> int:
        """More workers than this never train."""
        return self._target.max_workers

    @max_workers.setter
    def max_workers(self, workers: int) -> None:
        self._target.max_workers = workers

    @property
    def current_workers(self) -> int:
        """Number of workers that train now: data ranks, or all ranks with `layouts`."""
        return self.mesh.data.size if self._choice is None else self.mesh.size

    @property
    def can_scale_up(self) -> bool:
        """True if more workers may train than do now."""
        return self.current_workers < self._target.most

    @property
    def can_scale_down(self) -> bool:
        """True if fewer workers may train than do now."""
        return self.current_workers > self._target.least

    def resize(self, workers: int | None = None, *, mesh: Mapping[str, int] | None = None) -> None:
        """Request a number of workers, or a mesh; the last request counts.

        Not collective.  The change comes at the next step, as far as there are processes.  Missing processes are
        spawned, which takes seconds; they join between two steps once all of them are ready.  If they cannot, the run
        reports why and continues with the workers that it has.  They run the script from its beginning, and can only
        join its first call of `optimize`.

        Parameters
        ----------
        workers : int, optional
            From `min_workers` to `max_workers`.
        mesh : mapping, optional
            In place of `workers`, with `layouts`: sizes of the axes, such as ``{"data": 2, "tensor": 2}``; an axis that
            is left out has size 1.  After a death the run takes another layout, until there are as many ranks again.

        Raises
        ------
        TypeError
            If both are given or none, or sizes are no numbers.
        ValueError
            If the number of workers is below `min_workers` or above `max_workers`, some workers would have no sample,
            the list of `layouts` has no mesh of so few, the mesh is none of `layouts`, or there are no `layouts`.
        """
        if (workers is None) == (mesh is None):
            raise TypeError("resize takes a number of workers, or mesh=sizes")
        if mesh is None:
            assert workers is not None
            self._target.resize(workers)
            return
        if self._choice is None:
            raise ValueError("resize(mesh=...) is for runs that may change their mesh: ElasticOptimizer(layouts=...)")
        sizes = MeshSizes.of(mesh)
        if refused := self._choice.why_refused(sizes):
            raise ValueError(refused)
        self._target.resize(sizes.ranks, sizes)

    @property
    def agreed_size(self) -> int:
        """The wanted number of workers, on which all ranks have agreed."""
        return self._target.agreed_size

    def optimize(
        self,
        problem: OptimizationProblem[P] | Callable[[Mesh], OptimizationProblem[P]],
        *,
        callback: Callable[[TrainingState[P]], bool | None] | None = None,
        progress: bool = True,
        checkpoints: Checkpoints | None = None,
        resume: bool = False,
        record: RunRecord | None = None,
        evaluate: Evaluation | None = None,
        stop_early: EarlyStopping | None = None,
    ) -> OptimizationResult[P]:
        """Minimise a problem, with workers that come and go.

        Collective over the mesh: every process of the job takes part, spares too.  At the end of the run all living
        processes are workers again, and have the result.  During the run it handles SIGTERM and SIGUSR1; at its end the
        handlers from before are restored.

        Parameters
        ----------
        problem : OptimizationProblem or callable
            What is minimised, and when the run stops.  With `layouts` a function ``problem(mesh)`` that makes the model
            for a mesh, and its problem: with the same tensors, samples and goals for every mesh.  It is called on all
            ranks of the mesh, at first and whenever the tensor or pipeline size changes; the values that it gives the
            parameters count only at the beginning, and later a `GPT` that it makes draws none.
        callback : callable, optional
            Called with a `TrainingState` on every worker after every step; returning True on any worker stops all of
            them.  After a death it may be called once more for the same step.
        progress : bool
            Show progress on stderr of rank 0.
        checkpoints : Checkpoints, optional
            Save the run there, as `ShardedOptimizer.optimize` does.
        resume : bool
            Continue from the newest complete checkpoint of `checkpoints`; start a new run if it has none.
        record : RunRecord, optional
            Write the course of the run there.
        evaluate : Evaluation, optional
            A validation set, and how often its mean loss is computed.  With `layouts` use `Evaluation.for_model`, which
            takes the model that was made for the mesh.
        stop_early : EarlyStopping, optional
            Stop when the validation loss no longer falls.

        Returns
        -------
        OptimizationResult
            The same on every rank except for `communication`; each has its part of a model that is split over ranks.

        Raises
        ------
        TypeError
            If `problem` is a function without `layouts`, or none with `layouts`.
        ValueError, OSError
            On every rank, if the run's folder cannot hold a ``control`` folder that belongs to the user, or an `audit`
            does not fit the optimizer or the problem.
        RuntimeError
            On every rank, if an `audit` finds a difference and no majority, as of two workers, or fewer than
            `min_workers` are left.
        """
        with opening(self.mesh.world, "ElasticOptimizer.optimize") as same:
            folder = self._folder(checkpoints)
            same |= {**self._settings, "the folder for requests": str(folder)}
            self._check_kind(problem)
        build, problem = self._built(problem)
        # With a batch that stays the same, more workers than samples would have nothing to do.
        constant = self.scaling == "constant" and self._choice is None and not problem.may_idle
        self._target.most = min(self.max_workers, problem.batch_size) if constant else self.max_workers

        with ExitStack() as stack:
            limits = self._target.least, self._target.most
            requests = stack.enter_context(
                ResizeRequests(self.mesh.world, *limits, folder, self.discover, self._choice)
            )
            monitor = StoppedPeerMonitor(self.failure_timeout)
            if heals_in_place():
                stack.enter_context(monitor)
            elastic_options = ElasticOptions(
                self._target,
                requests,
                monitor,
                self.respawn,
                self.scaling,
                choice=self._choice,
                build=build,
                rebuild=self._rebuild,
                audit=self.audit,
            )
            joins = is_joining()
            if joins:  # it waits for the run while the loop is made; others have the time limit there
                JoiningProcess.heed_signals()
                stack.enter_context(requests.signals)
            # It only makes the loop, so that no frame keeps the problem while that runs.
            loop: Any = problem.minimize(
                self.optimizer,
                callback=callback,
                progress=progress,
                checkpoints=checkpoints,
                resume=resume,
                record=record,
                evaluate=evaluate,
                stop_early=stop_early,
                loop=partial(ElasticLoop, elastic_options),
            )
            del problem  # or the first model would stay in memory when the run has another mesh
            if not joins:  # not before: a rank that waits in MPI cannot handle a signal, and would not end by it
                stack.enter_context(requests.signals)
            result: OptimizationResult[P] = loop.run()
            return result

    def _check_kind(self, problem: Any) -> None:
        """Raise TypeError unless this is a problem, or with `layouts` a function that makes it."""
        if isinstance(problem, OptimizationProblem) or not callable(problem):
            check_problem(problem)
            if self._choice is not None:
                raise TypeError(
                    "layouts= changes the mesh: give optimize a function that makes the model for a mesh, and its "
                    "problem: optimize(lambda mesh: OptimizationProblem.for_model(GPT(..., mesh=mesh), ...))"
                )
        elif self._choice is None:
            raise TypeError(
                "optimize was given a function that makes the problem for a mesh, but the mesh stays as it is; give "
                "ElasticOptimizer(..., layouts=...), or the problem itself"
            )

    def _built(
        self, problem: OptimizationProblem[P] | Callable[[Mesh], OptimizationProblem[P]]
    ) -> tuple[Callable[[Mesh], OptimizationProblem[P]] | None, OptimizationProblem[P]]:
        """The function that makes the problem, None without one, and the problem for the mesh as it is.  Collective."""
        if isinstance(problem, OptimizationProblem) or not callable(problem):
            return None, problem
        assert self._choice is not None
        with raised_on_all(self.mesh.world):
            # A joining process makes the whole model before it gets its part of one: without values it takes no memory.
            with self.mesh.without_initial_values() if is_joining() else nullcontext():
                trained, made = self.optimizer.parameters, problem(self.mesh)
            check_problem(made)
            if trained is not None and isinstance(made.start, FlatParameters):  # the call continues an earlier one
                made.start.held[...] = trained.held
            # One that joins may become the first, which chooses, and refuses what others ask for.
            self._choice.why_not = why_not = MeshLimits(self.optimizer, made)
            if not is_joining():
                self._choice.check()
            if self._choice.auto is not None:
                from mpishard.elastic.auto_layouts import AutoLayouts  # with the estimates

                auto = AutoLayouts() if self._choice.auto == "auto" else self._choice.auto
                self._choice.use(auto.for_problem(self.optimizer, made, why_not))
        return problem, made

    def _folder(self, checkpoints: Checkpoints | None) -> Path | None:
        """The folder in which other shells find the run."""
        folder: Path | None = self.folder or getattr(checkpoints, "folder", None)
        if folder is not None:
            return folder
        run = JobNotes.from_environment()
        return None if run is None else run.path


def _mesh_of(optimizer: Any, config: Any) -> Mesh:
    """The mesh of an optimizer, or else of the configuration; TypeError if neither has one."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.mesh
    if config is None:
        raise TypeError("ElasticOptimizer of a rule needs a Mesh or a ShardingConfiguration")
    return mesh_of(config)
