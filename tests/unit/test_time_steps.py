"""The adjoint of time steps from few stored states: the bits of storing all of them, and as few steps as can be."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest

from mpishard.inverse.time_steps import backward_in_time

Array = np.ndarray


@functools.cache
def fewest(steps: int, states: int) -> int:
    """Forward steps that must be taken if the adjoint of a step needs the state before it, the first one stored."""
    if steps <= 1:
        return 0
    if states == 1:
        return steps * (steps - 1) // 2
    return min(first + fewest(first, states) + fewest(steps - first, states - 1) for first in range(1, steps))


class Waves:
    """A nonlinear recurrence with parameters, its adjoint, and a count of what is computed and stored."""

    def __init__(self) -> None:
        self.parameters = np.linspace(0.1, 0.9, 5)
        self.gradient = np.zeros(5)
        self.steps = 0
        self.order: list[int] = []

    def forward(self, state: Array, step: int) -> Array:
        self.steps += 1
        state += 0.1 * np.sin(self.parameters * state + step)
        return state

    def backward(self, state: Array, adjoint: Array, step: int) -> Array:
        self.order.append(step)
        slope = 0.1 * np.cos(self.parameters * state + step) * adjoint
        self.gradient += slope * state
        return adjoint + self.parameters * slope


def all_stored(start: Array, steps: int) -> tuple[Array, Array]:
    waves, states = Waves(), [start.copy()]
    for step in range(steps):
        states.append(waves.forward(states[-1].copy(), step))
    adjoint = 2 * states[-1]
    for step in reversed(range(steps)):
        adjoint = waves.backward(states[step], adjoint, step)
    return adjoint, waves.gradient


@pytest.mark.parametrize(("steps", "states"), [(1, 1), (2, 1), (9, 1), (10, 3), (31, 4), (40, 39), (40, 100), (100, 5)])
def test_bits_and_number_of_steps(steps: int, states: int) -> None:
    pytest.importorskip("checkpoint_schedules")
    start, waves = np.linspace(-1, 1, 5), Waves()
    adjoint = backward_in_time(waves.forward, waves.backward, start, steps, lambda u: 2 * u, states=states)
    expected, gradient = all_stored(start, steps)
    assert np.array_equal(adjoint, expected) and np.array_equal(waves.gradient, gradient)
    assert np.array_equal(start, np.linspace(-1, 1, 5))
    assert waves.order == list(reversed(range(steps)))
    assert waves.steps == fewest(steps, states) + 1  # and the last step, for the final state


def test_no_more_states_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("checkpoint_schedules")
    alive: set[int] = set()
    most = 0

    class State:
        def __init__(self) -> None:
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

        def __deepcopy__(self, memo: object) -> State:
            return State()

    def forward(state: State, step: int) -> State:
        nonlocal most
        most = max(most, len(alive))
        return state

    start = State()
    backward_in_time(forward, lambda u, a, k: a, start, 50, lambda u: 0, states=4)
    assert most <= 4 + 3  # the start, the state that moves, and the one of the last step


def test_no_steps_and_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backward_in_time(lambda u, k: u, lambda u, a, k: a, 3.0, 0, lambda u: 2 * u, states=1) == 6.0
    with pytest.raises(ValueError, match="states=0"):
        backward_in_time(lambda u, k: u, lambda u, a, k: a, 3.0, 5, lambda u: 2 * u, states=0)
    with pytest.raises(TypeError, match="must be functions"):
        backward_in_time(lambda u, k: u, 3, 3.0, 5, lambda u: 2 * u, states=1)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "checkpoint_schedules", None)
    with pytest.raises(ModuleNotFoundError, match=r"mpishard\[revolve\]"):
        backward_in_time(lambda u, k: u, lambda u, a, k: a, 3.0, 5, lambda u: 2 * u, states=1)
