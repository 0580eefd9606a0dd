"""Loss scaling: a factor on the loss, and so on all gradients, keeps small half-precision ones from rounding to zero.

Source: Micikevicius et al., "Mixed precision training" (2018), section 3.2.
"""

from __future__ import annotations

_START = 2.0**16
_SMALLEST = 1.0
# A larger factor would make a whole batch's gradient overflow even in float32.
_LARGEST = 2.0**40
_PATIENCE = 2000


class LossScale:
    """The factor that gradients contain, and that the optimizer divides by.

    `setting` is a fixed factor; or "dynamic", a factor that halves after an overflow and doubles after 2000 steps
    without one; or None for a factor of 1.  Dynamic factors are powers of two, so that multiplication and division are
    exact.  `good_steps` are those since the factor last changed.
    """

    def __init__(self, setting: float | str | None) -> None:
        self.dynamic: bool = setting == "dynamic"
        self.value: float = _START if isinstance(setting, str) else 1.0 if setting is None else float(setting)
        self.good_steps: int = 0

    def overflowed(self) -> bool:
        """Halve the factor after an overflow.

        Returns False if it is fixed or at its minimum, so that it is not the cause of the overflow.
        """
        self.good_steps = 0
        if not self.dynamic or self.value <= _SMALLEST:
            return False
        self.value = max(_SMALLEST, self.value / 2)
        return True

    def succeeded(self) -> None:
        """Count a step that was taken, and double the factor after enough of them."""
        self.good_steps += 1
        if self.dynamic and self.good_steps >= _PATIENCE:
            self.value = min(_LARGEST, self.value * 2)
            self.good_steps = 0

    @property
    def state(self) -> tuple[float, int] | None:
        """The value and the count that a resumed run needs; None for a fixed factor."""
        return (self.value, self.good_steps) if self.dynamic else None

    def restore(self, state: tuple[float, int] | None) -> None:
        """Continue from a saved `state`.

        None, that of a fixed factor, changes nothing, and a fixed factor stays.
        """
        if self.dynamic and state is not None:
            self.value, self.good_steps = state
