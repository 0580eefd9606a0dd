"""The options of an elastic run, and its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpishard.comm.mesh import Mesh
from mpishard.elastic.agreements import Agreements
from mpishard.elastic.external_requests import Outside
from mpishard.elastic.membership import Membership
from mpishard.elastic.mesh_choice import MeshChoice
from mpishard.elastic.recruiter import Recruiter
from mpishard.elastic.step_decisions import Decisions
from mpishard.elastic.stopped_processes import Watch
from mpishard.elastic.transactions import Transactions
from mpishard.elastic.worker_mesh import WorkerMesh
from mpishard.elastic.worker_target import WorkerTarget
from mpishard.training.objective import Objective
from mpishard.training.run import TrainingRun


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
    choice : MeshChoice, optional
        Chooses the mesh; without it the tensor and pipeline sizes stay.
    build : callable, optional
        ``build(mesh)`` makes the problem for a mesh; given with `choice`.
    """

    target: WorkerTarget
    outside: Outside
    watch: Watch
    respawn: bool
    scaling: str
    choice: MeshChoice | None = None
    build: Callable[[Mesh], Objective[Any]] | None = None


@dataclass(frozen=True)
class Parts:
    """The parts of an elastic run; each owns one state, and the phases of the loop work on all of them.

    Parameters
    ----------
    elasticity : Elasticity
    training : TrainingRun
        Steps, batches, losses, checkpoints and reports, as of every run.
    membership : Membership
        All processes.
    workers : WorkerMesh
        The communicators of those that train.
    agreements : Agreements
        In which of them others may be waiting.
    transactions : Transactions
        The committed state.
    decisions : Decisions
        What the workers have decided about the next ones.
    recruiter : Recruiter
        The processes that are being spawned.
    """

    elasticity: Elasticity
    training: TrainingRun
    membership: Membership
    workers: WorkerMesh
    agreements: Agreements
    transactions: Transactions
    decisions: Decisions
    recruiter: Recruiter
