"""Draws the next token of a text from a model's logits."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arguments import integer, number, shown
from mpishard.backend.array import is_array, to_host
from mpishard.backend.random import generator
from mpishard.nn.inputs import check_tokens


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; raises TypeError or ValueError if a field is of another type or out of range."""

    temperature: float = 1.0  # divides the logits; 0 takes the most likely token
    top_k: int | None = None  # draw from this many most likely tokens only
    top_p: float | None = None  # draw from the fewest most likely tokens whose probabilities have at least this sum
    stop_tokens: Sequence[int] = ()  # a text ends with the first of these that is drawn

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", number("temperature", self.temperature, least=0))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", integer("top_k", self.top_k, least=1))
        if self.top_p is not None:
            object.__setattr__(self, "top_p", number("top_p", self.top_p, above=0, most=1))
        stops: Any = self.stop_tokens
        if isinstance(stops, str) or not isinstance(stops, Sequence | Set | np.ndarray):
            raise TypeError(f"stop_tokens={shown(stops)} must be a sequence of tokens")
        stops = sorted({integer("each of stop_tokens", token) for token in stops})
        object.__setattr__(self, "stop_tokens", tuple(stops))

    def check_stop_tokens(self, vocabulary_size: int) -> None:
        """Raise ValueError if a stop token can never be drawn."""
        if self.stop_tokens:
            check_tokens("stop_tokens", np.array(self.stop_tokens), vocabulary_size)


class TokenSampler:
    """Draws tokens; the same on all ranks that draw from the same logits.

    Each number `text` among several texts has separate draws.
    """

    def __init__(self, sampling: Sampling, seed: int, text: int = 0) -> None:
        self._sampling = sampling
        self._random = generator(seed, f"generate/{text}" if text else "generate")

    def next(self, logits_v: np.ndarray) -> int:
        """A token, from the logits of all of them, float64."""
        if self._sampling.temperature == 0:
            return int(logits_v.argmax())
        with np.errstate(over="ignore"):  # close to temperature 0 all others have weight 0
            weights_v = np.exp((logits_v - logits_v.max()) / self._sampling.temperature)
        self._cut(weights_v)
        edges_v = np.cumsum(weights_v)
        return min(int(np.searchsorted(edges_v, self._random.random() * edges_v[-1], "right")), len(edges_v) - 1)

    def _cut(self, weights_v: np.ndarray) -> None:
        """Set the weights of tokens that are not to be drawn to 0; of equally likely ones the first is kept."""
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        if top_k is None and top_p is None:
            return
        # To sort a whole vocabulary takes long: what is certainly cut goes first.
        least = 0.0
        if top_k is not None and top_k < len(weights_v):
            least = np.partition(weights_v, -top_k)[-top_k]
        kept = np.flatnonzero(weights_v >= least)
        if top_p is not None and top_k is None:  # all weights below this together are less than 1 - top_p of the sum
            kept = np.flatnonzero(weights_v >= 0.999 * (1 - top_p) * weights_v.sum() / len(weights_v))
        kept = kept[np.argsort(-weights_v[kept], kind="stable")][:top_k]
        if top_p is not None:
            sums = np.cumsum(weights_v[kept])
            whole = sums[-1] if top_k is not None else weights_v.sum()
            kept = kept[: int(np.searchsorted(sums, top_p * whole)) + 1]
        weights = weights_v[kept]
        weights_v[:] = 0
        weights_v[kept] = weights


def checked_prompts(prompt_tokens: Any, vocabulary_size: int) -> tuple[list[np.ndarray], bool]:
    """Prompts as int64 arrays of at least one token each, and whether they are several.

    Raises TypeError or ValueError if no prompt is given, or one has no tokens, other things, or tokens outside of the
    vocabulary.
    """
    if is_array(prompt_tokens):
        prompt_tokens = to_host(prompt_tokens)
    of_prompts = _is_sequence(prompt_tokens) and any(_is_sequence(each) for each in prompt_tokens)
    if not of_prompts:
        return [_checked_prompt("prompt_tokens", prompt_tokens, vocabulary_size)], False
    named = ((f"prompt_tokens[{number}]", prompt) for number, prompt in enumerate(prompt_tokens))
    return [_checked_prompt(what, prompt, vocabulary_size) for what, prompt in named], True


def _checked_prompt(what: str, prompt: Any, vocabulary_size: int) -> np.ndarray:
    if not _is_sequence(prompt) or any(_is_sequence(each) for each in prompt):
        raise TypeError(f"{what}={shown(prompt)} must be a sequence of tokens")
    if len(prompt) == 0:
        raise ValueError(f"{what} is empty; a prompt has at least one token")
    tokens = to_host(prompt) if is_array(prompt) else np.array(list(prompt))
    check_tokens(what, tokens, vocabulary_size)
    return tokens.astype(np.int64)


def _is_sequence(given: Any) -> bool:
    return (isinstance(given, Sequence) and not isinstance(given, str)) or (is_array(given) and given.ndim > 0)
