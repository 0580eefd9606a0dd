"""That ranks have the same tokens, and that a model's vocabulary has them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.arguments import shown
from mpishard.comm.agreement import agree_on_settings
from mpishard.comm.axis import Axis
from mpishard.data.token_files import Tokens
from mpishard.layout.boxes import split

_CHUNK = 1024**2  # tokens that are read at a time


def agree_on_data(ranks: Axis, sources: Sequence[Tokens], facts: Mapping[str, Any]) -> None:
    """Raise ValueError on all ranks if files have other sizes, texts other tokens, or other facts differ.

    Collective over `ranks`.
    """
    own = {name: str(value) for name, value in facts.items()}
    for place, tokens in enumerate(sources):  # by place: names may differ, as each node may have a copy of its own
        own[f"the number of tokens of sources[{place}]"] = str(tokens.count)
        own[f"the dtype of sources[{place}]"] = tokens.dtype.str
        if digest := getattr(tokens, "digest", ""):
            own[f"the digest of the tokens of sources[{place}]"] = digest
    agree_on_settings(ranks, own, what="data")


def agree_on_tokens(ranks: Axis | None, sources: Sequence[Tokens], vocabulary_size: int) -> None:
    """Raise ValueError on all ranks if a token of any source is not in the vocabulary.

    Each rank reads its share.  Collective over `ranks`, if there are any.
    """
    problem: Exception | None = None
    try:
        for tokens in sources:
            limits = np.iinfo(tokens.dtype)
            if limits.min < 0 or limits.max >= vocabulary_size:  # else no token can be outside
                cuts = split(tokens.count, 1 if ranks is None else ranks.size)
                rank = 0 if ranks is None else ranks.rank
                for start in range(cuts[rank], cuts[rank + 1], _CHUNK):
                    values = tokens.read(start, min(start + _CHUNK, cuts[rank + 1]))
                    check_tokens(tokens, values, start, vocabulary_size)
    except Exception as error:  # libraries of arrays have kinds of their own
        problem = error
    if ranks is not None:
        ranks.raise_if_any(problem)
    elif problem is not None:
        raise problem


def check_samples(samples: Any, count: int) -> np.ndarray:
    """Indices as an array; an error unless each is of one of `count` samples.  Not collective."""
    known = np.asarray(samples)
    if known.ndim != 1 or (known.size and known.dtype.kind not in "iu"):
        raise TypeError(f"samples={shown(samples)} must be a one-dimensional array of sample indices")
    outside = known[(known < 0) | (known >= count)]
    if outside.size:
        raise IndexError(f"there is no sample {outside[0]}: the data has {count}, from 0 to {count - 1}")
    return known.astype(np.int64, copy=False)


def check_tokens(tokens: Tokens, values: np.ndarray, start: int, vocabulary_size: int) -> None:
    """Raise ValueError if one of these values, which begin at `start`, is not in the vocabulary.  Not collective."""
    if not values.size or 0 <= int(values.min()) <= int(values.max()) < vocabulary_size:
        return
    place = int(np.argmax((values < 0) | (values >= vocabulary_size)))
    raise ValueError(
        f"{tokens.name}: token {values[place]} at position {start + place}, but vocabulary_size={vocabulary_size} has "
        f"tokens 0 to {vocabulary_size - 1}: the file is for a larger vocabulary, has another dtype, or is corrupt"
    )
