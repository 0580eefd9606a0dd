"""Steps that are transactions: committed on all workers, or taken back on all.

A step is committed when all workers have agreed that each has its part of the new state, and its buddy a copy of that.
"""

from __future__ import annotations

from dataclasses import replace

from mpishard.elastic.agreements import Agreements
from mpishard.elastic.committed_state import Committed
from mpishard.elastic.membership import Membership
from mpishard.elastic.run_status import RunStatus
from mpishard.layout.run_state import RunState
from mpishard.training.run import StepOutcome, TrainingRun


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
        self._training = training
        self._membership = membership
        self._agreements = agreements
        self._among_all = among_all
        self._committed: Committed | None = None
        self._ready: StepOutcome | None = None  # of the step that is ready to be committed

    @property
    def has_state(self) -> bool:
        """True if this process has a part of the committed state."""
        return self._committed is not None

    # -- steps ------------------------------------------------------------------------------------------------------

    def take_step(self) -> StepOutcome:
        """Take a step and commit it.  Collective over the workers."""
        self.compute()
        self._agreements.agree_as_workers()
        return self.commit()

    def compute(self) -> None:
        """Take a step that is to be committed or rolled back.  Collective over the workers."""
        committed = self._state()
        committed.begin(self._training.optimizer.state.facts)
        outcome = self._training.take_step(self.status.committed_step + 1)
        committed.send_copies()
        self._ready = outcome

    def commit(self) -> StepOutcome:
        """Make the computed step the last committed one."""
        outcome = self._ready
        assert outcome is not None
        with self._training.report.phase("commit"):
            self._state().commit()
        self.status = self.status._replace(committed_step=self.status.committed_step + 1)
        self._training.finish_step(outcome)
        self._ready = None
        return outcome

    def roll_back(self) -> None:
        """Return to parameters and state of the last committed step, if another one has begun.

        Its gradients are dropped when the optimizer's arrays are made again, for the ranks that are left.
        """
        facts = self._state().roll_back()
        if facts is not None:
            self._training.optimizer.state.restore(facts)
        self._ready = None

    def prepare_move(self) -> None:
        """Commit a state that can move: no worker has data for its own use only (error feedback).

        Collective over the workers.
        """
        optimizer, committed = self._training.optimizer, self._state()
        if optimizer.state.needs_consolidation:
            committed.begin(optimizer.state.facts)
            optimizer.state.consolidate()
            committed.send_copies()
            self._agreements.agree_as_workers()
            committed.commit()

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
            self.roll_back()
        self.status = newest

    # -- other workers ----------------------------------------------------------------------------------------------

    def source(self) -> RunState | None:
        """The part of the committed state that this process can give, with the optimizer's facts, or None."""
        committed = self._committed
        if committed is None:
            return None
        if committed.facts is None:  # a move that fails leaves other facts in the optimizer
            committed.facts = self._training.optimizer.state.facts
        return replace(committed.source(self._membership.roles.identities), facts=committed.facts)

    def copy_anew(self) -> Committed:
        """Make the present state the committed one, with copies at new buddies.  Collective over the workers."""
        membership, mesh = self._membership, self._training.optimizer.mesh
        axis = mesh.world if self._among_all else mesh.data
        identities = [membership.roles.identities[rank] for rank in axis.members]
        nodes = [membership.roles.peers[rank].host for rank in axis.members]
        state = self._training.optimizer.state
        return Committed(axis, identities, nodes, state.capture(), lambda: state.versions)

    def restore(self, status: RunStatus) -> None:
        self.status = status

    def install(self, committed: Committed | None) -> None:
        """Drop the old committed state for a new one; None in a spare."""
        self._committed = committed

    def _state(self) -> Committed:
        assert self._committed is not None
        return self._committed
