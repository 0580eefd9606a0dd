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
    """Options of an elastic run in addition to the problem and the optimizer."""

    target: WorkerTarget
    outside: Outside
    watch: Watch  # kills processes of this host that are stopped
    respawn: bool  # processes are spawned to replace the dead
    scaling: str  # the policy of `Scaling`
    choice: MeshChoice | None = None  # None: the tensor and pipeline sizes stay
    build: Callable[[Mesh], Objective[Any]] | None = None  # makes the problem for a mesh; given with `choice`


@dataclass(frozen=True)
class Parts:
    """The parts of an elastic run; each owns one state, and the phases of the loop work on all of them."""

    elasticity: Elasticity
    training: TrainingRun
    membership: Membership
    workers: WorkerMesh
    agreements: Agreements
    transactions: Transactions
    decisions: Decisions
    recruiter: Recruiter
