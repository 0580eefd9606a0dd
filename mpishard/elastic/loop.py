"""The training loop of an elastic run: steps that are transactions, and changes of the workers between two steps.

`mpishard.elastic.phases` has the phases of a process and their transitions; this file has the work of each phase.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from mpi4py import MPI

from mpishard.backend.process import own_cores
from mpishard.comm.abort import die, fail_alone, finalize_in_time
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.comm.supervisor_reports import give_up, lead, leave_to_others, note_cell, note_training, tell
from mpishard.data_parallel.results import OptimizationResult
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.elastic.healing import heal
from mpishard.elastic.membership import Membership, Order, WorkerMesh, is_joining
from mpishard.elastic.mesh_choice import MeshChoice, MeshSizes
from mpishard.elastic.phases import Phase, PhaseEvent, next_phase
from mpishard.elastic.requests import Decisions, Recruiter
from mpishard.elastic.resizing import Resizing
from mpishard.elastic.run import ElasticOptions, ElasticRun
from mpishard.elastic.transactions import Agreements, RunStatus, Transactions
from mpishard.io import log
from mpishard.launch.job_notes import ON_ALL_RANKS, JobNotes, RunLost
from mpishard.layout.tensors import WHOLE
from mpishard.record.audits import PUT_OUT, STOPPED
from mpishard.training import Scaling
from mpishard.training.audit import REPLICAS, WrongPart, compare_replicas
from mpishard.training.objective import Objective, RunOptions
from mpishard.training.run import TrainingRun

# Error classes of MPI after a death, or when a peer that has detected one has revoked the communicator.
_DEATH = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED
# While spawned processes start on cores that workers share, workers sleep after a step for this multiple of its
# duration, and for at most this number of seconds.  Nothing is lost: the cores have the same work in all, and the
# starting processes join sooner.
_GIVE_WAY, _GIVE_WAY_MOST_S = 3, 0.1
# After so many healings, one after the other, that have lost nobody and gained no step the run gives up.
_IN_VAIN = 3


class ElasticLoop:
    """One run of the training loop in which workers may join, leave and die.

    Creation is collective over the optimizer's mesh; in a process that joins the run, it returns when the process has
    joined.  `phase` alone decides what the process does next.
    """

    runs: ClassVar[int] = 0  # number of runs that this process has begun

    def __init__(
        self,
        elastic_options: ElasticOptions,
        problem: Objective[Any],
        optimizer: ShardedOptimizer,
        run_options: RunOptions,
    ) -> None:
        # A joining process is alone until it has joined the run, which has the state and the progress bar.
        joins = is_joining()
        fail_alone(joins and heals_in_place())
        ElasticLoop.runs += 1
        mesh = optimizer.mesh
        first = max(1, min(elastic_options.target.agreed_size, mesh.data.size))
        training = TrainingRun(
            problem,
            optimizer,
            replace(run_options, resume=False) if joins else run_options,
            Scaling(elastic_options.scaling, first),
            begins=not joins,
            transactional=True,
            audit=elastic_options.audit,
        )
        chooses = elastic_options.choice is not None
        # Where the mesh may change, a worker is a process, which can take any place in the model.
        place, number = (WHOLE, mesh.size) if chooses else (mesh.place, mesh.data.size)
        mesh.unwatch()  # not before: until here ranks may wait for one whose arguments are others
        membership = Membership(mesh.world.comm, place, number)
        elastic_options.monitor.follow(membership.roles.peers)
        training.deferred_error.on_failure = membership.fail
        reason, clock = training.reached_goal(), optimizer.clock
        agreements = Agreements(mesh, membership)
        status = RunStatus(clock, clock, reason, bool(reason))
        transactions = Transactions(training, membership, agreements, status, among_all=chooses)
        target, requests = elastic_options.target, elastic_options.requests
        recruiter = Recruiter(membership, target, place, ElasticLoop.runs == 1, elastic_options.respawn)
        worker_mesh = WorkerMesh(mesh, training.checkpoints)
        if elastic_options.choice is not None:
            wanted, choice = target.agreed_mesh, elastic_options.choice
            worker_mesh.chosen_for = _first_choice(mesh, wanted, choice, problem.batch_size)
        decisions = Decisions(
            training, membership, target, requests, recruiter, transactions, worker_mesh if chooses else None
        )
        self._run = ElasticRun(
            elastic_options, training, membership, worker_mesh, agreements, transactions, decisions, recruiter
        )
        if not joins:
            transactions.install(transactions.new_checkpoint())
        self.phase: Phase = Phase.STARTING
        self._order: Order | None = Order(membership.roles.workers) if joins else None  # the next change of the workers
        self._heals = heals_in_place()
        self._healed: tuple[int, tuple[int, ...]] | None = None  # step and processes after the last healing
        self._in_vain = 0

    def run(self) -> OptimizationResult[Any]:
        """Take part in the run until it ends; returns its result.  Collective over all processes.

        Raises SystemExit in a process that is in no whole replica of the model at the end.
        """
        membership, training = self._run.membership, self._run.training
        training.begin()
        fail_alone(self._heals)
        leave_to_others(False)
        note_training(True, tells=membership.rank == 0)
        if self._run.options.choice is not None:  # it takes a mesh for any number of ranks
            note_cell(1)
        # Not a method of the loop: after an error that the script catches, it would keep the state of the run.
        leave = atexit.register(partial(_leave, membership)) if self._heals else None
        try:
            while self.phase is not Phase.ENDED:
                self.phase = next_phase(self.phase, self._take_turn())
        except (Exception, SystemExit) as error:
            # An error of all processes is no death of one: none stays in the run, and would wait for this process.
            of_all = leave is None or getattr(error, ON_ALL_RANKS, 0) == membership.roles.size
            if of_all:
                self._run.recruiter.dismiss()  # who is on the way would wait for a word, and MPI_Finalize for it
                if Membership.lost:
                    finalize_in_time()
                if Membership.lost or membership.rank == 0:  # the script may catch it, and do something else
                    tell(JobNotes.note_training, False)
            if leave is not None and of_all:
                fail_alone(False)
                atexit.unregister(leave)
            raise
        finally:
            training.close()
            lead(False)
        fail_alone(False)
        if leave is not None:
            atexit.unregister(leave)
        if Membership.lost:
            finalize_in_time()
        # After a death all report, since the first process may die before it has.
        note_training(False, tells=Membership.lost or membership.rank == 0)
        leave_to_others(membership.rank > 0)
        membership.end()
        if membership.roles.working < membership.roles.size:  # those that end here come to no `free` of the mesh
            self._run.worker_mesh.mesh.unwatch(wholly=True)
        if not membership.works:
            log.inform(f"process {membership.identity} is in no whole replica of the model and ends")
            raise SystemExit(0)
        by_user = self._run.options.requests.signals.by_user
        return training.result(self._run.transactions.status.stop_reason, by_user)

    # -- phases -----------------------------------------------------------------------------------------------------

    def _take_turn(self) -> PhaseEvent:
        """Do the work of the present phase; returns how it has ended."""
        try:
            return self._TURNS[self.phase](self)
        except MPI.Exception as error:
            # In a step the script itself may have caused another error than that of a death.
            by_script = self._run.agreements.workers_may_wait and error.Get_error_class() not in _DEATH
            if self.phase is not Phase.HEALING and (by_script or not self._heals):
                raise
            return PhaseEvent.DIED
        except (Exception, SystemExit) as error:
            # As of gradients that are not finite, or a full disk.  Where MPI heals, spares learn that the workers die.
            told = self._run.training.deferred_error.is_raised or self._heals
            if self.phase in (Phase.TRAINING, Phase.STOPPING) and not told and self._run.membership.rank == 0:
                self._run.membership.send_error(error)
            raise

    def _start(self) -> PhaseEvent:
        """Have all processes begin with the wanted number of workers, which they know without an order."""
        if self._order is None:
            self._order = self._run.decisions.next_order()
        return self._next() if self._order is None else PhaseEvent.ORDERED

    def _train(self) -> PhaseEvent:
        """Take a step and decide what comes next."""
        training, transactions, decisions = self._run.training, self._run.transactions, self._run.decisions
        takes_step, began = transactions.status.is_decided, time.perf_counter()
        if takes_step:
            training.save_best()
            try:
                self._compare_replicas()
                outcome = transactions.take_step()
            except WrongPart as found:
                return self._put_out(found)
            training.evaluate()
            decisions.stop_request = training.stop_request(transactions.status.committed_step, outcome)
            transactions.unseen = None
        else:  # a death came between the commit of the last step and the decision after it
            training.evaluate()
            self._repeat_callback()
        decisions.decide()
        if not transactions.status.stop_reason:
            training.save(last=False)
            if takes_step and decisions.awaits_recruits and self._run.worker_mesh.mesh.node.size > len(own_cores()):
                time.sleep(min(_GIVE_WAY * (time.perf_counter() - began), _GIVE_WAY_MOST_S))
            return self._pass_on(PhaseEvent.WORKS)
        try:
            self._compare_replicas(last=True)
        except WrongPart as found:
            return self._put_out(found)
        return PhaseEvent.STOPPED

    def _wait(self) -> PhaseEvent:
        with self._run.training.report.phase("waiting"):  # or it would count as computation of its next step
            self._order = self._run.membership.wait_for_order()
        if not self._order.workers:
            self._run.training.deferred_error.raise_over(self._run.membership.axis)
        return PhaseEvent.ORDERED

    def _resize(self) -> PhaseEvent:
        assert self._order is not None
        Resizing(self._run).resize(self._order)
        return self._next()

    def _heal(self) -> PhaseEvent:
        """Return to the last committed step with the survivors."""
        self._order = heal(self._run)
        step = self._run.transactions.status.committed_step
        now = step, self._run.membership.roles.identities
        self._in_vain = self._in_vain + 1 if now == self._healed else 0
        self._healed = now
        if self._in_vain == _IN_VAIN:
            raise RunLost(
                f"MPI reports a death after step {step} again and again, and nobody is lost: a function or the "
                "callback may use a communicator with a dead rank, as MPI.COMM_WORLD is; take mesh.world, which "
                "has the living ones, or make others in rebuild="
            )
        return PhaseEvent.ORDERED

    def _stop(self) -> PhaseEvent:
        """Save the last checkpoint, and make workers of all spares."""
        if not self._run.transactions.status.saved:
            self._run.training.save(last=True)
            self._run.transactions.note_saved()
            self._run.recruiter.dismiss()
        return self._pass_on(PhaseEvent.FINISHED)

    def _close(self) -> PhaseEvent:
        """Wait until all processes have come here: then no process needs another any more."""
        self._run.agreements.agree_on_membership()
        return PhaseEvent.CLOSED

    # Functions, not bound methods: with those the loop would refer to itself, and so the copies of the state of its run
    # would stay until Python looks for cycles.
    _TURNS: ClassVar[Mapping[Phase, Callable[[ElasticLoop], PhaseEvent]]] = {
        Phase.STARTING: _start,
        Phase.TRAINING: _train,
        Phase.WAITING: _wait,
        Phase.RESIZING: _resize,
        Phase.HEALING: _heal,
        Phase.STOPPING: _stop,
        Phase.ENDING: _close,
    }

    # -- parts of phases --------------------------------------------------------------------------------------------

    def _next(self) -> PhaseEvent:
        """The event when the workers are those that are wanted: FINISHED, SPARE, STOPPED or WORKS."""
        status, membership = self._run.transactions.status, self._run.membership
        lead(membership.rank == 0)
        if status.stop_reason and status.saved and self._run.decisions.suits(membership.roles.most):
            return PhaseEvent.FINISHED
        if not membership.works:
            return PhaseEvent.SPARE
        return PhaseEvent.STOPPED if status.stop_reason else PhaseEvent.WORKS

    def _pass_on(self, otherwise: PhaseEvent) -> PhaseEvent:
        """Send all processes the next order; returns `otherwise` without an order.  Collective over the workers."""
        run = self._run
        order = run.decisions.next_order()
        if order is None:
            return otherwise
        run.training.checkpoints.wait()  # a save that has failed: once spares have the order, they hear of no error
        run.transactions.prepare_move()
        run.agreements.agree_as_workers()  # either all workers continue with the resizing, or none
        run.agreements.end_steps()
        if run.membership.rank == 0:
            run.membership.send_order(order)
        self._order = order
        return PhaseEvent.ORDERED

    def _repeat_callback(self) -> None:
        """Call the callback for the last step, if a death has kept it from any worker.  Collective over the workers.

        All call it, since it may be collective: those that had called it once more, and those that have joined since.
        """
        training, transactions, decisions = self._run.training, self._run.transactions, self._run.decisions
        outcomes = training.optimizer.mesh.world.allgather_object(transactions.unseen)
        unseen = next((each for each in outcomes if each is not None), None)
        if unseen is not None:
            request = training.stop_request(transactions.status.committed_step, unseen)
            decisions.stop_request = max(request, decisions.stop_request)
        transactions.unseen = None

    def _compare_replicas(self, last: bool = False) -> None:
        """Compare what the workers hold, if that is audited.  Collective over the workers."""
        if self._run.options.audit == REPLICAS:
            training = self._run.training
            compare_replicas(training.optimizer, training.report.audit_found, last=last)

    def _put_out(self, found: WrongPart) -> PhaseEvent:
        """Have the ranks leave that the audit has found; the others take the step again, which has come to nothing.

        Collective over the workers.  Raises WrongPart on all processes if it has found none, or too few are left.
        """
        run = self._run
        run.transactions.rollback()
        if found.ranks:
            run.decisions.put_out(found.ranks)
        stops = not found.ranks or run.membership.roles.able < run.options.target.min_workers
        run.training.report.audit_found({**found.facts, "outcome": STOPPED if stops else PUT_OUT})
        if stops:
            run.training.deferred_error.error = found
            run.training.deferred_error.raise_on_all()
        if run.membership.rank == 0:
            log.warn(f"{found}; the others take the step again")
        return self._pass_on(PhaseEvent.WORKS)


def _leave(membership: Membership) -> None:
    """End a process whose script ends in the middle of the run; MPI_Finalize would wait for the others."""
    give_up()
    die(f"mpishard: process {membership.identity} leaves the run, its script has ended")


def _first_choice(
    mesh: Mesh, wanted: MeshSizes | None, choice: MeshChoice, batch_size: int
) -> tuple[int, MeshSizes | None]:
    """What the first mesh is `chosen_for`: this number of processes (0: it has to change), and the mesh that is wanted.

    Collective over the mesh.
    """
    if wanted is not None or is_joining():
        return mesh.size, wanted
    best = None
    with raised_on_all(mesh.world):
        if mesh.rank == 0:
            best = choice.best(mesh.size, batch_size)
    stays = mesh.world.allgather_object(best == MeshSizes(**mesh.shape))[0]
    return (mesh.size if stays else 0), None
