"""Steps that are transactions: committed on all workers, or taken back on all.

Everything that a step changes is copied before, to a `BuddyCheckpoint`.  A step is committed when all workers have
agreed that each has its part of the new state, and its *buddy* a copy of that.  If it fails before, every survivor
rolls back to the state before the step.  The buddy is on another node where there is one, so that the loss of a node
loses no state: another rank of the data axis, and in a run that changes its mesh any other rank, since it may be asked
for parts and stages that no survivor holds.  An array that has a version is copied only if it was written since its
last copy.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.elastic.membership import Membership, agree
from mpishard.layout.run_state import RunState, Shard
from mpishard.layout.tensors import LocalLayout
from mpishard.training.checkpoints import RunProgress
from mpishard.training.run import StepOutcome, TrainingRun

Array = Any


_WORKERS, _MEMBERSHIP = "workers", "membership"


class Agreements:
    """Agreements of the workers, and of all processes of the run.

    The agreement of ULFM is uniform: if it returns on one survivor, it returns on all.  A process that fails elsewhere
    must therefore still take part, with a no, in each agreement in which others may be waiting: see `refuse_all`.
    """

    def __init__(self, mesh: Mesh, membership: Membership) -> None:
        self._mesh = mesh
        self._membership = membership
        self._pending = {_WORKERS, _MEMBERSHIP}  # in these others may be waiting

    @property
    def workers_may_wait(self) -> bool:
        """True while this process is in a step, when other workers may be waiting in an agreement of the workers."""
        return _WORKERS in self._pending

    def agree_as_workers(self) -> None:
        """Return when all workers have come here.  Collective over the workers."""
        self._pending.remove(_WORKERS)
        agree(self._mesh.world.comm, sound=True)
        self._pending.add(_WORKERS)

    def agree_on_membership(self) -> None:
        """Return when all processes have come here.  Collective over all processes of the run."""
        self._pending.remove(_MEMBERSHIP)
        agree(self._membership.axis.comm, sound=True)
        self._pending.add(_MEMBERSHIP)

    def refuse_all(self) -> None:
        """Take part with a no in all agreements in which others may be waiting, so that they fail there."""
        for scope, comm in ((_WORKERS, self._mesh.world.comm), (_MEMBERSHIP, self._membership.axis.comm)):
            if scope in self._pending:
                with contextlib.suppress(MPI.Exception):
                    agree(comm, sound=False)
        self.end_steps()

    def end_steps(self) -> None:
        """Note that no worker waits in an agreement of the workers any more."""
        self._pending = {_MEMBERSHIP}

    def begin_steps(self) -> None:
        """Note that workers may wait in an agreement of the workers from now on."""
        self._pending.add(_WORKERS)


def buddies(nodes: Sequence[str]) -> list[int]:
    """For each rank, the rank that keeps the copy of its state: a permutation.  `nodes` has the node of each rank.

    The ranks are sorted by node, the node with the most ranks first.  A rank's buddy is as many positions further in
    this row as that first node has ranks, counted round the end.  So no buddy is on the rank's own node, unless more
    than half of all ranks are there.
    """
    numbers = Counter(nodes)
    row = sorted(range(len(nodes)), key=lambda rank: (-numbers[nodes[rank]], nodes.index(nodes[rank])))
    shift = max(numbers.values(), default=0) if len(numbers) > 1 else 1
    found = [0] * len(nodes)
    for position, rank in enumerate(row):
        found[rank] = row[(position + shift) % len(row)]
    return found


def needs_copy(holdings: Sequence[Hashable], nodes: Sequence[str], rank: int) -> bool:
    """Return True if an array of this rank would be lost with the rank, or with its node if there are other nodes.

    `holdings` says, by rank, which elements of the array a rank holds (empty: none); `nodes` has the node of each rank.
    """
    if not holdings[rank]:
        return False
    holders = [other for other, holding in enumerate(holdings) if holding == holdings[rank]]
    several_nodes = len(set(nodes)) > 1
    return len({nodes[other] for other in holders}) == 1 if several_nodes else len(holders) == 1


class BuddyCheckpoint:
    """A checkpoint in memory: the last committed state of this rank, and that of its neighbour, whose buddy it is.

    Creation is collective over `axis`, the ranks that keep each other's copies: the data axis, or the world.
    `identities` and `nodes` are by rank of this axis.  `state` has the live arrays; an array whose elements another
    rank holds too, on another node if there is one, needs no second copy.  `versions()` gives, by kind of shard, a
    number that is raised when the array is written and is the same on all ranks; an array without one counts as written
    in every step.

    `facts` is the metadata of this state once it was asked for: a move may be tried several times, if others die
    meanwhile.
    """

    def __init__(
        self,
        axis: Axis,
        identities: list[int],
        nodes: list[str],
        state: RunState,
        versions: Callable[[], Mapping[str, int]],
    ) -> None:
        self.state = state
        self._axis = axis
        self._versions = versions
        self._own_copies = [arrays.empty(each.array.shape, each.array.dtype, like=each.array) for each in state.shards]
        self._facts_at_begin: dict[str, Any] | None = None
        self.facts: Mapping[str, Any] | None = None
        layouts = axis.allgather_object(tuple(shard.holding for shard in state.shards))
        to = buddies(nodes)
        self._buddy, self._neighbour_rank = to[axis.rank], to.index(axis.rank)
        self.neighbour: int = identities[self._neighbour_rank]
        self._neighbour_layouts: list[LocalLayout] = list(layouts[self._neighbour_rank])
        # By number of the shard: whether the buddy must have this rank's array, and this rank its neighbour's.
        self._buddy_needs, self._neighbour_needs = (
            [
                shard.required and needs_copy([each[number] for each in layouts], nodes, rank)
                for number, shard in enumerate(state.shards)
            ]
            for rank in (axis.rank, self._neighbour_rank)
        )
        # By number of the shard: the neighbour's committed arrays, and those received since, to be committed.
        self._neighbour_copies: dict[int, Array] = {}
        self._received: dict[int, Array] = {}
        self._free: list[Array] = []  # memory for the next ones
        # Versions of the arrays: in this rank's own copies, as last sent, and in the buddy's committed copies.
        self._own_versions: Mapping[str, int] = {}
        self._sent_versions: Mapping[str, int] = {}
        self._buddy_versions: Mapping[str, int] = {}
        self.send_to_buddy()
        self.commit()

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Copy the arrays that were written since their last copy, before a step."""
        versions = self._versions()
        for number in self._written_since(self._own_versions, versions):
            self._own_copies[number][...] = self.state.shards[number].array
        self._own_versions = versions
        self._facts_at_begin, self.facts = dict(facts), None

    def send_to_buddy(self) -> None:
        """Send the buddy what was written, of the arrays that only this rank has.  Collective over the axis."""
        axis = self._axis
        if axis.size == 1:
            return
        pending = []
        self._sent_versions = self._versions()
        written = self._written_since(self._buddy_versions, self._sent_versions)
        # First what goes to memory of the host: it would wait until the copies of device arrays before it are over.
        for number in written:
            if self._neighbour_needs[number]:
                size = sum(piece.size for piece in self._neighbour_layouts[number])
                self._received[number] = self._allocate(size, self.state.shards[number].array.dtype)
                pending.append(axis.start_recv(self._received[number], self._neighbour_rank, tag=number, label="buddy"))
        for number in written:
            if self._buddy_needs[number]:
                pending.append(axis.start_send(self.state.shards[number].array, self._buddy, tag=number, label="buddy"))
        try:
            for each in pending:
                each.wait()
        except MPI.Exception:
            axis.revoke()  # or this rank would wait for transfers that cannot end
            for each in pending:
                each.abandon()
            raise

    def commit(self) -> None:
        """Make the present state the committed one."""
        self._free += [self._neighbour_copies[number] for number in self._received if number in self._neighbour_copies]
        self._neighbour_copies |= self._received
        self._received = {}
        self._buddy_versions = self._sent_versions
        self._facts_at_begin = None

    def rollback(self) -> dict[str, Any] | None:
        """Restore the arrays as they were at `begin`; returns the facts of then, None if no step had begun."""
        facts, self._facts_at_begin = self._facts_at_begin, None
        if facts is not None:
            for before, shard in zip(self._own_copies, self.state.shards, strict=True):
                shard.array[...] = before
        self._free += self._received.values()
        self._received = {}
        return facts

    def source(self, alive: Collection[int]) -> RunState:
        """The state that this rank can give to others: its own, and that of its neighbour if the neighbour is lost."""
        if self.neighbour in alive:
            return self.state
        shards = []
        for number, shard in enumerate(self.state.shards):
            if not self._neighbour_needs[number]:
                shards.append(shard)
                continue
            own = shard.array.size
            theirs = tuple(replace(piece, start=piece.start + own) for piece in self._neighbour_layouts[number])
            array = arrays.joined([shard.array, np.asarray(self._neighbour_copies[number], like=shard.array)])
            shards.append(Shard(shard.kind, array, (*shard.holding, *theirs), (*shard.counted, *theirs)))
        return replace(self.state, shards=tuple(shards))

    def _written_since(self, since: Mapping[str, int], versions: Mapping[str, int]) -> list[int]:
        """The numbers of the shards that may have been written since these versions."""
        kinds = enumerate(self.state.kinds)
        return [number for number, kind in kinds if kind not in versions or versions[kind] != since.get(kind)]

    def _allocate(self, size: int, dtype: np.dtype) -> Array:
        """Memory for an array: of an earlier copy if one has this size and dtype."""
        fitting = (number for number, array in enumerate(self._free) if (array.size, array.dtype) == (size, dtype))
        number = next(fitting, None)
        return np.empty(size, dtype) if number is None else self._free.pop(number)


