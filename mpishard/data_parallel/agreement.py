"""The check that all ranks pass the same arguments and have the same settings; if not, all raise one error.

`agree_on_step` compares before each step: the parameters, the divisor and the settings.  `agree_on_beginning` is for
what all do between two steps.  `mpishard.comm.agreement` compares any settings by name.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mpishard.comm.agreement import WAY_OUT, differing
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import ModelParallelGroup
from mpishard.parameters.flat import FlatParameters


class Compared(Protocol):
    """Settings that ranks compare."""

    @property
    def fingerprint(self) -> int: ...
    @property
    def way_out(self) -> str: ...
    def by_name(self) -> dict[str, str]: ...


def agree_on_step(
    ranks: Axis | ModelParallelGroup,
    parameters: FlatParameters | None,
    count: float | None,
    problem: Exception | None,
    settings: Compared | None = None,
) -> None:
    """Raise on all of some ranks if any has a problem, or if their arguments of `step` differ. Collective over them.

    A problem of any rank is raised as it is, a difference as ValueError on every rank. `parameters` is None where this
    rank has a problem; `count` is the divisor that it was given.
    """
    if len(ranks.members) == 1:  # nothing to compare
        if problem is not None:
            raise problem
        return
    model = -1 if parameters is None else parameters.fingerprint ^ parameters.model_fingerprint
    if settings is not None:
        model ^= settings.fingerprint
    number = -1 if count is None else int(np.float64(count).view(np.int64))
    shared = np.array([problem is not None, model, -model, number, -number], np.int64)
    ranks.all_reduce(shared, op="max", label="control")
    if shared[0]:
        ranks.raise_together(problem)
    assert parameters is not None
    if shared[1] != -shared[2]:
        models = ranks.allgather_object((parameters.fingerprint, parameters.description))
        if len({model for model, _ in models}) == 1:
            by_name, way_out = ({}, WAY_OUT) if settings is None else (settings.by_name(), settings.way_out)
            raise differing(ranks, {**by_name, **parameters.model_settings}, way_out=way_out)
        found = ", ".join(f"rank {rank} {what}" for rank, (_, what) in zip(ranks.members, models, strict=True))
        raise ValueError(f"all ranks must have the same parameters in the same order; here: {found}")
    if shared[3] != -shared[4]:
        raise ValueError(f"count must be the global number, the same on all ranks; got {ranks.allgather_object(count)}")


def agree_on_beginning(world: Axis, has_begun: bool, settings: Compared) -> bool:
    """Return True if all ranks have taken a first step, False if none has. Collective over the ranks.

    Raises ValueError on every rank if only some have, or if settings differ.
    """
    states = world.allgather_object((has_begun, settings.fingerprint))
    waiting = [rank for rank, (begun, _) in enumerate(states) if not begun]
    if waiting:
        if len(waiting) < len(states):
            raise ValueError(f"ranks {waiting} have not called step() yet")
        return False
    if len(set(states)) > 1:
        raise differing(world, settings.by_name(), way_out=settings.way_out)
    return True
