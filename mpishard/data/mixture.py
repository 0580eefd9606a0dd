"""Several sources of tokens as one, each by its weight: which window of which source a sample is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpishard.arguments import integer, number, shown
from mpishard.backend.random import permuted
from mpishard.data.token_files import TokenSource

_ROUNDING = 1e-6  # of a sum of weights that were written as decimals


@dataclass(frozen=True)
class Mixture:
    """Sources of tokens, and what fraction of the samples comes from each.

    A source whose fraction is larger than its share of all windows is read more than once.  No method is collective.

    Parameters
    ----------
    sources : sequence of TokenSource
        At least one.
    weights : sequence of float
        One for each source, above 0; they sum to 1.
    samples : int, optional
        Number of samples of an epoch.  By default so many that every window of every source is among them.
    seed : int
        Decides which windows of a source come once more than others, if it is not read a whole number of times.

    Raises
    ------
    TypeError, ValueError
        If a weight or number is invalid, or the weights are not one for each source.
    """

    sources: Sequence[TokenSource]
    weights: Sequence[float]
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sources", "weights"):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray):
                raise TypeError(f"{name}={shown(given)} must be a list: Mixture([first, second], [0.7, 0.3])")
        weights = [number(f"weights[{place}]", weight, above=0) for place, weight in enumerate(self.weights)]
        if not weights or len(weights) != len(self.sources):
            raise ValueError(f"{len(weights)} weights for {len(self.sources)} sources: give one for each")
        if abs(math.fsum(weights) - 1) > _ROUNDING:
            total = math.fsum(weights)
            fractions = ", ".join(f"{weight / total:.4g}" for weight in weights)
            raise ValueError(
                f"weights={shown(list(weights))} sum to {total:g}, not to 1: as fractions they would be [{fractions}]"
            )
        object.__setattr__(self, "sources", tuple(self.sources))
        object.__setattr__(self, "weights", tuple(weights))
        object.__setattr__(self, "seed", integer("seed", self.seed))
        if self.samples is not None:
            object.__setattr__(self, "samples", integer("samples", self.samples, least=1))


@dataclass(frozen=True)
class SampleMap:
    """Which window of which source each sample is: a pure function.

    Parameters
    ----------
    windows : tuple of int
        Of each source, at least 1.
    taken : tuple of int
        How many samples are from each source.
    seed : int
        Of the order within sources that are not taken once.
    """

    windows: tuple[int, ...]
    taken: tuple[int, ...]
    seed: int = 0

    @classmethod
    def weighted(cls, windows: Sequence[int], mixture: Mixture) -> SampleMap:
        """The map of a mixture of sources with so many windows."""
        total = math.fsum(mixture.weights)
        weights = [weight / total for weight in mixture.weights]
        samples = mixture.samples
        if samples is None:
            # A rounding error is no reason for a sample more.
            samples = max(math.ceil(n / w * (1 - 1e-12)) for n, w in zip(windows, weights, strict=True))
        return cls(tuple(windows), tuple(apportioned(samples, weights)), mixture.seed)

    def __len__(self) -> int:
        return sum(self.taken)

    def parts(self, samples: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(source, places in `samples`, their windows of it) of each source that has some of the samples."""
        ends = np.cumsum(self.taken)
        sources = np.searchsorted(ends, samples, side="right")
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            yield source, places, self._windows(source, samples[places] - (ends[source] - self.taken[source]))

    def _windows(self, source: int, numbers: np.ndarray) -> np.ndarray:
        """The windows of the samples with these numbers among those of a source."""
        count = self.windows[source]
        if self.taken[source] == count:
            return numbers
        rounds, positions = np.divmod(numbers, count)
        found = np.empty_like(numbers)
        for turn in np.unique(rounds).tolist():
            places = rounds == turn
            found[places] = permuted(positions[places], count, self.seed, "windows of source", source, turn)
        return found


def apportioned(total: int, weights: Sequence[float]) -> list[int]:
    """`total` in whole parts in proportion to weights that sum to 1, by largest remainders (Hamilton's method)."""
    exact = [total * weight for weight in weights]
    parts = [math.floor(value) for value in exact]
    # Stable, so that of equal remainders the first wins on every rank.
    by_remainder = sorted(range(len(parts)), key=lambda place: parts[place] - exact[place])
    for place in by_remainder[: total - sum(parts)]:
        parts[place] += 1
    return parts
