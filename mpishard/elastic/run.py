"""The parts of an elastic run, and its options: which object owns which state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpishard.comm.mesh import Mesh
from mpishard.elastic.membership import Membership, WorkerMesh
from mpishard.elastic.mesh_choice import MeshChoice
from mpishard.elastic.requests import Decisions, Recruiter, ResizeRequests, WorkerTarget
from mpishard.elastic.stopped_peers import StoppedPeerMonitor
from mpishard.elastic.transactions import Agreements, Transactions
from mpishard.training.objective import Objective
from mpishard.training.run import TrainingRun


@dataclass(frozen=True)
class ElasticOptions:
    """Options of an elastic run in addition to the problem and the optimizer."""

    target: WorkerTarget
    requests: ResizeRequests
    monitor: StoppedPeerMonitor  # kills processes of this host that are stopped
    respawn: bool  # processes are spawned to replace lost ones
    scaling: str  # the policy of `Scaling`
    choice: MeshChoice | None = None  # None: the tensor and pipeline sizes stay
    build: Callable[[Mesh], Objective[Any]] | None = None  # makes the problem for a mesh; given with `choice`
    rebuild: Callable[[Mesh], object] | None = None  # makes what functions have made of the communicators of the mesh
    audit: float | str | None = None  # the share of micro-batches that two workers compute, or REPLICAS


@dataclass(frozen=True)
class ElasticRun:
    """The parts of an elastic run; each owns one state, and the phases of the loop work on all of them."""

    options: ElasticOptions
    training: TrainingRun
    membership: Membership
    worker_mesh: WorkerMesh
    agreements: Agreements
    transactions: Transactions
    decisions: Decisions
    recruiter: Recruiter
