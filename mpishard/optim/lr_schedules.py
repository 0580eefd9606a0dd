"""Learning-rate schedules: pure functions of the step, so that a resumed run needs only its step.  Steps count from 1.

Each function returns a `Schedule`, a value whose repr is the call that creates it.  With ``warmup=w`` the rate rises
linearly over the first `w` steps and is ``peak`` at step `w`; a decay takes the remaining steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mpishard.arguments import integer, number

_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}


@dataclass(frozen=True, repr=False)
class Schedule:
    """A learning rate for every step; create it with `constant`, `warmup`, `linear`, `cosine` or `inverse_square_root`.

    Parameters
    ----------
    shape : str
        Name of the function that creates it.
    peak : float
        The highest rate.
    steps : int or None
        The step from which a decay stays at `floor`; None for shapes without an end.
    warmup : int
        Number of steps of the linear rise.
    floor : float
        The lowest rate after the warm-up.

    Raises
    ------
    TypeError, ValueError
        If a number is no number or out of its range, `floor` is above `peak`, or `steps` is not above `warmup`.
    """

    shape: str
    peak: float
    steps: int | None = None
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        for name in ("peak", "floor"):
            object.__setattr__(self, name, number(f"{self.shape}: {name}", getattr(self, name), least=0))
        if self.floor > self.peak:
            raise ValueError(f"{self.shape}: floor={self.floor} is above peak={self.peak}")
        least = 1 if self.shape in ("warmup", "inverse_square_root") else 0
        warmup = "steps" if self.shape == "warmup" else "warmup"
        object.__setattr__(self, "warmup", integer(f"{self.shape}: {warmup}", self.warmup, least=least))
        if self.steps is not None:
            object.__setattr__(self, "steps", integer(f"{self.shape}: steps", self.steps))
            if self.steps <= self.warmup:
                raise ValueError(f"{self.shape}: steps={self.steps} must be above warmup={self.warmup}")

    def __call__(self, step: int) -> float:
        """The learning rate of `step`, which counts from 1."""
        if step < self.warmup:
            return self.peak * step / self.warmup
        if self.shape == "inverse_square_root":
            return max(self.floor, self.peak * math.sqrt(self.warmup / step))
        if self.steps is None:
            return self.peak
        # A decay without a warm-up is at its peak in the first step.
        start = max(1, self.warmup)
        progress = min(1.0, (step - start) / max(1, self.steps - start))
        return self.floor + (self.peak - self.floor) * _SHAPES[self.shape](progress)

    def __repr__(self) -> str:
        given = {"peak": self.peak, "steps": self.steps, "warmup": self.warmup, "floor": self.floor}
        if self.shape == "warmup":
            given = {"peak": self.peak, "steps": self.warmup}
        arguments = (f"{name}={value!r}" for name, value in given.items() if value or name == "peak")
        return f"{self.shape}({', '.join(arguments)})"


def constant(peak: float, *, warmup: int = 0) -> Schedule:
    """`peak` at every step after the warm-up.

    Parameters
    ----------
    peak : float
        The learning rate, at least 0.
    warmup : int
        Number of steps of the linear rise to `peak`.

    Returns
    -------
    Schedule
        A function of the step.

    Raises
    ------
    TypeError, ValueError
        As `Schedule`.
    """
    return Schedule("constant", peak, warmup=warmup)


def warmup(peak: float, steps: int) -> Schedule:
    """A linear rise to `peak` at step `steps`, then `peak`.

    Parameters
    ----------
    peak : float
        The highest rate, at least 0.
    steps : int
        Number of steps of the rise, at least 1.

    Returns
    -------
    Schedule
        A function of the step.

    Raises
    ------
    TypeError, ValueError
        As `Schedule`.
    """
    return Schedule("warmup", peak, warmup=steps)


def linear(peak: float, steps: int, *, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """A straight line from `peak` to `floor` at step `steps`, then `floor`.

    Parameters
    ----------
    peak : float
        The highest rate, at least 0.
    steps : int
        The step at which the rate is `floor`; above `warmup`.
    warmup : int
        Number of steps of the linear rise to `peak`.
    floor : float
        The lowest rate after the warm-up, at most `peak`.

    Returns
    -------
    Schedule
        A function of the step.

    Raises
    ------
    TypeError, ValueError
        As `Schedule`.
    """
    return Schedule("linear", peak, steps, warmup, floor)


def cosine(peak: float, steps: int, *, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Half a cosine from `peak` to `floor` at step `steps`, then `floor` (Loshchilov and Hutter 2017, equation 5).

    Parameters
    ----------
    peak : float
        The highest rate, at least 0.
    steps : int
        The step at which the rate is `floor`; above `warmup`.
    warmup : int
        Number of steps of the linear rise to `peak`.
    floor : float
        The lowest rate after the warm-up, at most `peak`.

    Returns
    -------
    Schedule
        A function of the step.

    Raises
    ------
    TypeError, ValueError
        As `Schedule`.
    """
    return Schedule("cosine", peak, steps, warmup, floor)


def inverse_square_root(peak: float, *, warmup: int, floor: float = 0.0) -> Schedule:
    """``peak * sqrt(warmup / step)`` after the warm-up (Vaswani et al. 2017, equation 3).

    Parameters
    ----------
    peak : float
        The highest rate, at least 0, at step `warmup`.
    warmup : int
        Number of steps of the linear rise, at least 1.
    floor : float
        The lowest rate after the warm-up, at most `peak`.

    Returns
    -------
    Schedule
        A function of the step.

    Raises
    ------
    TypeError, ValueError
        As `Schedule`.
    """
    return Schedule("inverse_square_root", peak, warmup=warmup, floor=floor)
