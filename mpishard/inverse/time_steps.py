"""The adjoint of time steps with few stored states: steps are repeated from checkpoints, by an optimal schedule.

The schedule is binomial (Griewank and Walther, "Algorithm 799: revolve", 2000), and that of the package
checkpoint_schedules (Dolci, Maddison, Ham et al.), an optional dependency.  No MPI.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from mpishard.arguments import integer, shown

S = TypeVar("S")


def backward_in_time(
    forward: Callable[[S, int], S],
    backward: Callable[[S, Any, int], Any],
    start: S,
    steps: int,
    final: Callable[[S], Any],
    *,
    states: int,
) -> Any:
    """Take time steps forward, and their adjoints backward, with few states in memory.

    The functions may be collective.  The result has the bits that it has with all states in memory.

    Parameters
    ----------
    forward : callable
        ``forward(state, step) -> state``: one step, from 0 on.  It may change the state that it is given.
    backward : callable
        ``backward(state, adjoint, step) -> adjoint``: the adjoint of one step, of the state before it.  It is called
        once for each step, the last first.  Gradients of parameters are summed up by the function itself.
    start : object
        The first state: an array, or what `copy.deepcopy` copies.  It is not changed.
    steps : int
        How many.
    final : callable
        ``final(state) -> adjoint`` of the state after the last step.
    states : int
        How many states are stored at a time, the first included; at least 1.  Steps are repeated, the fewer the more
        states there are: with 10 states, 1000 steps are 3.6 times as many.

    Returns
    -------
    object
        The adjoint of the first state.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    ModuleNotFoundError
        Without the package checkpoint_schedules.

    Examples
    --------
    The state is doubled in each step, and so is the adjoint:

    >>> backward_in_time(lambda u, k: 2 * u, lambda u, a, k: 2 * a, 1.0, 10, lambda u: 1.0, states=3)
    1024.0
    """
    steps = integer("steps", steps, least=0)
    states = integer("states", states, least=1)
    for function in (forward, backward, final):
        if not callable(function):
            raise TypeError(f"forward, backward and final must be functions, got {shown(function)}")
    if steps == 0:
        return final(copy.deepcopy(start))
    stored: dict[int, S] = {}
    state, here = copy.deepcopy(start), 0  # the state before step `here`
    adjoint: Any = None
    for name, action in _actions(steps, states):
        if name == "forward":
            first, end, stores, turns = action
            assert first == here
            if stores:
                stored[first] = copy.deepcopy(state)
            # The last step before an adjoint one is not taken: `backward` has the state before it.
            for step in range(first, end - turns):
                state, here = forward(state, step), step + 1
            if turns and end == steps:
                adjoint = final(forward(copy.deepcopy(state), steps - 1))
        elif name == "restore":
            step, keeps = action
            state, here = copy.deepcopy(stored[step]) if keeps else stored.pop(step), step
        else:
            (step,) = action
            assert step == here
            adjoint = backward(state, adjoint, step)
    return adjoint


def _actions(steps: int, states: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The schedule: ("forward", (first, end, stores, turns)), ("restore", (step, keeps)), ("backward", (step,))."""
    try:
        import checkpoint_schedules as library
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "backward_in_time takes its schedule from the package checkpoint_schedules: pip install 'mpishard[revolve]'"
        ) from error
    for action in library.MultistageCheckpointSchedule(steps, states, 0):
        if isinstance(action, library.Forward):
            yield "forward", (action.n0, action.n1, bool(action.write_ics), bool(action.write_adj_deps))
        elif isinstance(action, library.Copy | library.Move):
            yield "restore", (action.n, isinstance(action, library.Copy))
        elif isinstance(action, library.Reverse):
            yield "backward", (action.n0,)
        elif isinstance(action, library.EndReverse):
            return
