"""One small GPT with ``reproducible=True`` in any layout: its cases, its training, and the digests of what comes of it.

`grid_bits_run.py` takes all of them, `mpi/test_same_bits.py` a part.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from grid_cases import SCHEDULES
from mpi4py import MPI
from steps import STRATEGIES

import mpishard
from mpishard import nn

STEPS = 10
SAMPLES, BATCH, MICRO_BATCH = 45, 13, 3  # batches of 13, 13, 13 and 6: of 5 micro-batches and of 2, the last one of 1
GROUPS = [
    mpishard.ParameterGroup(["*norm.weight", "*.bias"], weight_decay=0),
    mpishard.ParameterGroup("*_embedding.*", lr_factor=0.5),
]
RULE, CLIP = mpishard.AdamW(lr=1e-2, eps=1e-8, weight_decay=0.1, groups=GROUPS, ema_decay=0.75), 0.5
VALIDATED, EVERY = 7, 2  # samples of the validation set: 3 micro-batches, fewer than some meshes have data ranks


class Shape(NamedTuple):
    """The sizes of a model; `shards` slices, which do not divide the vocabulary."""

    shards: int
    heads: int
    width: int
    vocabulary: int = 11
    length: int = 5


# By the name that `--shapes` takes.
SHAPES = {
    "4": Shape(4, 8, 24),
    "6": Shape(6, 6, 24),
    "8": Shape(8, 8, 24),
    "4-wide": Shape(4, 4, 72, 53, 16),
    "1-wide": Shape(1, 4, 72, 53, 16),
    "4-large": Shape(4, 8, 192, 97, 48),
    "6-wide": Shape(6, 12, 96, 53, 16),
    "1": Shape(1, 8, 24),
}
COMPUTE_DTYPES = {"": None, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class BitsCase:
    """One layout, and the model that is trained in it."""

    shape: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    recompute: bool = False
    tied: bool = False
    seed: int = 3
    dtype: str = "float32"
    storage: str = ""
    compute: str = ""

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "interleaved" else 1

    @property
    def layers(self) -> int:
        """Every stage needs one."""
        return next(layers for layers in (4, 8, 16) if self.pipeline * self.chunks <= layers)

    @property
    def model(self) -> tuple[Any, ...]:
        """All cases with this value train the same model."""
        return self.layers, self.alone

    @property
    def alone(self) -> BitsCase:
        """The same training on one rank.  What is computed again is what was stored, but for rounding in storage."""
        again = self.recompute and bool(self.storage)
        kinds = {"dtype": self.dtype, "storage": self.storage, "compute": self.compute}
        return BitsCase(self.shape, recompute=again, tied=self.tied, seed=self.seed, **kinds)

    @property
    def sizes(self) -> dict[str, int]:
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}

    def __str__(self) -> str:
        flags = ("-tied" * self.tied) + ("-sequence" * self.sequence_parallel) + ("-recompute" * self.recompute)
        size = f"{self.data}x{self.tensor}x{self.pipeline}"
        kind = "".join(f"-{each}" for each in (self.dtype, self.storage, self.compute) if each not in ("", "float32"))
        return f"{self.shape}:{size}-zero{self.zero}-{self.schedule}{flags}{kind}-seed{self.seed}"


def bits_cases(ranks: int, shape: str, *, every_schedule: bool = False) -> Iterator[BitsCase]:
    """All layouts of a number of ranks that the shards of a shape allow.

    Without a pipeline all schedules but the interleaved one, which cuts a model of one stage in two, are one.
    """
    shards = SHAPES[shape].shards
    for tensor, pipeline in itertools.product(range(1, ranks + 1), repeat=2):
        if ranks % (tensor * pipeline) or shards % tensor:
            continue
        schedules = SCHEDULES if pipeline > 1 or every_schedule else ("1f1b", "interleaved")
        settings = itertools.product(range(4), schedules, range(1 + (tensor > 1)), range(2))
        for zero, schedule, sequence, recompute in settings:
            sizes = dict(data=ranks // (tensor * pipeline), tensor=tensor, pipeline=pipeline)
            flags = dict(sequence_parallel=bool(sequence), recompute=bool(recompute))
            yield BitsCase(shape, **sizes, zero=zero, schedule=schedule, **flags)


Tensors = dict[str, np.ndarray]
Watch = Callable[[int, float, Tensors], None]


def train(
    case: BitsCase,
    mesh: mpishard.Mesh,
    *,
    layers: int | None = None,
    steps: int = STEPS,
    rule: Any = RULE,
    clip: float | None = CLIP,
    watch: Watch | None = None,
) -> tuple[Tensors, np.ndarray]:
    """Parameters and slots, whole, by name, and the losses; the same on all ranks.  Collective over the mesh.

    `watch` gets each step, its loss, and parameters and slots after it.
    """
    shape = SHAPES[case.shape]
    tokens = np.random.default_rng(1).integers(0, shape.vocabulary, (SAMPLES, shape.length + 1))
    model = nn.GPT(
        vocabulary_size=shape.vocabulary,
        context_length=shape.length,
        width=shape.width,
        layers=layers or case.layers,
        heads=shape.heads,
        dtype=case.dtype,
        seed=case.seed,
        mesh=mesh,
        tied=case.tied,
        shards=shape.shards,
        sequence_parallel=case.sequence_parallel,
        recompute=case.recompute,
        schedule=case.schedule,
        chunks=case.chunks,
        sharded_parameters=case.zero == 3,
        storage_dtype=case.storage or None,
        compute_dtype=COMPUTE_DTYPES[case.compute],
    )
    config = mpishard.ShardingConfiguration(mesh, reproducible=True, max_gradient_norm=clip)
    optimizer = STRATEGIES[case.zero](rule, config)

    def batch(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tokens[samples, :-1], tokens[samples, 1:]

    def follow(state: Any) -> None:
        assert watch is not None
        watch(state.step, state.loss, whole(model, optimizer))

    sampling = dict(samples=SAMPLES, batch_size=BATCH, micro_batch_size=MICRO_BATCH, tokens_per_sample=shape.length)
    problem = mpishard.OptimizationProblem.for_model(model, batch, **sampling, steps=steps, seed=case.seed)
    evaluation = mpishard.Evaluation.for_model(
        batch, VALIDATED, every=EVERY, tokens_per_sample=shape.length, averaged=rule.ema_decay is not None
    )
    callback = None if watch is None else follow
    result = optimizer.optimize(problem, progress=False, callback=callback, evaluate=evaluation)
    assert len(result.validation_losses) == steps // EVERY
    return whole(model, optimizer), np.concatenate([result.loss_history, result.validation_losses])


def whole(model: Any, optimizer: Any) -> Tensors:
    """All tensors of parameters and slots, whole, sorted by name.  Collective."""
    full = optimizer.state.gather()
    values = mpishard.as_distributed(model, optimizer.mesh).gather_full_parameters()
    starts = list(itertools.accumulate((spec.size for spec in full.specs), initial=0))
    found = {}
    for kind, flat in {"": values, **{f"{slot} of ": array for slot, array in full.slots.items()}}.items():
        for spec, start in zip(full.specs, starts, strict=False):
            found[kind + spec.name] = flat[start : start + spec.size].copy()
    return dict(sorted(found.items()))


class Digests(NamedTuple):
    """The SHA-256 of parameters and slots, and that of the losses."""

    state: str
    losses: str


def digests(tensors: Tensors, losses: np.ndarray) -> Digests:
    state = hashlib.sha256()
    for name, values in tensors.items():
        state.update(f"{name} {values.dtype} {values.size}\n".encode() + values.tobytes())
    return Digests(state.hexdigest(), hashlib.sha256(losses.tobytes()).hexdigest())


def run(case: BitsCase, mesh: mpishard.Mesh, *, layers: int | None = None, steps: int = STEPS) -> Digests:
    """The digests of a case.  Collective over the mesh."""
    return digests(*train(case, mesh, layers=layers, steps=steps))


def run_alone(case: BitsCase, steps: int = STEPS) -> Digests:
    """The digests of the same training on this rank alone, as DDP."""
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        return run(case.alone, mesh, layers=case.layers, steps=steps)
