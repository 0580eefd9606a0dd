"""Draws the next token of a text from a model's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpishard.backend.random import generator


class TokenSampler:
    """Draws tokens; the same on all ranks that draw from the same logits.

    Parameters
    ----------
    temperature : float
        Divides the logits; 0 takes the most likely token.
    seed : int
        Same seed, same draws.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._random = generator(seed, "generate")

    def next(self, logits_v: np.ndarray) -> int:
        """A token, from the logits of all of them, float64."""
        if self._temperature == 0:
            return int(logits_v.argmax())
        weights_v = np.exp((logits_v - logits_v.max()) / self._temperature)
        edges_v = np.cumsum(weights_v)
        return min(int(np.searchsorted(edges_v, self._random.random() * edges_v[-1], "right")), len(edges_v) - 1)


def checked_prompt(prompt_tokens: Sequence[int], count: int, temperature: float) -> np.ndarray:
    """The prompt as an array; ValueError if it, `count` or `temperature` is not valid."""
    tokens = np.array(prompt_tokens, ndmin=1)
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"the prompt must be a sequence of at least one token, got shape {tokens.shape}")
    if count < 0 or not temperature >= 0:
        raise ValueError(f"count and temperature must not be negative, got {count} and {temperature}")
    return tokens
