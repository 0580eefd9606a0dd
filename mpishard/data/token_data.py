"""Windows of tokens from files, as samples of a problem.

Windows of several sources can be mixed by weight; ranks check that they have the same tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arguments import flag, integer, number, shown
from mpishard.backend.random import permuted
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.data.token_files import Tokens, TokenSource
from mpishard.layout.boxes import split

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
        Number of samples of an epoch.  By default the smallest that has every window of every source.
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
    """The window and source of each sample: a pure function.

    `windows`, each at least 1, and `taken`, the number of samples, are by source; `seed` is of the order within sources
    that are not taken once.
    """

    windows: tuple[int, ...]
    taken: tuple[int, ...]
    seed: int = 0

    @classmethod
    def weighted(cls, windows: Sequence[int], mixture: Mixture) -> SampleMap:
        """The map of a mixture of sources with these numbers of windows."""
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


_CHUNK = 1024**2  # tokens that are read at a time


def _described(sources: Sequence[Tokens]) -> dict[str, str]:
    """Sources as settings, which differ if files have other sizes, or texts other tokens."""
    own = {}
    for place, tokens in enumerate(sources):  # by place: names may differ, as each node may have its own copy
        own[f"the number of tokens of sources[{place}]"] = str(tokens.count)
        own[f"the dtype of sources[{place}]"] = tokens.dtype.str
        if tokens.digest:
            own[f"the digest of the tokens of sources[{place}]"] = tokens.digest
    return own


def agree_on_tokens(ranks: Axis | None, sources: Sequence[Tokens], vocabulary_size: int) -> None:
    """Raise ValueError on all ranks if a token of any source is not in the vocabulary.

    Each rank reads its share.  Collective over `ranks`, if there are any.
    """
    with raised_on_all(ranks):
        for tokens in sources:
            limits = np.iinfo(tokens.dtype)
            if limits.min < 0 or limits.max >= vocabulary_size:  # else no token can be outside
                cuts = split(tokens.count, 1 if ranks is None else ranks.size)
                rank = 0 if ranks is None else ranks.rank
                for start in range(cuts[rank], cuts[rank + 1], _CHUNK):
                    values = tokens.read(start, min(start + _CHUNK, cuts[rank + 1]))
                    check_tokens(tokens, values, start, vocabulary_size)


def check_samples(samples: Any, count: int) -> np.ndarray:
    """Indices as an array; an error unless each is of one of `count` samples."""
    known = np.asarray(samples)
    if known.ndim != 1 or (known.size and known.dtype.kind not in "iu"):
        raise TypeError(f"samples={shown(samples)} must be a one-dimensional array of sample indices")
    outside = known[(known < 0) | (known >= count)]
    if outside.size:
        raise IndexError(f"sample {outside[0]} does not exist: the data has {count}, from 0 to {count - 1}")
    return known.astype(np.int64, copy=False)


def check_tokens(tokens: Tokens, values: np.ndarray, start: int, vocabulary_size: int) -> None:
    """Raise ValueError if one of these values, which begin at `start`, is not in the vocabulary."""
    if not values.size or 0 <= int(values.min()) <= int(values.max()) < vocabulary_size:
        return
    place = int(np.argmax((values < 0) | (values >= vocabulary_size)))
    raise ValueError(
        f"{tokens.name}: token {values[place]} at position {start + place}, but vocabulary_size={vocabulary_size} has "
        f"tokens 0 to {vocabulary_size - 1}: the file is for a larger vocabulary, has another dtype, or is corrupt"
    )


class TokenData:
    """Samples of `context_length` tokens from files that need not fit in memory, each with the tokens that follow.

    The tokens of a source are one stream, cut into windows that overlap by one token.  What is left over at its end is
    not used.  Or, with `padding`, each document is one sample: cut if it is longer, else filled up.  Which
    tokens a sample has depends on the files and on the arguments, never on ranks.  Files are open for as long as the
    object lives; a rank reads the samples that it is asked for, and no others.

    Collective over `mesh`; without one each rank opens and checks all files by itself.  No method is collective.

    Parameters
    ----------
    sources : TokenSource, sequence of them, or Mixture
        Such as `TokenFile`.  Of a sequence each window is one sample; of a `Mixture` each source has its fraction.
    context_length : int
        Tokens of a sample.
    vocabulary_size : int, optional
        The model's: a token that is no smaller is an error.
    padding : int, optional
        Makes each document a sample, and is the token that fills it up.  As a target it counts as any other token: take
        one that ends documents.  By default documents are packed.
    check : bool
        Whether all tokens are read and compared with `vocabulary_size` now, the work divided over the ranks of the
        mesh.  Otherwise, `batch` compares those that it reads.
    mesh : Mesh, optional
        The ranks that open the data together: an error on any of them is raised on all.

    Attributes
    ----------
    tokens_per_sample : int
        For `OptimizationProblem`.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, a file is too short for one sample or no file of its kind, or a token is not in the
        vocabulary: named with its file and position.  Of what differs between ranks: their files' sizes, and the
        tokens of texts.
    OSError
        If a file cannot be read.

    Examples
    --------
    >>> import mpishard, numpy as np, tempfile
    >>> name = tempfile.mkdtemp() + "/train.bin"
    >>> (np.arange(1001) % 50).astype(np.uint16).tofile(name)
    >>> data = mpishard.data.TokenData(mpishard.data.TokenFile(name), 100, vocabulary_size=50)
    >>> len(data)
    10
    >>> inputs, targets = data.batch(np.array([3, 7]))
    >>> inputs.shape, inputs[0, :3], targets[0, :3]
    ((2, 100), array([0, 1, 2]), array([1, 2, 3]))
    """

    def __init__(
        self,
        sources: TokenSource | Sequence[TokenSource] | Mixture,
        context_length: int,
        *,
        vocabulary_size: int | None = None,
        padding: int | None = None,
        check: bool = True,
        mesh: Mesh | None = None,
    ) -> None:
        with opening(None if mesh is None else checked_mesh(mesh).world, "TokenData") as same:
            self.tokens_per_sample = integer("context_length", context_length, least=1)
            self._vocabulary_size = vocabulary_size
            if vocabulary_size is not None:
                self._vocabulary_size = integer("vocabulary_size", vocabulary_size, least=1)
            self._padding = None if padding is None else _checked_padding(padding, self._vocabulary_size)
            check = flag("check", check)
            self._sources = [_opened(source) for source in _listed(sources)]
            windows = [self._samples(tokens) for tokens in self._sources]
            once = SampleMap(tuple(windows), tuple(windows))
            self._map = SampleMap.weighted(windows, sources) if isinstance(sources, Mixture) else once
            same |= {"context_length": self.tokens_per_sample, "vocabulary_size": self._vocabulary_size, "check": check}
            same |= {"padding": padding, "samples of sources": self._map, **_described(self._sources)}
        if check and self._vocabulary_size is not None:
            agree_on_tokens(None if mesh is None else mesh.world, self._sources, self._vocabulary_size)

    def __len__(self) -> int:
        return len(self._map)

    def check_model(self, vocabulary_size: int, context_length: int) -> None:
        """Raise unless a model can take the samples; `OptimizationProblem.for_model` asks for models of `mpishard.nn`.

        Not collective.  A `vocabulary_size` that the data was not given is not looked for in the files.

        Parameters
        ----------
        vocabulary_size, context_length : int
            Of the model.

        Raises
        ------
        ValueError
            If samples are longer, or the vocabulary of the data is larger.
        """
        if self.tokens_per_sample > context_length:
            raise ValueError(
                f"samples have context_length={self.tokens_per_sample} tokens, but the model's context_length is "
                f"{context_length}: make the data with at most that, or a longer model"
            )
        if (self._vocabulary_size or 0) > vocabulary_size:
            raise ValueError(
                f"the data is for vocabulary_size={self._vocabulary_size}, but the model's is {vocabulary_size}: give "
                "the model at least as large a one, or the data the model's, which checks the files"
            )

    def batch(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read some samples: the argument `batch` of `OptimizationProblem.for_model`.

        Parameters
        ----------
        samples : ndarray of int, shape (n,)
            From 0 to ``len(self) - 1``.

        Returns
        -------
        (ndarray of int64, ndarray of int64)
            Inputs and targets, each of shape (n, context_length): targets are the inputs one token on.

        Raises
        ------
        IndexError, TypeError
            If there is no such sample, or what is given are no indices.
        ValueError
            If a token is not in the vocabulary.
        OSError
            If a file cannot be read, or was cut short after it was opened.
        """
        samples = check_samples(samples, len(self))
        length = self.tokens_per_sample
        rows = np.empty((len(samples), length + 1), np.int64)
        for source, places, windows in self._map.parts(samples):
            tokens = self._sources[source]
            for row, window in zip(places.tolist(), windows.tolist(), strict=True):
                start, stop = window * length, window * length + length + 1
                if self._padding is not None:
                    start, stop = tokens.document(window)
                    stop = min(stop, start + length + 1)
                    rows[row, stop - start :] = self._padding
                values = tokens.read(start, stop)
                rows[row, : stop - start] = values
                if self._vocabulary_size is not None:
                    check_tokens(tokens, values, start, self._vocabulary_size)
        return rows[:, :-1], rows[:, 1:]

    def _samples(self, tokens: Tokens) -> int:
        """Number of samples of a source; ValueError if it has none."""
        if self._padding is not None:
            if not tokens.documents:
                raise ValueError(
                    f"{tokens.name} has no index of documents, so they cannot be samples: leave out padding"
                )
            return tokens.documents
        if tokens.count <= self.tokens_per_sample:
            raise ValueError(
                f"{tokens.name} has {tokens.count} tokens: a sample of context_length={self.tokens_per_sample} needs "
                f"{self.tokens_per_sample + 1}"
            )
        return (tokens.count - 1) // self.tokens_per_sample


def _checked_padding(padding: Any, vocabulary_size: int | None) -> int:
    known = integer("padding", padding, least=0)
    if vocabulary_size is not None and known >= vocabulary_size:
        raise ValueError(f"padding={padding} is no token of vocabulary_size={vocabulary_size}")
    return known


def _listed(sources: Any) -> Sequence[TokenSource]:
    """The sources, one or several, as a sequence."""
    if isinstance(sources, Mixture):
        return sources.sources
    listed = [sources] if hasattr(sources, "open") and not isinstance(sources, os.PathLike) else sources
    if isinstance(listed, str | os.PathLike) or not isinstance(listed, Sequence):
        raise TypeError(f"sources={shown(sources)} must be such as TokenFile(path), or a list of them, or a Mixture")
    if not listed:
        raise ValueError("sources is empty: give at least one, such as TokenFile(path)")
    return listed


def _opened(source: Any) -> Tokens:
    """A source's tokens."""
    if not hasattr(source, "open") or isinstance(source, os.PathLike):
        raise TypeError(f"{shown(source)} is no source of tokens: give such as TokenFile(path)")
    tokens: Tokens = source.open()
    return tokens
