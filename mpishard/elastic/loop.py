"""The training loop of an elastic run: steps that are transactions, and changes of the workers between two steps.

==========  ==========================================================================================================
running     workers take steps, each of which ends in an agreement; spares wait; if there are too few processes for the
            wanted number of workers, rank 0 spawns some meanwhile
resizing    all processes know the new number of workers: spawned processes that are ready join, the mesh is split
            again, and the committed state moves to the ranks that need it
healing     a process has died: survivors wake the processes that wait, shrink the membership, agree on the last
            committed step, and resize to the workers that are left, where spares replace the dead; then others are
            spawned
stopping    the run is over: all living processes become workers once more, so that each has the result
==========  ==========================================================================================================

A step is committed when all workers have agreed that each has its part of the new state, and its buddy a copy of that.
The agreement of ULFM is uniform: if one survivor has the result of an agreement, all survivors get the same result.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from mpi4py import MPI

from mpishard.backend.blas_threads import own_cores
from mpishard.comm.abort import die, fail_alone
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.reshard import reshard_state
from mpishard.data_parallel.settings import agree_on_settings
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.elastic.committed_state import Committed
from mpishard.elastic.completion import finalize_in_time, give_up, leave_to_others, note_training
from mpishard.elastic.external_requests import Outside
from mpishard.elastic.membership import Membership, Order, agree, is_newcomer
from mpishard.elastic.recruiter import Recruiter
from mpishard.elastic.stopped_processes import Watch
from mpishard.elastic.worker_target import WorkerTarget
from mpishard.io import log
from mpishard.launch.run_folder import RunFolder, RunLost
from mpishard.layout.run_state import RunState
from mpishard.training import Loop, OptimizationResult, Scaling
from mpishard.training.objective import Objective
from mpishard.training.options import RunOptions
from mpishard.training.progress import Progress
from mpishard.training.stopping import StopRequest

_WORKERS, _CREW = "workers", "crew"
# Error classes of MPI after a death, or when a peer that has detected one has revoked the communicator.
_DEATH = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED
# While spawned processes start on cores that workers share, workers sleep after a step for so many times its duration,
# and for at most so many seconds.
_GIVE_WAY, _GIVE_WAY_MOST_S = 3, 0.1


class _Survivor(NamedTuple):
    """Facts of a process that all others get after a death; `knows`: whether it has had a part of the state yet."""

    knows: bool
    done: int
    decided: int
    reason: str
    saved: bool
    agreed: int
    last_disruption: int


@dataclass(frozen=True)
class Elasticity:
    """Options of an elastic run beside the problem and the optimizer.

    Parameters
    ----------
    target : WorkerTarget
        The wanted number of workers.
    outside : Outside
        Requests by signals, from other shells and by `discover`.
    watch : Watch
        Ends processes of this host that are stopped.
    respawn : bool
        Whether processes are spawned to replace the dead.
    scaling : str
        The policy of `Scaling`.
    """

    target: WorkerTarget
    outside: Outside
    watch: Watch
    respawn: bool
    scaling: str


class ElasticLoop(Loop):
    """One run of the training loop in which workers may join, leave and die."""

    runs: ClassVar[int] = 0  # number of runs that this process has begun
    meets_always: ClassVar[bool] = True  # every step ends with an agreement of all workers

    def __init__(
        self,
        elasticity: Elasticity,
        problem: Objective[Any],
        optimizer: ShardedOptimizer,
        options: RunOptions,
    ) -> None:
        # A joining process is alone until it has joined the run, which has the state and the progress bar.
        self.comes = newcomer = is_newcomer()
        self.begins = not newcomer
        fail_alone(newcomer and heals_in_place())
        ElasticLoop.runs += 1
        self.worker_target = elasticity.target
        self.outside = elasticity.outside
        self.watch = elasticity.watch
        self.respawn = elasticity.respawn
        self.mesh = optimizer.mesh
        first = max(1, min(self.worker_target.agreed_size, self.mesh.data.size))
        scaling = Scaling(elasticity.scaling, first)
        own = replace(options, progress=False, resume=False) if newcomer else options
        super().__init__(problem, optimizer, own, scaling)
        self.shows = options.progress
        self.crew = Membership(self.mesh.world.comm, self.mesh.place, self.mesh.data.size)
        self.watch.follow(self.crew.fellows)
        self.heals = heals_in_place()
        self.reason = self.what_was_reached()
        # The last committed step; the loss of the step that is ready to be committed; and the last step after which
        # all workers have decided whether the run stops.
        self.done = self.decided = self.optimizer.clock
        self.ready: float | None = None
        self.own_request: int = StopRequest.NONE
        self.recruiter = Recruiter(self.crew, self.worker_target, self.mesh.place, ElasticLoop.runs == 1)
        # The same on all workers: how many spawned workers are ready to join now, and whether some are still starting.
        self.recruits = 0
        self.awaited = False
        self.last_disruption = -1  # the last step before a process died or joined
        self.all_know = False  # whether all processes know that the run is over, spares too
        self.saved = bool(self.reason)  # whether the last checkpoint of the run is written
        # Agreements in which others may be waiting: this process takes part in them before it heals.
        self.pending_agreements = {_WORKERS, _CREW}
        self.whole = True
        self.committed: Committed | None = None
        if not newcomer:
            self.committed = self._commit_anew()

    def run(self) -> OptimizationResult[Any]:
        self.optimizer.measure_norm |= self.problem.tolerance is not None
        fail_alone(self.heals)
        leave_to_others(False)
        note_training(True, tells=self.crew.rank == 0)
        atexit.register(self._leave)
        wanted = Order(self.crew.workers) if self.comes else self._change()
        while True:
            try:
                if wanted is not None:
                    self._regroup(wanted)
                if self._is_over():
                    self._agree_as_crew()
                    break
                wanted = self._take_turn() if self.crew.works else self.crew.wait_for_order()
            except MPI.Exception as error:
                own = (
                    _WORKERS in self.pending_agreements and error.Get_error_class() not in _DEATH
                )  # in a step, by the script
                if own or not self.heals:
                    raise
                wanted = self._heal(error)
        self.runner.detach()
        self.progress.close()
        fail_alone(False)
        atexit.unregister(self._leave)
        if Membership.lost:
            finalize_in_time()
        note_training(
            False, tells=Membership.lost or self.crew.rank == 0
        )  # after a death all report, since the first process may die before it has
        leave_to_others(self.crew.rank > 0)
        self.crew.end()
        if not self.crew.works:
            log.inform(f"process {self.crew.identity} is in no whole replica of the model and ends")
            raise SystemExit(0)
        return self.result(self.reason)

    def _leave(self) -> None:
        """End a process whose script ends in the middle of the run; MPI_Finalize would wait for the others."""
        if self.heals:
            give_up()
            die(f"mpishard: process {self.crew.identity} leaves the run, its script has ended")

    def _is_over(self) -> bool:
        crew = self.crew
        if not (self.reason and self.saved and crew.workers == crew.most):
            return False
        return self.all_know or crew.working == crew.size

    def _take_turn(self) -> Order | None:
        """Take a step, unless the run is over, and return the next change.  Called by workers."""
        if not self.reason:
            self._step()
        if self.reason and not self.saved:
            self.save(last=True)
            self.saved = True
            self.recruiter.dismiss()
        order = self._change()
        if order is not None:
            if self.optimizer.state.needs_consolidation:
                self._prepare_move()
            self._agree()  # either all workers go on to the resizing, or none
            self.pending_agreements = {_CREW}
            if self.crew.rank == 0:
                self.crew.order(order)
        return order

    def _prepare_move(self) -> None:
        """Commit a state in which no worker has data for its own use only (error feedback), so that it can move."""
        committed = self._committed()
        committed.begin(self.optimizer.state.capture().facts)
        self.optimizer.state.consolidate()
        committed.send_copies()
        self._agree()
        committed.commit()

    def _change(self) -> Order | None:
        """The order that changes the workers to the wanted number, None without a change; the same on all workers."""
        crew = self.crew
        if self.reason:
            done = crew.workers == crew.most and crew.working == crew.size
            return None if done else Order(crew.most)
        workers = min(self.worker_target.agreed_size, crew.able + self.recruits)
        if workers == crew.workers and not self.recruits and crew.is_settled:
            return None
        return Order(workers, self.recruits)

    # -- a step is a transaction ------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Take one step and commit it."""
        committed, step = self._committed(), self.done + 1
        if self.decided < self.done:  # a death came between the commit of this step and the decision after it
            self._decide()
            return
        began = time.perf_counter()
        committed.begin(self.optimizer.state.capture().facts)
        loss, rate = self.advance(step)
        committed.send_copies()
        self.ready = loss
        self._agree()
        self._commit()
        self.own_request = self.stop_request(step, loss, rate)
        self._decide()
        if not self.reason:
            self.save(last=False)
            self._give_way(time.perf_counter() - began)

    def refuse_misuse(self) -> None:
        """Raise on this rank only: workers that meet for the first time may have taken different numbers of steps."""
        if self.runner.misuse is not None:
            raise self.runner.misuse

    def _give_way(self, seconds: float) -> None:
        """Sleep after a step of `seconds` s if workers share their cores with processes that start there.

        Nothing is lost: the cores have the same work in all, and the starting processes join sooner.
        """
        if self.awaited and self.mesh.node.size > len(own_cores()):
            time.sleep(min(_GIVE_WAY * seconds, _GIVE_WAY_MOST_S))

    def _agree(self) -> None:
        """Return when all workers have come here; if it returns on one survivor, it returns on all."""
        self.pending_agreements.remove(_WORKERS)
        agree(self.mesh.world.comm, sound=True)
        self.pending_agreements.add(_WORKERS)

    def _agree_as_crew(self) -> None:
        """Return when all processes have come here; if it returns on one survivor, it returns on all."""
        self.pending_agreements.remove(_CREW)
        self.crew.agree()
        self.pending_agreements.add(_CREW)

    def _settle(self) -> None:
        """Take part in all pending agreements with a no, so that they fail on the processes that wait in them."""
        for scope, comm in ((_WORKERS, self.mesh.world.comm), (_CREW, self.crew.axis.comm)):
            if scope in self.pending_agreements:
                with contextlib.suppress(MPI.Exception):
                    agree(comm, sound=False)
        self.pending_agreements = {_CREW}

    def _decide(self) -> None:
        """Agree with all workers on stopping, on processes that leave, and on the wanted number of workers."""
        target, outside, world = self.worker_target, self.outside, self.mesh.world
        ready = 0
        if world.rank == 0:
            target.look_outside(outside, self.mesh.data.size, self.done)
            ready = self.recruiter.recruit()
        asked = outside.signals.report()
        awaited = not ready and self.recruiter.is_starting
        discovered = outside.discovered if world.rank == 0 else -1
        changed = self.optimizer.settings.changed
        own = [self.own_request, target.request, asked, -asked, ready, awaited, discovered, changed]
        agreed = world.all_reduce(np.array(own, np.int64), op="max", label="control").tolist()
        stop_request, request, most, least, ready, awaited, outside.discovered, changed = agreed
        if changed:  # by a callback
            self.optimizer.settings.agree()
        target.adopt_request(request)
        self.recruits, self.awaited = ready, bool(awaited)
        self.reason = self.why_stop(stop_request) or ("signal" if -least > 0 else "")
        if most == 2 and not self.reason:
            self.crew.let_go(world.allgather_object(asked > 0))
            target.cap_workers(self.crew.able)
            self.reason = "signal" if self.crew.able < target.min_workers else ""
        self.decided = self.done

    @property
    def stopped_by_user(self) -> bool:
        return self.outside.signals.by_user

    def _commit(self) -> None:
        assert self.ready is not None
        with self.phase("commit"):
            self._committed().commit()
        self.done += 1
        self.note(self.ready)
        self.ready = None

    def _roll_back(self) -> None:
        facts = self._committed().roll_back()
        if facts is not None:
            self.optimizer.state.restore(facts)
        self.ready = None

    def _committed(self) -> Committed:
        assert self.committed is not None
        return self.committed

    # -- between steps ----------------------------------------------------------------------------------------------

    def _regroup(self, order: Order) -> None:
        """Give the run the number of workers of an order, and them the committed state.  Collective over all processes.

        Spawned processes join first, if the order says so.  Then the mesh is split again, the optimizer makes its state
        for the new mesh, and the committed state and the facts of the run are sent to it.
        """
        crew, optimizer = self.crew, self.optimizer
        self.pending_agreements = {_CREW}  # nobody waits in that of the workers
        was = self.mesh.data.size
        if self.record is not None:
            self.record.flush()  # rank 0 writes the record, and another process may become rank 0
        if order.recruits:
            self._take_in(order.workers)
        self._check_scripts()
        source = target = None
        if self.committed is not None:
            facts = {**optimizer.state.facts, "loss": self.losses.to_array(), "reason": self.reason, "done": self.done}
            facts |= {"decided": self.decided, "request": self.worker_target.agreed, "before": self.before}
            facts |= {"skipped_before": self.skipped_before, "resumed": self.resumed, "saved": self.saved}
            facts |= {"discovered": self.outside.discovered}
            facts |= {"checkpoints": [] if self.checkpoints is None else self.checkpoints.own}
            facts |= {"position": self.position, "first": self.scaling.first}
            source = replace(self.committed.source(crew.identities), facts=facts)
        if self.whole:
            if self.checkpoints is not None:
                self.checkpoints.release()
            self.mesh.release()
        self.whole = False
        comm = crew.split(order.workers, self.outside.signals.came and not crew.works, bool(self.reason))
        self.watch.follow(crew.fellows)
        self._agree_as_crew()  # a process could not be woken on a communicator that another one failed to make
        if comm is not None:
            self.mesh.rebind(comm)
            if self.checkpoints is not None:
                self.checkpoints.rebind()
        self._agree_as_crew()  # Open MPI 5 crashes if a communicator is revoked where it is still being made
        if comm is not None:
            optimizer.state.rebuild(self.runner.parameters)
            self.runner.attach()
            target = optimizer.state.capture()
        if self.optimizer.config.hierarchical:
            self._agree_as_crew()  # the same: sums by nodes have communicators of their own
        restored = self._reshard(source, target)
        self.reason, self.saved = restored["reason"], restored["saved"]
        self.outside.discovered = restored["discovered"]
        if self.checkpoints is not None:
            self.checkpoints.own = restored["checkpoints"]
        self.all_know = bool(self.reason)
        committed = None
        if comm is not None:
            optimizer.state.restore(restored)
            optimizer.state.resync()
            self.losses.restore(restored["loss"])
            self.done, self.decided = restored["done"], restored["decided"]
            self.before, self.position = restored["before"], restored["position"]
            self.skipped_before, self.resumed = restored["skipped_before"], restored["resumed"]
            self.scaling = replace(self.scaling, first=restored["first"])
            self.worker_target.adopt_request(restored["request"])
            if self.mesh.rank == 0 and not self.progress.shown:
                self.progress = Progress(self.problem.steps, shown=self.shows, done=len(self.losses))
            committed = self._commit_anew()
        self._agree_as_crew()  # nobody drops its old committed state before all have the new one
        self.committed = committed
        if crew.rank == 0 and self.shows and not self.reason and self.mesh.data.size != was:
            log.inform(f"{was} -> {self.mesh.data.size} workers after step {self.done}")
        self.whole = committed is not None
        if self.whole:
            self.pending_agreements.add(_WORKERS)
        if crew.rank:  # another process may have become rank 0, which spawns
            self.recruiter.dismiss()

    def _take_in(self, workers: int) -> None:
        """Let the spawned processes that are ready join, if they still live.  Collective over all processes."""
        recruitment, self.recruits = self.recruiter.hand_over(), 0
        self.last_disruption = self.done
        try:
            port, problem = self.crew.call_in(recruitment)
            if port:
                self._agree_as_crew()  # after a death, a process that connects to them alone could not be woken
                self.crew.take_in(port, workers, recruitment)
        except MPI.Exception:
            if recruitment is not None:
                recruitment.give_up()
            raise
        if port and recruitment is not None:
            recruitment.close()
        if not port:
            self.worker_target.cap_workers(self.crew.able)
            if recruitment is not None:
                self.recruiter.say_none_come(problem)

    def _check_scripts(self) -> None:
        """Raise on all processes if those that have joined have another model or problem.  Collective."""
        parameters = self.runner.parameters
        model = f"{parameters.description} ({parameters.fingerprint:x})"
        own = {"model": model, **self.problem.settings, "scaling": self.scaling.policy}
        agree_on_settings(
            self.crew.axis,
            self.optimizer.settings.by_name() | {name: str(value) for name, value in own.items()},
            what="settings, those that were spawned as well",
            way_out="the script must come to the same whenever it is started, also from what it reads, draws, or "
            "measures (stage_costs)",
        )

    def _reshard(self, source: RunState | None, target: RunState | None) -> Mapping[str, Any]:
        """Move the committed state to the new workers; returns its facts.  Collective over all processes."""
        try:
            return reshard_state(self.crew.axis, source, target)
        except ValueError:
            raise RunLost(
                "state is lost: those who died had all copies of it; start the run again from its newest checkpoint, "
                "as `mpishard run --elastic` does"
            ) from None

    def _commit_anew(self) -> Committed:
        crew, members = self.crew, self.mesh.data.members
        identities, nodes = [crew.identities[rank] for rank in members], [crew.fellows[rank].host for rank in members]
        return Committed(self.mesh.data, identities, nodes, self.optimizer.state.capture())

    def _heal(self, error: MPI.Exception) -> Order:
        """Remove the dead processes and return to the last committed step; returns the order for the next workers."""
        while True:
            try:
                return self._shrink(error)
            except MPI.Exception as another:
                error = another

    def _shrink(self, error: MPI.Exception) -> Order:
        crew = self.crew
        before = crew.identities
        self._note_healed(self.done)
        self.mesh.revoke()
        if self.checkpoints is not None:
            self.checkpoints.revoke()
        self.optimizer.state.abandon()
        self.whole = False
        crew.revoke()
        self._settle()
        crew.shrink()
        knows = self.committed is not None
        agreed = self.worker_target.agreed
        own = _Survivor(knows, self.done, self.decided, self.reason, self.saved, agreed, self.last_disruption)
        survivors: list[_Survivor] = crew.axis.allgather_object(own)
        known = [each for each in survivors if each.knows]
        if not known:
            raise RunLost("all workers have died; start the run again from its newest checkpoint")
        done = max(each.done for each in known)
        self.worker_target.adopt_request(max(each.agreed for each in known))
        if self.committed is not None:
            if done > self.done:
                self._commit()
            else:
                self._roll_back()
            decided, self.reason = max((each.decided, each.reason) for each in known)
            if decided == done:
                self.decided = done
            self.saved = all(each.saved for each in known)
        self._note_healed(done)
        dead = [str(who) for who in before if who not in crew.identities]
        if crew.rank == 0:
            log.warn(f"{_have(dead)} died; {crew.size} are left, step {done} is the last")
        if crew.able < self.worker_target.min_workers:
            raise RunLost(f"{crew.able} whole workers are left, and min_workers={self.worker_target.min_workers}")
        # A fault that recurs at one step, or kills every new worker, would otherwise spawn new ones for ever.
        if not self.respawn or done <= max(each.last_disruption for each in survivors):
            self.worker_target.cap_workers(crew.able)
        self.last_disruption, self.recruits, self.awaited = done, 0, False
        return Order(crew.most if self.reason else min(self.worker_target.agreed_size, crew.able))

    def _note_healed(self, step: int) -> None:
        """Inform the supervisor that the run has survived a death and goes on after this step."""
        folder = RunFolder.from_environment()
        if folder is not None:
            with contextlib.suppress(OSError):
                folder.note_healed(self.crew.size, step)


def _have(dead: list[str]) -> str:
    """Subject and verb of a message on the dead; "one has" if only a joining process has died."""
    if not dead:
        return "one has"
    return f"process {dead[0]} has" if len(dead) == 1 else f"processes {', '.join(dead)} have"
