"""Runs MPI operations that may wait forever after a death in a thread, with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from mpi4py import MPI

from mpishard.comm.abort import die
from mpishard.comm.capabilities import heals_in_place

# The operations take milliseconds.  After a death is known, those that can end will have ended within the grace time.
_GRACE_S = 2.0
_LIMIT_S = 20.0
_NAP_S = 0.001
_LATE = (
    f"mpishard: the run and spawned processes have not met within {_LIMIT_S:g} s, one may have died; start it again "
    "from its newest checkpoint, as `mpishard run --elastic` does"
)
Result = TypeVar("Result")


def in_time(work: Callable[[], Result], check: Callable[[], object] = lambda: None) -> Result:
    """Call `work` and return its result or raise its error; end this process if the call exceeds the time limit.

    With ULFM, `check` is called meanwhile, and raises MPI.Exception if a process has died.  If `work` then does not end
    within the grace time, this function raises that error too, and leaves the thread of `work` where it waits.
    """
    if not heals_in_place():
        late = threading.Timer(_LIMIT_S, die, [_LATE])
        late.daemon = True
        late.start()
        try:
            return work()
        finally:
            late.cancel()
    outcome: list[Any] = []

    def carry_out() -> None:
        try:
            outcome.extend((work(), None))
        except BaseException as problem:
            outcome.extend((None, problem))

    thread = threading.Thread(target=carry_out, name="mpishard-meeting", daemon=True)
    thread.start()
    limit, death = time.monotonic() + _LIMIT_S, None
    while thread.is_alive():
        thread.join(_NAP_S)
        if time.monotonic() > limit:
            if death is None:
                die(_LATE)
            else:
                raise death
        if death is None:
            try:
                check()
            except MPI.Exception as found:
                limit, death = time.monotonic() + _GRACE_S, found
    result, error = outcome
    if error is not None:
        raise error
    return result
