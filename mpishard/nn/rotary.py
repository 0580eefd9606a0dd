"""Rotary positions: queries and keys are turned by angles that grow with the position (Su et al., 2021, RoFormer)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arguments import integer, number

Array = Any
PAIRINGS = ("half-split", "interleaved")
# Tables of texts that grow have a multiple of this many rows.
_TABLE = 256
SCALINGS = ("linear", "llama3", "longrope")


@dataclass(frozen=True)
class RopeScaling:
    """Rescaled frequencies of rotary positions for longer contexts, as ``rope_scaling`` of `transformers`.

    Parameters
    ----------
    kind : {"linear", "llama3", "longrope"}
        linear: frequencies are divided by `factor`.  llama3: long waves are divided by `factor`, short ones stay, and
        between them there is a smooth passage (Llama 3.1).  longrope: each frequency is divided by a separate factor,
        and cosines and sines are multiplied by `attention_factor` (Ding et al., 2024).
    factor : float
        Of the context.
    original_context : int, optional
        Tokens of the sequences before; llama3 and longrope need it.
    low_frequency_factor, high_frequency_factor : float
        Of llama3: waves that fit fewer, or more times into the original context are long, or short.
    short_factors, long_factors : sequence of float
        Of longrope: a factor for each pair of channels, for sequences up to the original context, and longer ones.
    attention_factor : float, optional
        Of longrope; default ``sqrt(1 + log(factor) / log(original_context))``.

    Raises
    ------
    TypeError, ValueError
        For another kind, numbers out of range, or if one is missing that the kind needs.
    """

    kind: str
    factor: float = 1.0
    original_context: int | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise ValueError(f"there is no rope scaling {self.kind!r}; choose one of {', '.join(SCALINGS)}")
        self._set("factor", number("factor of a rope scaling", self.factor, above=0))
        if self.original_context is not None:
            self._set("original_context", integer("original_context", self.original_context, least=2))
        elif self.kind != "linear":
            raise ValueError(f"the rope scaling {self.kind} needs original_context, the tokens of sequences before")
        for name in ("low_frequency_factor", "high_frequency_factor"):
            self._set(name, number(name, getattr(self, name), above=0))
        if self.kind == "llama3" and self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor={self.low_frequency_factor:g} must be below high_frequency_factor="
                f"{self.high_frequency_factor:g}"
            )
        for name in ("short_factors", "long_factors"):
            self._set(name, tuple(number(f"one of {name}", each, above=0) for each in getattr(self, name)))
        if self.attention_factor is not None:
            self._set("attention_factor", number("attention_factor", self.attention_factor, above=0))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def check(self, pairs: int) -> None:
        """Raise unless there is a factor for each pair of channels.

        Parameters
        ----------
        pairs : int
            Half the channels of a head.

        Raises
        ------
        ValueError
            If longrope has another number of factors.
        """
        counts = len(self.short_factors), len(self.long_factors)
        if self.kind == "longrope" and counts != (pairs, pairs):
            raise ValueError(
                f"longrope has {counts[0]} short_factors and {counts[1]} long_factors, but heads have {pairs} pairs of "
                "channels; give one factor for each pair"
            )

    def apply(self, frequencies_p: np.ndarray, length: int) -> tuple[np.ndarray, float]:
        """The frequencies for sequences of `length` tokens, and the factor of cosines and sines.

        Parameters
        ----------
        frequencies_p : array
            Of each pair, in radians a token.
        length : int
            Tokens.

        Returns
        -------
        (array, float)
            Of the same dtype.

        Raises
        ------
        TypeError, ValueError
            If `length` is no number of tokens, or longrope has another number of factors.
        """
        length = integer("length", length, least=0)
        self.check(len(frequencies_p))
        if self.kind == "linear":
            return frequencies_p / frequencies_p.dtype.type(self.factor), 1.0
        assert self.original_context is not None
        if self.kind == "longrope":
            factors = self.long_factors if length > self.original_context else self.short_factors
            growth = math.log(self.factor) / math.log(self.original_context)
            usual = 1.0 if self.factor <= 1 else math.sqrt(1 + growth)
            found = frequencies_p / np.array(factors, frequencies_p.dtype)
            return found, usual if self.attention_factor is None else self.attention_factor
        low, high = self.low_frequency_factor, self.high_frequency_factor
        turns_p = self.original_context * frequencies_p / (2 * math.pi)
        smooth_p = np.clip((turns_p - low) / (high - low), 0, 1)
        found = (1 - smooth_p) * frequencies_p / self.factor + smooth_p * frequencies_p
        return found.astype(frequencies_p.dtype), 1.0


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of the channels of queries and keys.

    Pair p of the d channels of a head is turned by ``position * theta ** (-2 p / d)`` radians.  The angles are computed
    in the dtype of the model, as `transformers` does it in float32.

    Parameters
    ----------
    theta : float
        Base of the frequencies.
    pairing : {"half-split", "interleaved"}
        half-split pairs channel p with channel p + d / 2, as Llama of Hugging Face does; interleaved pairs channel 2 p
        with 2 p + 1, as Meta's own Llama and RoFormer do.
    scaling : RopeScaling or mapping, optional
        For longer contexts; a mapping has its fields.

    Raises
    ------
    TypeError, ValueError
        For values of another type or out of range.
    """

    theta: float = 10000.0
    pairing: str = "half-split"
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", number("theta of rotary positions", self.theta, above=0))
        if self.pairing not in PAIRINGS:
            raise ValueError(f"there is no pairing {self.pairing!r} of channels; choose one of {', '.join(PAIRINGS)}")
        scaling: Any = self.scaling
        if isinstance(scaling, Mapping):
            object.__setattr__(self, "scaling", RopeScaling(**scaling))
        elif scaling is not None and not isinstance(scaling, RopeScaling):
            raise TypeError(f"scaling={scaling!r} must be a RopeScaling or None")

    @property
    def apart(self) -> int:
        """1 if the channels of a pair lie half a head apart, else 0."""
        return int(self.pairing == "half-split")

    def check(self, head_width: int) -> None:
        """Raise unless heads of that many channels can be turned.

        Parameters
        ----------
        head_width : int
            Channels of a head.

        Raises
        ------
        ValueError
            If it is odd, or the scaling has another number of factors.
        """
        if head_width % 2:
            raise ValueError(f"heads have {head_width} channels; rotary positions turn pairs of channels: make it even")
        if self.scaling is not None:
            self.scaling.check(head_width // 2)

    def tables(self, head_width: int, length: int, dtype: Any, module: Any = np) -> tuple[Array, Array]:
        """Cosines and sines of the angles of all positions of a sequence.

        Parameters
        ----------
        head_width : int
            Channels of a head.
        length : int
            Tokens of the sequence.
        dtype : dtype
            float32 or float64.
        module : module
            Of the arrays, as for `FlatParameters`.

        Returns
        -------
        (array, array), each of shape (length, head_width / 2)
            The same arrays in every call: not to be written to.

        Raises
        ------
        TypeError, ValueError
            For other numbers or dtypes.
        """
        return _tables(self, head_width, length, np.dtype(dtype), module)

    def rows(self, head_width: int, start: int, stop: int, dtype: Any, module: Any = np) -> tuple[Array, Array]:
        """Cosines and sines of the positions from `start` to `stop` of a sequence of `stop` tokens.

        Parameters
        ----------
        head_width : int
            Channels of a head.
        start, stop : int
            Positions.
        dtype : dtype
            float32 or float64.
        module : module
            Of the arrays, as for `FlatParameters`.

        Returns
        -------
        (array, array), each of shape (stop - start, head_width / 2)
            Not to be written to.

        Raises
        ------
        TypeError, ValueError
            For other numbers or dtypes.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"positions from start={start} to stop={stop} are none of a sequence")
        length = -(-stop // _TABLE) * _TABLE  # one table for many lengths
        if (change := self.changes_after) is not None and stop <= change:
            length = min(length, change)
        cos_tp, sin_tp = self.tables(head_width, length, dtype, module)
        return cos_tp[start:stop], sin_tp[start:stop]

    @property
    def changes_after(self) -> int | None:
        """The length of a sequence beyond which all its angles are others; None if they never are."""
        if self.scaling is None or self.scaling.kind != "longrope":
            return None
        return self.scaling.original_context


# One entry serves all blocks of a model; ragged batches and the growing text of a generation have others.
@functools.lru_cache(maxsize=16)
def _tables(rotary: Rotary, head_width: int, length: int, dtype: np.dtype, module: Any) -> tuple[Array, Array]:
    head_width, length = integer("head_width", head_width, least=0), integer("length", length, least=0)
    rotary.check(head_width)
    if dtype not in (np.float32, np.float64):
        raise TypeError(f"dtype={dtype} of rotary positions must be float32 or float64")
    exponents_p = np.arange(0, head_width, 2, dtype=dtype) / dtype.type(head_width)
    frequencies_p, factor = 1 / dtype.type(rotary.theta) ** exponents_p, 1.0
    if rotary.scaling is not None:
        frequencies_p, factor = rotary.scaling.apply(frequencies_p, length)
    angles_tp = np.arange(length, dtype=dtype)[:, None] * frequencies_p
    cos_tp, sin_tp = (function(angles_tp) * dtype.type(factor) for function in (np.cos, np.sin))
    return module.asarray(cos_tp), module.asarray(sin_tp)
