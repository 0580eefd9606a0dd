"""A change of the workers between two steps: who works next, and how these get the committed state."""

from __future__ import annotations

from dataclasses import replace

from mpi4py import MPI

from mpishard.comm.reshard import reshard_state
from mpishard.data_parallel.agreement import agree_on_settings
from mpishard.elastic.membership import Order
from mpishard.elastic.parts import Parts
from mpishard.elastic.run_status import ResizeMetadata
from mpishard.io import log
from mpishard.launch.job_notes import RunLost
from mpishard.layout.run_state import RunState


class Resizing:
    """Gives the run other workers; has no state of its own.

    Parameters
    ----------
    parts : Parts
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def resize(self, order: Order) -> None:
        """Give the run the number of workers of an order, and them the committed state.  Collective over all processes.

        Spawned processes join first, if the order says so.  Then the mesh is split again, the optimizer makes its state
        for the new mesh, and the committed state and the metadata of the run are sent to it.
        """
        parts = self._parts
        membership, transactions, report = parts.membership, parts.transactions, parts.training.report
        mesh = parts.workers.mesh
        parts.agreements.end_steps()
        was = mesh.data.size
        report.flush()  # rank 0 writes the record, and another process may become rank 0
        if order.recruits:
            self._take_in(order.workers)
        self._check_scripts()
        source = self._source()
        parts.workers.release()
        works, target = self._split(order)
        metadata = self._reshard(source, target)
        transactions.restore(metadata.status)
        parts.elasticity.outside.discovered = metadata.discovered
        parts.training.checkpoints.own = metadata.checkpoints
        committed = None
        if works:
            self._restore(metadata)
            committed = transactions.copy_anew()
        parts.agreements.agree_as_crew()  # nobody drops its old committed state before all have the new one
        transactions.install(committed)
        if membership.rank == 0 and report.shows and not metadata.status.stop_reason and mesh.data.size != was:
            log.inform(f"{was} -> {mesh.data.size} workers after step {metadata.status.committed_step}")
        if works:
            parts.workers.note_whole()
            parts.agreements.begin_steps()
        if membership.rank:  # another process may have become rank 0, which spawns
            parts.recruiter.dismiss()

    def _take_in(self, workers: int) -> None:
        """Let the spawned processes that are ready join, if they still live.  Collective over all processes."""
        membership, recruiter = self._parts.membership, self._parts.recruiter
        request = recruiter.hand_over()
        self._parts.decisions.forget_recruits()
        recruiter.last_disruption = self._parts.transactions.status.committed_step
        try:
            port, problem = membership.call_in(request)
            if port:
                # After a death, a process that connects to them alone could not be woken.
                self._parts.agreements.agree_as_crew()
                membership.take_in(port, workers, request)
        except MPI.Exception:
            if request is not None:
                request.give_up()
            raise
        if port and request is not None:
            request.close()
        if not port:
            self._parts.elasticity.target.cap_workers(membership.roles.able)
            if request is not None:
                recruiter.say_none_come(problem)

    def _check_scripts(self) -> None:
        """Raise on all processes if those that have joined have another model or problem.  Collective."""
        training = self._parts.training
        parameters = training.runner.parameters
        model = f"{parameters.description} ({parameters.fingerprint:x})"
        own = {"model": model, **training.problem.settings, "scaling": self._parts.elasticity.scaling}
        agree_on_settings(
            self._parts.membership.axis,
            training.optimizer.settings.by_name() | {name: str(value) for name, value in own.items()},
            what="settings, those that were spawned as well",
            way_out="the script must come to the same whenever it is started, also from what it reads, draws, or "
            "measures (stage_costs)",
        )
        training.optimizer.state.binding.bits.agree(training.optimizer.config, self._parts.membership.axis)

    def _source(self) -> RunState | None:
        """What this process can give to the next workers; None if it has no state."""
        parts = self._parts
        state = parts.transactions.source()
        if state is None:
            return None
        metadata = ResizeMetadata(
            optimizer=state.facts,
            progress=parts.training.progress,
            status=parts.transactions.status,
            request=parts.elasticity.target.agreed,
            discovered=parts.elasticity.outside.discovered,
            checkpoints=parts.training.checkpoints.own,
        )
        return replace(state, facts=metadata.to_wire())

    def _split(self, order: Order) -> tuple[bool, RunState | None]:
        """Make the communicators of the next workers, and their state, still empty.  Collective over all processes.

        Returns whether this process is one of them, and its state.
        """
        parts = self._parts
        membership, agreements, optimizer = parts.membership, parts.agreements, parts.training.optimizer
        leaves = parts.elasticity.outside.signals.came and not membership.works
        comm = membership.split(order.workers, leaves, bool(parts.transactions.status.stop_reason))
        parts.elasticity.watch.follow(membership.roles.peers)
        agreements.agree_as_crew()  # a process could not be woken on a communicator that another one failed to make
        if comm is not None:
            parts.workers.rebind(comm)
        agreements.agree_as_crew()  # Open MPI 5 crashes if a communicator is revoked where it is still being made
        target = None
        if comm is not None:
            optimizer.state.rebuild(parts.training.runner.parameters)
            parts.training.runner.attach()
            target = optimizer.state.capture()
        if optimizer.config.hierarchical:
            agreements.agree_as_crew()  # the same: sums by nodes have communicators of their own
        return comm is not None, target

    def _reshard(self, source: RunState | None, target: RunState | None) -> ResizeMetadata:
        """Move the committed state to the new workers; returns what goes with it.  Collective over all processes."""
        try:
            sent = reshard_state(self._parts.membership.axis, source, target)
        except ValueError:
            raise RunLost(
                "state is lost: those who died had all copies of it; start the run again from its newest checkpoint, "
                "as `mpishard run --elastic` does"
            ) from None
        return ResizeMetadata.from_wire(sent)

    def _restore(self, metadata: ResizeMetadata) -> None:
        """Continue the run on this worker.  Collective over the workers."""
        training = self._parts.training
        training.optimizer.state.restore(metadata.optimizer)
        training.optimizer.state.resync()
        training.restore(metadata.progress)
        self._parts.elasticity.target.adopt_request(metadata.request)
        if training.optimizer.mesh.rank == 0:
            training.report.show(len(training.losses))
