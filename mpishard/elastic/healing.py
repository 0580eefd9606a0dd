"""The work of survivors after a death: they shrink to those who live, and agree on the last committed step."""

from __future__ import annotations

import contextlib

from mpishard.elastic.membership import Order
from mpishard.elastic.parts import Parts
from mpishard.elastic.run_status import RunStatus, Survivor
from mpishard.io import log
from mpishard.launch.job_notes import JobNotes, RunLost


class Healing:
    """Removes dead processes from the run; it has no state, `parts` own all of it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def heal(self) -> Order:
        """Remove the dead processes and return to the last committed step; returns the order for the next workers.

        Collective over the survivors, which come here from anywhere; if another one dies meanwhile, MPI.Exception is
        raised, and `heal` is called again.  Raises RunLost if the survivors lack a part of the state, or are too few.
        """
        parts = self._parts
        membership, transactions, target = parts.membership, parts.transactions, parts.elasticity.target
        before = membership.roles.identities
        self._note_healed(transactions.status.committed_step)
        parts.workers.revoke()
        parts.training.optimizer.state.abandon()
        membership.revoke()
        parts.agreements.refuse_all()
        membership.shrink()
        survivors = self._exchange()
        known = [each for each in survivors if each.has_state]
        if not known:
            raise RunLost("all workers have died; start the run again from its newest checkpoint")
        newest = RunStatus.newest(each.status for each in known)
        target.adopt_request(max(each.request for each in known))
        if transactions.has_state:
            transactions.adopt(newest)
        step = newest.committed_step
        self._note_healed(step)
        dead = [str(who) for who in before if who not in membership.roles.identities]
        if membership.rank == 0:
            log.warn(f"{_have(dead)} died; {membership.roles.size} are left, step {step} is the last")
        if membership.roles.able < target.min_workers:
            raise RunLost(f"{membership.roles.able} whole workers are left, and min_workers={target.min_workers}")
        parts.recruiter.note_death(step, max(each.last_disruption for each in survivors))
        parts.decisions.forget_recruits()
        stops = transactions.status.stop_reason
        return Order(membership.roles.most if stops else min(target.agreed_size, membership.roles.able))

    def _exchange(self) -> list[Survivor]:
        """The facts of each survivor.  Collective over them."""
        transactions, request = self._parts.transactions, self._parts.elasticity.target.agreed
        disruption = self._parts.recruiter.last_disruption
        own = Survivor(transactions.status, transactions.has_state, request, disruption)
        return self._parts.membership.axis.allgather_object(own)

    def _note_healed(self, step: int) -> None:
        """Inform the supervisor that the run has survived a death and continues after this step."""
        folder = JobNotes.from_environment()
        if folder is not None:
            with contextlib.suppress(OSError):
                folder.note_healed(self._parts.membership.roles.size, step)


def _have(dead: list[str]) -> str:
    """Subject and verb of a message on the dead; "one has" if only a joining process has died."""
    if not dead:
        return "one has"
    return f"process {dead[0]} has" if len(dead) == 1 else f"processes {', '.join(dead)} have"
