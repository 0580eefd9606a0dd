"""Windows of tokens from files, as samples of a problem."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.arguments import flag, integer, shown
from mpishard.comm.mesh import Mesh
from mpishard.data.mixture import Mixture, SampleMap
from mpishard.data.token_checks import agree_on_data, agree_on_tokens, check_samples, check_tokens
from mpishard.data.token_files import Tokens, TokenSource


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
        if not (mesh is None or isinstance(mesh, Mesh)):
            raise TypeError(f"mesh={shown(mesh)} must be mpishard.Mesh()")
        problem: Exception | None = None
        try:
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
        except Exception as error:  # of a tokenizer, too
            problem = error
        if mesh is not None:
            mesh.world.raise_if_any(problem)
            facts = {"context_length": self.tokens_per_sample, "vocabulary_size": self._vocabulary_size, "check": check}
            agree_on_data(mesh.world, self._sources, facts | {"padding": padding, "samples of sources": self._map})
        elif problem is not None:
            raise problem
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
        """How many samples a source has; ValueError if it has none."""
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
