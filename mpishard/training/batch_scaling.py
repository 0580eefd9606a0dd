"""How batch size and learning rate depend on the number of workers in a run that changes it."""

from __future__ import annotations

from dataclasses import dataclass

# The learning rate is proportional to this power of the batch size.
_POWERS = {"constant": 0.0, "linear": 1.0, "square_root": 0.5}


@dataclass(frozen=True)
class Scaling:
    """A scaling policy, and the number of workers that it starts from.

    No method is collective.

    Parameters
    ----------
    policy : {"constant", "linear", "square_root"}
        "constant": batch size and learning rate stay the same.  Otherwise the batch size is proportional to the number
        of workers, and the learning rate to the batch size ("linear"; Goyal et al. 2017, section 2.1) or to its square
        root ("square_root"; Krizhevsky 2014, section 5; for Adam Malladi et al. 2022).
    first : int
        The number of workers for which the problem's batch size and the rule's learning rate are given.

    Raises
    ------
    ValueError
        If the policy is unknown.
    """

    policy: str
    first: int

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or self.policy not in _POWERS:
            known = ", ".join(map(repr, _POWERS))
            raise ValueError(f"scaling={self.policy!r} is none of {known}")

    def batch_size(self, given: int, workers: int) -> int:
        """Samples in a step, over all workers, rounded down.

        Parameters
        ----------
        given : int
            The problem's batch size.
        workers : int
            Workers that train now.

        Returns
        -------
        int
            At least 1.
        """
        return given if self.policy == "constant" else max(1, given * workers // self.first)

    def rate_factor(self, growth: float) -> float:
        """The factor on the learning rate.

        Parameters
        ----------
        growth : float
            The batch divided by the problem's batch.

        Returns
        -------
        float
            1 with "constant".
        """
        return growth ** _POWERS[self.policy]