class RunStatus(NamedTuple):
    """The committed step and the decisions of the workers."""

    committed_step: int
    decided_step: int  # the last step after which all workers have decided whether to stop
    stop_reason: str  # empty if the run continues
    saved: bool  # the last checkpoint of the run is written

    @property
    def is_decided(self) -> bool:
        """True if the workers have decided on the last committed step; a death may come between the two."""
        return self.decided_step >= self.committed_step

    @staticmethod
    def newest(survivors: Iterable[RunStatus]) -> RunStatus:
        """The status after a death: what one survivor has committed or decided counts for all."""
        known = list(survivors)
        decided, reason = max((each.decided_step, each.stop_reason) for each in known)
        committed = max(each.committed_step for each in known)
        return RunStatus(committed, decided, reason, all(each.saved for each in known))


class Survivor(NamedTuple):
    """Facts of a process that all others get after a death."""

    status: RunStatus
    has_state: bool  # it has a part of the committed state; else its status does not count
    request: int  # the last request for workers that it knows all have agreed on
    last_disruption: int  # see `Recruiter`


@dataclass(frozen=True)
class ResizeMetadata:
    """The metadata that the processes of a run get with the arrays of its state when the workers change."""

    optimizer: Mapping[str, Any]  # part of the metadata of a `RunState`, for `OptimizerState.restore`
    progress: RunProgress
    status: RunStatus
    request: int  # the last request for workers that all have agreed on
    discovered: int  # the last number from `discover`
    checkpoints: list[str]  # ids of the run's own checkpoints

    def to_wire(self) -> dict[str, Any]:
        """As metadata of a `RunState`: plain values, and the losses as an array, which `reshard_state` sends as one."""
        progress = asdict(self.progress)
        return {
            **self.optimizer,
            "losses": progress.pop("losses"),
            "progress": progress,
            "status": tuple(self.status),
            "request": self.request,
            "discovered": self.discovered,
            "checkpoints": self.checkpoints,
        }

    @classmethod
    def from_wire(cls, metadata: Mapping[str, Any]) -> ResizeMetadata:
        """The value whose `to_wire` this is."""
        own = {"losses", "progress", "status", "request", "discovered", "checkpoints"}
        return cls(
            optimizer={name: value for name, value in metadata.items() if name not in own},
            progress=RunProgress(losses=metadata["losses"], **metadata["progress"]),
            status=RunStatus(*metadata["status"]),
            request=metadata["request"],
            discovered=metadata["discovered"],
            checkpoints=metadata["checkpoints"],
        )


