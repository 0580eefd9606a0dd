"""What start, step, checkpoint and healing take on very many ranks, by formulas.

Measured parts of one rank (`StartParts`) and of the links (`MachineProfile`) meet assumptions about the cluster
(`Cluster`).  With more ranks nothing becomes faster but the copy of a rank's state, which becomes smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mpishard.arguments import integer, number
from mpishard.estimate.profile import MachineProfile
from mpishard.estimate.start_parts import StartParts

# A mesh has two communicators for each of its five axes, and one for its watchdog.
COMMUNICATORS = 11
# MPI's communicators are made of a colour and a key of each rank.
_COMMUNICATOR_BYTES = 8
# Small objects of every rank that every rank reads: where a mesh is made (nodes, cores), for a checkpoint (reports
# before and after it is written), and after a death (survivors, members, their ports, layouts of what they hold).
_OBJECT_BYTES = 64
_OBJECTS_OF_START, _OBJECTS_OF_CHECKPOINT, _OBJECTS_OF_HEAL = 2, 2, 4
# Of a step of a GPT under ZeRO-1: gradients and parameters in ten buckets each, and two small sums.
_COLLECTIVES = 22
# float32 parameters and gradients; a checkpoint of Adam has parameters and two slots.
_ITEM_BYTES = 4
_STATE_BYTES = 12
_DAY_S = 86400.0
# More than any machine has had, and than the formulas were compared with.
MOST_RANKS = 10**7


@dataclass(frozen=True)
class Cluster:
    """What is assumed of a cluster and of a run on it; none of it is measured.

    Not collective.

    Parameters
    ----------
    cores_per_node, ranks_per_node : int
        Ranks beyond the cores share them.
    opens_per_second : float
        Opens of files, creations and questions after files that the shared file system answers per second.
    file_bandwidth : float
        Bytes per second that it reads or writes for all nodes together.
    days_between_failures : float
        Mean days between two deaths of the same node.
    detection_seconds : float
        From a death until all survivors know it.
    parameters : float
        Of the model, in data-parallel training.
    step_seconds : float
        Computation of a step on each rank.

    Raises
    ------
    TypeError
        If one is no number, or a count no whole number.
    ValueError
        If one is out of its range.
    """

    cores_per_node: int = 64
    ranks_per_node: int = 64
    opens_per_second: float = 5e4
    file_bandwidth: float = 2e10
    days_between_failures: float = 1825.0
    detection_seconds: float = 0.05
    parameters: float = 1e8
    step_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name in ("cores_per_node", "ranks_per_node"):
            integer(name, getattr(self, name), least=1)
        for name in ("opens_per_second", "file_bandwidth", "days_between_failures", "parameters", "step_seconds"):
            number(name, getattr(self, name), above=0)
        number("detection_seconds", self.detection_seconds, least=0)


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of four things on so many ranks.

    Parameters
    ----------
    ranks : int
        Of the run.
    start, step, checkpoint, heal : dict of str to float
        Seconds by part.
    deaths_per_second : float
        Of all nodes together.
    """

    ranks: int
    start: dict[str, float]
    step: dict[str, float]
    checkpoint: dict[str, float]
    heal: dict[str, float]
    deaths_per_second: float


def costs(ranks: int, parts: StartParts, cluster: Cluster, machine: MachineProfile) -> Costs:
    """Seconds of start, step, checkpoint and healing on so many data-parallel ranks.

    Not collective.

    Parameters
    ----------
    ranks : int
        At least 1.
    parts : StartParts
        Measured.
    cluster : Cluster
        Assumed.
    machine : MachineProfile
        Its links: latencies count for each of the log2(ranks) rounds of a collective.

    Returns
    -------
    Costs
        By part.

    Raises
    ------
    TypeError
        If `ranks` is no whole number.
    ValueError
        For fewer than 1, more than `MOST_RANKS`, or for a profile without links.
    """
    ranks = integer("ranks", ranks, least=1)
    if ranks > MOST_RANKS:
        raise ValueError(f"ranks={ranks} is more than the {MOST_RANKS:,} that this can say something about")
    nodes = math.ceil(ranks / cluster.ranks_per_node)
    machine = replace(machine, ranks_per_node=cluster.ranks_per_node)
    gather, reduce = machine.link("all_gather", ranks), machine.link("all_reduce", ranks)

    def gathered(count: int, size: int) -> float:
        """Seconds of all-gathers of so many bytes of each rank."""
        return gather.seconds(ranks, (ranks - 1) * size * count, count)

    def objects(count: int) -> float:
        return gathered(count, _OBJECT_BYTES) + count * ranks * parts.object_seconds

    communicators = gathered(COMMUNICATORS, _COMMUNICATOR_BYTES)
    step = {
        "computing": cluster.step_seconds,
        "bytes of gradients and parameters": reduce.seconds(
            ranks, 2 * (ranks - 1) / ranks * _ITEM_BYTES * cluster.parameters, 0
        ),
        "rounds of collectives": reduce.seconds(ranks, 0, _COLLECTIVES),
    }
    state = _STATE_BYTES * cluster.parameters
    return Costs(
        ranks=ranks,
        start={
            "processor time": parts.processor_seconds
            * max(1.0, min(ranks, cluster.ranks_per_node) / cluster.cores_per_node),
            "opening files": (parts.opens + parts.lookups) * ranks / cluster.opens_per_second,
            "reading files": parts.bytes_read * nodes / cluster.file_bandwidth,
            "communicators": communicators,
            "objects of all ranks": objects(_OBJECTS_OF_START),
        },
        step=step,
        checkpoint={
            "writing": state / cluster.file_bandwidth,
            "creating files": ranks / cluster.opens_per_second,
            "objects of all ranks": objects(_OBJECTS_OF_CHECKPOINT),
        },
        heal={
            "noticing a death": cluster.detection_seconds,
            "communicators": communicators,
            "objects of all ranks": objects(_OBJECTS_OF_HEAL),
            "state from a buddy": machine.link("send", ranks).seconds(2, state / ranks),
            "the step again": sum(step.values()),
        },
        deaths_per_second=nodes / (cluster.days_between_failures * _DAY_S),
    )
