"""How batch and learning rate go with the number of workers, where that number changes."""

from __future__ import annotations

from dataclasses import dataclass

# The learning rate goes with this power of the batch.
_POWERS = {"constant": 0.0, "linear": 1.0, "square_root": 0.5}


@dataclass(frozen=True)
class Scaling:
    """A policy, and where it starts from.

    Parameters
    ----------
    policy : {"constant", "linear", "square_root"}
        Batch and learning rate stay as they are; or the batch is in proportion to the workers, and the learning rate
        to the batch (Goyal et al. 2017, section 2.1) or to its square root (Krizhevsky 2014, section 5; for Adam
        Malladi et al. 2022).
    first : int
        The number of workers that the problem's batch size and the rule's learning rate are for.

    Raises
    ------
    ValueError
        If there is no such policy.
    """

    policy: str
    first: int

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or self.policy not in _POWERS:
            known = ", ".join(map(repr, _POWERS))
            raise ValueError(f"scaling={self.policy!r} is none of {known}")

    def batch_size(self, given: int, workers: int) -> int:
        """Samples a step, over all workers; rounded down where it does not come out even."""
        return given if self.policy == "constant" else max(1, given * workers // self.first)

    def rate_factor(self, growth: float) -> float:
        """What to multiply the learning rate by with a batch that is so many times the given one."""
        return growth ** _POWERS[self.policy]