class Transactions:
    """Takes steps and commits them; owns the committed state and what the workers have decided about it (`status`).

    With `among_all`, any two ranks may keep each other's copies, not only those of a data axis.
    """

    def __init__(
        self,
        training: TrainingRun,
        membership: Membership,
        agreements: Agreements,
        status: RunStatus,
        among_all: bool = False,
    ) -> None:
        self.status: RunStatus = status
        self.unseen: StepOutcome | None = None  # of the last committed step, until its callback has returned
        self._training = training
        self._membership = membership
        self._agreements = agreements
        self._among_all = among_all
        self._checkpoint: BuddyCheckpoint | None = None
        self._ready: StepOutcome | None = None  # of the step that is ready to be committed

    @property
    def has_state(self) -> bool:
        """True if this process has a part of the committed state."""
        return self._checkpoint is not None

    # -- steps ------------------------------------------------------------------------------------------------------

    def take_step(self) -> StepOutcome:
        """Take a step and commit it.  Collective over the workers."""
        self.compute()
        self._agreements.agree_as_workers()
        return self.commit()

    def compute(self) -> None:
        """Take a step that is to be committed or rolled back.  Collective over the workers."""
        checkpoint = self._current()
        checkpoint.begin(self._training.optimizer.state.facts)
        outcome = self._training.take_step(self.status.committed_step + 1)
        checkpoint.send_to_buddy()
        self._ready = outcome

    def commit(self) -> StepOutcome:
        """Make the computed step the last committed one."""
        outcome = self._ready
        assert outcome is not None
        with self._training.report.phase("commit"):
            self._current().commit()
        self.status = self.status._replace(committed_step=self.status.committed_step + 1)
        self._training.finish_step(outcome)
        self.unseen, self._ready = outcome, None
        return outcome

    def rollback(self) -> None:
        """Return to parameters and state of the last committed step, if another one has begun.

        Its gradients are dropped when the optimizer's arrays are made again, for the ranks that are left.
        """
        facts = self._current().rollback()
        if facts is not None:
            self._training.optimizer.state.restore(facts)
        self._ready = None

    def prepare_move(self) -> None:
        """Commit a state that can move: no worker has data for its own use only (error feedback).

        Collective over the workers.
        """
        optimizer, checkpoint = self._training.optimizer, self._current()
        if optimizer.state.needs_consolidation:
            checkpoint.begin(optimizer.state.facts)
            optimizer.state.consolidate()
            checkpoint.send_to_buddy()
            self._agreements.agree_as_workers()
            checkpoint.commit()

    # -- decisions --------------------------------------------------------------------------------------------------

    def decide(self, reason: str) -> None:
        """Note the decision of all workers after the last committed step: why the run stops, empty if it continues."""
        self.status = self.status._replace(decided_step=self.status.committed_step, stop_reason=reason)

    def note_saved(self) -> None:
        self.status = self.status._replace(saved=True)

    def adopt(self, newest: RunStatus) -> None:
        """After a death commit or roll back as the other survivors do, and adopt their newest status."""
        if newest.committed_step > self.status.committed_step:
            self.commit()
        else:
            self.rollback()
        self.status = newest

    # -- other workers ----------------------------------------------------------------------------------------------

    def source(self) -> RunState | None:
        """The part of the committed state that this process can give, with the optimizer's facts, or None."""
        checkpoint = self._checkpoint
        if checkpoint is None:
            return None
        if checkpoint.facts is None:  # a move that fails leaves other facts in the optimizer
            checkpoint.facts = self._training.optimizer.state.facts
        return replace(checkpoint.source(self._membership.roles.identities), facts=checkpoint.facts)

    def new_checkpoint(self) -> BuddyCheckpoint:
        """Make the present state the committed one, with copies at new buddies.  Collective over the workers."""
        membership, mesh = self._membership, self._training.optimizer.mesh
        axis = mesh.world if self._among_all else mesh.data
        identities = [membership.roles.identities[rank] for rank in axis.members]
        nodes = [membership.roles.peers[rank].host for rank in axis.members]
        state = self._training.optimizer.state
        return BuddyCheckpoint(axis, identities, nodes, state.capture(), lambda: state.versions)

    def install(self, checkpoint: BuddyCheckpoint | None) -> None:
        """Drop the old committed state for a new one; None in a spare."""
        self._checkpoint = checkpoint
        if checkpoint is None:
            self.unseen = None

    def _current(self) -> BuddyCheckpoint:
        assert self._checkpoint is not None
        return self._checkpoint
