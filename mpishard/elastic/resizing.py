"""Changes of the workers between two steps: who works next, and how these get the committed state.

Nothing here is about deaths: after one the survivors first shrink to those who live, and agree on the last committed
step (`mpishard.elastic.healing`).  Whether survivors heal or the job starts again is decided elsewhere, hop by hop: the
launcher's option (`mpishard.comm.capabilities.heals_in_place`); the loop, which heals if it may
(`mpishard.elastic.loop`); `heal`, which gives up if too much is lost; and then the supervisor
(`mpishard.launch.restart_policy`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from mpi4py import MPI

from mpishard.comm.abort import abort
from mpishard.comm.agreement import agree_on_gemm_libraries, agree_on_settings
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.errors import on_any, raised_on_all
from mpishard.comm.reshard import reshard_state
from mpishard.elastic.membership import Order
from mpishard.elastic.mesh_choice import MeshSizes
from mpishard.elastic.run import ElasticRun
from mpishard.elastic.transactions import ResizeMetadata
from mpishard.io import log
from mpishard.launch.job_notes import RunLost
from mpishard.launch.script import describe
from mpishard.layout.run_state import RunState

# How long a worker that fails waits for the others.
_OTHERS_S = 60.0


class Resizing:
    """Gives the run other workers; it has no state, `run` owns all of it."""

    def __init__(self, run: ElasticRun) -> None:
        self._run = run

    def resize(self, order: Order) -> None:
        """Give the run the number of workers of an order, and them the committed state.  Collective over all processes.

        Spawned processes join first, if the order says so.  Then the mesh is split again, the optimizer makes its state
        for the new mesh, and the committed state and the metadata of the run are sent to it.
        """
        run = self._run
        membership, transactions, report = run.membership, run.transactions, run.training.report
        mesh = run.worker_mesh.mesh
        run.agreements.end_steps()
        was, sizes_before = mesh.data.size, run.worker_mesh.sizes
        report.flush()  # rank 0 writes the record, and another process may become rank 0
        if order.recruits:
            self._take_in(order.workers)
        sizes = self._choose(order.workers)
        self._check_scripts()
        source = self._source()
        run.worker_mesh.release()
        works, empty = self._split(order.workers if sizes is None else sizes.ranks, sizes)
        metadata = self._reshard(source, empty)
        transactions.status = metadata.status
        run.options.requests.discovered = metadata.discovered
        run.training.checkpoints.own = metadata.checkpoints
        checkpoint = None
        if works:
            self._restore(metadata)
            checkpoint = transactions.new_checkpoint()
        run.agreements.agree_on_membership()  # nobody drops its old committed state before all have the new one
        transactions.install(checkpoint)
        if membership.rank == 0 and report.shows and not metadata.status.stop_reason:
            step = metadata.status.committed_step
            if sizes is None and mesh.data.size != was:
                log.inform(f"{was} -> {mesh.data.size} workers after step {step}")
            if sizes is not None and sizes != sizes_before:
                log.inform(f"{sizes_before} -> {sizes} after step {step}")
        if works:
            run.worker_mesh.note_whole()
            run.agreements.begin_steps()
        if membership.rank:  # another process may have become rank 0, which spawns
            run.recruiter.dismiss()

    def _take_in(self, workers: int) -> None:
        """Let the spawned processes that are ready join, if they still live.  Collective over all processes."""
        membership, recruiter = self._run.membership, self._run.recruiter
        spawn = recruiter.hand_over()
        self._run.decisions.forget_recruits()
        recruiter.last_disruption = self._run.transactions.status.committed_step
        try:
            port, problem = membership.call_in(spawn)
            if port:
                # After a death, a process that connects to them alone could not be woken.
                self._run.agreements.agree_on_membership()
                membership.take_in(port, workers, spawn)
        except MPI.Exception:
            if spawn is not None:
                spawn.give_up()
            raise
        if port and spawn is not None:
            spawn.close()
        if not port:
            self._run.options.target.cap_workers(membership.roles.able)
            if spawn is not None:
                recruiter.say_none_come(problem)

    def _choose(self, workers: int) -> MeshSizes | None:
        """The mesh for at most this number of workers; None if the tensor and pipeline sizes stay.

        Collective over all processes: the first one chooses, and sends the mesh to the others.  Raises RunLost on all
        if no mesh fits, or the user's function fails.
        """
        run = self._run
        membership, choice = run.membership, run.options.choice
        if choice is None:
            return None
        membership.assign_roles(workers, self._ends, leaves=self._leaves)
        target = run.options.target
        target.adopt_request(max(membership.axis.allgather_object(target.agreed)))  # spares may know an old one
        ranks, wanted = membership.roles.workers, target.agreed_mesh
        sizes, problem = None, ""
        if wanted is not None and wanted.ranks == ranks:
            sizes = wanted
        elif membership.rank == 0:
            try:
                sizes = choice.best(ranks, run.training.problem.batch_size)
            except (Exception, SystemExit) as error:  # of the user's function: all processes must learn of it
                problem = f"layouts fails for {ranks} ranks: {type(error).__name__}: {error}"
        gathered = membership.axis.allgather_object((sizes, problem))
        sizes, problem = gathered[membership.roles.ranks[0]]
        if sizes is None:
            raise RunLost(problem or f"no layout fits {ranks} ranks of at least {choice.min_ranks}")
        run.worker_mesh.chosen_for = ranks, wanted
        return MeshSizes(*sizes)

    @property
    def _ends(self) -> bool:
        """True if the run ends, so that processes that leave work once more."""
        return bool(self._run.transactions.status.stop_reason)

    @property
    def _leaves(self) -> bool:
        """True if this process is a spare that was asked to leave."""
        return self._run.options.requests.signals.came and not self._run.membership.works

    def _check_scripts(self) -> None:
        """Raise on all processes if those that have joined have another model or problem.  Collective."""
        training = self._run.training
        parameters = training.runner.parameters
        # Meshes of other sizes have other stages and parts of the same tensors.
        chooses = self._run.options.choice is not None
        number = parameters.whole_fingerprint if chooses else parameters.fingerprint
        model = f"{parameters.description} ({number:x})"
        own: dict[str, object] = {} if chooses else dict(parameters.model_settings)
        own |= {"model": model, **training.problem.settings, "scaling": self._run.options.scaling}
        own["audit"] = self._run.options.audit
        evaluation = training.validation.evaluation
        own["stop_early"] = training.stop_early
        own["evaluation"] = None if evaluation is None else evaluation.settings
        agree_on_settings(
            self._run.membership.axis,
            training.optimizer.settings.by_name() | {name: str(value) for name, value in own.items()},
            what="settings, those that were spawned as well",
            remedy="the script must come to the same whenever it is started, also from what it reads, draws, or "
            "measures (stage_costs)",
        )
        agree_on_gemm_libraries(self._run.membership.axis)
        arithmetic = training.optimizer.settings.arithmetic
        if training.optimizer.steps == 0:  # of those that have joined, which were in a mesh of their own before
            arithmetic.note_products()
        arithmetic.agree(training.optimizer.config, self._run.membership.axis, places=not chooses)

    def _source(self) -> RunState | None:
        """The state that this process can give to the next workers; None if it has none."""
        run = self._run
        state = run.transactions.source()
        if state is None:
            return None
        metadata = ResizeMetadata(
            optimizer=state.facts,
            progress=run.training.progress,
            status=run.transactions.status,
            request=run.options.target.agreed,
            discovered=run.options.requests.discovered,
            checkpoints=run.training.checkpoints.own,
        )
        return replace(state, facts=metadata.to_wire())

    def _split(self, workers: int, sizes: MeshSizes | None) -> tuple[bool, RunState | None]:
        """Make the communicators of the next workers, and their state, still empty.  Collective over all processes.

        Returns True if this process is one of them, and its state.
        """
        run = self._run
        membership, agreements, optimizer = run.membership, run.agreements, run.training.optimizer
        comm = membership.split(workers, self._leaves, self._ends)
        run.options.monitor.follow(membership.roles.peers)
        agreements.agree_on_membership()  # nobody could be woken on a communicator that another process failed to make
        if comm is not None:
            run.worker_mesh.rebind(comm, sizes)
        agreements.agree_on_membership()  # Open MPI 5 crashes if a communicator is revoked where it is still being made
        empty = None
        with self._failing_together():
            if comm is not None:
                if sizes is not None:
                    self._fit_model()
                if run.options.rebuild is not None:
                    run.options.rebuild(optimizer.mesh)
                optimizer.state.rebuild(run.training.runner.parameters)
                run.training.runner.attach()
                empty = optimizer.state.capture()
        if optimizer.config.hierarchical or sizes is not None or run.options.rebuild is not None:
            # The same: sums by nodes, ties and what is rebuilt have their own communicators.
            agreements.agree_on_membership()
        return comm is not None, empty

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """A context whose errors spares raise, too.  Collective over all.  Where MPI heals, an error is a death.

        A worker that fails alone ends the job if the others, who may wait for it in the block, do not come in time.
        """
        if heals_in_place():
            yield
            return
        with ExitStack() as stack, raised_on_all(self._run.membership.axis):
            try:
                yield
            except (Exception, SystemExit) as error:
                text = f"mpishard: a worker failed where the run is resized\n{describe(error, error.__traceback__)}"
                late = threading.Timer(_OTHERS_S, abort, [text])
                late.daemon = True
                late.start()
                stack.callback(late.cancel)
                raise

    def _fit_model(self) -> None:
        """Make the model for the mesh, unless those of all workers fit it already.  Collective over the workers."""
        training, build = self._run.training, self._run.options.build
        mesh, parameters = training.optimizer.mesh, training.runner.parameters
        if on_any(mesh.world, parameters.place != mesh.place):
            assert build is not None
            with mesh.without_initial_values():
                problem = build(mesh)
            training.rebuild(problem)
            parameters.carried.release()

    def _reshard(self, source: RunState | None, empty: RunState | None) -> ResizeMetadata:
        """Move the committed state into the `empty` states of the new workers; returns its metadata.

        Collective over all processes.
        """
        try:
            sent = reshard_state(self._run.membership.axis, source, empty)
        except ValueError:
            raise RunLost(
                "state is lost with the processes that had all copies of it; start the run again from its newest "
                "checkpoint, as `mpishard run --elastic` does"
            ) from None
        return ResizeMetadata.from_wire(sent)

    def _restore(self, metadata: ResizeMetadata) -> None:
        """Continue the run on this worker.  Collective over the workers."""
        training = self._run.training
        training.optimizer.state.restore(metadata.optimizer)
        training.optimizer.state.resync()
        training.restore(metadata.progress)
        training.report_validation()
        self._run.options.target.adopt_request(metadata.request)
        if training.optimizer.mesh.rank == 0:
            training.report.show(len(training.losses))
