"""Splits the traced steps of each rank: time in matrix products, in communication, and the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpishard.comm.ledger import PRODUCT
from mpishard.record.trace import OF_NO_AXIS, Traced


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of a step of one rank, as means over steps; `products`, `communication` and `rest` add up to `step`.

    Parameters
    ----------
    rank : int
        Of the whole mesh.
    step : float
        The whole step.
    products : float
        In matrix products of the layers of `mpishard.nn`, on the host.
    communication : float
        In calls on axes, which is mostly waiting for other ranks.
    """

    rank: int
    step: float
    products: float
    communication: float

    @property
    def rest(self) -> float:
        """Seconds in neither: element-wise kernels, the optimizer, Python, reading data, saving."""
        return self.step - self.products - self.communication


def split_times(spans: Sequence[Traced]) -> list[TimeSplit]:
    """Split the steps of a trace.  Not collective.

    Parameters
    ----------
    spans : sequence of Traced
        Of whole steps, as `read_trace` gives them.

    Returns
    -------
    list of TimeSplit
        One a rank, by rank.
    """
    by_step: dict[tuple[int, int], list[Traced]] = defaultdict(list)
    for span in spans:
        by_step[span.rank, span.step].append(span)
    by_rank: dict[int, list[TimeSplit]] = defaultdict(list)
    for (rank, _), own in sorted(by_step.items()):
        by_rank[rank].append(_split(rank, own))
    return [mean(steps, rank) for rank, steps in by_rank.items()]


def mean(splits: Sequence[TimeSplit], rank: int) -> TimeSplit:
    """The mean of times, as the time of `rank`.  Not collective.

    Parameters
    ----------
    splits : sequence of TimeSplit
        At least one.
    rank : int
        That of the result.

    Returns
    -------
    TimeSplit
        Each of its times is the mean of theirs.
    """
    count = len(splits)
    return TimeSplit(
        rank,
        sum(each.step for each in splits) / count,
        sum(each.products for each in splits) / count,
        sum(each.communication for each in splits) / count,
    )


def _split(rank: int, spans: Sequence[Traced]) -> TimeSplit:
    """The split of one step, whose spans these are."""
    (whole,) = (span for span in spans if span.kind == "step")
    calls = [span for span in spans if span.kind not in OF_NO_AXIS]
    products = [span for span in spans if span.kind == PRODUCT]
    communication = _covered(calls, whole)
    return TimeSplit(rank, whole.seconds, _covered([*calls, *products], whole) - communication, communication)


def _covered(spans: Iterable[Traced], whole: Traced) -> float:
    """Seconds of `whole` in which there is any of the spans: a moment in two of them counts once."""
    total, until, end = 0.0, whole.start, whole.start + whole.seconds
    for span in sorted(spans, key=lambda span: span.start):
        stop = min(span.start + span.seconds, end)
        if stop > until:
            total += stop - max(span.start, until)
            until = stop
    return total
