"""Tensors in memory, to make checkpoints of without a run."""

from __future__ import annotations

import secrets

import numpy as np

from mpishard.checkpoint.archives import write_checkpoint
from mpishard.layout.boxes import whole_box

# A slash, a percent sign, dots, brackets, letters of other alphabets; no elements, and no dimensions.
SHAPES = {"table.weight": (7, 3), "a/b%25": (2, 3, 4), "none": (0, 2), "gain": (), "[red]größe": (5,), "..": (1, 1)}
KINDS = {"parameters": np.dtype(np.float64), "optimizer/exp_avg": np.dtype(np.float32)}
FACTS = {
    "step": 5,
    "rule": "Adam",
    "rule.json": {"lr": 0.1, "betas": [0.9, 0.99]},
    "loss_scale": 1.5,
    "losses": np.array([3.0, 2.0]),
}


class Arrays:
    """A `Source` of random values."""

    def __init__(self, seed=0, shapes=SHAPES, kinds=KINDS, facts=FACTS):
        generator = np.random.default_rng(seed)
        self.tensors, self.kinds, self.facts = dict(shapes), dict(kinds), dict(facts)
        self.values = {
            (kind, name): np.asarray(generator.normal(size=shape), dtype)
            for kind, dtype in kinds.items()
            for name, shape in shapes.items()
        }

    def read(self, kind, name, box):
        return self.values[kind, name][(*(slice(*run) for run in box), ...)].copy()

    def same(self, other):
        """Whether another source has the same tensors, kinds and bits."""
        assert (list(self.kinds.items()), set(self.tensors.items())) == (
            list(other.kinds.items()),
            set(other.tensors.items()),
        )
        return all(
            values.tobytes() == other.read(*key, whole_box(values.shape)).tobytes()
            for key, values in self.values.items()
        )


def write(source, target, files=1, generation=1):
    write_checkpoint(source, target, files=files, generation=generation, id=secrets.token_hex(16))
    return target
