"""Time of start, step, checkpoint and healing on very many ranks, by formulas.

Measured parts of one rank (`StartParts`) and of the links (`MachineProfile`) meet assumptions about the cluster
(`Cluster`).  With more ranks nothing becomes faster but the copy of a rank's state, which becomes smaller.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from mpishard.arguments import integer, number
from mpishard.estimate.profile import MachineProfile
from mpishard.launch.detection import launches

_REPEATS = 3
_TIME_LIMIT_S = 120.0
# A step of a small model, without MPI.  What is not in Numba's cache is compiled, and cached for the next process.
_START = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
import numpy as np
import mpishard
mpishard.Mesh, mpishard.ZeRO1Optimizer
model, tokens = mpishard.nn.GPT(64, 16, 32, 2, 2), np.zeros((2, 16), int)
model.loss_and_gradient(tokens, tokens)
rule, parameters = mpishard.AdamW(), np.ones(4, np.float32)
rule.update(parameters, parameters.copy(), [np.zeros(4, np.float32) for _ in rule.slots], 1)
"""
_TIMED = """
import resource
exec({start!r})
usage = resource.getrusage(resource.RUSAGE_SELF)
print(usage.ru_utime + usage.ru_stime)
"""
# Files that Python opens, libraries that the process has mapped, and Python's questions after files and folders.
_COUNTED = """
import os, posix, sys
opened, questions, asked = [], [], (posix.stat, posix.lstat, posix.listdir, posix.scandir)
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(arguments[0]))
sys.setprofile(lambda frame, event, function: event == "c_call" and function in asked and questions.append(function))
exec({start!r})
sys.setprofile(None)
mapped = {{line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if line.count("/")}}
opens = [path for path in opened if isinstance(path, (str, bytes)) and not os.fsdecode(path).startswith("/proc/")]
files = {{path for path in (*map(os.fsdecode, opens), *mapped) if os.path.isfile(path)}}
print([len(opens) + len(mapped), len(questions), sum(os.path.getsize(path) for path in files)])
"""


@dataclass(frozen=True)
class StartParts:
    """The costs of one rank from its first instruction to the end of its first step.

    Parameters
    ----------
    processor_seconds : float
        Processor time, without that of MPI's own start.
    opens : int
        Files that it opens, libraries included.
    lookups : int
        Questions after files and folders, such as where a module is.
    bytes_read : int
        Sizes of these files together.
    object_seconds : float
        Processor time to read the small object that one rank has sent to all.

    Raises
    ------
    TypeError
        If a figure is no number, or a count no whole number.
    ValueError
        If one is negative or not finite.
    """

    processor_seconds: float
    opens: int
    lookups: int
    bytes_read: int
    object_seconds: float

    def __post_init__(self) -> None:
        for name in ("processor_seconds", "object_seconds"):
            number(name, getattr(self, name), least=0)
        for name in ("opens", "lookups", "bytes_read"):
            integer(name, getattr(self, name), least=0)


def measure_start() -> StartParts:
    """Measure the start of a rank on this machine, in a few seconds; the first time kernels are compiled.

    Needs no MPI: the processes that it starts load the MPI library, but do not start it.

    Returns
    -------
    StartParts
        Processor time is the median of three processes.

    Raises
    ------
    ValueError
        In a process that a launcher has started, since processes of a rank are no ranks; if one of them fails, or takes
        more than two minutes.
    """
    if found := launches(os.environ):
        raise ValueError(f"the start of a rank is measured by one process alone: call it without {found[0].launcher}")
    seconds = statistics.median(_run(_TIMED) for _ in range(_REPEATS))
    opens, lookups, bytes_read = _run(_COUNTED)
    return StartParts(seconds, opens, lookups, bytes_read, _object_seconds())


def _run(script: str) -> Any:
    """The values, as JSON, that a script with a start in it prints, in a separate process."""
    command = [sys.executable, "-c", script.format(start=_START)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the start of a process took more than {_TIME_LIMIT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"the start of a process cannot be measured, since it failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _object_seconds() -> float:
    received, count = pickle.dumps((1, "a node", 2**64)), 10_000
    began = time.process_time()
    for _ in range(count):
        pickle.loads(received)
    return (time.process_time() - began) / count


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
    """Assumptions about a cluster and a run on it; none of them is measured.

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
    """Seconds of the parts of start, step, checkpoint and healing on a number of ranks.

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
    """Seconds of start, step, checkpoint and healing on this number of data-parallel ranks.

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
        """Seconds of `count` all-gathers of `size` bytes of each rank."""
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


# The limits of start, step, checkpoint and healing in the words of a message; `burdens` has the numbers.
LIMITS = {
    "start": "takes more than ten minutes",
    "step": "communicates longer than it computes",
    "checkpoint": "takes more than six minutes, a tenth of the time if there is one an hour",
    "heal": "takes more than a tenth of the time, as nodes die so often",
}
THINGS = tuple(LIMITS)


@dataclass(frozen=True)
class Break:
    """One of `LIMITS`, and the number of ranks at which it breaks.

    Parameters
    ----------
    what : str
        One of `LIMITS`.
    ranks : int or None
        The least number of ranks above its limit; None: it holds for ten million.
    part : str
        The part that takes longest at that number of ranks, or at ten million.
    share : float
        Of this part, from 0 to 1, of the time of all parts that grow.
    """

    what: str
    ranks: int | None
    part: str
    share: float


def burdens(found: Costs) -> dict[str, float]:
    """How near each thing is to its limit in `LIMITS`, by the thing's name; it breaks above 1."""
    computing = found.step["computing"]
    return {
        "start": sum(found.start.values()) / 600,
        "step": (sum(found.step.values()) - computing) / computing,
        "checkpoint": sum(found.checkpoint.values()) / 360,
        "heal": sum(found.heal.values()) * found.deaths_per_second / 0.1,
    }


def breaks(parts: StartParts, cluster: Cluster, machine: MachineProfile) -> list[Break]:
    """Where start, step, checkpoint and healing break (`LIMITS`), the first first.

    Parameters
    ----------
    parts : StartParts
        Measured.
    cluster : Cluster
        Assumed.
    machine : MachineProfile
        Its links.

    Returns
    -------
    list of Break
        In the order of their numbers of ranks; what holds comes last.

    Raises
    ------
    ValueError
        For a profile without links.
    """

    def broken(what: str, ranks: int) -> bool:
        return burdens(costs(ranks, parts, cluster, machine))[what] > 1

    found = []
    for what in LIMITS:
        below, above = 0, 1
        while above < MOST_RANKS and not broken(what, above):
            below, above = above, min(2 * above, MOST_RANKS)
        ranks = above if broken(what, above) else None
        while ranks is not None and ranks - below > 1:
            middle = (below + ranks) // 2
            below, ranks = (below, middle) if broken(what, middle) else (middle, ranks)
        times: dict[str, float] = dict(getattr(costs(ranks or MOST_RANKS, parts, cluster, machine), what))
        times.pop("computing", None)  # what a step's communication is compared with
        part = max(times, key=lambda name: times[name])
        found.append(Break(what, ranks, part, times[part] / sum(times.values()) if times[part] else 0.0))
    return sorted(found, key=lambda each: math.inf if each.ranks is None else each.ranks)
