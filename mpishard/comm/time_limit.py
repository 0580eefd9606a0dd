"""How long a collective may wait: the user's number, or one that follows from the steps of the run."""

from __future__ import annotations

# The default limits of a collective: seconds before the first step is over, when one rank may read data or compile
# while the others wait; seconds if all ranks wait, and at least; and afterwards a multiple of the longest step.
_SET_UP_S, LEAST_S, _STEPS = 1800.0, 120.0, 10


class TimeLimit:
    """How many seconds a collective may wait: the chosen number, or one that follows from the longest step so far.

    Parameters
    ----------
    chosen : float or None
        None: `_SET_UP_S` until the first step is over; then ten times the longest step (from its begin to the begin of
        the next), at least `LEAST_S`.
    """

    def __init__(self, chosen: float | None) -> None:
        self.chosen = chosen
        self._step = 0
        self._began = 0.0
        self._longest: float | None = None

    def note(self, step: int, now: float, any_over: bool = False) -> None:
        """Note that `step` is under way at the time `now`; 0 before the first.

        `any_over`: a step has ended, perhaps before the first call of this.
        """
        if any_over and self._longest is None:
            self._longest = 0.0
        if step == self._step:
            return
        if self._step:
            self._longest = max(self._longest or 0.0, now - self._began)
        self._step, self._began = step, now

    @property
    def in_set_up(self) -> bool:
        """Whether no limit was chosen and no step is over."""
        return self.chosen is None and self._longest is None

    @property
    def seconds(self) -> float:
        if self.chosen is not None:
            return self.chosen
        return _SET_UP_S if self._longest is None else max(LEAST_S, _STEPS * self._longest)

    def __str__(self) -> str:
        ways = "MPISHARD_TIMEOUT or Mesh(timeout=...)"
        if self.chosen is not None:
            return f"{self.seconds:g} s ({ways})"
        rule = f"{_STEPS} times the longest step and at least {LEAST_S:g} s"
        return (
            f"{self.seconds:.0f} s ({'before the first step' if self._longest is None else rule}; {ways} sets another)"
        )
