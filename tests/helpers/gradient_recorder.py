"""A reducer of gradients whose sums note what they get."""

from __future__ import annotations

import numpy as np

from mpishard.layout.tensors import ParameterSpec
from mpishard.parameters.buckets import make_buckets
from mpishard.parameters.reducer import GradientReducer

LIKE = np.zeros(1)


def specs(*sizes):
    return [ParameterSpec(f"t{index}", (size,)) for index, size in enumerate(sizes)]


class Transfer:
    """A sum under way."""

    def wait(self):
        pass

    test = abandon = wait


class Recorder:
    """Sums that note what they get."""

    def __init__(self, sizes, minimum, runs=None, factor=1, **options):
        pieces = specs(*sizes)
        self.got = []
        self.complete_calls = []
        self.resets = 0
        self.factor = factor
        self.gradients = GradientReducer(pieces, make_buckets(pieces, minimum, runs), LIKE, self, **options)

    @property
    def order(self):
        return [index for index, _ in self.got]

    def sum_copies(self, bucket, gradient):
        gradient *= self.factor

    def start(self, bucket, gradient, earlier=()):
        self.got.append((bucket.index, gradient.tolist()))
        self.earlier = [partial.tolist() for partial in earlier]
        return Transfer()

    def finish(self, started):
        self.complete_calls.append([bucket.index for bucket, _, _ in started])

    def add_uses(self):
        self.got.append("uses")

    def reset(self):
        self.resets += 1

    def backward(self, names, value=1.0):
        for name in names:
            view, add = self.gradients.gradient(name)
            view[...] = view + value if add else value
            self.gradients.mark_ready(name)
