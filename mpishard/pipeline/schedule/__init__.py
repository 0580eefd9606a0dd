"""Pipeline schedules: programs as data, their generators, and a simulator that proves and times them.

No MPI.

>>> from mpishard.pipeline.schedule import make_schedule, simulate
>>> simulate(make_schedule("1f1b", stages=4, microbatches=8)).peak_live
(4, 3, 2, 1)
"""

from mpishard.pipeline.schedule.actions import KINDS, Action, Schedule
from mpishard.pipeline.schedule.generators import SCHEDULES, forward_only, make_schedule
from mpishard.pipeline.schedule.simulator import (
    Deadlock,
    Event,
    Timeline,
    Wait,
    check_deadlock_free,
    find_deadlock,
    simulate,
)

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Action",
    "Deadlock",
    "Event",
    "Schedule",
    "Timeline",
    "Wait",
    "check_deadlock_free",
    "find_deadlock",
    "forward_only",
    "make_schedule",
    "simulate",
]
