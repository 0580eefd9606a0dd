"""Healing: after the loss of processes the survivors return to the last committed step, with the bits of then.

Collective over the survivors. Who heals and who starts again is decided in `mpishard.elastic.loop`.
"""

from __future__ import annotations

from mpishard.comm.supervisor_reports import tell
from mpishard.elastic.membership import Order
from mpishard.elastic.run import ElasticRun
from mpishard.elastic.transactions import RunStatus, Survivor
from mpishard.io import log
from mpishard.launch.job_notes import JobNotes, RunLost


def heal(run: ElasticRun) -> Order:
    """Remove the lost processes and return to the last committed step; returns the order for the next workers.

    Collective over the survivors, which come here from anywhere; if another one dies meanwhile, MPI.Exception is
    raised, and `heal` is called again.  Raises RunLost if the survivors lack a part of the state, or are too few.
    """
    membership, transactions, target = run.membership, run.transactions, run.options.target
    before = membership.roles.identities
    # At once, since a supervisor then gives the run its time to heal; again when it is known what is left.
    tell(JobNotes.note_healed, membership.roles.size, transactions.status.committed_step)
    run.worker_mesh.revoke()
    run.training.optimizer.state.abandon()
    membership.axis.revoke()
    run.agreements.refuse_all()
    membership.shrink()
    recruiter = run.recruiter
    own = Survivor(transactions.status, transactions.has_state, target.agreed, recruiter.last_disruption)
    survivors = membership.axis.allgather_object(own)
    known = [each for each in survivors if each.has_state]
    if not known:
        raise RunLost("all workers are lost; start the run again from its newest checkpoint")
    newest = RunStatus.newest(each.status for each in known)
    target.adopt_request(max(each.request for each in known))
    if transactions.has_state:
        transactions.adopt(newest)
    step = newest.committed_step
    tell(JobNotes.note_healed, membership.roles.size, step)
    lost = [str(who) for who in before if who not in membership.roles.identities]
    if membership.rank == 0:
        who = f"process{'es' * (len(lost) > 1)} {', '.join(lost)}" if lost else "a joining process"
        log.warn(f"lost {who}; {membership.roles.workers} workers continue from step {step}")
    if membership.roles.able < target.min_workers:
        raise RunLost(f"{membership.roles.able} whole workers remain, and min_workers={target.min_workers}")
    recruiter.note_lost(step, max(each.last_disruption for each in survivors))
    run.decisions.forget_recruits()
    stops = transactions.status.stop_reason
    return Order(membership.roles.most if stops else min(target.agreed_size, membership.roles.able))
