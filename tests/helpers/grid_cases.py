"""The layouts that `grid.py` compares, and `bits.py` takes a sample of: names and numbers only, no mpishard.

And which of many cases have every pair of their settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
RULES = ("sgd", "adamw")
MODELS = ("gpt", "llama")
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One layout, and how it is run."""

    data: int
    tensor: int
    pipeline: int
    zero: int
    schedule: str
    microbatches: int
    tied: bool
    sequence_parallel: bool
    rule: str = "sgd"
    model: str = "gpt"

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def heads(self) -> int:
        if self.model == "llama":  # two for each head of keys and values
            return 12 if self.tensor in (3, 6) else 16
        return 24 if self.tensor in (3, 6) else 8

    @property
    def layers(self) -> int:
        return 2 * self.pipeline

    def __str__(self) -> str:
        flags = ("-tied" if self.tied else "") + ("-sequence" if self.sequence_parallel else "")
        size = f"{self.data}x{self.tensor}x{self.pipeline}"
        size = size if self.model == "gpt" else f"{self.model}-{size}"
        return f"{size}-zero{self.zero}-{self.schedule}-m{self.microbatches}{flags}-{self.rule}"


def cases(ranks: int, model: str = "gpt") -> Iterator[Case]:
    """All of them for one number of ranks and one of MODELS: fewer micro-batches than stages, as many, and no multiple.

    The update rules take turns, so that every pair of other settings meets both.
    """
    for tensor, pipeline in itertools.product(range(1, ranks + 1), repeat=2):
        if ranks % (tensor * pipeline):
            continue
        counts = sorted({max(1, pipeline - 1), pipeline, pipeline + 1})
        settings = [range(len(SCHEDULES)), range(len(counts)), range(4), range(2), range(1 + (tensor > 1))]
        for numbers in itertools.product(*settings):
            schedule, count, zero, tied, sequence = numbers
            rule = RULES[sum(numbers) % 2]
            sizes = ranks // (tensor * pipeline), tensor, pipeline
            flags = bool(tied), bool(sequence)
            yield Case(*sizes, zero, SCHEDULES[schedule], counts[count], *flags, rule, model)


def every_pair(candidates: Sequence[T], settings: Callable[[T], Mapping[str, Any]]) -> list[T]:
    """Every pair of settings at least once, in as few of the candidates as a greedy choice finds."""
    pairs = {case: set(itertools.combinations(settings(case).items(), 2)) for case in candidates}
    left, chosen = set().union(*pairs.values()), []
    while left:
        chosen.append(max(candidates, key=lambda case: len(pairs[case] & left)))
        left -= pairs[chosen[-1]]
    return chosen
