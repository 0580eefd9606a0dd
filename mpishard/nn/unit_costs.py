"""Measures the times of a model's units, so that a pipeline can be cut into stages of equal time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from mpishard.backend.array import ready
from mpishard.comm.axis import Axis
from mpishard.nn.block import TransformerBlock
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.tensor_parallel import TensorParallel
from mpishard.nn.units import Batch, EmbeddingUnit, OutputHead
from mpishard.nn.workspace import Workspace
from mpishard.parameters.flat import FlatParameters

_REPEATS = 3


def measure_costs(
    architecture: DecoderArchitecture, dtype: Any, world: Axis, compute_dtype: Any = None, module: Any = np
) -> list[float]:
    """Seconds that one sequence of `context_length` tokens spends in each unit, forward and backward.

    Rank 0 of `world` builds the embeddings, one block and an output head for the measurement, and broadcasts the times,
    so that all ranks cut the model alike; `compute_dtype` and `module` as for `GPT`.  Collective over `world`.
    """
    seconds = np.zeros(3)
    if world.rank == 0:
        seconds[:] = _measure(architecture, dtype, compute_dtype, module)
    if world.size > 1:
        world.broadcast(seconds, label="control")
    embedding, block, head = (float(each) for each in seconds)
    return [embedding, *([block] * architecture.layers), head]


def _measure(architecture: DecoderArchitecture, dtype: Any, compute_dtype: Any, module: Any) -> list[float]:
    small: DecoderArchitecture = replace(architecture, layers=1)  # type: ignore[type-var]
    parameters = FlatParameters(small.specs(), dtype, module=module)
    embedding, block, head = (small.build(unit) for unit in small.units())
    assert isinstance(embedding, EmbeddingUnit) and isinstance(block, TransformerBlock) and isinstance(head, OutputHead)
    alone = TensorParallel(shards=architecture.shards)
    for unit in (embedding, block, head):
        unit.bind(parameters, alone, compute_dtype)
        unit.initialize(0)
    work = Workspace(dtype, module)
    length = architecture.context_length
    tokens_n = module.asarray(np.arange(length) % architecture.vocabulary_size)

    def now() -> float:
        ready(parameters.like)
        return time.perf_counter()

    batch = Batch(tokens_n, tokens_n, length)
    work.rows = batch.rows
    best = [float("inf")] * 3
    for _ in range(1 + _REPEATS):
        marks = [now()]
        x_nc = embedding.forward(None, work, batch)
        marks.append(now())
        x_nc = block.forward(x_nc, work, length)
        marks.append(now())
        head.forward(x_nc, work, batch)
        dx_nc = head.backward(None, work, batch)
        marks.append(now())
        dx_nc = block.backward(dx_nc, work, length)
        marks.append(now())
        embedding.backward(dx_nc, work, batch)
        marks.append(now())
        parameters.reset_gradients()
        spans = np.diff(marks)
        once = [spans[0] + spans[4], spans[1] + spans[3], spans[2]]
        # The first round compiles and takes memory, and is never the fastest.
        best = [min(pair) for pair in zip(best, once, strict=True)]
    return best
