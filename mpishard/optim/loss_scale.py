"""Loss scaling: small half-precision gradients survive because the loss, and with it all of them, is multiplied.

Micikevicius et al., "Mixed precision training" (2018), section 3.2.
"""

from __future__ import annotations

_START = 2.0**16
_SMALLEST = 1.0
# More than this times a whole batch's gradient would not be finite in float32 either.
_LARGEST = 2.0**40
_PATIENCE = 2000


class LossScale:
    """The factor by which gradients arrive too large.

    Parameters
    ----------
    setting : float, "dynamic" or None
        A fixed factor, none, or one that halves after an overflow and doubles after 2000 steps without: powers of two,
        so that multiplying and dividing lose no bit.

    Attributes
    ----------
    value : float
    good_steps : int
        Steps since the factor last changed.
    """

    def __init__(self, setting: float | str | None) -> None:
        self.dynamic: bool = setting == "dynamic"
        self.value: float = _START if isinstance(setting, str) else 1.0 if setting is None else float(setting)
        self.good_steps: int = 0

    def overflowed(self) -> bool:
        """Halve; False if it is fixed or cannot be smaller, and the fault is not in the scale."""
        self.good_steps = 0
        if not self.dynamic or self.value <= _SMALLEST:
            return False
        self.value = max(_SMALLEST, self.value / 2)
        return True

    def succeeded(self) -> None:
        """Count a step that was taken, and double after enough of them."""
        self.good_steps += 1
        if self.dynamic and self.good_steps >= _PATIENCE:
            self.value = min(_LARGEST, self.value * 2)
            self.good_steps = 0

    @property
    def state(self) -> tuple[float, int] | None:
        """What a run needs to go on; None for a fixed factor."""
        return (self.value, self.good_steps) if self.dynamic else None

    def restore(self, state: tuple[float, int] | None) -> None:
        """Go on from the state of another, unless this one is fixed or that one was."""
        if self.dynamic and state is not None:
            self.value, self.good_steps = state
