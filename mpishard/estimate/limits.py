"""What start, step, checkpoint and healing may take, and which of them breaks first as the ranks become more."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpishard.estimate.many_ranks import MOST_RANKS, Cluster, Costs, costs
from mpishard.estimate.profile import MachineProfile
from mpishard.estimate.start_parts import StartParts

# What may cost how much, in the words of a message; `burdens` has the numbers.
LIMITS = {
    "start": "takes more than ten minutes",
    "step": "communicates longer than it computes",
    "checkpoint": "takes more than six minutes, a tenth of the time if there is one an hour",
    "heal": "takes more than a tenth of the time, as nodes die so often",
}
THINGS = tuple(LIMITS)


@dataclass(frozen=True)
class Break:
    """What breaks at how many ranks.

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
    """How near each thing is to its limit in `LIMITS`; it breaks above 1.

    Not collective.

    Parameters
    ----------
    found : Costs
        On some number of ranks.

    Returns
    -------
    dict of str to float
        By the name of the thing.
    """
    computing = found.step["computing"]
    return {
        "start": sum(found.start.values()) / 600,
        "step": (sum(found.step.values()) - computing) / computing,
        "checkpoint": sum(found.checkpoint.values()) / 360,
        "heal": sum(found.heal.values()) * found.deaths_per_second / 0.1,
    }


def breaks(parts: StartParts, cluster: Cluster, machine: MachineProfile) -> list[Break]:
    """Where start, step, checkpoint and healing break (`LIMITS`), the first first.

    Not collective.

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
